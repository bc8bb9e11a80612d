# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Reasoning parsers: what they split off, however the text is cut, and with a tool parser behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.extended import examples
from tests.unit.parsers.thinking_marks import marks_of
from tests.unit.parsers.tool_parser_cases import CASES, LOOKS, TOOLS
from triton_openai.parsers.channels import MuseGlimmer
from triton_openai.parsers.events import Content, Event, Reasoning
from triton_openai.parsers.grammar import Grammar
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.reasoning import Delimited
from triton_openai.parsers.tools.harmony import Harmony


class Case(msgspec.Struct, frozen=True):
    """A text, what the prompt said of thinking, and what the text means."""

    parser: str
    inside: bool | None
    text: str
    reasoning: str
    content: str


CASES_OF_REASONING = (
    Case("qwen3", None, "<think>\nHm, 1 < 2.\n</think>\n\nYes. ", "Hm, 1 < 2.", "Yes. "),
    Case("qwen3", None, "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
    Case("qwen3", None, " Yes <think>no</think>", "", " Yes <think>no</think>"),
    Case("qwen3", None, "", "", ""),
    Case("qwen3", None, " \n<thi", "", " \n<thi"),
    Case("qwen3", True, "Hm.\n\nSo. </think>Yes.</think>", "Hm.\n\nSo.", "Yes.</think>"),
    Case("qwen3", True, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    Case("qwen3", True, "Hm. </thin", "Hm. </thin", ""),
    Case("qwen3", True, " <th is", "<th is", ""),
    Case("qwen3", False, "Yes.", "", "Yes."),
    Case(
        "qwen3",
        True,
        "A <tool_call> it is.\n<tool_call>\n<function=f>",
        "A <tool_call> it is.",
        "<tool_call>\n<function=f>",
    ),
    Case("deepseek_r1", None, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    Case("deepseek_r1", None, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
    Case("deepseek_r1", None, "Hm", "Hm", ""),
    Case("deepseek_r1", False, "Yes.", "", "Yes."),
    Case("mistral", None, "[THINK]Hm [1].[/THINK]Yes.", "Hm [1].", "Yes."),
    Case("kimi", None, "◁think▷Hm◁/think▷Yes", "Hm", "Yes"),
    Case("kimi_k2", None, "<think>Hm<|tool_calls_section_begin|>x", "Hm", "<|tool_calls_section_begin|>x"),
    Case("minimax_m2", None, "Hm\n<minimax:tool_call>x", "Hm", "<minimax:tool_call>x"),
    Case("seed_oss", None, "<seed:think>Hm</seed:think>Yes", "Hm", "Yes"),
    Case("granite", None, "Here is my thought process: Hm.\nHere's my response: Yes.", "Hm.", "Yes."),
    Case(
        "granite",
        None,
        "Here's my thought process:\nHere is a thing.\nHere is my response:\nYes.",
        "Here is a thing.",
        "Yes.",
    ),
    Case("granite", None, "Here is my answer.", "", "Here is my answer."),
    Case("deepseek_r1", None, "Hm\n<｜tool▁calls▁begin｜>x", "Hm", "<｜tool▁calls▁begin｜>x"),
    Case("deepseek_v3", True, "Hm\n<｜DSML｜function_calls>x", "Hm", "<｜DSML｜function_calls>x"),
    Case("gemma4", None, "<|channel>thought\nHm\n<channel|>Yes", "Hm", "Yes"),
    Case("gemma4", None, "<|channel>thought\nHm<|tool_call>call:f{}", "Hm", "<|tool_call>call:f{}"),
    Case("gemma4", False, "Yes", "", "Yes"),
    Case(
        "cohere_command3",
        None,
        "<|START_THINKING|>Hm<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        "Hm",
        "Yes.",
    ),
    Case("cohere_command3", False, "<|START_RESPONSE|>Yes<|END_RESPONSE|> \n", "", "Yes"),
    Case("cohere_command3", False, "<|START_ACTION|>[]<|END_ACTION|>", "", "<|START_ACTION|>[]<|END_ACTION|>"),
    Case(
        "hunyuan_a13b", None, "<think>\nHm\n</think>\n<answer>\nYes </answer> no\n</answer>", "Hm", "Yes </answer> no"
    ),
    Case("hunyuan_a13b", None, "<think>Hm</think>Yes</answer", "Hm", "Yes</answer"),
    Case("hunyuan_a13b", None, "Yes <answer>", "", "Yes <answer>"),
    Case("ernie45", None, "Hm\n</think>\n\n<response>\nYes\n</response>\n", "Hm", "Yes"),
    Case("ernie45", None, "Hm</think>Yes<resp", "Hm", "Yes<resp"),
    Case(
        "openai_gptoss",
        None,
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes",
        "Hm",
        "Yes",
    ),
    Case("openai_gptoss", None, "<|channel|>commentary to=browser.search code<|message|>Hm<|call|>", "Hm", ""),
    Case("openai_gptoss", True, "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>", "Hm", "Yes"),
    Case(
        "openai_gptoss",
        None,
        "<|channel|>commentary to=functions.f<|message|>{}<|start|>assistant<|channel|>final<|message|>Yes",
        "",
        "<|channel|>commentary to=functions.f<|message|>{}Yes",
    ),
    Case(
        "openai_gptoss",
        None,
        "<|channel|>commentary<|message|>Look:<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        "<|message|>{}<|call|><|start|>assistant to=functions.f<|channel|>commentary<|message|>x",
        "",
        "Look:<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        "<|start|>assistant to=functions.f<|channel|>commentary<|message|>x",
    ),
)


def run(name: str, inside: bool | None, pieces: Iterable[str]) -> tuple[str, str]:
    """Return the reasoning and the content of *pieces*."""
    parser = REASONING_PARSERS.load(name)(inside=inside)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.flush()
    assert all(isinstance(event, Content | Reasoning) and event.text for event in events)
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Content)),
    )


@every_case("case", CASES_OF_REASONING, ids=lambda case: f"{case.parser}-{case.text[:20]!r}")
def test_every_border(case: Case) -> None:
    """The text means what its case says, at once, cut anywhere, and one character at a time."""
    expected = (case.reasoning, case.content)

    assert expected == run(case.parser, case.inside, [case.text])
    assert expected == run(case.parser, case.inside, case.text)
    for border in range(len(case.text) + 1):
        assert expected == run(case.parser, case.inside, [case.text[:border], case.text[border:]])


WORDS = [
    *(
        "<think>",
        "</think>",
        "<thi",
        "</",
        "[THINK]",
        "[/THINK]",
        "◁think▷",
        "◁/think▷",
        "<answer>",
        "</answer>",
        "<tool_call>\n<function=",
    ),
    *(
        "Here is my thought process:",
        "Here's my",
        " response:",
        "Here is my ",
        "<seed:think>",
        "</seed:think>",
        " ",
        "\n",
        "a",
    ),
    *(
        "<|channel|>",
        "analysis",
        "final",
        "commentary",
        " to=functions.f",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|call|>",
    ),
]


@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=2), max_size=20), borders=st.lists(st.integers(0, 200)))
@settings(max_examples=examples(40), deadline=None)
def test_any_text(words: list[str], borders: list[int]) -> None:
    """Any text in any pieces is read without an error, to one result; without thinking it is content as it was."""
    text = "".join(words)
    cuts = sorted(min(border, len(text)) for border in borders)
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]

    @every_case("inside", [None, True, False])
    @every_case("name", REASONING_PARSERS.table)
    def check(name: str, inside: bool | None) -> None:
        whole = run(name, inside, [text])

        assert whole == run(name, inside, pieces)
        assert whole == run(name, inside, text)
        parser = REASONING_PARSERS.load(name)
        # Messages with headers may begin with any of the markers.
        openings = ("<|",) if issubclass(parser, (Harmony, MuseGlimmer)) else getattr(parser, "openings", ())
        framed = getattr(parser, "frame", None) is not None and "answer>" in text
        # Marks of the end of an answer are no text.
        marks = (*openings, *getattr(parser, "dropped", ()))
        # Nor is the end of a thinking that did not begin.
        ends = text.lstrip().startswith(tuple(getattr(parser, "closings", ())))
        if inside is False and not framed and not ends and not any(mark in text for mark in marks):
            assert ("", text) == whole

    check()


@every_case("name", REASONING_PARSERS.table)
def test_cost_is_linear(name: str) -> None:
    """A character is looked at a bounded number of times, in thinking and in the answer."""
    front, middle = marks_of(name)
    parser_class = REASONING_PARSERS.load(name)
    for body in ("lorem ipsum ", "</thin [/THIN Here's m ◁/th <|en ", "<[◁H", "\n"):
        text = front + body * (2_000 // len(body)) + middle + body * (2_000 // len(body))
        for pieces in ([text], list(text)):
            parser = parser_class()
            assert isinstance(parser, Grammar)
            for piece in pieces:
                parser.feed(piece)
            parser.flush()
            assert parser.examined <= LOOKS * len(text)


def test_thinking_streams() -> None:
    """Thinking and answer come out with the piece that brings them, but for white space that may end the thinking."""
    parser = REASONING_PARSERS.load("qwen3")()
    parser.feed("<think>\n")
    out = [parser.feed(piece) for piece in ("Hm", " so", ".\n", "</thi", "nk>\n\n", "Yes", "!")]

    assert [[Reasoning("Hm")], [Reasoning(" so")], [Reasoning(".")], [], [], [Content("Yes")], [Content("!")]] == out
    assert [] == parser.flush()


@every_case(
    "name,prompt,expected",
    [
        ("qwen3", "<|im_start|>assistant\n<think>\n", True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("qwen3", "What does <think> mean?<|im_start|>assistant\n", None),
        ("mistral", "[/INST][THINK]", True),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>", True),
        ("openai_gptoss", "<|start|>assistant", None),
    ],
)
def test_what_the_prompt_says(name: str, prompt: str, expected: bool | None) -> None:
    """Only the end of the prompt tells whether the answer begins inside of thinking."""
    assert expected is REASONING_PARSERS.load(name).inside_after(prompt)


@every_case("case", [case for case in CASES if case.parser == "openai"], ids=lambda case: case.name)
def test_harmony_in_two_stages(case: object) -> None:
    """gpt-oss's reasoning parser in front of its tool parser comes to what the tool parser alone comes to."""
    text = case.text  # type: ignore[attr-defined]

    def events(*, both: bool) -> list[Event]:
        numbers = itertools.count()
        tools = TOOL_PARSERS.load("openai")(TOOLS, new_id=lambda: str(next(numbers)))
        if not both:
            return tools.feed(text) + tools.flush()
        first = REASONING_PARSERS.load("openai_gptoss")()
        found: list[Event] = []
        for event in first.feed(text) + first.flush():
            found += tools.feed(event.text) if isinstance(event, Content) else [event]
        return found + tools.flush()

    def summary(found: list[Event]) -> tuple[str, str, list[Event]]:
        return (
            "".join(event.text for event in found if isinstance(event, Content)),
            "".join(event.text for event in found if isinstance(event, Reasoning)),
            [event for event in found if not isinstance(event, Content | Reasoning)],
        )

    assert summary(events(both=False)) == summary(events(both=True))


@every_case("name", REASONING_PARSERS.table)
def test_ends_of_thinking_that_come_again(name: str) -> None:
    """An end that comes twice, and the end of a thinking that did not begin, are markup, however the text is cut."""
    kind = REASONING_PARSERS.load(name)
    if not issubclass(kind, Delimited):
        return
    for closing in kind.closings:
        for inside, text, reasoning in (
            (True, f"Hm{closing}\n{closing}\n\nOk", "Hm"),
            (False, f"{closing}\n\nOk", ""),
            (False, f"\n{closing}{closing}Ok", ""),
        ):
            for pieces in ([text], text):
                parser = kind(inside=inside)
                events = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
                thoughts = [event.text for event in events if isinstance(event, Reasoning)]
                words = [event.text for event in events if isinstance(event, Content)]
                assert (reasoning, "Ok") == ("".join(thoughts), "".join(words)), text
