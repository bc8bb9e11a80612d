"""The small request that tells whether a model answers, on every kind of model."""

from __future__ import annotations

import pytest

from tests.conformance.calls import in_session_loop
from triton_openai.api.info import probe
from triton_openai.app import SERVICE
from triton_openai.errors import RequestRefused

pytestmark = in_session_loop


async def test_every_model_answers_it(proxy, triton):
    """Whatever a model needs in a request, and whatever it makes: none is held to be silent for want of a good one."""
    service = proxy.client.server.app[SERVICE]
    owners = {model.triton_model: model for model in proxy.models.served.values()}
    assert {"ensemble", "tensorrt_llm_bls", "vllm_model", "text_embedding", "text_rerank_ids"} <= owners.keys()
    for name, model in owners.items():
        if name == "vllm_embedding":
            # Its tensors are those of any model of its backend. A refusal is a sign of life.
            with pytest.raises(RequestRefused):
                await probe(service, model, timeout=120)
        else:
            await probe(service, model, timeout=120)
