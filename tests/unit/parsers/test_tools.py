"""Tool parsers: what they find, however the text is cut, at a cost that grows with its length."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.parsers import CALLS
from tests.cases import every_case
from tests.extended import examples, sample
from tests.unit.parsers.tool_parser_cases import ALL, CASES, LOOKS, TOOLS, Case
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.grammar import Grammar
from triton_openai.parsers.parser_registry import TOOL_PARSERS
from triton_openai.parsers.tools.brace_calls import BraceCalls
from triton_openai.parsers.tools.tagged_calls import TaggedCalls
from triton_openai.parsers.tools.tool_parser import CallGrammar, ToolParser, Tools

#: What of a closing tag came before the end of a text counts as text of the parameter.
TAGGED = (TaggedCalls, BraceCalls)


class Merged(msgspec.Struct, frozen=True):
    """What a stream of events says altogether."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str, str], ...]


def make(name: str, tools: Tools = TOOLS) -> ToolParser:
    """Return a new parser whose own ids are counted."""
    numbers = itertools.count()
    return TOOL_PARSERS.load(name)(tools, new_id=lambda: f"id{next(numbers)}")


def merge(events: Iterable[Event]) -> Merged:
    """Put events together, checking that they follow on each other as they must."""
    content, reasoning = [], []
    calls: list[list[str]] = []
    for event in events:
        match event:
            case Content(text):
                assert text
                content.append(text)
            case Reasoning(text):
                assert text
                reasoning.append(text)
            case ToolCallStart(index, call_id, name):
                assert len(calls) == index
                assert name
                calls.append([call_id, name, ""])
            case ToolCallArguments(index, text):
                assert len(calls) - 1 == index
                assert text
                calls[index][2] += text
    return Merged("".join(content), "".join(reasoning), tuple((a, b, c) for a, b, c in calls))


def parse(name: str, pieces: Iterable[str]) -> Merged:
    """Feed *pieces* to a new parser."""
    parser = make(name)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merge(events + parser.flush())


def expected(case: Case) -> Merged:
    """Return what *case* says, with the ids that the tests' parsers give."""
    numbers = itertools.count()
    calls = tuple(
        (call[0], call[1], call[2]) if len(call) == 3 else (f"id{next(numbers)}", call[0], call[1])
        for call in case.calls
    )
    return Merged(case.content, case.reasoning, calls)


def title(case: Case) -> str:
    """Return the name of a case."""
    return f"{case.parser}-{case.name.replace(' ', '_')}"


@every_case("case", CASES, ids=title)
def test_a_whole_text(case: Case) -> None:
    """A text that arrives at once means what its case says."""
    assert expected(case) == parse(case.parser, [case.text])


@pytest.mark.sampled
@every_case("case", CASES, ids=title)
def test_every_border(case: Case) -> None:
    """Cutting the text anywhere changes nothing, and neither does cutting it everywhere."""
    whole = parse(case.parser, [case.text])

    for border in sample(range(len(case.text) + 1), few=6):
        assert whole == parse(case.parser, [case.text[:border], case.text[border:]]), case.text[:border]
    assert whole == parse(case.parser, case.text)
    assert whole == parse(case.parser, [piece for character in case.text for piece in ("", character, "")])


@pytest.mark.sampled
@every_case("case", CASES, ids=title)
def test_every_end(case: Case) -> None:
    """A text may end anywhere: nothing is lost from what no call was made of, and calls are no longer than before."""
    whole = parse(case.parser, [case.text])

    for end in sample(range(len(case.text)), few=6):
        cut = parse(case.parser, [case.text[:end]])
        assert cut == parse(case.parser, case.text[:end])
        if not cut.calls and case.parser != "openai":
            assert case.text[:end] == cut.content
        for before, after in zip(cut.calls, whole.calls, strict=False):
            assert before[:2] == after[:2]
            if not issubclass(TOOL_PARSERS.load(case.parser), TAGGED):
                assert after[2].startswith(before[2])


@every_case("name", ALL)
def test_a_long_beginning_is_content(name: str) -> None:
    """An answer that begins as a code block or a name may, but goes on for too long, is content."""
    for beginning in ("", "```", "```json\n"):
        for part in "a`_ \n語":
            text = beginning + 300 * part + "!"
            for pieces in ([text], [text[at : at + 50] for at in range(0, len(text), 50)]):
                assert Merged(text, "", ()) == parse(name, pieces), (beginning, part)


#: A malformation behind the beginning of the arguments cannot be taken back, and neither can an early end.
UNFINISHED = ("cut", "malformed behind", "malformed parameter")
FINISHED = [case for case in CASES if case.calls and not case.name.startswith(UNFINISHED)]


@every_case("case", FINISHED, ids=title)
def test_arguments_are_json(case: Case) -> None:
    """The arguments of every call that was finished are a JSON object."""
    for _, _, arguments in parse(case.parser, [case.text]).calls:
        assert isinstance(json.loads(arguments), dict)


def _words() -> list[str]:
    """Return pieces that texts are made of: whole markers of all families, parts of them, and what stands between."""
    found = {*re.findall(r"<[^<>\s]{1,40}>|\[[A-Z_]+\]|functools\[|[\w.]+|\s+|[^\w\s]", "".join(c.text for c in CASES))}
    return sorted(found)


WORDS = _words()
#: Texts are made of markup much more often than chance would have it.
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=40).map("".join)


@st.composite
def cuttings(draw: Any) -> list[str]:
    """Draw a text in pieces."""
    text = draw(TEXTS)
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in itertools.pairwise([0, *borders, len(text)])]


def assert_one_result(name: str, pieces: list[str]) -> None:
    """Assert that a text in any pieces means the same, and is content as it was when it has no calls."""
    text = "".join(pieces)
    whole = parse(name, [text])

    assert whole == parse(name, pieces)
    assert whole == parse(name, text)
    if not whole.calls and name != "openai":
        assert text == whole.content


@given(pieces=cuttings())
@settings(max_examples=examples(80), deadline=None)
def test_any_text(pieces: list[str]) -> None:
    """Every parser reads any text in any pieces without an error, to one result."""
    every_case("name", ALL)(assert_one_result)(pieces=pieces)


@given(
    start=st.floats(0, 1),
    size=st.integers(0, 4),
    inserted=st.sampled_from(["", *WORDS]),
    borders=st.lists(st.floats(0, 1), max_size=12),
)
@settings(max_examples=examples(20, few=6), deadline=None)
def test_damaged_calls(start: float, size: int, inserted: str, borders: list[float]) -> None:
    """A call with a fault anywhere is read without an error, to one result, however it is cut."""

    @every_case("case", [case for case in CASES if case.calls], ids=title)
    def check(case: Case) -> None:
        at = round(start * len(case.text))
        text = case.text[:at] + inserted + case.text[at + size :]
        cuts = sorted(round(border * len(text)) for border in borders)
        assert_one_result(case.parser, [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])])

    check()


#: The tool that the `CALLS` of the bench call: for each parser, what stands before and behind one long argument.
ONE_TOOL = {"f": {"type": "object", "properties": {"city": {"type": "string"}}}}
BODIES = {
    "letters": "lorem ipsum ",
    "half markers": "</tool_cal </param <｜DS [TOOL </arg_ <|en ",  # noqa: RUF001
    "brackets": "{[(<",
    "line breaks": "\\n\\n",
}


def cost(name: str, pieces: Sequence[str]) -> tuple[int, Merged]:
    """Return how many characters a parser looked at, and its result."""
    parser = make(name, ONE_TOOL)
    assert isinstance(parser, Grammar)
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.flush()
    return parser.examined, merge(events)


@every_case("body", BODIES)
@every_case("name", CALLS)
def test_cost_is_linear(name: str, body: str) -> None:
    """Looking at a character costs a bounded number of looks, in content and in arguments, whole or one by one."""
    front, behind = CALLS[name]
    for before, after in (("", ""), (front, behind)):
        text = before + BODIES[body] * (2_000 // len(BODIES[body])) + after
        for pieces in ([text], list(text), [text[at : at + 7] for at in range(0, len(text), 7)]):
            examined, merged = cost(name, pieces)
            assert examined <= LOOKS * len(text)
            assert len(merged.calls) == (1 if before else 0)


@every_case("item", ["-12.5e3, ", '"lorem", ', '{"a": 1, "b": [true, null], "c": "d"}, ', "[[], [1]], "])
def test_many_values_cost_little(item: str) -> None:
    """Arguments made of many small values are looked at as often as a long text is."""
    text = '<tool_call>{"name": "f", "arguments": {"a": [' + item * (4_000 // len(item)) + "0]}}</tool_call>"
    for size in (1, 7, len(text)):
        examined, merged = cost("hermes", [text[at : at + size] for at in range(0, len(text), size)])
        assert examined <= LOOKS * len(text)
        assert isinstance(json.loads(merged.calls[0][2]), dict)


@every_case("name", CALLS)
def test_a_text_that_ends_within_a_call(name: str) -> None:
    """A parser knows after the end of the text whether it ended in the middle of a call."""
    front, behind = CALLS[name]
    for text, unfinished in ((front, True), (front + "x" + behind, False), ("x", False)):
        parser = make(name, ONE_TOOL)
        assert isinstance(parser, CallGrammar)
        parser.feed(text)
        parser.flush()
        assert unfinished is parser.unfinished


def test_a_text_that_ends_behind_a_call() -> None:
    """A text that ends behind a call does not end in the middle of one; a call that is malformed counts as cut."""
    for name, text, unfinished in (
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "c", "a": nil}}', True),
        ("openai", '<|channel|>commentary to=functions.f<|message|>{"b": "c", "a": nil}', True),
        ("openai", "<|channel|>commentary to=functions.f<|message|><|call|>", False),
    ):
        parser = make(name, ONE_TOOL)
        assert isinstance(parser, CallGrammar)
        assert any(isinstance(event, ToolCallStart) for event in parser.feed(text) + parser.flush())
        assert unfinished is parser.unfinished


@every_case("name", CALLS)
def test_arguments_stream(name: str) -> None:
    """Each piece of a long argument comes out as soon as it came in; the name comes first, without arguments."""
    front, behind = CALLS[name]
    parser = make(name, ONE_TOOL)
    first = parser.feed(front)

    assert ToolCallStart in [type(event) for event in first]
    for number in range(100):
        word = f"word{number} "
        out = parser.feed(word)
        held = "" if out else word
        assert [ToolCallArguments] == [type(event) for event in out], held
    rest = parser.feed(behind) + parser.flush()
    assert {ToolCallArguments} >= {type(event) for event in rest}


@every_case("name", ALL)
def test_text_passes_without_delay(name: str) -> None:
    """Text without markup comes out with the piece that brings it, but for white space that a call might follow."""
    parser = make(name, ONE_TOOL)
    fed = ""
    seen = ""
    for word in ["It", "is", "5", "<", "6,", "so", "{a}", "and", "[b]", "hold.\nBye", "now"]:
        fed += word + " "
        for event in parser.feed(word + " "):
            assert isinstance(event, Content)
            seen += event.text
        assert fed.rstrip() == seen


@every_case("name", ALL)
def test_partial_markers_are_held_back(name: str) -> None:
    """Nothing of a marker is shown while it may still become one."""
    front, _ = CALLS[name]
    parser = make(name, ONE_TOOL)
    for character in front:
        assert not [event for event in parser.feed(character) if isinstance(event, Content)]


def test_ids() -> None:
    """Ids are OpenAI's in style, but Mistral's own nine characters and Kimi's own count."""
    for name in ALL:
        front, behind = CALLS[name]
        start = next(e for e in TOOL_PARSERS.load(name)(ONE_TOOL).feed(front + behind) if isinstance(e, ToolCallStart))
        pattern = {"mistral": r"[A-Za-z0-9]{9}", "kimi_k2": r"functions\.f:0"}.get(name, r"call_[A-Za-z0-9]{24}")
        assert re.fullmatch(pattern, start.id)


def test_a_deep_value() -> None:
    """Nesting without end is read without recursion."""
    depth = 50_000
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * depth + "]" * depth + "}}</tool_call>"

    assert len(parse("hermes", [text]).calls[0][2]) == 2 * depth + len('{"a": }')
    assert parse("pythonic", ["[now(a=" + "[" * depth]).content
    text = '<tool_call>{"name": "f", "arguments": "' + "[" * depth + '"}</tool_call>'
    assert text == parse("hermes", [text]).content


@every_case(
    "text",
    [
        '<tool_call>{"name": "f", "x": ' + "9" * 2000 + "}",
        '<tool_call>{"name": "f", "x": [' + "9" * 2000 + ", 1]}",
        "<tool_call>" + "9" * 2000,
        "<|python_start|>" + "f" * 2000 + "(",
        "<tool_call>" + "\n" * 2000 + "x",
    ],
)
@every_case("name", ALL)
def test_what_is_too_long(name: str, text: str) -> None:
    """What is held back until its end, a number or a name, is held back only so far, wherever the text is cut."""
    whole = parse(name, [text])

    assert Merged(text, "", ()) == whole
    assert whole == parse(name, text)
    assert whole == parse(name, [text[:1500], text[1500:]])


@every_case("text", ["<|channel|>" + "a" * 500, "<|channel|>a<|constrain|>b" * 20])
def test_a_header_that_does_not_end(text: str) -> None:
    """A header that does not end is shown when it cannot be one any more, before the text ends."""
    assert any(isinstance(event, Content) for event in make("openai").feed(text))
