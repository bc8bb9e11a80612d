"""The command ``parse``: shows what a format of tool calls makes of a model's answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.errors import ConfigurationError
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.tools.format import read_format_file
from triton_openai.parsers.tools.tool_parser import ToolParser, Tools


class _Function(msgspec.Struct):
    name: str
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _Function


def parse_answer(
    text: str, *, format: str, reasoning: str | None, tools: Path | None, prompt: str, cut: bool
) -> dict[str, Any]:
    """
    Return what the parsers make of *text*: content, reasoning, calls, and what became of each call.

    Raises :class:`ConfigurationError` for a format that does not exist or a file that cannot be read.
    """
    reasoning_parser = None
    if reasoning is not None:
        kind = REASONING_PARSERS.load(reasoning)
        reasoning_parser = kind(inside=kind.inside_after(prompt))
    parser = AnswerParser(reasoning_parser, _tool_parser(format)(_tools(tools)))
    answer: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in [*parser.feed(text), *parser.flush(cut=cut)]:
        if isinstance(event, Content):
            answer["content"] += event.text
        elif isinstance(event, Reasoning):
            answer["reasoning"] += event.text
        elif isinstance(event, ToolCallStart):
            answer["tool_calls"].append({"id": event.id, "name": event.name, "arguments": ""})
        elif isinstance(event, ToolCallArguments):
            answer["tool_calls"][event.index]["arguments"] += event.text
    answer["outcomes"] = [" ".join(filter(None, outcome)) for outcome in parser.outcomes()]
    return answer


def run(options: Mapping[str, Any]) -> int:
    """Print what the command line's *options* make of standard input. Return the exit status."""
    answer = parse_answer(sys.stdin.read(), **options)
    print(json.dumps(answer, ensure_ascii=False, indent=2))
    return 0


def _tool_parser(name: str) -> type[ToolParser]:
    if name.endswith((".yaml", ".yml")):
        return read_format_file(Path(name)).parser(Path(name).stem)
    return TOOL_PARSERS.load(name)


def _tools(path: Path | None) -> Tools:
    """Return the schemas of the tools in the file *path*, by name."""
    if path is None:
        return {}
    try:
        tools: Sequence[_Tool] = msgspec.json.decode(path.read_bytes(), type=list[_Tool])
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigurationError(f"{path} is not a JSON file with a list of tools: {error}.") from error
    return {tool.function.name: tool.function.parameters or {} for tool in tools}
