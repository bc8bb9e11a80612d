# ruff: noqa: E501, RUF001 - texts as models write them; DeepSeek's markers are made of full-width bars
"""Every notation and slip within the markers of every format: the call that was meant, or text, and no half truth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cases import every_case
from tests.extended import is_sample
from tests.unit.parsers.test_slips import read, said
from triton_openai.parsers import tools as parsers_of_tools
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.parser_registry import TOOL_PARSERS

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "bash": {
        "type": "object",
        "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
        "required": ["command"],
    },
    "write": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "opts": {"type": "object", "properties": {"deep": {"type": "boolean"}, "lang": {"type": "string"}}},
        },
        "required": ["query"],
    },
}
# Calls that agents' models make. The schema of bash has no description: models write one nevertheless.
CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("bash", {"command": "cat note.txt", "description": "Read the note"}),
    ("bash", {"command": "cat a.txt", "timeout": 20, "description": "Read it"}),
    ("bash", {"description": "Look, please", "command": "ls -l"}),
    ("bash", {"command": "ls"}),
    ("write", {"path": "a.py", "content": "print('x')\nif a == \"b\": pass"}),
    ("write", {"path": "a.json", "content": '{"a": "b", "c": "d"}'}),
    ("search", {"query": "cats, dogs", "limit": 3, "tags": ["a", "b c"], "opts": {"deep": True, "lang": "de"}}),
)


def markers() -> dict[str, tuple[str, str]]:
    """Return what opens and closes the calls of each format."""
    file = Path(parsers_of_tools.__file__).with_name("formats.yaml")
    found = {
        "mistral": ("[TOOL_CALLS]", ""),
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        "deepseek_v3": ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    }
    for name, form in yaml.safe_load(file.read_text(encoding="utf-8")).items():
        closing = "".join(form.get("close", ())[:1])
        if form.get("opens_list"):
            closing = "]"
        found[name] = (form["open"][0], closing)
    return found


def bare(value: Any) -> str:
    """Return *value* as JSON whose keys have no quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join([f"{key}: {bare(item)}" for key, item in value.items()]) + "}"
    return json.dumps(value)


def in_tags(arguments: Mapping[str, Any], before: str, between: str, after: str) -> str:
    """Return *arguments* in tags."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return "\n".join([f"{before}{key}{between}{text}{after}" for key, text in texts.items()])


def notations(name: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the call of *name* with *arguments* in other notations and with slips, by what is wrong."""
    whole = json.dumps(arguments)
    call = json.dumps({"name": name, "arguments": arguments})
    parameters = in_tags(arguments, "<parameter=", ">", "</parameter>")
    named = in_tags(arguments, '<parameter name="', '">', "</parameter>")
    return {
        "keys without quotes": f'{{name: "{name}", arguments: {bare(arguments)}}}',
        "argument keys without quotes": f'{{"name": "{name}", "arguments": {bare(arguments)}}}',
        "keywords": f"{name}({bare(arguments)[1:-1]})",
        "an object in parentheses": f"{name}({whole})",
        "Python": repr({"name": name, "arguments": arguments}),
        "a brace too few": call[:-1],
        "braces too few": call[:-2],
        "a brace too many": f"{call}}}",
        "doubled braces": f"{{{call}}}",
        "a trailing comma": f"{call[:-2]},}}}}",
        "encoded twice": json.dumps({"name": name, "arguments": whole}),
        "the whole call encoded twice": json.dumps(call),
        "escaped as a whole": json.dumps(call)[1:-1],
        "a code block": f"```json\n{call}\n```",
        "a namespace": json.dumps({"name": f"functions.{name}", "arguments": arguments}),
        "an index": json.dumps({"name": f"functions.{name}:0", "arguments": arguments}),
        "another case": json.dumps({"name": name.title(), "arguments": arguments}),
        "parameters": json.dumps({"name": name, "parameters": arguments}),
        "tool and args": json.dumps({"tool": name, "args": arguments}),
        "action and its input": json.dumps({"action": name, "action_input": arguments}),
        "OpenAI's object": json.dumps({"type": "function", "function": {"name": name, "arguments": arguments}}),
        "OpenAI's object with a string": json.dumps(
            {"type": "function", "function": {"name": name, "arguments": whole}}
        ),
        "beside the name": json.dumps({"name": name, **arguments}),
        "the name as key": json.dumps({name: arguments}),
        "a list of arguments": json.dumps({"name": name, "arguments": [arguments]}),
        "a list of calls": f"[{call}]",
        "a line": f"{name}\n{whole}",
        "a colon": f"{name}: {whole}",
        "functions": f"<function={name}>\n{parameters}\n</function>",
        "invokes": f'<invoke name="{name}">\n{named}\n</invoke>',
        "no comma behind the name": call.replace('", "arguments"', '" "arguments"'),
        "a line break in a string": call.replace("\\n", "\n"),
        "a comment": call.replace(', "arguments"', ', /* the arguments */ "arguments"'),
    }


def make(parser: str) -> AnswerParser:
    """Return a parser of answers in a format."""
    return AnswerParser(None, TOOL_PARSERS.load(parser)(TOOLS))


@pytest.mark.sampled
@every_case("number, parser", list(enumerate(markers())))
def test_every_notation_in_every_format(number: int, parser: str) -> None:
    """A call in another format's notation is the call that was meant, whole, in pieces, and cut or text."""
    opening, closing = markers()[parser]
    # Each format has another part of the table, as all of it takes too long.
    name, arguments = CALLS[number % len(CALLS)]
    chosen = list(enumerate(notations(name, arguments).items()))
    if is_sample():
        # Of three formats in a row, each has another third of the notations.
        chosen = chosen[number % 3 :: 3]
    for place, (slip, call) in chosen:
        text = f"{opening}{call}{closing}"
        answer = make(parser)
        merged = read(answer, [text])
        assert not answer.cut, (slip, text)
        assert [(name, arguments)] == said(merged)[2], (slip, text)
        border = 1 + (7 * place + number) % (len(text) - 1)
        assert said(merged) == said(read(make(parser), [text[:border], text[border:]])), (slip, text[:border])
        check_cut(parser, text[:border], name, arguments)


def check_cut(parser: str, text: str, name: str, arguments: Mapping[str, Any]) -> None:
    """Assert that no call in a *text* that a limit cut is taken for whole, unless it is."""
    answer = make(parser)
    merged = read(answer, [text], cut=True)
    if not answer.cut:
        assert all((name, arguments) == call for call in said(merged)[2]), text


def hermes(arguments: str) -> str:
    """Return a call of bash with the text of its arguments."""
    return f'<tool_call>{{"name": "bash", "arguments": {arguments}}}</tool_call>'


# What agents' models write, and what it means.
_READ: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bare keys that the schema does not have": (
        hermes('{command: "cat a", description: "Read it"}'),
        {"command": "cat a", "description": "Read it"},
    ),
    "parameters in tags that the schema does not have": (
        "<tool_call><function=bash><parameter=command>ls</parameter><parameter=why>To look</parameter></tool_call>",
        {"command": "ls", "why": "To look"},
    ),
    "keys in tags that the schema does not have": (
        "<tool_call>bash<arg_key>command</arg_key><arg_value>ls</arg_value>"
        "<arg_key>why</arg_key><arg_value>To look</arg_value></tool_call>",
        {"command": "ls", "why": "To look"},
    ),
    "tags of another form in a value": (
        '<tool_call><function=bash><parameter=command>a <param name="x"></param><param name="y"></param>'
        "</parameter></function></tool_call>",
        {"command": 'a <param name="x"></param><param name="y"></param>'},
    ),
    "a quote too few before a number": (hermes('{"command": "ls, "timeout": 20}'), {"command": "ls", "timeout": 20}),
    "a quote too few before several members": (
        '<tool_call>{"name": "search", "arguments": {"query": "cats, dogs, "limit": 3, "tags": ["a", "b"]}}</tool_call>',
        {"query": "cats, dogs", "limit": 3, "tags": ["a", "b"]},
    ),
    "escapes in what is escaped as a whole": (
        '<tool_call>{\\"name\\": \\"bash\\", \\"arguments\\": {\\"command\\": \\"a\\\\nb \\\\\\"c\\\\\\"\\"}}</tool_call>',
        {"command": 'a\nb "c"'},
    ),
}


@every_case("case", _READ)
def test_what_is_read(case: str) -> None:
    """The meaning is clear."""
    text, arguments = _READ[case]
    (call,) = said(read(make("hermes"), [text]))[2]
    assert arguments == call[1]


# What has two meanings: a value could contain what follows it.
_UNREAD: Mapping[str, str] = {
    "a comma too few before a key that the schema does not have": hermes('{"command": "ls" "why": "x"}'),
    "a quote too few before a key that the schema does not have": hermes('{"command": "ls, "why": "x"}'),
    "another separator": hermes('{"command": "ls"; "timeout": "x y"; "why": "z"}'),
    "half of a key's quotes": hermes('{"command": "ls", why": "To look"}'),
    "a colon too few": hermes('{"command": "ls", "why" "To look"}'),
    "a comma too few in an array": (
        '<tool_call>{"name": "search", "arguments": {"query": "x", "tags": ["a" "b c"]}}</tool_call>'
    ),
}


@every_case("case", _UNREAD)
def test_what_has_two_meanings(case: str) -> None:
    """It is no call that is whole, and above all none whose value has swallowed the next member."""
    answer = make("hermes")
    merged = read(answer, [_UNREAD[case]])
    assert answer.cut or not merged.calls, merged.calls
