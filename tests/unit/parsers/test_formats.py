"""Formats of tool calls as data: what an operator can describe, and what is wrong with a description."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.parsers import CALLS
from tests.cases import every_case
from tests.unit.parsers.test_tools import merge
from tests.unit.parsers.test_tools_in_parts import assert_chosen
from triton_openai.cli.parse_answer import parse_answer
from triton_openai.errors import ConfigurationError
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS, choose
from triton_openai.parsers.tools.format import built_in_formats, read_format
from triton_openai.parsers.tools.tool_parser import ToolParser

TOOLS: dict[str, dict[str, Any]] = {
    "f": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {},
}


def said(parser: ToolParser | AnswerParser, text: str, size: int) -> tuple[str, str, list[tuple[str, Any]]]:
    """Return content, reasoning and calls of *text*, given in pieces of a *size*."""
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    merged = merge([*events, *parser.flush()])
    calls = [(name, json.loads(arguments)) for _, name, arguments in merged.calls]
    return merged.content.strip(), merged.reasoning.strip(), calls


def test_most_built_in_formats_are_data() -> None:
    """Data describes most formats, with fields that are all there in what people can read."""
    assert len(built_in_formats()) >= 20
    assert len(built_in_formats()) >= len(TOOL_PARSERS.table) - 4
    assert all(format.description for format in built_in_formats().values())


PARIS = {"city": "Paris"}
PARIS_2 = {"city": "Paris", "days": 2}
K3 = (
    '<|open|>call tool="f" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|><|close|>call<|sep|>'
)
K3_JSON = (
    '<|open|>call tool="f" index="2"<|sep|><|open|>json type="object"<|sep|>{"city": "Paris"}<|close|>json<|sep|>'
    "<|close|>call<|sep|>"
)
M3 = (
    ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="f">\n]<]minimax[>[<city>Paris]<]minimax[>[</city>\n'
    "]<]minimax[>[<days>2]<]minimax[>[</days>\n]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
)
HY3 = (
    "<tool_calls>\n<tool_call>f<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>now<tool_sep></tool_call>\n</tool_calls>"
)
MARKED = re.sub(r"(</?\w+)>", r"\1:opensource>", HY3)
MUSE = (
    '<atem:function_calls>\n<atem:invoke name="f">\n<atem:parameter name="city">Paris</atem:parameter>\n'
    '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


@every_case("name,text,content,calls", [
    ("apertus", 'Look. <|tools_prefix|>[{"f": {"city": "Paris"}}, {"now": {}}]<|tools_suffix|>', "Look.",
     [("f", PARIS), ("now", {})]),
    ("gigachat3", 'Look.<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"city": "Paris"}}'
     "<|message_sep|>\n\n", "Look.", [("f", PARIS)]),
    ("gigachat3", 'Look.<|function_call|>{"name": "f", "arguments": {"city": "Paris"}}', "Look.", [("f", PARIS)]),
    ("hy_v3", f"Look.\n{HY3}", "Look.", [("f", PARIS_2), ("now", {})]),
    ("hy_v3_opensource", f"Look.\n{MARKED}", "Look.", [("f", PARIS_2), ("now", {})]),
    ("hy_v3_opensource", '<tool_call:opensource>f<tool_sep:opensource>{"city": "Paris"}<end_of_tool_call:opensource>',
     "", [("f", PARIS)]),
    ("muse_glimmer", f"Look. {MUSE}", "Look.", [("f", PARIS_2)]),
    ("kimi_k3", f"<|open|>tools<|sep|>{K3}{K3_JSON}<|close|>tools<|sep|>", "", [("f", PARIS_2), ("f", PARIS)]),
    ("minimax_m3", f"Look.\n{M3}", "Look.", [("f", PARIS_2)]),
    ("dots", '<dots_function_call>{"name": "f", "arguments": {"city": "Paris"}}</dots_function_call>', "",
     [("f", PARIS)]),
])  # fmt: skip
def test_new_formats(name: str, text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    """A format of 2026 is read, whole and one character at a time."""
    for size in (1, 7, 10_000):
        assert (content, "", calls) == said(TOOL_PARSERS.load(name)(TOOLS), text, size)


@every_case("name,reasoning,prompt,text,wanted", [
    ("kimi_k3", "kimi_k3", "<|open|>think<|sep|>",
     f"Hm.<|close|>think<|sep|><|open|>response<|sep|>Look.<|close|>response<|sep|><|open|>tools<|sep|>{K3}"
     "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>", ("Look.", "Hm.", [("f", PARIS_2)])),
    ("kimi_k3", "kimi_k3", "<|open|>response<|sep|>", "Hi.<|close|>response<|sep|><|close|>message<|sep|>",
     ("Hi.", "", [])),
    ("hy_v3_opensource", "hy_v3_opensource", "<think:opensource>", f"Hm.</think:opensource>Look.{MARKED}",
     ("Look.", "Hm.", [("f", PARIS_2), ("now", {})])),
    ("muse_glimmer", "muse_glimmer", "<|start|>assistant",
     f" to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|>{MUSE}<|eom|>"
     "<|start|>assistant to=user<|message|>Look.<|eot|>", ("Look.", "Hm.", [("f", PARIS_2)])),
    ("muse_glimmer", "muse_glimmer", "<|start|>assistant to=self<|message|>",
     "Hm.<|eom|><|start|>assistant to=user<|message|>Hi.<|eot|>", ("Hi.", "Hm.", [])),
    ("muse_glimmer", "muse_glimmer", "", "<|message|>Hi.", ("Hi.", "", [])),
    ("muse_glimmer", "muse_glimmer", "", "No header.", ("No header.", "", [])),
    ("minimax_m3", "minimax_m3", "<mm:think>", f"Hm.</mm:think>Look.{M3}", ("Look.", "Hm.", [("f", PARIS_2)])),
    ("apertus", "apertus", "", "<|inner_prefix|>Hm.<|inner_suffix|>Hi.", ("Hi.", "Hm.", [])),
    ("jamba", "apriel", "Here are my reasoning steps:\n",
     'Hm.\n[BEGIN FINAL RESPONSE]\nLook.<tool_calls>[{"name": "f", "arguments": {"city": "Paris"}}]</tool_calls>\n'
     "<|end|>",
     ("Look.", "Hm.", [("f", PARIS)])),
])  # fmt: skip
def test_new_formats_of_reasoning(name: str, reasoning: str, prompt: str, text: str, wanted: tuple[Any, ...]) -> None:
    """Thinking, the answer and its calls come apart, without the markers between them."""
    kind = REASONING_PARSERS.load(reasoning)
    for size in (1, 10_000):
        parser = AnswerParser(kind(inside=kind.inside_after(prompt)), TOOL_PARSERS.load(name)(TOOLS))
        assert wanted == said(parser, text, size)


@every_case("template,tools,reasoning", [
    ("{{ '<|open|>' + tag }}{{ '<|close|>' }}{{ '<|sep|>' }}", "kimi_k3", "kimi_k3"),
    ("]<]minimax[>[<tool_call> <mm:think>", "minimax_m3", "minimax_m3"),
    ("<|tools_prefix|> <|inner_prefix|>", "apertus", "apertus"),
    ("'role': 'function call' role_sep='<|role_sep|>\n'", "gigachat3", None),
    ("<|function_call|>", "gigachat3", None),
    ("<tool_call>f<tool_sep><arg_key>k</arg_key><arg_value>v</arg_value> <think></think>", "hy_v3", "glm45"),
    ("{% set t = ':opensource' %}{{ '<tool_sep' + t }} {{ '</think' + t }}", "hy_v3_opensource", "hy_v3_opensource"),
    ("to=self<|message|> <atem:function_calls>", "muse_glimmer", "muse_glimmer"),
    ("<tool_calls>[ [BEGIN FINAL RESPONSE]", "jamba", "apriel"),
    ("<dots_function_call>", "dots", None),
    # Gemma 4's template as users edit it
    ("{{ '<|turn>model\n' }}{{ '<' + '|tool_call>' }}{{ '<turn|>' }} <channel|>", "gemma4", "gemma4"),
    ("{{ '<|turn>model\n' }}{{ '<turn|>' }} <tool_call>", "gemma4", None),
])  # fmt: skip
def test_new_formats_are_recognised(template: str, tools: str, reasoning: str | None) -> None:
    """The markers of a chat template show its formats."""
    assert_chosen(template, tools, reasoning)


#: A format of each notation, and a call in it.
DESCRIBED: dict[str, tuple[dict[str, Any], str]] = {
    "json": (
        {"notation": "json", "open": ["<<"], "close": [">>"], "name_keys": ["fn"]},
        '<<{"fn": "f", "arguments": {"city": "Paris"}}>>',
    ),
    "python": ({"notation": "python", "open": ["CALL "], "close": ["END"]}, "CALL [f(city='Paris')]END"),
    "functions": (
        {"notation": "functions", "open": ["<<"], "close": [">>"]},
        "<<<function=f><parameter=city>Paris</parameter></function>>>",
    ),
    "invokes": (
        {
            "notation": "invokes", "open": ["<calls>"], "close": ["</calls>"], "call": ["<run", "</run>"],
            "parameter": ["<arg", "</arg>"], "name_attribute": "tool", "key_attribute": "key",
        },
        '<calls><run tool="f"><arg key="city">Paris</arg></run></calls>',
    ),
    "tag_names": (
        {"notation": "tag_names", "open": ["<calls>"], "close": ["</calls>"], "call": ["<run", "</run>"]},
        '<calls><run name="f"><city>Paris</city></run></calls>',
    ),
    "keys": (
        {
            "notation": "keys", "open": ["<calls>"], "close": ["</calls>"], "call": ["<run>", "</run>"],
            "key": ["<k>", "</k>"], "value": ["<v>", "</v>"], "name_end": "<args>",
        },
        "<calls><run>f<args><k>city</k><v>Paris</v></run></calls>",
    ),
    "braces": ({"notation": "braces", "open": ["<<"], "close": [">>"], "name_start": ""}, '<<f{city:"Paris"}>>'),
    "named_json": (
        {
            "notation": "named_json", "open": ["<calls>"], "close": ["</calls>"], "call": ["<run>", "</run>"],
            "separator": "<args>",
        },
        '<calls><run>f<args>{"city": "Paris"}</run></calls>',
    ),
}  # fmt: skip


@every_case("notation", DESCRIBED)
def test_a_described_format(notation: str) -> None:
    """A format that an operator describes is read in a stream too, and its special tokens are kept."""
    description, text = DESCRIBED[notation]
    kind = read_format({**description, "special_tokens": True}, "test").parser("mine")
    assert kind.special_tokens
    for size in (1, 5, 1_000):
        assert ("Look. Done.", "", [("f", PARIS)]) == said(kind(TOOLS), f"Look. {text} Done.", size)
    chosen = choose("<tool_call>", tools=None, reasoning=None, tool_format=read_format(description, "test"))
    assert "tool_format" == chosen.tools_reason
    named = choose("", tools="hermes", reasoning=None, tool_format=read_format(description, "test"))
    assert ("hermes", "setting") == (named.tools and named.tools.__name__, named.tools_reason)


@every_case("description,words", [
    ({"notation": "xml", "open": ["<"]}, "xml"),
    ({"open": ["<"]}, "notation"),
    ({"notation": "json"}, "open"),
    ({"notation": "json", "open": ["<"], "colour": 1}, "colour"),
    ({"notation": "json", "open": [""]}, "open"),
    ({"notation": "json", "open": ["<"], "close": ["a", "b"]}, "one closing marker"),
    ({"notation": "functions", "open": ["<"]}, "one opening and one closing"),
    (["json"], "object"),
])  # fmt: skip
def test_wrong_descriptions(description: Any, words: str) -> None:
    """What is wrong with a description is said in a sentence."""
    with pytest.raises(ConfigurationError, match=words):
        read_format(description, "test").parser("mine")


def test_the_command(tmp_path: Path) -> None:
    """It shows content, reasoning, calls and what became of them, by name or by a file."""
    tools = tmp_path / "tools.json"
    tools.write_bytes(msgspec.json.encode([{"type": "function", "function": {"name": "f", "parameters": TOOLS["f"]}}]))
    options: dict[str, Any] = {"reasoning": "qwen3", "tools": tools, "prompt": "<think>", "cut": False}
    before, after = CALLS["hermes"]
    answer = parse_answer(f"Hm.</think>Look. {before}Paris{after}", format="hermes", **options)
    assert ("Look.", "Hm.", ["strict"]) == (answer["content"], answer["reasoning"], answer["outcomes"])
    assert [("f", '{"city": "Paris"}')] == [(call["name"], call["arguments"]) for call in answer["tool_calls"]]

    file = tmp_path / "mine.yaml"
    file.write_text('notation: json\nopen: ["<<"]\n', encoding="utf-8")
    answer = parse_answer("<<{'name': 'f', 'arguments': {'city': 'Paris'}}", format=str(file), **options)
    assert ["f"] == [call["name"] for call in answer["tool_calls"]]
    assert ["repaired literals"] == answer["outcomes"]
    with pytest.raises(ConfigurationError, match="There is no tool parser 'nobody'"):
        parse_answer("", format="nobody", **options)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse_answer("", format=str(tmp_path / "missing.yaml"), **options)
