"""The LLM API stand-in behaves, on a real Triton, as the real model does; and its adapter makes the best of it."""

from __future__ import annotations

import queue
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
from tests.pictures import data_url, part, png, seen
from tests.proxy_fixture import TRANSPORTS, Proxy, proxy_settings, serving
from tests.standins.repository import build_repository
from tests.triton_fixture import TestTriton, embedded, shared
from tests.unit.adapters.encoding import request_of
from triton_openai.cli.inspect import report
from triton_openai.config.tree import LoraSettings, ModelSettings, Settings, TritonSettings
from triton_openai.demo.record import Record
from triton_openai.demo.repository import DemoRepository
from triton_openai.generation import Generation, Sampling
from triton_openai.triton.endpoint import Endpoint
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODEL = "tensorrt_llm_llmapi"
OLD = "tensorrt_llm_llmapi_r1_0"
SEEING = "tensorrt_llm_llmapi_multimodal"
P = "sampling_param_"


def raw(url: str, model: str = MODEL, **inputs: Any) -> list[Answer]:
    """Send one request to the model itself and return all its responses."""
    with streaming(url, model, batched=False, **inputs) as stream:
        return stream.rest()


@contextmanager
def _releases(folder: Path) -> Iterator[tuple[EmbeddedTriton, DemoRepository]]:
    """Run the models that few need: an older release, and one that takes images."""
    repository = build_repository(folder / "repository", models=[OLD, SEEING], record=folder / "record.jsonl")
    server = embedded(repository)
    with shared(server):
        yield server, repository


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llmapi_proxies(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One running service per transport that knows the model's files, shared by the tests of this file."""
    loras = (LoraSettings(name="french", path=str(triton.tokenizer)), LoraSettings(name="gone", path="/gone"), "bare")
    named = {MODEL: ModelSettings(loras=loras)}
    over = {
        name: msgspec.structs.replace(proxy_settings(triton, name, repository=(triton.repository.path,)), models=named)
        for name in TRANSPORTS
    }
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


def test_what_fails_before_the_engine_has_it_is_never_answered(triton: TestTriton) -> None:
    """Stop strings fail, which is why the adapter never sends any; an empty prompt and half a LoRA adapter, too."""
    for wrong in (
        {"text_input": "Hi", f"{P}stop": ["one"]},
        {"text_input": ""},
        {"text_input": "Hi", "lora_name": "x"},
    ):
        with streaming(triton.grpc_url, MODEL, batched=False, **wrong) as stream:
            triton.record.wait_for(bool, 120.0, id=stream.id, event="failed")
            with pytest.raises(queue.Empty):
                stream.take(timeout=0.05)
            stream.cancel()


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
    """A parameter that the model lacks is refused by its name."""
    answer = await ask(llmapi, "completions", MODEL, "Hello", **{name: 2 if name != "ignore_eos" else True})

    assert (400, name) == (answer.status, answer.error["param"])


@in_session_loop
async def test_a_failure_is_reported(llmapi: Proxy) -> None:
    """A failure is reported with the backend's reason."""
    answer = await ask(llmapi, "completions", MODEL, steered(fail_at=0, error="out of luck"))

    assert (502, "The model failed: out of luck") == (answer.status, answer.error["message"])


@in_session_loop
async def test_what_would_never_be_answered_is_refused(llmapi: Proxy) -> None:
    """What the engine is known to refuse is found out here, by the limit in the model's own file."""
    empty = await ask(llmapi, "completions", MODEL, "")
    long = await ask(llmapi, "completions", MODEL, "word " * 2100, stream=True)

    assert (400, "prompt", "invalid_value") == (empty.status, empty.error["param"], empty.error["code"])
    assert (400, "prompt", "context_length_exceeded") == (long.status, long.error["param"], long.error["code"])


@in_session_loop
async def test_lora_adapters(llmapi: Proxy, triton: TestTriton) -> None:
    """
    LoRA adapters are listed, and sent as the three inputs; what is missing is the operator's, and a silence is
    explained.
    """
    listed = {model["id"] for model in (await llmapi.get("/v1/models")).json["data"]}
    answer = await ask(llmapi, "chat", "french", "Hello", max_tokens=3)
    inputs = await inputs_of(triton, MODEL, id_of(answer))
    silent = await llmapi.post(
        PATHS["chat"], request("chat", "gone", "Hello", max_tokens=3), **{"x-first-token-timeout": "0.3"}
    )
    (found,) = [each for each in await report(llmapi.models) if each.name == MODEL]

    assert {MODEL, "french", "gone"} <= listed
    assert "bare" not in listed
    assert ["french", str(triton.tokenizer)] == [inputs[name]["value"][0] for name in ("lora_name", "lora_path")]
    assert 504 == silent.status
    assert "the LoRA adapter's files are not on its machine" in silent.error["message"]
    assert any("'bare' is not served: the model reads it itself: give its path" in note for note in found.notes)
    assert "token by token" == found.streaming
    # Only gRPC tells the model that a client has left.
    assert (llmapi.transport == "http") == any("over gRPC only" in note for note in found.notes)


@in_session_loop
async def test_leaving_cancels(llmapi: Proxy, triton: TestTriton) -> None:
    """Closing the stream is what ends the work: the first event is read, and no other."""
    body = request("completions", MODEL, steered(text="word ", eos=False, delay_ms=50), max_tokens=2000, stream=True)
    async with llmapi.client.post(PATHS["completions"], json=body) as response:
        line = await response.content.readline()

    asked = line.decode().split('"id":"')[1].split('"')[0]
    assert "cancelled" == (await end_of(triton, MODEL, asked))[0]


@in_session_loop
async def test_other_releases(tmp_path: Path) -> None:
    """Up to 1.2 the whole text at once is a stream too; images go with one user message, and a plain chat as ever."""
    with _releases(tmp_path) as (server, repository):
        assert [True] == [
            answer.final for answer in raw(server.grpc_url, OLD, text_input=steered(text="one two"), streaming=True)
        ]
        assert ["Error generating request: Prompt cannot be empty"] == [
            answer.error for answer in raw(server.grpc_url, OLD, text_input="")
        ]
        record = Record(tmp_path / "record.jsonl")
        named = {OLD: ModelSettings(loras=("x",))}
        for url in (server.http_url, server.grpc_url):
            triton = TritonSettings(url=(url,), repository=(repository.path,))
            async with serving(Settings(triton=triton, models=named)) as service:
                await service.ready()
                await _check_old(service)
                await _check_images(service, record)
        # Both addresses: gRPC is taken, which tells the model that a client has left.
        both = TritonSettings(url=(server.http_url, server.grpc_url))
        async with serving(Settings(triton=both, models={SEEING: ModelSettings(chat_template="chatml")})) as service:
            await service.ready()
            adapter = service.models.served[SEEING].adapter
            asked = request_of(adapter, Generation(id="1", prompt="Hi", sampling=Sampling(max_tokens=1)))
            assert server.grpc_url == Endpoint(both.url).address_of(asked)
            # Nobody has said that the model takes images, which it would ignore.
            unseen = await service.post(PATHS["chat"], _chat([part(data_url(png()))]))
    assert (400, "messages[0].content[0]") == (unseen.status, unseen.error["param"])


async def _check_old(service: Proxy) -> None:
    include = {"stream_options": {"include_usage": True}}
    answer = await ask(service, "chat", OLD, steered(text="one two €"), stream=True, **include)
    assert ("one two €", "stop") == (outcome("chat", answer)["text"], outcome("chat", answer)["finish"])
    cut = await ask(service, "completions", OLD, steered(text="one two three four five"), stop="two", max_tokens=50)
    assert {"text": "one ", "finish": "stop", "tokens": 2} == outcome("completions", cut)
    (found,) = [each for each in await report(service.models) if each.name == OLD]
    assert "whole answer as one chunk" == found.streaming
    assert found.reason.endswith("TensorRT-LLM 1.0 to 1.2")
    for end in ("TensorRT-LLM streams since 1.3", "the model has no inputs for them."):
        assert any(note.endswith(end) for note in found.notes), found.notes


async def _check_images(service: Proxy, record: Record) -> None:
    text, image = {"type": "text", "text": "What is it?"}, part(data_url(png(1)))
    seen_answer = await service.post(PATHS["chat"], _chat([text, image]))
    plain = await service.post(PATHS["chat"], _chat("What is it?"))

    assert "You sent 1 images." in seen_answer.json["choices"][0]["message"]["content"]
    sent, bare = (record.events(id=id_of(each), event="request")[0]["inputs"] for each in (seen_answer, plain))
    # The model's own template writes the turn around an image's text, and around no other.
    assert ["What is it?"] == sent["text_input"]["value"]
    assert seen(png(1), prefix="data:image/png;base64,") == sent["image_url"]["value"]
    assert "<|im_start|>user" in bare["text_input"]["value"][0]
    assert "image_url" not in bare
    tool = {"type": "function", "function": {"name": "f"}}
    for body, param in (
        (_chat([text, image], before={"role": "system", "content": "Be brief."}), "messages[0]"),
        (_chat([text, image], before={"role": "user", "content": "Hi"}), "messages[1]"),
        (_chat([text, image], tools=[tool]), "tools"),
        (_chat([text, image], chat_template_kwargs={"x": 1}), "chat_template_kwargs"),
        (_chat([text, image], add_generation_prompt=False), "add_generation_prompt"),
    ):
        refused = await service.post(PATHS["chat"], body)
        assert (400, param) == (refused.status, refused.error["param"]), refused.body


def _chat(content: Any, before: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    messages = [*([before] if before else ()), {"role": "user", "content": content}]
    return {"model": SEEING, "messages": messages, "max_tokens": 100, **fields}
