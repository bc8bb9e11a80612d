"""What engines that are asked token by token tell beside their answers: alternatives, the prompt's scores, ids."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.conformance.calls import ask, id_of, in_session_loop, inputs_of, outcome, recorded, steered
from tests.integration.test_token_level import MODELS, STREAMING, token_settings
from tests.proxy_fixture import TRANSPORTS, Proxy, serving
from tests.triton_fixture import TestTriton
from triton_openai.demo.standins import logits
from triton_openai.prompts.tokenizer import Tokenizer

pytestmark = in_session_loop

TEXT = "one é two"


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(triton: TestTriton) -> AsyncIterator[dict[str, Proxy]]:
    """One running service per way to Triton that serves the engines."""
    async with (
        serving(token_settings(triton, "http"), transport="http") as over_http,
        serving(token_settings(triton, "grpc"), transport="grpc") as over_grpc,
        serving(token_settings(triton, "both"), transport="both") as over_both,
    ):
        found = {"http": over_http, "grpc": over_grpc, "both": over_both}
        for proxy in found.values():
            await proxy.ready()
        yield found


@pytest.fixture(params=["grpc", "both"])
def engine(request: pytest.FixtureRequest, engines: dict[str, Proxy]) -> Proxy:
    """The service over each way that carries raw tensors in streams."""
    return engines[request.param]


@pytest.fixture(scope="session")
def tokenizer(triton: TestTriton) -> Tokenizer:
    """The tokenizer of all models."""
    return Tokenizer.load(str(triton.tokenizer))


def likeliest(number: int, size: int, count: int) -> list[tuple[int, float]]:
    """Return the ids and log probabilities that the stand-in's scores give, by the plain formula."""
    scores = logits.MadeUp().rows(0, [number], size)[0].astype(np.float64)
    normal = scores - (scores.max() + math.log(np.exp(scores - scores.max()).sum()))
    return [(int(place), float(normal[place])) for place in np.argsort(-normal, kind="stable")[:count]]


def entries_of(answer: Any, *, stream: bool) -> list[dict[str, Any]]:
    """Return the entries of a chat."""
    assert 200 == answer.status, answer.body
    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    return [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_alternatives(engine: Proxy, tokenizer: Tokenizer, model: str, stream: bool) -> None:
    """The most likely tokens with their exact bytes, and the chosen one's number out of the same distribution."""
    answer = await ask(
        engine, "chat", model, steered(text=TEXT), logprobs=True, top_logprobs=4, max_tokens=20, stream=stream
    )

    entries = entries_of(answer, stream=stream)
    ids = tokenizer.encode(TEXT)
    assert list(TEXT.encode()) == [byte for entry in entries for byte in entry["bytes"]]
    for number, entry in zip(ids, entries, strict=True):
        expected = likeliest(number, tokenizer.vocab_size, 4)
        assert pytest.approx(logits.log_probability(number), abs=1e-4) == entry["logprob"]
        told = entry["top_logprobs"]
        assert [pytest.approx(value, abs=1e-4) for _, value in expected] == [each["logprob"] for each in told]
        assert [list(tokenizer.pieces.raw(each) or b"") for each, _ in expected] == [each["bytes"] for each in told]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_alternatives_of_completions(engine: Proxy, stream: bool) -> None:
    """
    Alternatives of completions are named by their texts, with the chosen one, and cut with the text at a stop
    string.
    """
    answer = await ask(
        engine, "completions", "tensorrt_llm", steered(text="one two three"), logprobs=2, stop=["wo"], stream=stream
    )

    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    assert "one t" == "".join(choice["text"] for choice in choices)
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert ["one", " two"] == [token for each in told for token in each["tokens"]]
    assert [0, 3] == [offset for each in told for offset in each["text_offset"]]
    assert all(
        each["top_logprobs"][place][token] == each["token_logprobs"][place]
        for each in told
        for place, token in enumerate(each["tokens"])
    )


@pytest.mark.parametrize("model", STREAMING)
@pytest.mark.parametrize(
    "endpoint, fields", [("chat", {"logprobs": True, "top_logprobs": 1}), ("completions", {"logprobs": 1})]
)
async def test_json_cannot_carry_logits(
    engines: dict[str, Proxy], model: str, endpoint: str, fields: dict[str, Any]
) -> None:
    """With Triton's HTTP address alone a stream has no alternatives, and says what is missing."""
    answer = await ask(engines["http"], endpoint, model, "Hello", **fields)

    assert (400, "logprobs") == (answer.status, answer.error["param"])
    assert "gRPC" in answer.error["message"]


async def test_answers_at_once_have_them_over_http_too(engines: dict[str, Proxy]) -> None:
    """A model that does not stream answers with raw tensors on either address."""
    answer = await ask(
        engines["http"], "completions", "tensorrt_llm_nonstreaming", steered(text="one"), logprobs=1, echo=True
    )

    assert 200 == answer.status, answer.body
    assert [None] == answer.json["choices"][0]["logprobs"]["token_logprobs"][:1]


def scored(tokenizer: Tokenizer, prompt: str) -> list[Any]:
    """Return the log probabilities of a prompt's tokens, none for the first."""
    ids = tokenizer.encode(prompt)
    return [None, *(pytest.approx(logits.log_probability(number), abs=1e-4) for number in ids[1:])]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_echo_tells_the_prompts_log_probabilities(
    engine: Proxy, tokenizer: Tokenizer, model: str, stream: bool
) -> None:
    """First the prompt's, null at its first token, then the answer's; the offsets run through."""
    prompt = steered("Hé", text="one two")
    answer = await ask(engine, "completions", model, prompt, logprobs=1, echo=True, max_tokens=2, stream=stream)

    assert 200 == answer.status, answer.body
    choices = [chunk["choices"][0] for chunk in answer.chunks] if stream else answer.json["choices"]
    told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    lists = {name: [value for each in told for value in each[name]] for name in told[0]}
    assert f"{prompt}one two" == "".join(choice["text"] for choice in choices)
    expected = [*scored(tokenizer, prompt), *(logits.log_probability(number) for number in tokenizer.encode("one two"))]
    assert pytest.approx(expected[1:], abs=1e-4) == lists["token_logprobs"][1:]
    assert (None, None, 0) == (lists["token_logprobs"][0], lists["top_logprobs"][0], lists["text_offset"][0])
    assert [len(prompt), len(prompt) + 3] == lists["text_offset"][-2:]
    assert ["one", " two"] == lists["tokens"][-2:]
    assert all(len(each) in (1, 2) for each in lists["top_logprobs"][1:])


async def test_scoring_as_evaluation_harnesses_do(engine: Proxy, triton: TestTriton, tokenizer: Tokenizer) -> None:
    """Lists of token ids, echoed, with one alternative and no tokens: the likeliest is found by comparing numbers."""
    prompts = [tokenizer.encode(text) for text in ("one two three", "Hello")]
    body = {"model": "tensorrt_llm", "prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}
    answer = await engine.post("/v1/completions", body)

    assert 200 == answer.status, answer.body
    assert {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 0} == {
        name: answer.json["usage"][name] for name in ("prompt_tokens", "completion_tokens")
    }
    for ids, choice in zip(prompts, answer.json["choices"], strict=True):
        told = choice["logprobs"]
        assert ids == tokenizer.encode("".join(told["tokens"]))
        assert "length" == choice["finish_reason"]
        for number, value, top in zip(ids[1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
            assert (likeliest(number, tokenizer.vocab_size, 1)[0][0] == number) is (value == max(top.values()))
    (event,) = await recorded(triton, id=f"{id_of(answer)}-0-prompt", model="tensorrt_llm", event="request")
    assert ([1], [False]) == (event["inputs"]["request_output_len"]["value"], event["inputs"]["streaming"]["value"])
    assert not triton.record.events(id=f"{id_of(answer)}-0", model="tensorrt_llm", event="request")


async def test_a_prompt_is_scored_once_for_all_its_answers(engine: Proxy, triton: TestTriton) -> None:
    """A prompt is scored once for all its answers, because its scores are large."""
    answer = await ask(
        engine, "completions", "tensorrt_llm", steered(text="one"), logprobs=0, echo=True, n=3, max_tokens=1
    )

    assert 3 == len(answer.json["choices"])
    assert 1 == len({tuple(choice["logprobs"]["tokens"]) for choice in answer.json["choices"]})
    asked = [event["id"] for event in triton.record.events(model="tensorrt_llm", event="request")]
    assert 1 == sum(each.startswith(id_of(answer)) and each.endswith("-prompt") for each in asked)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_prompt_logprobs(engine: Proxy, triton: TestTriton, tokenizer: Tokenizer, endpoint: str) -> None:
    """
    Log probabilities of prompts are by token id, with ranks, the prompt's own token first, as vLLM's server has
    them.
    """
    answer = await ask(
        engine, endpoint, "tensorrt_llm", steered(text="one"), prompt_logprobs=2, max_tokens=1, return_token_ids=True
    )

    assert 200 == answer.status, answer.body
    holder = answer.json if endpoint == "chat" else answer.json["choices"][0]
    ids = holder["prompt_token_ids"]
    assert ids == (await inputs_of(triton, "tensorrt_llm", id_of(answer)))["input_ids"]["value"]
    assert holder["prompt_logprobs"][0] is None
    for number, told in zip(ids[1:], holder["prompt_logprobs"][1:], strict=True):
        assert str(number) == next(iter(told))
        best = likeliest(number, tokenizer.vocab_size, 3)
        place = [each for each, _ in best].index(number) + 1 if number in dict(best) else None
        assert place is None or place == told[str(number)]["rank"]
        assert 2 <= len(told) <= 3
        assert 1 in [each["rank"] for each in told.values()]


async def test_prompt_logprobs_have_no_place_in_a_stream(engine: Proxy) -> None:
    """Log probabilities of prompts are refused for a stream, as vLLM's server does."""
    answer = await ask(engine, "chat", "tensorrt_llm", "Hello", prompt_logprobs=0, stream=True)

    assert (400, "prompt_logprobs") == (answer.status, answer.error["param"])


@pytest.mark.parametrize(
    "fields, param", [({"echo": True, "logprobs": 0}, "logprobs"), ({"prompt_logprobs": 0}, "prompt_logprobs")]
)
async def test_json_cannot_carry_the_prompts_scores(
    engines: dict[str, Proxy], fields: dict[str, Any], param: str
) -> None:
    """The error names what asked for them."""
    answer = await ask(engines["http"], "completions", "tensorrt_llm", "Hello to you", **fields)

    assert (400, param) == (answer.status, answer.error["param"])
    assert "gRPC" in answer.error["message"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_token_ids(
    engines: dict[str, Proxy], tokenizer: Tokenizer, transport: str, model: str, endpoint: str, stream: bool
) -> None:
    """Those that the engine got and gave, also of a step that completes no character."""
    answer = await ask(
        engines[transport], endpoint, model, steered(text=TEXT), return_token_ids=True, max_tokens=20, stream=stream
    )

    assert 200 == answer.status, answer.body
    chunks = answer.chunks if stream else [answer.json]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert tokenizer.encode(TEXT) == [number for choice in choices for number in choice.get("token_ids", [])]
    holders = chunks if endpoint == "chat" else choices
    (asked,) = [each["prompt_token_ids"] for each in holders if "prompt_token_ids" in each]
    assert "Hello" in tokenizer.decode(asked)


async def test_nothing_of_it_shows_unasked(engine: Proxy) -> None:
    """The answer has OpenAI's fields, vLLM's stop reason, and no others."""
    answer = await ask(engine, "completions", "tensorrt_llm", steered(text="one"), max_tokens=4)

    assert {"text", "index", "logprobs", "finish_reason", "stop_reason"} == answer.json["choices"][0].keys()
    assert {"text": "one", "finish": "stop", "tokens": 1} == outcome("completions", answer)


async def test_best_of_by_the_engines_sum(engine: Proxy, triton: TestTriton) -> None:
    """With and without the tokens' own."""
    for fields in ({}, {"logprobs": 0}, {"logprobs": 1}):
        answer = await ask(
            engine, "completions", "tensorrt_llm", steered(text="one two"), best_of=2, max_tokens=4, **fields
        )

        assert 200 == answer.status, answer.body
        assert ("logprobs" in fields) is (answer.json["choices"][0]["logprobs"] is not None)
