"""
One table of answers, for every model over both transports: request in, text, finish reason and counts out.

Each case is asked in all four forms: chat and completions, streamed and whole. `make test` compares the bytes of both
transports for some cases only.
"""

# ruff: noqa: E501 - a row of a table stays on its line

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import (
    ANSWERS_AT_ONCE,
    BREAKS_CHARACTERS,
    COUNTS_END,
    MODELS,
    ask,
    in_session_loop,
    outcome,
    steered,
)
from tests.extended import sample
from tests.proxy_fixture import Answer, Proxy

pytestmark = in_session_loop

BROKEN = "\ufffd"
FORMS = [(endpoint, streamed) for endpoint in ("chat", "completions") for streamed in (False, True)]


@dataclass(frozen=True)
class Case:
    """
    What the backend is told to answer, what the client asks for, and what it gets.

    *tokens* are those that the backend made; *but* holds what is otherwise on single models, *returns_whole* where the whole
    answer comes in one response, and *in_parts* where each token is decoded alone. On the model that does not count and
    is not known to stream, *uncounted* differs as well: its text is tokenized again.
    """

    name: str
    order: Mapping[str, Any]
    fields: Mapping[str, Any]
    text: str
    finish: str
    tokens: int
    but: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    returns_whole: Mapping[str, Any] = field(default_factory=dict)
    in_parts: Mapping[str, Any] = field(default_factory=dict)
    uncounted: Mapping[str, Any] = field(default_factory=dict)

    def expected(self, model: str, streamed: bool) -> dict[str, Any]:
        """Return the outcome on *model*."""
        found = {"text": self.text, "finish": self.finish, "tokens": self.tokens, **self.but.get(model, {})}
        if model == "ensemble_nonstreaming" or (model in ANSWERS_AT_ONCE and not streamed):
            return {**found, **self.returns_whole, **(self.uncounted if model == "ensemble_legacy" else {})}
        return {**found, **(self.in_parts if model in BREAKS_CHARACTERS else {})}


def on(*models: str, **what: Any) -> dict[str, dict[str, Any]]:
    """Return the same exception for several models."""
    return dict.fromkeys(models, what)


def eos(tokens: int) -> dict[str, dict[str, Any]]:
    """Return the count of vLLM, which counts the end of sequence as a token."""
    return on(*COUNTS_END, tokens=tokens)


THREE = {"text": "one two three"}
FOUR = {"text": "one two three four"}
CASES = (
    # How a generation ends.
    Case("ends by itself", THREE, {"max_tokens": 9}, "one two three", "stop", 3, eos(4)),
    Case("is cut at max_tokens", THREE, {"max_tokens": 2}, "one two", "length", 2),
    Case("is cut at one token", THREE, {"max_tokens": 1}, "one", "length", 1),
    Case("fills max_tokens exactly", THREE, {"max_tokens": 3}, "one two three", "length", 3),
    Case("is empty", {"text": ""}, {"max_tokens": 9}, "", "stop", 0, eos(1)),
    Case("would never end", {"text": "a", "eos": False}, {"max_tokens": 40}, "a" * 40, "length", 40),
    Case("several tokens at once", {**FOUR, "tokens_per_response": 3}, {"max_tokens": 9}, FOUR["text"], "stop", 4, eos(5)),
    Case("several tokens beyond max_tokens", {**FOUR, "tokens_per_response": 3}, {"max_tokens": 2}, "one two", "length", 2),
    # Stop strings.
    Case("stop over tokens", FOUR, {"max_tokens": 9, "stop": "o thr"}, "one tw", "stop", 3, returns_whole={"tokens": 4}, uncounted={"tokens": 3}),
    Case("stop inside a token", FOUR, {"max_tokens": 9, "stop": ["hre"]}, "one two t", "stop", 3, returns_whole={"tokens": 4}, uncounted={"tokens": 3}),
    Case("stop is a whole token", FOUR, {"max_tokens": 9, "stop": " two"}, "one", "stop", 2),
    Case("stop at the very start", FOUR, {"max_tokens": 9, "stop": "on"}, "", "stop", 1, returns_whole={"tokens": 4}, uncounted={"tokens": 1}),
    Case("stop is everything", {"text": "one"}, {"max_tokens": 9, "stop": "one"}, "", "stop", 1),
    Case("stop never comes", THREE, {"max_tokens": 9, "stop": "five"}, "one two three", "stop", 3, eos(4)),
    Case("only the beginning of a stop", THREE, {"max_tokens": 9, "stop": "threefold"}, "one two three", "stop", 3, eos(4)),
    Case("beginning of a stop at the limit", THREE, {"max_tokens": 2, "stop": "two t"}, "one two", "length", 2),
    Case("stop at the limit", THREE, {"max_tokens": 2, "stop": "two"}, "one ", "stop", 2),
    Case("first of several stops", FOUR, {"max_tokens": 9, "stop": ["four", "three", "two t"]}, "one ", "stop", 3,
         # Both are complete at the same token, of which vLLM takes the one that stands first in the list.
         on("vllm_model", text="one two "), returns_whole={"tokens": 4}, uncounted={"tokens": 3}),
    Case("stop that begins twice", {"text": "aab aac"}, {"max_tokens": 99, "stop": "aac"}, "aab ", "stop", 0),
    Case("stop among tokens that came together", {**FOUR, "tokens_per_response": 4}, {"max_tokens": 9, "stop": "wo"}, "one t", "stop", 4,
         # Where nobody counts, the text up to the stop string is tokenized.
         on(*COUNTS_END, "tensorrt_llm_llmapi", "ensemble_legacy", tokens=2)),
    # Characters that are split over tokens: é is two, the emoji is four.
    Case("split characters", {"text": "a😀b é!"}, {"max_tokens": 99}, "a😀b é!", "stop", 10,
         eos(11), in_parts={"text": f"a{BROKEN * 4}b {BROKEN * 2}!"}),
    Case("cut inside a character", {"text": "a😀b"}, {"max_tokens": 3}, "a", "length", 3),
    Case("cut behind a special token", {"tokens": [356, 3, 848]}, {"max_tokens": 3}, "one two", "length", 3,
         # Nothing of the special token is known of an answer that comes at once.
         uncounted={"tokens": 2, "finish": "stop"}),
    Case("stop beyond ASCII", {"text": "a😀b"}, {"max_tokens": 99, "stop": "😀"}, "a", "stop", 5,
         # The engine's own stop words work on tokens: it ends there, and the broken text is no stop string.
         in_parts={"text": f"a{BROKEN * 4}"}),
    # Text that JSON and event streams must not trip over.
    Case("awkward text", {"text": 'x\n\ndata: y\r\n"\\\t\u0000\u2028</s>'}, {"max_tokens": 99}, 'x\n\ndata: y\r\n"\\\t\u0000\u2028</s>', "stop", 0,
         in_parts={"text": f'x\n\ndata: y\r\n"\\\t\u0000{BROKEN * 3}</s>'}),
)  # fmt: skip
#: Those that are asked over gRPC too.
COMPARED = sample(CASES, few=6)


@pytest.mark.sampled
@pytest.mark.parametrize("model", MODELS)
@every_case("case", CASES, ids=lambda case: case.name)
async def test_the_answer_is_the_same_in_every_form(proxies, model, case):
    """
    Text, finish reason and counts are right, in chat and completions, streamed and whole; and the bytes are the same
    over HTTP and over gRPC, but for id and time. A companion model's tokens are one chunk if they come together.
    """
    prompt = steered(**case.order)
    over_http = await _in_every_form(proxies["http"], model, prompt, case)
    found = {form: outcome(form[0], answer) for form, answer in over_http.items()}
    expected = {form: case.expected(model, form[1]) for form in FORMS}
    if not case.tokens:
        # Depends on how the text falls into tokens, which the tokenizer's own tests look at.
        expected = {form: {**each, "tokens": found[form]["tokens"]} for form, each in expected.items()}

    assert expected == found
    if case not in COMPARED:
        return
    over_grpc = await _in_every_form(proxies["grpc"], model, prompt, case)
    if model == "companion":
        assert expected == {form: outcome(form[0], answer) for form, answer in over_grpc.items()}
        return
    assert {form: answer.normalised for form, answer in over_http.items()} == {
        form: answer.normalised for form, answer in over_grpc.items()
    }


async def _in_every_form(proxy: Proxy, model: str, prompt: str, case: Case) -> dict[tuple[str, bool], Answer]:
    answers = await asyncio.gather(
        *(
            ask(
                proxy, endpoint, model, prompt, **case.fields,
                stream=streamed, stream_options={"include_usage": True} if streamed else None,
            )
            for endpoint, streamed in FORMS
        )
    )  # fmt: skip
    return dict(zip(FORMS, answers, strict=True))
