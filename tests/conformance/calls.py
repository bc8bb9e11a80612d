"""What all conformance tests share: the models, ways to ask them, and ways to look at what they were asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest

from tests.proxy_fixture import Answer, Proxy
from tests.triton_fixture import TestTriton
from triton_openai.adapters._common.base import Rule
from triton_openai.adapters._common.registry import BUILT_IN

# The models whose inputs some tests know by name.
TRTLLM = (
    "ensemble",
    "ensemble_legacy",
    "ensemble_nonstreaming",
    "tensorrt_llm_bls",
    "tensorrt_llm_bls_delta",
    "tensorrt_llm",
    "tensorrt_llm_llmapi",
)
TRTLLM_AND_VLLM = (*TRTLLM, "vllm_model")
# All that take part in most tests.
MODELS = (*TRTLLM_AND_VLLM, "companion")


def inputs_for(parameter: str) -> set[str]:
    """Return what the inputs of *parameter* are called in the tables of all adapters."""
    names: set[str] = set()
    for path in BUILT_IN.values():
        for row in getattr(import_module(path.partition(":")[0]), "PARAMETERS", ()):
            if row.name == parameter:
                names.update(row.inputs)
    return names


LIMITS = inputs_for("max_tokens")
SEEDS = inputs_for("seed")
BLS = ("tensorrt_llm_bls", "tensorrt_llm_bls_delta")
STREAMING = tuple(model for model in MODELS if model != "ensemble_nonstreaming")
# Where a stream cannot put a character together again that is split over tokens: each token is decoded alone.
BREAKS_CHARACTERS = ("ensemble", "ensemble_legacy", "tensorrt_llm_bls_delta")
# Those that are asked for the whole answer where the client wants no stream.
ANSWERS_AT_ONCE = ("ensemble", "ensemble_legacy", "ensemble_nonstreaming", "tensorrt_llm_bls", "tensorrt_llm_bls_delta")
# Those whose backend puts a special token in front of every text.
ADDS_BOS = ("tensorrt_llm_llmapi", "vllm_model", "companion")
# vLLM counts the token that ends an answer.
COUNTS_END = ("vllm_model", "companion")
# What runs the tokens behind a model, under the client's request id; behind a BLS it has an id of its own.
ENGINES = {
    **dict(zip(MODELS, MODELS, strict=True)),
    "ensemble": "tensorrt_llm",
    "ensemble_legacy": "tensorrt_llm_legacy",
    "ensemble_nonstreaming": "tensorrt_llm_nonstreaming",
    "tensorrt_llm_bls": "tensorrt_llm",
    "tensorrt_llm_bls_delta": "tensorrt_llm",
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ENDS = ("finished", "cancelled", "stopped", "failed")

in_session_loop = pytest.mark.asyncio(loop_scope="session")


def approximately(entries: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return *entries* whose numbers *name* equal others to some digits: sums of a batch depend on the processor."""
    return [{**entry, name: pytest.approx(entry[name], abs=1e-5)} for entry in entries]


def steered(prompt: str = "Hello", **orders: Any) -> str:
    """Return a prompt that tells the stand-ins what to do."""
    return f"{prompt} <<steer {json.dumps(orders)}>>"


def request(endpoint: str, model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a request to *endpoint*; fields that are ``None`` are left out."""
    ask: dict[str, Any] = (
        {"messages": [{"role": "user", "content": prompt}]} if endpoint == "chat" else {"prompt": prompt}
    )
    return {"model": model, **ask, **{name: value for name, value in fields.items() if value is not None}}


def require(proxy: Proxy, model: str, *parameters: str) -> None:
    """Skip the test for a model whose adapter refuses one of *parameters*."""
    for row in proxy.models.served[model].adapter.parameters:
        if row.name in parameters and row.rule is Rule.REFUSED:
            pytest.skip(f"{model} takes no {row.name}")


async def ask(proxy: Proxy, endpoint: str, model: str, prompt: str, **fields: Any) -> Answer:
    """Send one request and return the answer, whatever it is."""
    return await proxy.post(PATHS[endpoint], request(endpoint, model, prompt, **fields))


def id_of(answer: Answer) -> str:
    """Return the id of a whole answer or of a stream; it is what Triton saw as the request's id."""
    if answer.body.startswith(b"data:"):
        return str(json.loads(answer.events[0])["id"])
    return str(answer.json["id"])


def text_of(endpoint: str, answer: Answer) -> str:
    """Return the text of the first choice of a whole answer or of a stream."""
    if not answer.body.startswith(b"data:"):
        choice = answer.json["choices"][0]
        return str(choice["message"]["content"] if endpoint == "chat" else choice["text"])
    choices = [choice for chunk in map(json.loads, answer.events[:-1]) for choice in chunk.get("choices", [])]
    pieces = [choice["delta"].get("content") or "" if endpoint == "chat" else choice["text"] for choice in choices]
    return "".join(pieces)


def outcome(endpoint: str, answer: Answer) -> dict[str, Any]:
    """Return text, finish reason and completion tokens, read out of a whole answer or of a stream with usage."""
    assert 200 == answer.status, answer.body
    if answer.body.startswith(b"data:"):
        *chunks, usage = answer.chunks
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert [None] * (len(reasons) - 1) == reasons[:-1]
        finish, counted = reasons[-1], usage["usage"]
    else:
        finish, counted = answer.json["choices"][0]["finish_reason"], answer.json["usage"]
    assert counted["prompt_tokens"] + counted["completion_tokens"] == counted["total_tokens"]
    return {"text": text_of(endpoint, answer), "finish": finish, "tokens": counted["completion_tokens"]}


async def recorded(
    triton: TestTriton, condition: Callable[[list[dict[str, Any]]], bool] | None = None, **narrowed: str
) -> list[dict[str, Any]]:
    """Wait for events of the stand-ins' record; see `Record.wait_for`."""
    # Mostly it is there already.
    found = triton.record.events(**narrowed)
    if condition(found) if condition is not None else found:
        return found
    return await asyncio.to_thread(lambda: triton.record.wait_for(condition, 120.0, **narrowed))


async def inputs_of(triton: TestTriton, model: str, request_id: str) -> Mapping[str, dict[str, Any]]:
    """Return the inputs with which *model* got the request; a stop request for it has the same id."""
    events = await recorded(triton, id=request_id, model=model, event="request")
    (event,) = [event for event in events if "stop" not in event["inputs"]]
    return dict(event["inputs"])


def prompt_input(inputs: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the name of the input with the prompt, which the orders in it show: see :func:`steered`."""
    (name,) = [
        name
        for name, tensor in inputs.items()
        if tensor["dtype"] == "BYTES" and any("<<steer " in text for text in tensor["value"])
    ]
    return name


async def inputs_asked(triton: TestTriton, model: str, request_id: str, count: int) -> list[dict[str, Any]]:
    """Return the inputs of the *count* requests that came of one call, in their order."""

    def ours(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [event for event in events if event["id"].startswith(request_id)]

    events = await recorded(triton, lambda found: len(ours(found)) >= count, model=model, event="request")
    return [event["inputs"] for event in sorted(ours(events), key=lambda event: int(event["id"].rpartition("-")[2]))]


async def end_of(triton: TestTriton, model: str, request_id: str) -> tuple[str, int]:
    """Wait until *model* has ended a request, and return how and after how many tokens."""

    def ends(events: list[dict[str, Any]]) -> list[tuple[str, int]]:
        # The stop request has the same id; an engine that is not decoupled cannot answer it and calls that a failure.
        found = [(each["event"], each["tokens"]) for each in events if each["event"] in ENDS]
        return found if model != "tensorrt_llm_nonstreaming" else [end for end in found if end != ("failed", 0)]

    events = await recorded(triton, lambda found: bool(ends(found)), id=request_id, model=model)
    return ends(events)[0]


async def inner_id(triton: TestTriton, limit: int, engine: str = "tensorrt_llm") -> str:
    """
    Return the id of an *engine*'s request, found by a *limit* that only this test asks for (see :func:`new_limit`).

    Behind a BLS model it is the engine's own, and before the first answer nobody has told it yet.
    """

    def is_it(event: Mapping[str, Any]) -> bool:
        return limit_of(event) == limit

    events = await recorded(triton, lambda found: any(map(is_it, found)), model=engine, event="request")
    return str(next(event["id"] for event in events if is_it(event)))


def limit_of(event: Mapping[str, Any]) -> object:
    """Return the limit of tokens that a recorded request has, ``None`` if it has none."""
    inputs = event.get("inputs", {})
    # Other tests send models what is no JSON, or no object.
    with contextlib.suppress(ValueError, AttributeError):
        if sampling := inputs.get("sampling_parameters"):
            return json.loads(sampling["value"][0]).get("max_tokens")
        if companion := inputs.get("request"):
            return json.loads(companion["value"][0]).get("sampling", {}).get("max_tokens")
    for name in LIMITS:
        if name in inputs:
            return next(iter(inputs[name]["value"]), None)
    return None


def new_limit(triton: TestTriton, limits: Iterator[int]) -> int:
    """Return the next of *limits* that no request on record has: tests of other files use the same Triton."""
    used = list(map(limit_of, triton.record.events(event="request")))
    return next(limit for limit in limits if limit not in used)
