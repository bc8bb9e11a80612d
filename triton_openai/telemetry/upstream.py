"""
What goes along with the requests to Triton that are made for one client's request: its id, and its trace.

It is found through a context variable, which tasks take over from whoever starts them: neither adapters nor whoever
makes a request to Triton need to know what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import msgspec

from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason
from triton_openai.triton.tensors import InferRequest


class Answer(Protocol):
    """
    An answer that Triton is asked for: its first token, its end, and why it ended, once they are there. ``cancelled``
    is whether it was stopped before that.
    """

    first: float | None
    ended: float | None
    finish_reason: FinishReason | None
    error: ServiceError | None
    cancelled: bool


class Upstream:
    """The *headers* that the requests carry. Nothing is remembered of them here."""

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.headers = headers

    def begin(self, request: InferRequest, answer: Answer, *, lora: str | None = None) -> InferRequest:
        """
        Return *request* as it is to be sent, for *answer*, which knows its end itself; *lora* is the LoRA adapter that
        is asked for.
        """
        return self._with(request, self.headers)

    @contextmanager
    def call(self, request: InferRequest) -> Iterator[InferRequest]:
        """Yield *request* as it is to be sent; its answer has come when the block ends."""
        yield self._with(request, self.headers)

    @staticmethod
    def _with(request: InferRequest, headers: Mapping[str, str]) -> InferRequest:
        return msgspec.structs.replace(request, headers=headers) if headers else request


#: That of the request which is being answered; for work of the service's own there is nothing to send along.
UPSTREAM: ContextVar[Upstream] = ContextVar("upstream", default=Upstream({}))  # noqa: B039 - it never changes
