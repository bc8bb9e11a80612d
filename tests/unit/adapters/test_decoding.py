"""The decoders that the adapters share: cumulative text, the prompt's echo, counts and finish reasons."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from triton_openai.adapters._common.decoding import CumulativeText, PromptEcho, TextDecoder, cumulative_logprob
from triton_openai.errors import UpstreamError
from triton_openai.generation import Delta, FinishReason
from triton_openai.triton.tensors import JsonResponse

BROKEN = "\ufffd"


def cumulative(texts: list[str], skip: int = 0) -> list[str]:
    """Return the deltas of *texts* and what is left at the end."""
    stage = CumulativeText(skip)
    return [*(stage.feed(text) for text in texts), stage.flush()]


@every_case(
    "texts, expected",
    [
        (["a", "ab", "abc"], ["a", "b", "c", ""]),
        # The same text again: a step without text, or the empty one at the end.
        (["a", "a", "ab", "ab"], ["a", "", "b", "", ""]),
        ([""], ["", ""]),
        # An incomplete character is one U+FFFD at the end, until it is complete.
        ([f"a{BROKEN}", f"a{BROKEN}", "a😀", "a😀b"], ["a", "", "😀", "b", ""]),
        # ... or until the text goes on behind it: then it stays.
        ([f"a{BROKEN}", f"a{BROKEN}b"], ["a", f"{BROKEN}b", ""]),
        # ... or until the end.
        ([f"a{BROKEN}"], ["a", BROKEN]),
        ([f"a{BROKEN}{BROKEN}"], ["a", BROKEN * 2]),
        ([f"a{BROKEN}", f"a{BROKEN}{BROKEN}", f"a{BROKEN}é"], ["a", "", f"{BROKEN}é", ""]),
    ],
)
def test_cumulative_text_becomes_deltas(texts, expected):
    """Each delta is what is new and certain; nothing that was sent changes afterwards."""
    assert expected == cumulative(texts)


@every_case(
    "texts, expected",
    [
        (["Hi", "Hi th", "Hi there"], ["", " th", "ere", ""]),
        (["Hi"], ["", ""]),
        ([f"H{BROKEN}"], ["", ""]),
        (["H", "Hi th"], ["", " th", ""]),
    ],
)
def test_cumulative_text_skips_the_prompt(texts, expected):
    """Characters that stand in front of the answer are left out."""
    assert expected == cumulative(texts, skip=2)


@given(st.text(alphabet="aé😀日", max_size=12), st.lists(st.integers(1, 3), min_size=48, max_size=48))
def test_cumulative_text_is_whole_for_any_cutting_of_its_bytes(text, steps):
    """Decoding a growing run of bytes, as the backends do, loses nothing and never shows a broken character."""
    data = text.encode()
    texts = []
    end = 0
    for step in steps:
        if end >= len(data):
            break
        end = min(len(data), end + step)
        # An incomplete character at the end shows as one U+FFFD.
        texts.append(data[:end].decode("utf-8", "replace"))

    deltas = cumulative(texts)

    assert text == "".join(deltas)
    assert not any(BROKEN in delta for delta in deltas)


def feed(decoder: TextDecoder, **outputs: Any) -> Delta:
    """Feed one response and return its delta."""
    return decoder.feed(JsonResponse(outputs))


def test_counts_and_reasons_are_read_where_they_are():
    """Tokens are those of each step, the prompt's are told once, and "None" is no finish reason."""
    decoder = TextDecoder(prompt_count="num_input_tokens", token_count="num_output_tokens", finish="finish_reason")

    first = feed(decoder, text_output="one", num_input_tokens=7, num_output_tokens=1, finish_reason="None")
    second = feed(decoder, text_output="", num_input_tokens=7, num_output_tokens=0, finish_reason="stop")

    assert Delta("one", tokens=1, prompt_tokens=7) == first
    assert Delta("", tokens=0, finish_reason=FinishReason.STOP) == second
    assert "" == decoder.flush()


def test_what_is_missing_stays_unknown():
    """Outputs that a response does not have leave no trace, and an empty output is an empty text."""
    decoder = TextDecoder(prompt_count="num_input_tokens", token_count="num_output_tokens", finish="finish_reason")

    assert Delta("") == feed(decoder)
    assert Delta("") == feed(decoder, text_output=[], num_output_tokens=[])
    assert Delta("a") == feed(decoder, text_output=["a", "b"])


@every_case("reasons", [[None], ["None"], ["None", None]])
def test_an_answer_without_its_last_response(reasons):
    """A stream may end in good order before its end: where the last response has a reason, one without was cut off."""
    decoder = TextDecoder(finish="finish_reason")
    for reason in reasons:
        feed(decoder, text_output="a", finish_reason=reason)

    with pytest.raises(UpstreamError, match="before it was complete") as caught:
        decoder.flush()
    assert "upstream_disconnected" == caught.value.code


@every_case("values, expected", [([-0.5], -0.5), ([math.nan], None), ([], None)])
def test_the_log_probability_of_an_answer(values: list[float], expected: float | None) -> None:
    """One that is not a number is none."""
    delta = feed(TextDecoder(readers=[cumulative_logprob("sum")]), text_output="a", sum=values)
    assert expected == delta.cumulative_logprob


@every_case("reason, expected", [("stop", FinishReason.STOP), ("length", FinishReason.LENGTH)])
def test_the_reasons_of_a_finished_generation(reason, expected):
    """Both reasons are OpenAI's own words."""
    assert expected == feed(TextDecoder(finish="finish_reason"), finish_reason=reason).finish_reason


@every_case("reason", ["abort", "error", "", "x" * 100])
def test_a_generation_that_was_broken_off_is_an_error(reason):
    """A reason that is neither stop nor length did not end by itself, and is not reported as if it had."""
    with pytest.raises(UpstreamError) as caught:
        feed(TextDecoder(finish="finish_reason"), finish_reason=reason)

    assert "generation_aborted" == caught.value.code
    assert len(caught.value.message) < 120


class _Event(JsonResponse, frozen=True):
    """Gives its values as they came, as events of a stream do for the sake of speed."""

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        return [self.values.get(name) for name in names]


@every_case("values", [("a", "x", None), ("a", [1, 2], None), ("a", 1, ["stop", "length"]), (5, 1, None)])
def test_outputs_of_another_form_are_the_upstreams_fault(values: tuple[Any, ...]) -> None:
    """Names may be mapped to outputs that have no counts, or another number of elements than the text."""
    decoder = TextDecoder(token_count="tokens", finish="finish_reason")
    with pytest.raises(UpstreamError):
        decoder.feed(_Event(dict(zip(("text_output", "tokens", "finish_reason"), values, strict=True))))


def test_a_cumulative_decoder_gives_back_what_it_held():
    """The end of the stream settles what an incomplete character was."""
    decoder = TextDecoder(CumulativeText())

    assert "a" == feed(decoder, text_output=f"a{BROKEN}").text
    assert BROKEN == decoder.flush()
    assert "" == decoder.flush()


def test_the_echo_is_removed_in_any_of_its_forms():
    """The longest form that fits is taken: the prompt as sent, or as the backend's tokenizer gives it back."""
    remove = PromptEcho("<s>Hi", "Hi").feed

    assert " there" == remove("<s>Hi there")
    assert " there" == remove("Hi there")
    assert "" == remove("Hi")
    assert "there" == PromptEcho("Hi", "Hi ").feed("Hi there")


def test_an_echo_that_is_not_found_is_an_error():
    """What may hold the prompt is not shown; the message says what can be done."""
    with pytest.raises(UpstreamError) as caught:
        TextDecoder(PromptEcho("<s>Hi")).feed(JsonResponse({"text_output": "hi there"}))

    assert re.search("exclude_input_in_output", caught.value.message)


def test_the_echo_is_removed_by_the_decoder():
    """The decoder of a model that repeats the prompt shows the answer alone."""
    assert Delta(" there") == feed(TextDecoder(PromptEcho("Hi")), text_output="Hi there")
