"""What a companion model does beside generations: transcriptions by its own prompts, and a vector for each token."""

from __future__ import annotations

import base64
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from tests.cases import every_case
from tests.conformance.calls import in_session_loop, steered
from tests.conformance.test_transcriptions import PATH, TEXT, TRANSLATIONS, events, refused, send
from tests.proxy_fixture import Proxy, serving
from tests.speech import SENTENCE, speak, wav
from tests.standins.repository import build_repository
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.config.tree import ModelSettings, Settings, TritonSettings
from triton_openai.demo.record import Record

pytestmark = in_session_loop

SPEECH, TOKENS, HEARING = "companion_speech", "companion_tokens", "companion_hearing"
POOLING = "/pooling"


@pytest.fixture(scope="module")
def companions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A Triton with the models."""
    folder = tmp_path_factory.mktemp("companions")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=(SPEECH, TOKENS, HEARING), record=record)
    server = embedded(repository)
    with shared(server):
        yield TestTriton(server, repository, Record(record))


def settings_for(triton: TestTriton, *models: str) -> Settings:
    """Return settings with a tokenizer for each of *models*."""
    own = ModelSettings(tokenizer=str(triton.tokenizer), max_model_len=2048)
    return Settings(triton=TritonSettings(url=(triton.http_url,)), models=dict.fromkeys(models, own))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def proxy(companions: TestTriton) -> AsyncIterator[Proxy]:
    """The service in front of it. The models that hear have no tokenizer here: speech needs none."""
    async with serving(settings_for(companions, TOKENS)) as running:
        await running.ready()
        yield running


async def test_a_recording_is_written_down(proxy: Proxy) -> None:
    """The text comes without the model's marks, whole and in a stream, of as many chunks as the recording has."""
    for words in (SENTENCE, SENTENCE * 12):
        file = wav(speak(words))
        answer = await send(proxy, file, model=SPEECH)
        assert (200, " ".join(words)) == (answer.status, answer.json["text"])
        *deltas, done = events(await send(proxy, file, model=SPEECH, stream="true"))
        assert " ".join(words) == done["text"] == "".join(each["delta"] for each in deltas)


@every_case("path,fields,asked", [
    (PATH, {}, ("transcribe", None, None, "ask")),
    (PATH, {"language": "German"}, ("transcribe", "de", None, "ask")),
    (PATH, {"languages": ["de", "en"]}, ("transcribe", "de", None, "ask")),
    (TRANSLATIONS, {}, ("translate", None, "en", "ask")),
])  # fmt: skip
async def test_what_the_model_is_asked(proxy: Proxy, path: str, fields: dict[str, Any], asked: Sequence[Any]) -> None:
    """Its class gets the task, the language, the language to translate to, and the client's prompt."""
    answer = await send(proxy, wav(speak(SENTENCE)), path, model=SPEECH, prompt="ask", **fields)

    assert f"language {tuple(asked)}" == answer.json["text"]


async def test_times_of_a_text(proxy: Proxy) -> None:
    """There is a segment for each chunk, and no words: the model returns no times."""
    file = wav(speak(SENTENCE))
    (segment,) = (await send(proxy, file, model=SPEECH, response_format="verbose_json")).json["segments"]
    assert (0.0, TEXT) == (segment["start"], segment["text"])
    assert pytest.approx(3.0, abs=0.1) == segment["end"]

    words = {"response_format": "verbose_json", "timestamp_granularities": ["word"]}
    assert (400, "timestamp_granularities") == (await refused(proxy, file, model=SPEECH, **words))[:2]


@every_case("fields,param", [({"language": "la"}, "language"), ({"language": "klingon"}, "language")])
async def test_languages_that_are_refused(proxy: Proxy, fields: dict[str, Any], param: str) -> None:
    """By the service if nobody speaks it, and by the model if the model does not take it."""
    assert (400, param) == (await refused(proxy, wav(speak(SENTENCE)), model=SPEECH, **fields))[:2]


async def test_a_long_prompt(proxy: Proxy) -> None:
    """The model would tokenize it while all of its streams wait."""
    file = wav(speak(SENTENCE))
    assert 200 == (await send(proxy, file, model=SPEECH, prompt="a" * 16_384)).status
    long = await refused(proxy, file, model=SPEECH, prompt="a" * 16_385)
    assert (400, "prompt", "string_above_max_length") == long


async def test_the_same_over_grpc(proxy: Proxy, companions: TestTriton) -> None:
    """Texts, and vectors that come in parts, do not depend on the transport."""
    file = wav(speak(SENTENCE))
    body = {"model": TOKENS, "input": [list(range(10, 60)), [5]]}
    settings = settings_for(companions, TOKENS)
    async with serving(replace(settings, triton=TritonSettings(url=(companions.grpc_url,)))) as other:
        await other.ready()
        assert TEXT == (await send(other, file, model=SPEECH)).json["text"]
        assert (await proxy.post(POOLING, body)).json["data"] == (await other.post(POOLING, body)).json["data"]


async def test_a_model_that_only_writes_speech_down(proxy: Proxy) -> None:
    """A chat with it is refused by its name, and so are vectors of it."""
    chat = {"model": SPEECH, "messages": [{"role": "user", "content": "Hi"}]}
    for path, body in (("/v1/chat/completions", chat), (POOLING, {"model": SPEECH, "input": "Hi"})):
        answer = await proxy.post(path, body)
        assert (400, "model") == (answer.status, answer.error["param"]), answer.body


async def test_a_model_that_chats_too(proxy: Proxy, companions: TestTriton) -> None:
    """Without a tokenizer it writes down speech all the same, and a chat says what lacks; with one it does both."""
    file = wav(speak(SENTENCE))
    assert TEXT == (await send(proxy, file, model=HEARING)).json["text"]
    chat = {"model": HEARING, "messages": [{"role": "user", "content": steered("Hi", text="Hello.")}]}
    answer = await proxy.post("/v1/chat/completions", chat)
    assert (501, "configuration_error") == (answer.status, answer.error["code"]), answer.body

    async with serving(settings_for(companions, HEARING)) as other:
        await other.ready()
        assert TEXT == (await send(other, file, model=HEARING)).json["text"]
        answer = await other.post("/v1/chat/completions", chat)
        assert "Hello." == answer.json["choices"][0]["message"]["content"]
        assert ["generate", "transcribe", "translate"] == list((await other.models.find(HEARING)).tasks)


async def test_a_vector_for_each_token(proxy: Proxy) -> None:
    """Of each input its own, as lists of numbers or as base64 text."""
    body = {"model": TOKENS, "input": [[5, 6, 7], [8]], "task": "token_embed"}
    numbers = (await proxy.post(POOLING, body)).json
    text = (await proxy.post(POOLING, {**body, "encoding_format": "base64"})).json

    rows = [[[5.0, 0.0], [6.0, 1.0], [7.0, 2.0]], [[8.0, 0.0]]]
    assert rows == [each["data"] for each in numbers["data"]]
    assert ["list", TOKENS, {"prompt_tokens": 4, "total_tokens": 4}] == [
        numbers[name] for name in ("object", "model", "usage")
    ]
    assert [(0, "pooling"), (1, "pooling")] == [(each["index"], each["object"]) for each in numbers["data"]]
    for expected, each in zip(rows, text["data"], strict=True):
        flat = [value for row in expected for value in row]
        assert flat == array("f", base64.b64decode(each["data"])).tolist()


_INPUTS: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
    "ids": ({"input": [5, 6]}, [[5.0, 0.0], [6.0, 1.0]]),
    "no task": ({"input": [5]}, [[5.0, 0.0]]),
    "cut": ({"input": [5, 6, 7], "truncate_prompt_tokens": 2}, [[5.0, 0.0], [6.0, 1.0]]),
    "cut at its beginning": (
        {"input": [5, 6, 7], "truncate_prompt_tokens": 2, "truncation_side": "left"},
        [[6.0, 0.0], [7.0, 1.0]],
    ),
    "before the activation": ({"input": [5, 6], "use_activation": False}, [[-5.0, -0.0], [-6.0, -1.0]]),
}


@every_case("name", list(_INPUTS))
async def test_inputs_of_pooling(proxy: Proxy, name: str) -> None:
    """They are those of embeddings, on both paths."""
    fields, expected = _INPUTS[name]
    for path in (POOLING, "/v1/pooling"):
        answer = await proxy.post(path, {"model": TOKENS, **fields})
        assert [expected] == [each["data"] for each in answer.json["data"]], answer.body


async def test_a_text_for_pooling(proxy: Proxy) -> None:
    """It is tokenized here, with the special token in front."""
    answer = (await proxy.post(POOLING, {"model": TOKENS, "input": "Hello there"})).json

    assert answer["usage"]["prompt_tokens"] == len(answer["data"][0]["data"]) > 1
    assert [0.0, 0.0] == answer["data"][0]["data"][0]


async def test_inputs_of_many_tokens(proxy: Proxy) -> None:
    """Their vectors come from the model in parts, and stay in order and with their input."""
    ids = list(range(10, 110))
    body = {"model": TOKENS, "input": [ids, [5] * 5]}
    first, second = (await proxy.post(POOLING, body)).json["data"]
    assert [[10.0 + place, float(place)] for place in range(100)] == first["data"]
    assert [[5.0, float(place)] for place in range(5)] == second["data"]

    first, _ = (await proxy.post(POOLING, {**body, "encoding_format": "base64"})).json["data"]
    assert [10.0, 0.0, 11.0, 1.0] == array("f", base64.b64decode(first["data"])).tolist()[:4]
    assert 2 * len(ids) == len(array("f", base64.b64decode(first["data"])))


_UNPOOLED: dict[str, tuple[dict[str, Any], str, str]] = {
    "another task": ({"task": "token_classify"}, "task", "but 'token_embed'"),
    "a task of other paths": ({"task": "embed"}, "task", "/v1/embeddings"),
    "a task of another type": ({"task": 5}, "task", ""),
    "nothing": ({"input": ""}, "input", "empty"),
    "unknown ids": ({"input": [10**9]}, "input", ""),
    "more than the context": ({"input": [5] * 2049}, "input", "2048"),
    "more than an answer takes": ({"input": [[5] * 2000] * 9}, "input", "at most 16384"),
    "dimensions": ({"dimensions": 1}, "dimensions", ""),
    "a conversation": ({"messages": [{"role": "user", "content": "Hi"}]}, "messages", ""),
    "another encoding": ({"encoding_format": "bytes"}, "encoding_format", ""),
}


@every_case("name", list(_UNPOOLED))
async def test_pooling_that_is_refused(proxy: Proxy, name: str) -> None:
    """The error names the parameter, and what to do where there is something."""
    fields, param, expected = _UNPOOLED[name]
    answer = await proxy.post(POOLING, {"model": TOKENS, "input": [5], **fields})

    assert (400, param) == (answer.status, answer.error["param"]), answer.body
    assert expected in answer.error["message"]


async def test_other_jobs_of_a_model_of_token_vectors(proxy: Proxy) -> None:
    """It makes no vectors of whole texts."""
    answer = await proxy.post("/v1/embeddings", {"model": TOKENS, "input": "Hi"})

    assert (400, "model") == (answer.status, answer.error["param"])
