"""Hermes and Qwen: ``<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>``, repeated for each call."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Hermes(JsonCalls):
    """As the chat templates of Nous Hermes 2 Pro and 3, Qwen 2.5, Qwen 3, QwQ and Granite 4 ask for calls."""

    markers = Markers("<tool_call>")
    closing = "</tool_call>"
