"""
Text to content, reasoning and tool calls: the formats are in ``tools`` and ``reasoning``.

A parser of another package subclasses :class:`ToolParser` or :class:`ReasoningParser`; see
``docs/guides/writing-a-parser.md``.
"""

from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallArguments, ToolCallStart
from triton_openai.parsers.reasoning import ReasoningParser
from triton_openai.parsers.tools.tool_parser import ToolParser

__all__ = ["Content", "Event", "Reasoning", "ReasoningParser", "ToolCallArguments", "ToolCallStart", "ToolParser"]
