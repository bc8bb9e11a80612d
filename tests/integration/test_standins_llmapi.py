"""The LLM API stand-in behaves, on a real Triton, as the real model does; and its adapter makes the best of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tests.conformance.calls import PATHS, ask, end_of, id_of, in_session_loop, inputs_of, outcome, request
from tests.integration.standin_calls import Answer, generate, steered, streaming
from tests.proxy_fixture import TRANSPORTS, Proxy, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.config import ModelSettings, Settings, TritonSettings
from triton_openai.demo.repository import build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODEL = "tensorrt_llm_llmapi"
OLD = "tensorrt_llm_llmapi_r1_0"
P = "sampling_param_"


def raw(url: str, model: str = MODEL, **inputs: Any) -> list[Answer]:
    """Send one request to the model itself and return all its responses."""
    with streaming(url, model, batched=False, **inputs) as stream:
        return stream.rest()


@contextmanager
def _old(folder: Path) -> Iterator[tuple[EmbeddedTriton, Path]]:
    repository = build_repository(folder / "repository", models=[OLD])
    server = EmbeddedTriton(model_repository=repository.path, backends=repository.backends, environment=os.environ)
    server.start()
    try:
        yield server, repository.tokenizer
    finally:
        server.stop(timeout=1.0)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llmapi_proxies(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One running service per transport that knows the model's tokenizer, shared by the tests of this file."""
    named = {MODEL: ModelSettings(tokenizer=str(triton.tokenizer))}
    over = {name: msgspec.structs.replace(proxy_settings(triton, name), models=named) for name in TRANSPORTS}
    async with (
        serving(over["http"], transport="http") as over_http,
        serving(over["grpc"], transport="grpc") as over_grpc,
    ):
        await over_http.ready()
        await over_grpc.ready()
        yield {"http": over_http, "grpc": over_grpc}


@pytest.fixture(params=TRANSPORTS)
def llmapi(request: pytest.FixtureRequest, llmapi_proxies: dict[str, Proxy]) -> Proxy:
    """The service over each transport in turn."""
    return llmapi_proxies[request.param]


def texts(answers: list[Answer]) -> list[str]:
    """Return the texts of *answers*."""
    return [answer.text() for answer in answers]


def test_every_response_holds_the_whole_text(triton: TestTriton) -> None:
    """The prompt too, unless it is excluded; the reason is the word "None" until the end."""
    prompt = steered(text="one two")

    answers = raw(triton.grpc_url, text_input=prompt, streaming=True, return_finish_reason=True)

    assert [f"{prompt}one", f"{prompt}one two", f"{prompt}one two"] == texts(answers)
    assert ["None", "None", "stop"] == [answer.text("finish_reason") for answer in answers]
    assert [False, False, True] == [answer.final for answer in answers]


def test_numbers_are_text(triton: TestTriton) -> None:
    """What the config declares as FP32 comes as a string, over JSON too."""
    _, (answer,) = generate(
        triton.http_url, MODEL, text_input=steered(text="one"), return_cumulative_logprob=True, stream=True
    )

    assert isinstance(answer["cumulative_logprob"], str)


def test_stop_strings_fail(triton: TestTriton) -> None:
    """Stop strings fail, which is why the adapter never sends any."""
    (answer,) = raw(triton.grpc_url, text_input="Hi", sampling_param_stop=["one"])

    assert (answer.error or "").startswith("Error generating request: ")


def test_a_stop_request_is_itself_answered_with_an_error(triton: TestTriton) -> None:
    """The stopped stream ends with a reason of its own."""
    with streaming(
        triton.grpc_url,
        MODEL,
        batched=False,
        text_input=steered(hang_at=1),
        streaming=True,
        return_finish_reason=True,
    ) as stream:
        stream.take()
        order = raw(triton.grpc_url, text_input="", stop=True, request_id=stream.id)
        rest = stream.rest()

    assert ["Request cancelled by client"] == [answer.error for answer in order]
    assert "cancelled" == rest[-1].text("finish_reason")


@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@in_session_loop
async def test_answers(llmapi: Proxy, triton: TestTriton, endpoint: str, stream: bool) -> None:
    """Text is exact, reasons are the backend's, and the tokenizer counts."""
    vocabulary = Tokenizer.from_file(str(triton.tokenizer / "tokenizer.json"))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}

    short = await ask(llmapi, endpoint, MODEL, steered(text="one € two 😀"), max_tokens=50, **options)
    cut = await ask(llmapi, endpoint, MODEL, steered(text="one two three"), max_tokens=2, **options)

    tokens = len(vocabulary.encode("one € two 😀", add_special_tokens=False).ids)
    assert {"text": "one € two 😀", "finish": "stop", "tokens": tokens} == outcome(endpoint, short)
    assert {"text": "one two", "finish": "length", "tokens": 2} == outcome(endpoint, cut)


@in_session_loop
async def test_parameters(llmapi: Proxy, triton: TestTriton) -> None:
    """Everything arrives under the LLM API's names; stop strings never do, and are matched all the same."""
    answer = await ask(
        llmapi,
        "completions",
        MODEL,
        steered(text="one two three"),
        max_tokens=9,
        temperature=0.5,
        top_p=0.25,
        top_k=-1,
        seed=5,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        stop=["wo t"],
    )

    sent = {
        name: (entry["dtype"], entry["shape"], *entry["value"])
        for name, entry in (await inputs_of(triton, MODEL, id_of(answer))).items()
        if name != "text_input"
    }
    assert {
        "streaming": ("BOOL", [1], True),
        "return_finish_reason": ("BOOL", [1], True),
        f"{P}exclude_input_from_output": ("BOOL", [1], True),
        f"{P}max_tokens": ("INT32", [1], 9),
        f"{P}temperature": ("FP32", [1], 0.5),
        f"{P}top_p": ("FP32", [1], 0.25),
        f"{P}top_k": ("INT32", [1], 0),
        f"{P}seed": ("UINT64", [1], 5),
        f"{P}frequency_penalty": ("FP32", [1], 0.5),
        f"{P}presence_penalty": ("FP32", [1], 0.25),
    } == sent
    assert ("one t", "stop") == (answer.json["choices"][0]["text"], answer.json["choices"][0]["finish_reason"])


@pytest.mark.parametrize("name", ["min_tokens", "repetition_penalty", "ignore_eos"])
@in_session_loop
async def test_what_the_model_lacks_is_refused(llmapi: Proxy, name: str) -> None:
    """With the parameter's name."""
    answer = await ask(llmapi, "completions", MODEL, "Hello", **{name: 2 if name != "ignore_eos" else True})

    assert (400, name) == (answer.status, answer.error["param"])


@in_session_loop
async def test_a_failure_is_reported(llmapi: Proxy) -> None:
    """Its reason comes from the backend."""
    answer = await ask(llmapi, "completions", MODEL, steered(fail_at=0, error="out of luck"))

    assert (400, "The model refused the request: out of luck") == (answer.status, answer.error["message"])


@in_session_loop
async def test_leaving_cancels(llmapi: Proxy, triton: TestTriton) -> None:
    """Closing the stream is what ends the work: the first event is read, and no other."""
    body = request("completions", MODEL, steered(text="word ", eos=False, delay_ms=5), max_tokens=2000, stream=True)
    async with llmapi.client.post(PATHS["completions"], json=body) as response:
        line = await response.content.readline()

    asked = line.decode().split('"id":"')[1].split('"')[0]
    assert "cancelled" == (await end_of(triton, MODEL, asked))[0]


@in_session_loop
async def test_up_to_1_2_a_stream_is_one_response(tmp_path: Path) -> None:
    """The whole text at once is a stream too."""
    with _old(tmp_path) as (server, tokenizer):
        assert [True] == [
            answer.final for answer in raw(server.grpc_url, OLD, text_input=steered(text="one two"), streaming=True)
        ]
        settings = Settings(
            triton=TritonSettings(url=(server.http_url,)), models={OLD: ModelSettings(tokenizer=str(tokenizer))}
        )
        async with serving(settings) as service:
            await service.ready()
            answer = await ask(
                service,
                "chat",
                OLD,
                steered(text="one two €"),
                stream=True,
                stream_options={"include_usage": True},
            )

    assert ("one two €", "stop") == (outcome("chat", answer)["text"], outcome("chat", answer)["finish"])
