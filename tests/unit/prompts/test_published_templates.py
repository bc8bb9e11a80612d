"""
What the model families' published templates make of a conversation of ours, and what we make of it.

The strings in ``fixtures/renderings.json`` were rendered, with ``transformers`` and with this service alike, by the
chat templates that the families publish (those of vLLM's examples where it says so). A past turn with tool calls is
written as the model is meant to write it: so its parser has to read it back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from tests.cases import every_case
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.parser_registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.prompts import prompter
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prepare import prepare
from triton_openai.prompts.template import ChatTemplate

SCHEMAS = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "now": {"type": "object", "properties": {}},
}
CALLS = [("get_weather", {"city": "Zürich <b>", "days": 2}), ("now", {})]
THOUGHT = "Hm hm."


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A past turn of an assistant as its family's template writes it, and what stands in front of it."""

    family: str
    tool_parser: str
    reasoning_parser: str | None
    prompt_end: str
    text: str
    calls: int
    thinks: bool


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt that a published template makes, and the built-in template that has to make the same."""

    family: str
    template: str
    special_tokens: dict[str, str]
    messages: list[dict[str, Any]]
    prompt: str


class Renderings(msgspec.Struct, frozen=True):
    """The file."""

    turns: list[Turn]
    prompts: list[Prompt]


RENDERINGS = msgspec.json.decode(
    (Path(__file__).parents[1].parent / "fixtures" / "renderings.json").read_bytes(), type=Renderings
)


def read(turn: Turn, pieces: list[str]) -> tuple[str, str, list[tuple[str, dict[str, Any]]]]:
    """Return content, reasoning and calls of a turn."""
    thinking = None if turn.reasoning_parser is None else REASONING_PARSERS.load(turn.reasoning_parser)
    parser = AnswerParser(
        None if thinking is None else thinking(inside=thinking.inside_after(turn.prompt_end)),
        TOOL_PARSERS.load(turn.tool_parser)(SCHEMAS),
    )
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)] + parser.flush()
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.text
    return (
        "".join(event.text for event in events if isinstance(event, Content)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        [(name, json.loads(arguments)) for name, arguments in calls],
    )


@every_case("turn", RENDERINGS.turns, ids=lambda turn: turn.family)
def test_a_past_turn_reads_back(turn: Turn) -> None:
    """The parsers make of a past turn what it was written from, at once and one character at a time."""
    expected = ("", THOUGHT if turn.thinks else "", CALLS[: turn.calls])

    assert expected == read(turn, [turn.text])
    assert expected == read(turn, list(turn.text))


@every_case("prompt", RENDERINGS.prompts, ids=lambda prompt: f"{prompt.family}-{len(prompt.messages)}")
def test_built_in_templates(prompt: Prompt) -> None:
    """A built-in template makes the same prompt as that of the family it was written for."""
    template = ChatTemplate(
        prompter.read_builtin(prompt.template), name=prompt.template, special_tokens=prompt.special_tokens
    )

    assert prompt.prompt == template.render(prepare(msgspec.convert(prompt.messages, list[Message]), template))
