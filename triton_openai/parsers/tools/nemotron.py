"""Llama Nemotron and Nemotron Nano 2: ``<TOOLCALL>[{"name": "f", "arguments": {…}}, …]</TOOLCALL>``."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class Nemotron(JsonCalls):
    """As the chat templates of NVIDIA's Llama 3.3 Nemotron Super 1.5 and Nemotron Nano 9B v2 ask for calls."""

    markers = Markers("<TOOLCALL>")
    closing = "</TOOLCALL>"
