"""InternLM 2 and 2.5: ``<|action_start|><|plugin|>{"name": "f", "parameters": {…}}<|action_end|>``."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.json_calls import JsonCalls


class InternLM(JsonCalls):
    """As InternLM's chat format writes calls; code for its ``<|interpreter|>`` is none."""

    special_tokens = True
    markers = Markers("<|action_start|><|plugin|>")
    closing = "<|action_end|>"
