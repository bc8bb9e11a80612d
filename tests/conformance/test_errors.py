"""What goes wrong upstream, before and after the first byte, for every model over both transports."""

from __future__ import annotations

import json

import pytest

from tests.cases import every_case
from tests.conformance.calls import BLS, MODELS, PATHS, STREAMING, ask, in_session_loop, steered, text_of

pytestmark = in_session_loop

SECRETS = ("Traceback", "/opt/", "/models/", ".py", "0x7f", "\n", "request id", "in ensemble")
GENERIC = "The model failed to answer the request."


def failed_by(model: str, reason: str | None) -> tuple[int, str, str]:
    """Return status, code and message of a failure whose text is *reason* (``None``: one that must not be shown)."""
    if model in BLS or reason is None:
        return 502, "upstream_error", GENERIC
    return 502, "upstream_error", f"The model failed: {reason}"


@every_case("streamed", [False, True])
@every_case(
    "text, shown",
    [
        ("out of luck", "out of luck"),
        ("cannot open /opt/tritonserver/models/x/1/model.py", None),
        ("/opt/tritonserver/models/x", None),
        ("<_io.BytesIO object at 0x7f00deadbeef>", None),
        ("first line\nTraceback (most recent call last):\n  File \"x.py\", line 3", None),
        ("first line\nsecond line", None),
        ("ünïcode 😀 \"quoted\" {json}", "ünïcode 😀 \"quoted\" {json}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("model", MODELS)
async def test_a_failure_before_the_first_token(proxy, model, text, shown, streamed):
    """
    Nothing has been sent yet, so the error is a JSON body with its own status, and gives nothing away. What is not
    about the request has a status that clients try again.
    """
    prompt = steered(text="one", fail_at=0, error=text)
    answer = await ask(proxy, "chat", model, prompt, max_tokens=9, stream=streamed)

    status, code, message = failed_by(model, shown)
    assert (status, "application/json") == (answer.status, answer.headers["Content-Type"].partition(";")[0])
    assert {"message", "type", "param", "code"} == set(answer.error)
    assert (code, message) == (answer.error["code"], answer.error["message"])
    assert not [secret for secret in SECRETS if secret in answer.error["message"]]
    assert "x-should-retry" not in answer.headers


@every_case("streamed", [False, True])
@every_case(
    "text, shown",
    [
        ("Requested sample logprobs of 50, which is greater than max allowed: 20", None),
        ("The schema in /opt/x.json\nis not supported\n", "The schema in … is not supported"),
    ],
)
async def test_vllm_refuses_the_request(proxy, text, shown, streamed):
    """What it says of the request is the client's mistake."""
    prompt = steered(text="one", fail_at=0, error=text)
    answer = await ask(proxy, "chat", "vllm_model", prompt, max_tokens=9, stream=streamed)

    assert (400, "invalid_request") == (answer.status, answer.error["code"])
    assert f"The model refused the request: {shown or text}" == answer.error["message"]


@every_case("streamed", [False, True])
async def test_vllm_without_a_reason(proxy, streamed):
    """An error whose reason vLLM keeps to itself is not the client's fault."""
    prompt = steered(text="one", fail_at=0, error="")
    answer = await ask(proxy, "chat", "vllm_model", prompt, max_tokens=9, stream=streamed)

    assert (502, "upstream_error") == (answer.status, answer.error["code"])


@every_case("endpoint, param", [("chat", "messages"), ("completions", "prompt")])
@every_case("streamed", [False, True])
@pytest.mark.parametrize("model", MODELS)
async def test_a_prompt_that_is_too_long(proxy, model, endpoint, param, streamed):
    """Every backend's own text about a long prompt becomes the one code that clients know, with the numbers."""
    answer = await ask(proxy, endpoint, model, "word " * 2100, max_tokens=9, stream=streamed)

    error = answer.error
    assert (400, "context_length_exceeded", param) == (answer.status, error["code"], error["param"])
    assert "invalid_request_error" == error["type"]
    assert "2048" in error["message"]
    assert not [secret for secret in SECRETS if secret in error["message"]]


@every_case("endpoint, param", [("chat", "messages"), ("completions", "prompt")])
@every_case("streamed", [False, True])
@pytest.mark.parametrize(
    "model, text",
    [
        ("vllm_model", "The decoder prompt cannot be empty"),
        ("tensorrt_llm_llmapi", "Prompt cannot be empty"),
        ("ensemble", "[TensorRT-LLM][ERROR] Assertion failed: !mInputTokenIds.empty() (/src/requestImpl.h:53)"),
        ("tensorrt_llm_bls", "[TensorRT-LLM][ERROR] Assertion failed: !mInputTokenIds.empty() (/src/requestImpl.h:53)"),
    ],
)
async def test_a_prompt_that_is_empty(proxy, model, text, endpoint, param, streamed):
    """What a backend says of a prompt without tokens is the client's mistake, whatever its words."""
    prompt = steered(text="one", fail_at=0, error=text)
    answer = await ask(proxy, endpoint, model, prompt, max_tokens=9, stream=streamed)

    error = answer.error
    assert (400, "invalid_value", param) == (answer.status, error["code"], error["param"])
    assert "The prompt is empty: there is nothing to continue." == error["message"]


@every_case("endpoint", PATHS)
@pytest.mark.parametrize("model", [model for model in STREAMING if model not in BLS])
async def test_a_failure_in_the_stream(proxy, model, endpoint):
    """After the first byte an error is one last event with an error object, and the stream ends without [DONE]."""
    # An ensemble whose engine fails while the first token is still on its way loses that token.
    delay = 400 if model.startswith("ensemble") else 150
    prompt = steered(text="one two three four five", fail_at=4, error="out of luck", delay_ms=delay)
    answer = await ask(proxy, endpoint, model, prompt, max_tokens=9, stream=True)

    assert 200 == answer.status
    *chunks, last = answer.events
    assert chunks
    assert "one two three four".startswith(text_of(endpoint, answer))
    _, code, message = failed_by(model, "out of luck")
    error = json.loads(last)
    assert ["error"] == list(error)
    assert (code, message) == (error["error"]["code"], error["error"]["message"])
    assert all("finish_reason" in chunk and '"finish_reason":null' in chunk for chunk in chunks)


@pytest.mark.parametrize("model", [model for model in MODELS if model not in BLS])
async def test_a_failure_in_the_middle_of_a_whole_answer(proxy, model):
    """A client that wants the whole answer gets no part of one that failed."""
    prompt = steered(text="one two three", fail_at=2, error="out of luck")
    answer = await ask(proxy, "chat", model, prompt, max_tokens=9)

    status, code, message = failed_by(model, "out of luck")
    assert (status, code, message) == (answer.status, answer.error["code"], answer.error["message"])


@every_case("place", [0, 1])
async def test_one_prompt_of_several_is_too_long_for_the_backend(proxy, place):
    """A stream does not begin before every prompt is accepted: the error has its own status, whichever prompt it is."""
    text = "The decoder prompt (length 3000) is longer than the maximum model length of 2048."
    prompts = [steered(text="one two", delay_ms=10)]
    prompts.insert(place, steered(text="one", fail_at=0, error=text, first_delay_ms=100))
    answer = await proxy.post("/v1/completions", {"model": "vllm_model", "prompt": prompts, "stream": True})

    assert (400, "context_length_exceeded", "prompt") == (answer.status, answer.error["code"], answer.error["param"])


async def test_one_prompt_of_several_fails(proxy):
    """One failing prompt fails the request, and the others are not left running."""
    prompts = [steered(text="one"), steered(text="one", fail_at=0, error="out of luck"), steered(text="one")]
    body = {"model": "ensemble", "prompt": prompts, "max_tokens": 9}
    answer = await proxy.post("/v1/completions", body)

    assert (502, "The model failed: out of luck") == (answer.status, answer.error["message"])


@pytest.mark.parametrize(
    "model", ["preprocessing", "tensorrt_llm_legacy", "postprocessing", "no_such_model", "en/semble"]
)
@every_case("endpoint", PATHS)
async def test_models_that_are_not_served(proxy, endpoint, model):
    """Helpers and made-up names do not exist for a client."""
    answer = await ask(proxy, endpoint, model, "Hi")

    error = answer.error
    assert (404, "model_not_found", "model") == (answer.status, error["code"], error["param"])
    assert error["message"].startswith(f"The model '{model}' does not exist.")


@every_case("endpoint", PATHS)
async def test_a_model_that_does_not_generate(proxy, endpoint):
    """An embedding model is refused by name where text is wanted."""
    answer = await ask(proxy, endpoint, "text_embedding", "Hi")

    assert (400, "model") == (answer.status, answer.error["param"])


async def test_an_embedding_only_vllm_model_says_so(proxy):
    """A vLLM model that only embeds has the tensors of any, so it is the backend that refuses to generate."""
    answer = await ask(proxy, "completions", "vllm_embedding", "Hi")

    assert 400 == answer.status
    assert "does not support 'generate' request" in answer.error["message"]
