"""Jamba, Hunyuan A13B, MiniMax M1, Apriel: ``<tool_calls>[{"name": "f", "arguments": {…}}, …]</tool_calls>``."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Jamba(JsonCalls):
    """As AI21's chat template for Jamba 1.5 and later asks for calls; MiniMax M1 writes an object a line instead."""

    special_tokens = True
    markers = Markers("<tool_calls>")
    closing = "</tool_calls>"
