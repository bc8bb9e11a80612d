"""LoRA adapters: what is listed, and what reaches the model."""

from __future__ import annotations

import json

import msgspec
import pytest

from tests.conformance.calls import PATHS, id_of, in_session_loop, inputs_of, request
from tests.proxy_fixture import changed, proxy_settings, serving

pytestmark = in_session_loop


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_adapters_of_the_settings(triton, transport):
    """Each is a model of its own name, and of the model's with a separator; the backend gets its name."""
    settings = changed(proxy_settings(triton, transport), api={"lora_separator": ":"})
    models = {**settings.models}
    models["vllm_model"] = msgspec.structs.replace(models["vllm_model"], loras=("alpha", "missing"))
    async with serving(msgspec.structs.replace(settings, models=models)) as proxy:
        await proxy.ready()
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}
        for name in ("alpha", "vllm_model:alpha"):
            answer = await proxy.post(PATHS["chat"], request("chat", name, "Hello", max_tokens=3))
            assert (200, name) == (answer.status, answer.json["model"])
            inputs = await inputs_of(triton, "vllm_model", id_of(answer))
            assert "alpha" == json.loads(inputs["sampling_parameters"]["value"][0])["lora_name"]
        unknown = await proxy.post(PATHS["chat"], request("chat", "missing", "Hello", max_tokens=3))

    assert {"alpha", "vllm_model:alpha", "missing", "vllm_model:missing"} <= listed
    assert (404, "lora_not_loaded", "model") == (unknown.status, unknown.error["code"], unknown.error["param"])
    assert "missing" in unknown.error["message"]


async def test_adapters_of_a_repository(triton):
    """Where the repository can be read, its own list is enough."""
    settings = changed(proxy_settings(triton, "http"), triton={"model_repository": (triton.repository.path,)})
    async with serving(settings) as proxy:
        await proxy.ready()
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}

    assert {"alpha", "beta"} <= listed


async def test_a_name_that_is_taken(triton):
    """A LoRA adapter does not hide a model."""
    settings = proxy_settings(triton, "http")
    models = {**settings.models}
    models["vllm_model"] = msgspec.structs.replace(models["vllm_model"], loras=("ensemble",))
    async with serving(msgspec.structs.replace(settings, models=models)) as proxy:
        await proxy.ready()
        assert None is proxy.models.served["ensemble"].lora
