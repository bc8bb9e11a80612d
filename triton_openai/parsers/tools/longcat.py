"""LongCat Flash: ``<longcat_tool_call>{"name": "f", "arguments": {…}}</longcat_tool_call>``, repeated for each call."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class LongCat(JsonCalls):
    """As Meituan's chat template for LongCat Flash asks for calls."""

    markers = Markers("<longcat_tool_call>")
    closing = "</longcat_tool_call>"
