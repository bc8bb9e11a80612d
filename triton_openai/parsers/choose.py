"""Which parsers read a model's answers: those that the operator names, else those that its chat template shows."""

from __future__ import annotations

import msgspec

from triton_openai.config.tree import AUTO, NONE
from triton_openai.parsers.detect import detect
from triton_openai.parsers.reasoning.base import ReasoningParser
from triton_openai.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from triton_openai.parsers.tools.base import ToolParser


class Parsers(msgspec.Struct, frozen=True, kw_only=True):
    """The parser classes of a model; ``None`` where its text stays as it is."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @property
    def special_tokens(self) -> bool:
        """Whether their markup is lost when the backend leaves special tokens out of the text."""
        return any(parser is not None and parser.special_tokens for parser in (self.tools, self.reasoning))


def choose(template: str, *, tools: str | None, reasoning: str | None) -> Parsers:
    """
    Return the parsers called *tools* and *reasoning* (``auto`` or ``None``: by the text of the chat *template*;
    ``none``: no parser).

    Raises :class:`ConfigurationError` for names that do not exist.
    """
    found_tools, found_reasoning = detect(template)
    tool_name = found_tools if tools in (None, AUTO) else tools
    reasoning_name = found_reasoning if reasoning in (None, AUTO) else reasoning
    return Parsers(
        tools=None if tool_name in (None, NONE) else TOOL_PARSERS.load(tool_name),
        reasoning=None if reasoning_name in (None, NONE) else REASONING_PARSERS.load(reasoning_name),
    )
