"""The parser of a choice: which stages it has, which ids its calls get, and when a call counts as cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bench.parsers import CALLS
from tests.cases import every_case
from tests.extended import sample
from triton_openai.api.chat import ToolCall, message_of
from triton_openai.api.chat_tools import NamedFunction, NamedTool, ToolChoice, plan_chat_tools
from triton_openai.api.conversation import make_parser
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.parser_registry import TOOL_PARSERS, Parsers
from triton_openai.parsers.reasoning import Hunyuan, Think
from triton_openai.parsers.tools.json_calls import Mistral
from triton_openai.parsers.tools.tool_parser import ToolParser

Hermes = TOOL_PARSERS.load("hermes")
Llama3Json = TOOL_PARSERS.load("llama3_json")
Pythonic = TOOL_PARSERS.load("pythonic")
TOOLS = [{"type": "function", "function": {"name": "now"}}]
NAMED = NamedTool(function=NamedFunction(name="now"))
CALL = '<tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'


@every_case("choice", ["required", NAMED])
def test_forced_calls_have_ids_of_the_family(choice: Any) -> None:
    """Mistral's templates take nine letters and digits, also for calls that the backend was held to."""
    wanted = plan_chat_tools(tools=TOOLS, tool_choice=choice, functions=None, function_call=None, parallel=None)
    text = '[{"name": "now", "parameters": {}}]' if choice == "required" else "{}"
    lengths = []
    for tools in (Mistral, Hermes, None):
        parser = make_parser(Parsers(tools=tools), wanted, "")
        (start, *_) = parser.feed(text)
        assert isinstance(start, ToolCallStart)
        lengths.append(len(start.id))

    assert lengths == [9, 29, 29]


OWN: dict[type[ToolParser] | None, str] = {
    Hermes: CALL,
    Mistral: '[TOOL_CALLS][{"name": "now", "arguments": {"a": 1}}]',
    Pythonic: "[now(a=1)]",
    Llama3Json: '<|python_tag|>{"name": "now", "parameters": {"a": 1}}',
    None: '{"name": "now", "parameters": {"a": 1}}',
}


@every_case("tools", OWN)
@every_case("size", [1, 5, 1000])
def test_a_forced_call_in_the_models_own_form(tools: type[ToolParser] | None, size: int) -> None:
    """A backend that did not hold the model to the schema may have let it write calls as it learned to."""
    own, array, arguments = OWN[tools], '[{"name": "now", "parameters": {"a": 1}}]', ' {"a": 1}'
    cases: list[tuple[ToolChoice, Sequence[str]]] = [
        ("required", (own, f"\n{array}")), (NAMED, (own, arguments) if tools else (arguments,)),
    ]  # fmt: skip
    for choice, texts in cases:
        wanted = plan_chat_tools(tools=TOOLS, tool_choice=choice, functions=None, function_call=None, parallel=None)
        for text in texts:
            parser = make_parser(Parsers(tools=tools), wanted, "")
            events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
            message = message_of(events + parser.flush(), wanted, ("reasoning",))
            assert isinstance(message.tool_calls, list), text
            (call,) = message.tool_calls
            assert isinstance(call, ToolCall)
            assert ("now", {"a": 1}) == (call.function.name, json.loads(call.function.arguments))
            assert (None, False) == (message.content, parser.cut)


@every_case("choice", ["required", NAMED])
@every_case("text", ["Now.", "[now]", '[{"name": "then", "parameters": {}}]', "  [", "<tool_call>then", " <tool_ca"])
def test_a_forced_call_that_is_none(choice: Any, text: str) -> None:
    """The text is content, as the model wrote it."""
    wanted = plan_chat_tools(tools=TOOLS, tool_choice=choice, functions=None, function_call=None, parallel=None)
    parser = make_parser(Parsers(tools=Hermes), wanted, "")
    message = message_of(
        [event for character in text for event in parser.feed(character)] + parser.flush(), wanted, ("reasoning",)
    )

    assert (text.strip(), msgspec.UNSET) == ((message.content or "").strip(), message.tool_calls)


@every_case(
    "text,parallel,cut",
    [
        (CALL, True, False),
        (CALL[:-15], True, True),
        (CALL[:-12], True, False),
        # Within a word of JSON
        (CALL.replace("1}}</tool_call>", "tru"), True, True),
        (CALL + CALL[:-15], True, True),
        # The call that was cut is not passed on.
        (CALL + CALL[:-15], False, False),
        ("no call", True, False),
    ],
)
def test_a_cut_call(text: str, parallel: bool, cut: bool) -> None:
    """A call is cut when the text ends before its arguments do, not when only markup behind them is missing."""
    parser = AnswerParser(None, Hermes({"now": {}}), parallel=parallel)
    parser.feed(text)
    parser.flush()

    assert cut is parser.cut


def test_a_forced_call_that_is_cut() -> None:
    """A forced call that is cut counts as cut in the model's own form too."""
    wanted = plan_chat_tools(tools=TOOLS, tool_choice="required", functions=None, function_call=None, parallel=None)
    for text in (CALL[:-15], '[{"name": "now", "parameters": {"a'):
        parser = make_parser(Parsers(tools=Hermes), wanted, "")
        parser.feed(text)
        parser.flush()
        assert parser.cut, text


FORCED = {
    "required": '[{"name": "f", "parameters": {"city": "Bonn"}}, {"name": "f", "parameters": {"a": "ö", "n": 12}}]',
    "named": '{"city": "Bonn", "n": [1, {"a": "b\\n"}]}',
    **{name: f"{begin}Bonn{end}" for name, (begin, end) in CALLS.items()},
}


@pytest.mark.sampled
@every_case("name", FORCED)
def test_a_forced_answer_is_cut_anywhere(name: str) -> None:
    """Up to the name there is nothing, then a call whose arguments begin those of the whole; there is never text."""
    choice: ToolChoice = NamedTool(function=NamedFunction(name="f")) if name == "named" else "required"
    function = {"name": "f", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    wanted = plan_chat_tools(tools=[{"type": "function", "function": function}], tool_choice=choice)
    tools = TOOL_PARSERS.load(name) if name in CALLS else Hermes

    def read(text: str, size: int) -> tuple[list[tuple[str, str]], AnswerParser]:
        parser = make_parser(Parsers(tools=tools), wanted, "")
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        message = message_of(events + parser.flush(cut=True), wanted, ())
        assert not message.content, text
        made = [call for call in message.tool_calls or [] if isinstance(call, ToolCall)]
        return [(call.function.name, call.function.arguments) for call in made], parser

    text = FORCED[name]
    whole, parser = read(text, len(text))
    assert whole
    assert not parser.cut
    seen = [0]
    for size in sample(range(len(text)), few=12):
        calls, parser = read(text[:size], 1)
        assert calls == read(text[:size], 1000)[0]
        seen.append(len(calls))
        assert calls[:-1] == whole[: max(0, len(calls) - 1)]
        for (called, arguments), (_, all_arguments) in zip(calls[-1:], whole[len(calls) - 1 :], strict=False):
            assert "f" == called
            assert all_arguments.startswith(arguments)
            assert parser.cut or arguments == all_arguments, text[:size]
    assert seen == sorted(seen)
    assert seen[-1] == len(whole)


def test_a_name_without_arguments_is_a_call() -> None:
    """A name without arguments is a call as soon as its quote is closed, or what ends it otherwise has come."""
    wanted = plan_chat_tools(tools=TOOLS, tool_choice="required")
    cut = {'[{"name": "now': 0, '[{"name": "now"': 1, "<tool_call>now": 0, '<tool_call>{"name": "now",': 1}
    for text, calls in cut.items():
        parser = make_parser(Parsers(tools=Hermes), wanted, "")
        parser.feed(text)
        parser.flush(cut=True)
        assert (calls, bool(calls)) == (parser.calls, parser.cut), text


def test_a_third_partys_parser() -> None:
    """A parser that knows nothing of cuts is believed to have found whole calls."""

    class Plain(ToolParser):
        def feed(self, text: str) -> list[Event]:
            return [Content(text)]

    parser = AnswerParser(None, Plain())
    parser.feed("x")
    parser.flush()

    assert not parser.cut


def test_text_behind_a_forced_call() -> None:
    """Text behind a forced call is content, even if it has the model's own form of a call."""
    wanted = plan_chat_tools(tools=TOOLS, tool_choice="required", functions=None, function_call=None, parallel=None)
    parser = make_parser(Parsers(tools=Hermes), wanted, "")
    assert parser is not None
    events = parser.feed('[{"name": "now", "parameters": {}}]' + CALL) + parser.flush()
    assert (1, CALL) == (parser.calls, "".join(event.text for event in events if isinstance(event, Content)))


def test_the_tokens_of_the_thinking() -> None:
    """A piece counts as what its text ends in, and one that shows nothing as what was before; some have no count."""
    parser = AnswerParser(Think(), None)
    counts = []
    for text, tokens in (("<think>a", 2), ("b", None), (" ", 1), ("c</think>d", 8), ("e", 16)):
        parser.feed(text, tokens)
        counts.append(parser.reasoning_tokens)

    assert [2, 2, 3, 3, 3] == counts


def test_what_both_stages_hold_back() -> None:
    """What both stages hold back comes in the order in which it was written."""
    parser = AnswerParser(Hunyuan(), Hermes({"now": {}}))
    events = parser.feed("<think>a</think>b<tool_ca</ans") + parser.flush()
    assert [Reasoning("a"), Content("b"), Content("<tool_ca</ans")] == events


@every_case("size", [1, 7, 1000])
def test_calls_after_the_first(size: int) -> None:
    """
    Calls after the first are dropped for a client that takes one at a time, with their arguments; text between them
    stays.
    """
    text = f"<think>c</think>{CALL}a{CALL}{CALL}b"
    seen = {}
    for parallel in (False, True):
        parser = AnswerParser(Think(), Hermes({"now": {}}), parallel=parallel)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        events += parser.flush()
        seen[parallel] = {event.index for event in events if isinstance(event, ToolCallStart | ToolCallArguments)}
        for kind, expected in ((Content, "ab"), (Reasoning, "c")):
            assert expected == "".join(event.text for event in events if isinstance(event, kind))

    assert {False: {0}, True: {0, 1, 2}} == seen
