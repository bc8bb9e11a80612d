"""Where the thinking is in an answer, and how the service ends it, for every family."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.unit.parsers.thinking_marks import marks_of
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Reasoning
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.thinking_meter import ThinkingMeter

NAMES = tuple(REASONING_PARSERS.names())


def measured(meter: ThinkingMeter, pieces: list[str]) -> str:
    """Return what of the text in *pieces* is thinking."""
    return "".join([piece[start:end] for piece in pieces for start, end in meter.feed(piece)])


@given(
    st.lists(st.sampled_from(["<", "think", "</", ">", "<think>", "</think>", "a", " ", "\n", "<tool"]), max_size=12),
    st.booleans(),
)
def test_a_meter_however_the_text_is_cut(parts: list[str], inside: bool) -> None:
    """What is thinking does not depend on the cuts, but for the beginning of a marker that ends the piece."""

    def meter() -> ThinkingMeter:
        return ThinkingMeter(("<think>",), ("</think>", "<tool>"), inside=inside)

    text = "".join(parts)
    whole = meter()
    once = measured(whole, [text])
    for pieces in (parts, list(text)):
        one = meter()
        measured(one, pieces)
        assert (whole.inside, whole.over) == (one.inside, one.over)
    assert once in text


@every_case("calls", [False, True])
@every_case("name", NAMES)
def test_the_end_of_the_thinking_of_each_family(name: str, calls: bool) -> None:
    """What the service writes in place of the model ends the thinking, shows nowhere, and the answer follows."""
    kind = REASONING_PARSERS.load(name)
    ending = kind.ending(calls=calls)
    begin, _ = marks_of(name)
    follows = "Yes."
    if ending.endswith("commentary"):
        follows = "<|message|>Yes."
    elif ending.endswith("to="):
        follows = "user<|message|>Yes."
    meter = kind.meter("", ())
    measured(meter, [begin, "Hm, well"])
    assert meter.inside
    tools = TOOL_PARSERS.load("openai")({}) if "|end|" in ending and calls else None
    parser = AnswerParser(kind(inside=None), tools, streams=True)
    events = [
        *parser.feed(begin + "Hm, well"),
        *parser.feed(ending),
        *parser.feed(follows),
        *parser.flush(),
    ]

    assert "Hm, well" == "".join([event.text for event in events if isinstance(event, Reasoning)])
    assert "Yes." == "".join([event.text for event in events if isinstance(event, Content)])


def test_a_call_of_gpt_oss_after_the_thinking() -> None:
    """With tools, the model goes on in the channel of calls, and may call or say something."""
    kind = REASONING_PARSERS.load("openai_gptoss")
    parser = AnswerParser(kind(inside=None), TOOL_PARSERS.load("openai")({"f": {}}), streams=True)
    text = "<|channel|>analysis<|message|>Hm" + kind.ending(calls=True)
    events = [*parser.feed(text), *parser.feed(" to=functions.f <|constrain|>json<|message|>{}<|call|>")]
    parser.flush()

    assert 1 == parser.calls
    assert "Hm" == events[0].text  # type: ignore[union-attr]


def test_where_the_thinking_begins() -> None:
    """An opening counts at the start only, after white space; the prompt may have opened it."""
    for inside, text, expected in (
        (False, " <think>a</think>b", "a"),
        (False, "x<think>a</think>", ""),
        (True, "<think>a</think>b", "a"),
        (True, "a</think>b<think>c", "a"),
        (True, "a<tool>b", "a"),
    ):
        meter = ThinkingMeter(("<think>",), ("</think>", "<tool>"), inside=inside)
        assert expected == measured(meter, [text])


@every_case("inside", [False, True])
def test_white_space_without_end(inside: bool) -> None:
    """It costs each piece the same: what was there before is not looked at again."""
    meter = ThinkingMeter(("<think>",), ("</think>",), inside=inside)
    began = time.thread_time()
    for _ in range(10_000):
        meter.feed("\n" * 200)
    assert time.thread_time() - began < 2
    assert "a" == measured(meter, ["<think>a</think>b"])
