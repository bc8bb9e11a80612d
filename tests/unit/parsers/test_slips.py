"""Calls with slips: what the request's tools make clear is repaired, however the text is cut, and the rest is text."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.parsers import CALLS
from tests.cases import every_case
from tests.extended import is_sample
from tests.unit.parsers.slip_cases import CLASSES, SLIP_TOOLS, SLIPS, Slip
from tests.unit.parsers.test_tools import Merged, merge
from tests.unit.parsers.thinking_marks import marks_of
from triton_openai.api.chat import finish_reason
from triton_openai.api.chat_tools import plan_chat_tools
from triton_openai.api.conversation import make_parser
from triton_openai.generation import AnswerState, FinishReason, Generation, Sampling
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, Parsers
from triton_openai.parsers.tools import json_text, names, tolerant
from triton_openai.parsers.tools.tool_parser import ToolParser

PLAN = plan_chat_tools([{"type": "function", "function": {"name": n, "parameters": p}} for n, p in SLIP_TOOLS.items()])


def make(slip: Slip) -> AnswerParser:
    """Return the parser of an answer whose events are seen as they come."""
    kind = None if slip.thinks is None else REASONING_PARSERS.load(slip.thinks)
    reasoning = None if kind is None else kind(inside=kind.inside_after(slip.prompt))
    return AnswerParser(reasoning, TOOL_PARSERS.load(slip.parser)(SLIP_TOOLS))


def read(parser: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> Merged:
    """Return what *parser* makes of *pieces*."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.feed(piece)
    return merge(events + parser.flush(cut=cut))


def said(merged: Merged) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls."""
    calls = [(name, json.loads(arguments)) for _, name, arguments in merged.calls]
    return merged.content.strip(), merged.reasoning, calls


def expected(slip: Slip) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return what *slip* means."""
    return slip.content.strip(), slip.reasoning, list(slip.calls)


@every_case("kind", CLASSES)
def test_every_slip(kind: str) -> None:
    """A slip means what its case says, at once, cut anywhere, and one character at a time."""

    def check(slip: Slip) -> None:
        wanted = expected(slip)
        assert wanted == said(read(make(slip), [slip.text]))
        assert wanted == said(read(make(slip), slip.text))
        for border in range(1, len(slip.text), 11):
            assert wanted == said(read(make(slip), [slip.text[:border], slip.text[border:]])), slip.text[:border]

    every_case("slip", CLASSES[kind], ids=lambda slip: slip.slip)(check)()


def whole(slip: Slip, text: str, *, cut: bool = False) -> tuple[Merged, AnswerParser]:
    """Return what comes of *text* in an answer that is sent as a whole."""
    tools = TOOL_PARSERS.load(slip.parser)
    reasoning = None if slip.thinks is None else REASONING_PARSERS.load(slip.thinks)
    parser = make_parser(Parsers(tools=tools, reasoning=reasoning), PLAN, slip.prompt)
    return read(parser, [text], cut=cut), parser


@every_case("slip", SLIPS, ids=lambda slip: f"{slip.parser}: {slip.slip}")
def test_slips_in_whole_answers(slip: Slip) -> None:
    """An answer that is sent as a whole means the same, and each call is counted by what became of it."""
    merged, parser = whole(slip, slip.text)

    assert expected(slip) == said(merged)
    outcomes = [outcome for outcome, _ in parser.outcomes()]
    assert len(slip.calls) == len([outcome for outcome in outcomes if outcome != "text"])


WORDS = ['"', "\\", "{", "}", "]", ",", "'", "<tool_call>", "</tool_call>", "</parameter>", "\n", "exec", ": "]


def is_object(text: str) -> bool:
    """Return whether *text* is a JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


@given(start=st.floats(0, 1), size=st.integers(0, 5), inserted=st.sampled_from(["", *WORDS]), cut=st.booleans())
@settings(max_examples=12, deadline=None)
def test_no_broken_call_is_complete(start: float, size: int, inserted: str, cut: bool) -> None:
    """
    Whatever is wrong with a text, the arguments of calls are JSON objects, unless the answer says that one was cut.

    In an answer that is sent as a whole and ended by itself, only its end can cut a call.
    """

    @every_case("slip", SLIPS[::3], ids=lambda slip: f"{slip.parser}: {slip.slip}")
    def check(slip: Slip) -> None:
        at = round(start * len(slip.text))
        text = slip.text[:at] if cut else slip.text[:at] + inserted + slip.text[at + size :]
        for merged, parser in (whole(slip, text, cut=cut), (read(p := make(slip), text, cut=cut), p)):
            broken = [call for call in merged.calls if not is_object(call[2])]
            assert parser.cut or not broken
            reason = FinishReason.LENGTH if cut else FinishReason.STOP
            if broken:
                assert "length" == finish_reason(state(reason), parser, PLAN)

    check()


def state(reason: FinishReason) -> AnswerState:
    """Return an answer that ended for *reason*."""
    progress = AnswerState(Generation(id="i", prompt="", sampling=Sampling(max_tokens=9)))
    progress.finish_reason = reason
    return progress


ONE_TOOL = {"f": {"type": "object", "properties": {"city": {"type": "string"}}}}


def check_pair(reasoning: str, tools: str, pieces: Sequence[str], *, inside: bool, after: str) -> None:
    """Assert that a call of *tools* inside of the thinking of *reasoning* is a call."""
    kind = REASONING_PARSERS.load(reasoning)
    parser = AnswerParser(kind(inside=inside), TOOL_PARSERS.load(tools)(ONE_TOOL))
    merged = read(parser, pieces)
    assert [("f", {"city": "Bonn"})] == said(merged)[2]
    assert ("Look.", after) == (merged.reasoning.strip(), merged.content.strip())


@pytest.mark.sampled
@every_case("number, reasoning", list(enumerate(REASONING_PARSERS.table)))
def test_a_call_inside_of_the_thinking(number: int, reasoning: str) -> None:
    """A call inside of the thinking is a call for every tool parser, whether the thinking is closed after it or not."""
    opening, closing = marks_of(reasoning)

    def check(tools: str) -> None:
        call = f"Look.\n{CALLS[tools][0]}Bonn{CALLS[tools][1]}"
        check_pair(reasoning, tools, [call], inside=True, after="")
        if (reasoning, tools) == ("muse_glimmer", "openai"):
            # Both read the same tokens as headers of their own.
            return
        closed = f"{call}\n{closing}Done"
        check_pair(reasoning, tools, [closed], inside=True, after="Done")
        pieces = opening + closed if tools == "hermes" else [opening + closed]
        check_pair(reasoning, tools, pieces, inside=False, after="Done")

    formats = list(TOOL_PARSERS.table)
    if is_sample():
        # Of three parsers of reasoning in a row, each has another third of the formats.
        formats = formats[number % 3 :: 3]
    every_case("tools", formats)(check)()


LONG = "A long answer, longer than what waits. " * 4


@every_case("text,cut,reasoning,content", [
    ("It is 4.", False, "", "It is 4."),
    (" It is 4.\n", False, "", " It is 4.\n"),
    ("It is 4.", True, "It is 4.", ""),
    ("Hm.</think>Yes", False, "Hm.", "Yes"),
    ("<think>Hm", False, "Hm", ""),
    (LONG, True, LONG.strip(), ""),
    (LONG, False, "", LONG),
])  # fmt: skip
def test_thinking_that_the_model_skips(text: str, cut: bool, reasoning: str, content: str) -> None:
    """Text without an end of the thinking that the prompt opened is content, unless it was cut or came in a stream."""
    parser = AnswerParser(REASONING_PARSERS.load("qwen3")(inside=True), None)
    merged = read(parser, [text], cut=cut)
    assert (reasoning, content) == (merged.reasoning, merged.content)

    streamed = AnswerParser(REASONING_PARSERS.load("qwen3")(inside=True), None, streams=True)
    merged = read(streamed, text, cut=cut)
    assert content == merged.content
    assert merged.reasoning == (LONG.strip() if text == LONG else reasoning)


def test_the_tokens_of_thinking_that_waits() -> None:
    """Tokens count as thinking once it is known that they are."""
    for text, expected_tokens in ((["Hm", ".", "</think>", "Yes"], 2), (["It", " is 4."], 0)):
        parser = AnswerParser(REASONING_PARSERS.load("qwen3")(inside=True), None)
        for piece in text:
            parser.feed(piece, 1)
        parser.flush()
        assert expected_tokens == parser.reasoning_tokens or (expected_tokens, parser.reasoning_tokens) == (2, 3)


def test_arguments_stream_up_to_the_slip() -> None:
    """What is right goes on at once; from the slip on, the call waits until it is clear how it goes on."""
    parser = AnswerParser(None, TOOL_PARSERS.load("hermes")(SLIP_TOOLS))
    events = parser.feed('<tool_call>{"name": "write_file", "arguments": {"content": "He said ')
    assert [ToolCallStart, ToolCallArguments] == [type(event) for event in events]
    assert [ToolCallArguments] == [type(event) for event in parser.feed("more")]
    assert not parser.feed('"hello" to me"}}')
    assert [ToolCallArguments] == [type(event) for event in parser.feed("</tool_call>" + " " * 2000)]
    assert not parser.flush()
    assert not parser.cut


def test_a_call_after_one_with_a_slip_streams() -> None:
    """A slip that is repaired holds back no later call."""
    parser = AnswerParser(None, TOOL_PARSERS.load("hermes")(SLIP_TOOLS))
    found = parser.feed('<tool_call>{"name": "exec", "arguments": {"command": "ls",}}</tool_call>\n')
    found += parser.feed('<tool_call>{"name": "write_file", "arguments": {"content": "')
    found += [event for number in range(200) for event in parser.feed(f"word{number} ")]
    assert {0, 1} == {event.index for event in found if isinstance(event, ToolCallStart)}
    assert len([event for event in found if isinstance(event, ToolCallArguments)]) > 50


HOSTILE = (
    "<tool_call>{", '<tool_call>{"name": "exec", "arguments": {"command": "', '", "', "[[", '{"a": "x, "b": "', "/*",
    "<tool_call>\n<function=exec>\n<parameter=command>\n", "</parameter>\n<x>", "'}", '"}}', "\\",
)  # fmt: skip


@every_case("name", ["hermes", "qwen3_coder"])
def test_tolerance_is_linear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerant reader gets a bounded multiple of a hostile text to read."""
    reads: list[int] = []
    original = tolerant.read

    def counted(text: str, *args: Any, **options: Any) -> tolerant.Calls:
        reads.append(len(text))
        return original(text, *args, **options)

    monkeypatch.setattr(tolerant, "read", counted)
    for part in HOSTILE:
        reads.clear()
        text = HOSTILE[1] + part * (8_000 // len(part))
        parser = AnswerParser(None, TOOL_PARSERS.load(name)(SLIP_TOOLS))
        for at in range(0, len(text), 500):
            parser.feed(text[at : at + 500])
        parser.flush(cut=False)
        assert sum(reads) <= 16 * len(text) + 400_000, part


TWO_TEXTS = {"f": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}}
LARGE = 100_000


def calls_in(text: str, *, name: str | None = None) -> list[dict[str, Any]]:
    """Return the arguments of the calls in *text*; none if it is unreadable."""
    try:
        calls = tolerant.read(text, TWO_TEXTS, ended=True, cut=False, name=name).calls
    except tolerant.Unreadable:
        return []
    return [dict(call.arguments) for call in calls]


@every_case("beginning,part,ending", [
    ('{"a": x', ",", "!"),
    ('{"a": x', ", ", "!"),
    ('{"a": x', "}, ", "!"),
    ('{"a": x', ",x", "!"),
    ('{"a": ', "0", "!"),
    ('{"a": "x" ', " ", "!"),
    ("{a", " ", "!"),
    ('{"a": "x", b', " ", "!"),
    ('{"a": "', '",', "!"),
    ('{"a": "x\\', "</tool_call>", ""),
    ("{'a': 'x", "]</tool_call>", "!"),
    ("{/*", "/*", "!"),
])  # fmt: skip
def test_large_arguments_are_read_in_linear_time(beginning: str, part: str, ending: str) -> None:
    """What repeats in arguments is passed once, or the reading ends after a bounded number of steps."""
    text = beginning + part * (LARGE // len(part)) + ending
    # All of it is the value, or nothing is.
    assert calls_in(text, name="f") in ([], [{"a": text.removeprefix('{"a": ')}])


@every_case("beginning,part,ending", [
    ("<tool_call>f\n<arg_key>", " ", "x<"),
    ("<tool_call>f\n<arg_key>a", " ", "x<"),
    ("<tool_call>f\n<arg_key>", "x ", "<"),
    ("<tool_call>\n<function=f>\n<parameter=a>\n", "\n</function>", "!"),
    ("<tool_call>\n<function=f>\n<parameter=a>\n", "</parameter>", "!</parameter>!"),
    ("<tool_call>\n<function=f>\n<parameter=a>\n", "</tool_call>\n</parameter>", "!"),
    ("<tool_call>\n<function=f>\n<parameter", " ", "!"),
    ("<tool_call>\n<function=f>\n", "<parameter=a", "!"),
    ("<tool_call>call:", " ", "!"),
    ("f(a=x", ",", "!"),
])  # fmt: skip
def test_large_calls_are_read_in_linear_time(beginning: str, part: str, ending: str) -> None:
    """What repeats in a call is passed once, or the reading ends after a bounded number of steps."""
    assert not calls_in(beginning + part * (LARGE // len(part)) + ending)


@every_case("text,name", [
    ('f(a="x", 5)', None),
    ("f(a='x', 5)", None),
    ("f(a=x, 5)", None),
    ("f(5, a='x')", None),
    ('f(a="x", "y")', None),
    ('f({"a": "x"} trailing)', None),
    ('{"a": "he said "ok", "b": "fake" and left", "b": "real"}', "f"),
])  # fmt: skip
def test_no_argument_is_invented(text: str, name: str | None) -> None:
    """A value without a key, text after the arguments, and a key that comes twice make a call unreadable."""
    assert not calls_in(text, name=name)


@every_case("text,value", [('{"n": 007}', 7), ('{"n": 1_000}', 1000), ('{/* all */ "n": 1}', 1), ('{"n": +1.}', 1.0)])
def test_numbers_and_comments_are_literals(text: str, value: float) -> None:
    """A number that JSON does not have, and a comment, count as literals."""
    tools: dict[str, Any] = {"g": {"type": "object", "properties": {"n": {"type": "number"}}}}
    (call,) = tolerant.read(text, tools, ended=True, cut=False, name="g").calls
    assert {"n": value} == call.arguments
    assert {"literals"} == call.repairs


def test_a_reading_has_a_maximum_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that goes on beyond the maximum becomes text; no reading gets more."""
    reads: list[int] = []
    original = tolerant.read

    def counted(text: str, *args: Any, **options: Any) -> tolerant.Calls:
        reads.append(len(text))
        return original(text, *args, **options)

    monkeypatch.setattr(tolerant, "read", counted)
    parser = AnswerParser(None, TOOL_PARSERS.load("hermes")(SLIP_TOOLS))
    merged = read(parser, ["<tool_call>{'name': 'exec', 'arguments': {'command': '", "x" * 1_000_000])
    assert not merged.calls
    assert max(reads, default=0) <= 100_000


@every_case(
    "written,expected",
    [
        ("exec", "exec"),
        ("functions.exec", "exec"),
        ("functions.exec:3", "exec"),
        ("functionsexec3", "exec"),
        ("Exec", "exec"),
        ("ns:exec", "exec"),
        ("a.b.exec", "exec"),
        ("exec()", "exec"),
        ("exec[2]", "exec"),
        ("webBrowsing", "web-browsing"),
        ("github.create_issue", "mcp__github__create_issue"),
        ("exec2", None),
        ("executor", None),
        ("exe", None),
        ("toolexec", None),
        ("", None),
        ("x" * 10_000, None),
    ],
)
def test_names(written: str, expected: str | None) -> None:
    """A name means the one tool that it names in another spelling; what is another word means none."""
    assert expected == names.resolve(written, SLIP_TOOLS)


def test_names_of_two_tools() -> None:
    """A name that fits two tools means neither, unless it is the name of one."""
    tools: dict[str, Any] = {"get_user": {}, "getUser": {}, "a__run": {}, "b__run": {}, "exec": {}, "exec_5": {}}
    assert names.resolve("GetUser", tools) is None
    assert names.resolve("run", tools) is None
    assert names.resolve("functions.exec5", tools) is None
    assert "getUser" == names.resolve("getUser", tools)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(arguments=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), share=st.floats(0, 1))
@settings(deadline=None)
def test_missing_rest(arguments: dict[str, Any], share: float) -> None:
    """What makes the beginning of a text one of the arguments does so, wherever it ends but within an escape."""
    text = json_text.dump(arguments)
    begun = text[: round(share * len(text))]
    rest = tolerant.missing_rest(begun, arguments)
    if rest is None:
        assert (
            begun.rstrip('"u0123456789abcdef').endswith("\\") or begun[-1:] in "-0123456789abcdefghijklmnopqrstuvwxyz"
        )
    else:
        assert arguments == json.loads(begun + rest)


def test_no_missing_rest() -> None:
    """Arguments that do not begin so have no rest."""
    for begun in ('{"b', '{"a": "y', '{"a": "x", "b', '["', "{}"):
        assert tolerant.missing_rest(begun, {"a": "x"}) is None


def test_an_unrepaired_call_in_a_stream() -> None:
    """A call that is wrong after its first byte ends as one that was cut; what follows is text."""
    tools = TOOL_PARSERS.load("hermes")(SLIP_TOOLS)
    parser = AnswerParser(None, tools)
    merged = read(parser, ['<tool_call>{"name": "add", "arguments": {"x": "y", "a": 1 + 2}}</tool_call>'])
    assert parser.cut
    assert "length" == finish_reason(state(FinishReason.STOP), parser, PLAN)
    assert "+ 2}}</tool_call>" in merged.content
    assert [("text", ""), ("cut", "")] == sorted(parser.outcomes(), reverse=True)


def test_outcomes() -> None:
    """Calls are counted by what became of them."""
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'.format
    text = call("now", "{}") + call("functions.now", "{}") + call("other", "{}") + call("now", '{"a": nil}')
    parser = AnswerParser(None, TOOL_PARSERS.load("hermes")(SLIP_TOOLS))
    read(parser, [text])
    outcomes = [("repaired", "name"), ("strict", ""), ("text", ""), ("unknown_tool", "")]
    assert outcomes == sorted(parser.outcomes())


def test_a_third_partys_parser_has_outcomes() -> None:
    """The calls of a parser that repairs nothing are strict."""

    class Plain(ToolParser):
        def feed(self, text: str) -> list[Event]:
            return [Content(text), ToolCallStart(0, "i", "f"), ToolCallArguments(0, "{}")]

    parser = AnswerParser(None, Plain({"f": {}}))
    assert [Content, ToolCallStart, ToolCallArguments] == [type(event) for event in parser.feed("x")]
    parser.flush()
    assert [("strict", "")] == parser.outcomes()
    assert not any(isinstance(event, Reasoning) for event in itertools.chain(parser.flush()))
