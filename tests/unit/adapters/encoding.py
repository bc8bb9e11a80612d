"""What the tests of adapters that generate text share."""

from __future__ import annotations

from triton_openai.adapters import Adapter
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferRequest


def request_of(adapter: Adapter, generation: Generation) -> InferRequest:
    """Return the only request for *generation*."""
    (request,) = adapter.encode(generation)
    return request
