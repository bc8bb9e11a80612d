"""What an operator reads of a Triton whose answers are invalid."""

from __future__ import annotations

import structlog

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.config.tree import Settings, TritonSettings

MODELS = ("m", "n")


async def test_each_problem_of_a_model_is_logged_once() -> None:
    """Clients get a 502 for each request, and the operator a warning for each model and problem."""
    async with (
        FakeTriton(*map(config_of, MODELS)) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        with structlog.testing.capture_logs() as logs:
            for value in (5, [1, 2], {"secret": 1}, 5):
                triton.responses = [{"text_output": value}]
                for model in MODELS:
                    answer = await proxy.post("/v1/completions", {"model": model, "prompt": "Hi"})
                    assert (502, "upstream_invalid_answer") == (answer.status, answer.error["code"])
                    assert answer.error["message"].startswith(f"Triton's answer for the model '{model}' is invalid: ")
            stream = await proxy.post("/v1/completions", {"model": "m", "prompt": "Hi", "stream": True})
    told = [line for line in logs if line["event"] == "Triton's answer is invalid"]
    assert ["m", "n"] == [line["model"] for line in told]
    assert {"the output 'text_output' has something else where a text is needed"} == {line["problem"] for line in told}
    assert {"warning"} == {line["log_level"] for line in told}
    assert not [line for line in logs if line.get("exc_info")]
    assert "secret" not in str(logs)
    assert stream.body.count(b'"error"') == 1


async def test_an_answer_without_end() -> None:
    """A model that goes on behind the limit of its tokens fills no memory."""
    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        triton.responses = [{"text_output": "a"}] * 1500
        answer = await proxy.post("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 5})
        assert (502, "upstream_invalid_answer") == (answer.status, answer.error["code"])
        answer = await proxy.post("/v1/completions", {"model": "m", "prompt": "Hi", "max_tokens": 50})
        assert 200 == answer.status
