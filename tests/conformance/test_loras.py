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
    """With a separator, each is a model of its model's name and its own; the backend gets its own name."""
    settings = changed(proxy_settings(triton, transport), api={"lora_separator": ":"})
    models = {**settings.models}
    models["vllm_model"] = msgspec.structs.replace(models["vllm_model"], loras=("alpha", "missing"))
    async with serving(msgspec.structs.replace(settings, models=models)) as proxy:
        await proxy.ready()
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}
        name = "vllm_model:alpha"
        answer = await proxy.post(PATHS["chat"], request("chat", name, "Hello", max_tokens=3))
        assert (200, name) == (answer.status, answer.json["model"])
        inputs = await inputs_of(triton, "vllm_model", id_of(answer))
        assert "alpha" == json.loads(inputs["sampling_parameters"]["value"][0])["lora_name"]
        unknown = await proxy.post(PATHS["chat"], request("chat", "vllm_model:missing", "Hello", max_tokens=3))

    assert {"vllm_model:alpha", "vllm_model:missing"} <= listed
    assert {"alpha", "missing"}.isdisjoint(listed)
    assert (404, "lora_not_loaded", "model") == (unknown.status, unknown.error["code"], unknown.error["param"])
    assert "missing" in unknown.error["message"]


async def test_adapters_that_only_the_backend_knows(triton):
    """A name of a model and an adapter reaches a vLLM model whose files cannot be read here; metrics name the model."""
    settings = changed(proxy_settings(triton, "http"), api={"lora_separator": ":"})
    models = {**settings.models}
    models["vllm_model"] = msgspec.structs.replace(models["vllm_model"], loras=())
    async with serving(msgspec.structs.replace(settings, models=models)) as proxy:
        await proxy.ready()
        name = "vllm_model:alpha"
        answer = await proxy.post(PATHS["chat"], request("chat", name, "Hello", max_tokens=3))
        inputs = await inputs_of(triton, "vllm_model", id_of(answer))
        described = await proxy.get(f"/v1/models/{name}")
        refused = [
            await proxy.post(PATHS["chat"], request("chat", name, "Hello", max_tokens=3))
            for name in ("vllm_model:missing", "vllm_model:", "ensemble:alpha", "alpha")
        ]
        listed = {model["id"] for model in (await proxy.get("/v1/models")).json["data"]}
        metrics = (await proxy.get("/metrics")).body.decode()

    assert (200, name) == (answer.status, answer.json["model"])
    assert "alpha" == json.loads(inputs["sampling_parameters"]["value"][0])["lora_name"]
    assert (name, "vllm_model") == (described.json["id"], described.json["parent"])
    assert ["lora_not_loaded", *["model_not_found"] * 3] == [answer.error["code"] for answer in refused]
    assert name not in listed
    assert f'model="{name}"' not in metrics


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
