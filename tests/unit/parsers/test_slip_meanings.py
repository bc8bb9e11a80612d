# ruff: noqa: RUF001 - DeepSeek's markers are made of full-width bars
"""Slips of agents' models: wrapped calls, tags by tools' names, types; whole, in pieces, and cut at each place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.cases import every_case
from tests.unit.parsers.test_slip_notations import TOOLS as TOOLS_OF_NOTATIONS
from tests.unit.parsers.test_slips import read, said
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.parser_registry import TOOL_PARSERS
from triton_openai.parsers.tools import tags

TOOLS: Mapping[str, Mapping[str, Any]] = {
    **TOOLS_OF_NOTATIONS,
    "now": {"type": "object", "properties": {}},
    "browse": {"type": "object", "properties": {"url": {"type": "string"}, "input": {"type": "string"}}},
    "todo": {
        "type": "object",
        "properties": {
            "todos": {
                "type": "array",
                "items": {"type": "object", "properties": {"id": {"type": "string"}, "done": {"type": "boolean"}}},
            }
        },
        "required": ["todos"],
    },
}
Calls = list[tuple[str, dict[str, Any]]]
LS: Calls = [("bash", {"command": "ls"})]
NOW: Calls = [("now", {})]
CALL = json.dumps({"name": "bash", "arguments": {"command": "ls"}})
NOW_CALL = json.dumps({"name": "now", "arguments": {}})


def make(parser: str) -> AnswerParser:
    """Return a parser of answers in a format."""
    return AnswerParser(None, TOOL_PARSERS.load(parser)(TOOLS))


def check(parser: str, text: str, calls: Calls, content: str = "") -> None:
    """Assert that *text* means *calls*, whole and in pieces, and that no beginning of it is another whole call."""
    answer = make(parser)
    meaning = said(read(answer, [text]))
    assert not answer.cut
    assert (content, "", calls) == meaning
    assert meaning == said(read(make(parser), text))
    for border in range(1, len(text), 5):
        assert meaning == said(read(make(parser), [text[:border], text[border:]])), text[:border]
        begun = make(parser)
        cut = read(begun, [text[:border]], cut=True)
        if not begun.cut:
            assert all(call in calls for call in said(cut)[2]), text[:border]


def tagged(text: str) -> str:
    """Return *text* between the tags of Hermes."""
    return f"<tool_call>\n{text}\n</tool_call>"


_WRAPPED: Mapping[str, tuple[str, Calls]] = {
    "two calls in one string": (json.dumps(f"{CALL}, {NOW_CALL}"), LS + NOW),
    "a list of calls in a string": (json.dumps(f"[{CALL}, {NOW_CALL}]"), LS + NOW),
    "a list of strings": (json.dumps([CALL, NOW_CALL]), LS + NOW),
    "tool_calls": (f'{{"tool_calls": [{CALL}, {NOW_CALL}]}}', LS + NOW),
    "tool_calls of OpenAI's objects": (
        json.dumps(
            {
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
                ]
            }
        ),
        LS,
    ),
    "tool_call": (f'{{"tool_call": {CALL}}}', LS),
    "function_call": (f'{{"function_call": {CALL}}}', LS),
}


@every_case("case", _WRAPPED)
def test_calls_in_objects_and_strings(case: str) -> None:
    """Calls in an object that has nothing else, or in strings, are the calls that were meant."""
    text, calls = _WRAPPED[case]
    check("hermes", tagged(text), calls)


def test_text_behind_a_call_in_a_string() -> None:
    """A string with more than calls is none of them, and nothing of it is lost."""
    text = tagged(json.dumps(f"{CALL} and then look"))
    merged = read(make("hermes"), [text])
    assert not merged.calls
    assert text == merged.content


_BESIDE: Mapping[str, tuple[str, Calls]] = {
    "Anthropic's input": ('{"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "ls"}}', LS),
    "kwargs": ('{"name": "bash", "kwargs": {"command": "ls"}}', LS),
    "tool_input": ('{"name": "browse", "tool_input": {"url": "x"}}', [("browse", {"url": "x"})]),
    "a parameter with such a name": ('{"name": "browse", "input": "x"}', [("browse", {"input": "x"})]),
    "an index": ('{"name": "browse", "index": 0}', [("browse", {})]),
    "something else for a tool without parameters": ('{"name": "now", "why": "x"}', NOW),
}


@every_case("case", _BESIDE)
def test_arguments_under_other_keys(case: str) -> None:
    """Arguments under another key than the format's are the arguments: the call does not go on without them."""
    text, calls = _BESIDE[case]
    check("hermes", tagged(text), calls)


def test_arguments_under_an_unknown_key() -> None:
    """A call whose arguments may stand under a key that nobody knows is text, not a call without arguments."""
    text = tagged('{"name": "bash", "payload": {"command": "ls"}}')
    merged = read(make("hermes"), [text])
    assert not merged.calls
    assert text == merged.content


_OTHERS: Mapping[str, tuple[str, str, Calls]] = {
    "the tool's name as a tag": ("hermes", tagged("<bash>\n<command>ls</command>\n</bash>"), LS),
    "the tool's name as a tag, and parameters": (
        "qwen3_coder",
        tagged("<bash>\n<parameter=command>\nls\n</parameter>\n</bash>"),
        LS,
    ),
    "the tool's name as a tag, and an object": ("glm45", tagged('<bash>{"command": "ls"}</bash>'), LS),
    "two tags": ("hermes", tagged("<bash><command>ls</command></bash>\n<now></now>"), LS + NOW),
    "a tag of an invoke": (
        "minimax_m2",
        "<minimax:tool_call>\n<bash>\n<command>ls</command>\n</bash>\n</minimax:tool_call>",
        LS,
    ),
    "a tag for a parameter, on lines": (
        "qwen3_coder",
        tagged("<function=bash>\n<command>\nls\n</command>\n</function>"),
        LS,
    ),
    "a tag for a parameter, with a line break at its end": (
        "qwen3_coder",
        tagged("<function=bash>\n<command>ls\n</command>\n</function>"),
        [("bash", {"command": "ls\n"})],
    ),
    "no brace of an object in an array": (
        "hermes",
        tagged('{"name": "todo", "arguments": {"todos": [{"id": "1", "done": true}, {"id": "2"]}}'),
        [("todo", {"todos": [{"id": "1", "done": True}, {"id": "2"}]})],
    ),
    "no comma between calls": ("jamba", f"<tool_calls>[\n{CALL}\n{NOW_CALL}\n]</tool_calls>", LS + NOW),
    "two lists": ("jamba", f"<tool_calls>[{CALL}]\n[{NOW_CALL}]</tool_calls>", LS + NOW),
    "a slip and no comma between calls": (
        "jamba",
        "<tool_calls>[{'name': 'bash', 'arguments': {'command': 'ls'}}\n" + NOW_CALL + "]</tool_calls>",
        LS + NOW,
    ),
    "Kimi's arguments in a string": (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        '"{\\"command\\": \\"ls\\"}"<|tool_call_end|><|tool_calls_section_end|>',
        LS,
    ),
    "Mistral's arguments in a string": ("mistral", '[TOOL_CALLS]bash[ARGS]"{\\"command\\": \\"ls\\"}"', LS),
    "gpt-oss's arguments in a string": (
        "openai",
        '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>"{\\"command\\": \\"ls\\"}"<|call|>',
        LS,
    ),
}


@every_case("case", _OTHERS)
def test_other_slips(case: str) -> None:
    """Tags with tools' names, commas and braces too few, and arguments in strings."""
    check(*_OTHERS[case])


def test_a_parameter_that_comes_twice() -> None:
    """A parameter that comes twice is no whole call, and its second value is no part of the first one."""
    answer = make("qwen3_coder")
    parameter = "<parameter=command>\nls\n</parameter>\n"
    merged = read(answer, [tagged(f"<function=bash>\n{parameter}{parameter}</function>")])
    assert answer.cut or not merged.calls


TYPES: Calls = [("search", {"query": "7", "limit": 3, "tags": ["a", "b"], "opts": {"deep": True}})]
_JSON_TYPES = '{"query": 7, "limit": "3", "tags": "[\\"a\\", \\"b\\"]", "opts": "{\\"deep\\": true}"}'
_TYPED: Mapping[str, tuple[str, str]] = {
    "Hermes": ("hermes", tagged(f'{{"name": "search", "arguments": {_JSON_TYPES}}}')),
    "the arguments before the name": ("hermes", tagged(f'{{"arguments": {_JSON_TYPES}, "name": "search"}}')),
    "the arguments in a string": (
        "hermes",
        tagged(json.dumps({"name": "search", "arguments": _JSON_TYPES})),
    ),
    "Mistral": ("mistral", f"[TOOL_CALLS]search[ARGS]{_JSON_TYPES}"),
    "Llama": ("llama3_json", f'{{"name": "search", "parameters": {_JSON_TYPES}}}'),
    "gpt-oss": ("openai", f"<|channel|>commentary to=functions.search<|message|>{_JSON_TYPES}<|call|>"),
    "Apertus": ("apertus", f'<|tools_prefix|>[{{"search": {_JSON_TYPES}}}]<|tools_suffix|>'),
    "Python": ("pythonic", """[search(query=7, limit='3', tags="['a', 'b']", opts="{'deep': True}")]"""),
    "Gemma": (
        "gemma4",
        '<|tool_call>call:search{query:7,limit:<|"|>3<|"|>,'
        'tags:<|"|>["a", "b"]<|"|>,opts:<|"|>{"deep": true}<|"|>}<tool_call|>',
    ),
    "a slip beside it": ("hermes", tagged(f'{{"name": "search", "arguments": {_JSON_TYPES[:-1]},}}}}')),
}


@every_case("case", _TYPED)
def test_types_follow_the_schema(case: str) -> None:
    """A value in quotes, or without them, has the type of the tool's schema in every format."""
    parser, text = _TYPED[case]
    check(parser, text, TYPES)
    answer = make(parser)
    read(answer, [text])
    assert [("repaired", "types")] == [outcome for outcome in answer.outcomes() if outcome[1] == "types"] or (
        case == "a slip beside it"
    )


@every_case("value", ['"many"', '"3 of them"', "[3]", "null", '"\\ud800"'])
def test_values_of_no_type_of_the_schema(value: str) -> None:
    """What is no value of the schema's type goes on as the model wrote it."""
    merged = read(make("hermes"), [tagged(f'{{"name": "search", "arguments": {{"query": "x", "limit": {value}}}}}')])
    ((_, _, arguments),) = merged.calls
    assert f'{{"query": "x", "limit": {value}}}' == arguments


def test_other_values_stream_beside_one_that_is_converted() -> None:
    """Only the value whose type changes waits for its end."""
    parser = make("hermes")
    parser.feed('<tool_call>{"name": "search", "arguments": {"limit": "3", "query": "cats ')
    assert parser.feed("and dogs")


_AROUND: Mapping[str, tuple[str, str, Calls]] = {
    "a code block": ("hermes", f"```json\n{CALL}\n```", LS),
    "a code block without a language": ("qwen3_coder", f"```\n{CALL}\n```", LS),
    "a code block with a list": ("mistral", f"```json\n[{CALL}, {NOW_CALL}]\n```", LS + NOW),
    "a code block of calls": ("hermes", f"```tool_call\n{CALL}\n```", LS),
    "Gemma's code block": ("gemma4", '```tool_code\nbash(command="ls")\n```', LS),
    "Python's code block": ("pythonic", '```python\n[bash(command="ls")]\n```', LS),
    "the tags of the tools": ("hermes", f"<tools>\n{CALL}\n</tools>", LS),
    "Phi's tags": (
        "phi4_mini_json",
        f'<|tool_call|>[{{"type": "function", "function": {CALL}}}]<|/tool_call|>',
        LS,
    ),
    "no marker of Mistral": ("mistral", 'bash[ARGS]{"command": "ls"}', LS),
    "no token of Mistral": ("mistral", 'bash{"command": "ls"}', LS),
    "no section of Kimi": (
        "kimi_k2",
        'functions.bash:0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>',
        LS,
    ),
    "an announcement at the end": ("glm45", f"{tagged('now')}<tool_call>", NOW),
    "an announcement of Mistral at the end": ("mistral", '[TOOL_CALLS]bash[ARGS]{"command": "ls"}[TOOL_CALLS]', LS),
}


@every_case("case", _AROUND)
def test_what_is_around_calls(case: str) -> None:
    """Code blocks, tags of other models, and markers that are missing."""
    check(*_AROUND[case])


@every_case("end", tags.STRAYS_AFTER_CALLS)
def test_ends_behind_a_call(end: str) -> None:
    """What ends a turn, or a call once more, is no text behind a call, and text everywhere else."""
    check("hermes", tagged(CALL) + end, LS)
    merged = read(make("hermes"), f"In words: {end}, so")
    assert f"In words: {end}, so" == merged.content


@every_case("text", [
    "```json\n{\"name\": \"Bonn\", \"people\": 3}\n```",
    f"```json\n{CALL}\n```\nThat is how to call it.",
    "```python\nbash(command)\n```",
    "```python\n[1, 2]\n```",
    "```json\n[1, 2]\n```",
    "```\nbash: not found\n```",
    "``` json",
    "`bash` lists",
    "````json\n{}\n````",
    "<tools> are in the box.",
    "bash[0] is a word",
])  # fmt: skip
def test_answers_that_only_look_like_calls(text: str) -> None:
    """An answer that is more than calls, or something else, is text."""
    for name in ("hermes", "mistral", "pythonic", "gemma4"):
        for pieces in ([text], text):
            merged = read(make(name), pieces)
            assert not merged.calls
            assert text == merged.content


def test_a_code_block_of_an_answer_streams() -> None:
    """JSON that is no call is held back up to its first key only."""
    parser = make("hermes")
    assert not parser.feed("```json\n")
    assert parser.feed(json.dumps({"people": ["x"] * 200}))
    parser = make("hermes")
    assert parser.feed("```json\n" + json.dumps({"name": "Bonn", "people": ["x"] * 200}))


def dsml(inside: str) -> str:
    """Return a call of bash in DeepSeek's tags."""
    call = f'<｜DSML｜invoke name="bash">\n{inside}\n'
    return f"<｜DSML｜function_calls>\n{call}</｜DSML｜invoke>\n</｜DSML｜function_calls>"


_ENDS: Mapping[str, tuple[str, str, Calls]] = {
    "the key's own name": (
        "qwen3_coder",
        tagged("<function=bash>\n<parameter=command>\nls\n</command>\n</function>"),
        LS,
    ),
    "the key in the end": (
        "qwen3_coder",
        tagged("<function=bash>\n<parameter=command>\nls\n</parameter=command>\n</function>"),
        LS,
    ),
    "the function in the end": (
        "qwen3_coder",
        tagged("<function=bash>\n<parameter=command>\nls\n</parameter>\n</function=bash>"),
        LS,
    ),
    "an element with the key's name, and no end": (
        "qwen3_coder",
        tagged("<function=bash>\n<parameter=command>\n<command>x</command>\n</function>"),
        [("bash", {"command": "<command>x</command>"})],
    ),
    "plain tags in DeepSeek's": (
        "deepseek_v32",
        dsml('<｜DSML｜parameter name="command" string="true">ls</parameter>\n</invoke>').replace(
            "</｜DSML｜invoke>\n", ""
        ),
        LS,
    ),
    "plain tags in a value of DeepSeek's": (
        "deepseek_v32",
        dsml('<｜DSML｜parameter name="command" string="true">a</parameter>b</invoke>c</｜DSML｜parameter>'),
        [("bash", {"command": "a</parameter>b</invoke>c"})],
    ),
    "a number that DeepSeek calls a string": (
        "deepseek_v32",
        dsml(
            '<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="timeout" string="true">20</｜DSML｜parameter>'
        ),
        [("bash", {"command": "ls", "timeout": 20})],
    ),
    "a colon between GLM's tags": (
        "glm45",
        "<tool_call>bash<arg_key>command</arg_key>: <arg_value>ls</arg_value></tool_call>",
        LS,
    ),
    "the name in a tag": ("hermes", tagged('<name>bash</name>\n<arguments>{"command": "ls"}</arguments>'), LS),
    "the name in a tag, and parameters": (
        "hermes",
        tagged("<tool_name>bash</tool_name>\n<parameters>\n<command>ls</command>\n</parameters>"),
        LS,
    ),
    "the name in a tag, and GLM's keys": (
        "glm45",
        tagged("<name>bash</name>\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>"),
        LS,
    ),
    "a slash behind gpt-oss's namespace": (
        "openai",
        '<|channel|>commentary to=functions/bash<|message|>{"command": "ls"}<|call|>',
        LS,
    ),
    "a key behind Llama's arguments": (
        "llama3_json",
        '{"name": "bash", "parameters": {"command": "ls"}, "why": "x"}',
        LS,
    ),
}


@every_case("case", _ENDS)
def test_other_ends_and_names(case: str) -> None:
    """Ends of values and calls in other tags, and names in tags of their own."""
    check(*_ENDS[case])


def test_strings_beside_each_other() -> None:
    """Two strings beside each other are one in Python, and two quotes in a text elsewhere: neither is read."""
    answer = make("pythonic")
    merged = read(answer, ['[bash(command="a" "b")]'])
    assert answer.cut or not merged.calls


def test_long_values_in_quotes() -> None:
    """JSON in quotes is converted at any length, Python's spelling up to one: its translation holds the event loop."""
    for quote, count, kind in (('\\"', 20_000, list), ("'", 100, list), ("'", 20_000, str)):
        value = "[" + ", ".join([f"{quote}a{quote}"] * count) + "]"
        call = f'{{"name": "search", "arguments": {{"query": "x", "tags": "{value}"}}}}'
        ((_, arguments),) = said(read(make("hermes"), [tagged(call)]))[2]
        assert kind is type(arguments["tags"])
