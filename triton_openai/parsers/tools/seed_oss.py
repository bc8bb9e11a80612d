"""Seed OSS: the tags of Qwen 3 Coder between ``<seed:tool_call>`` and ``</seed:tool_call>``."""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.qwen3_coder import Qwen3Coder


class SeedOss(Qwen3Coder):
    """As the chat template of ByteDance's Seed OSS asks for calls."""

    opening = "<seed:tool_call>"
    closing = "</seed:tool_call>"
    markers = Markers(opening, "<function=")
