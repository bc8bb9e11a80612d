"""
MiniMax M2::

    <minimax:tool_call>
    <invoke name="f">
    <parameter name="k">value</parameter>
    </invoke>
    </minimax:tool_call>
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.invokes import Invokes


class MiniMaxM2(Invokes):
    """As MiniMax's chat template for M2 asks for calls. Parameters carry no type: the tool's schema has it."""

    markers = Markers("<minimax:tool_call>")
    closings = ("</minimax:tool_call>",)
    call = "<invoke"
    call_end = "</invoke>"
    parameter = ("<parameter", "</parameter>")
    # The template puts values between the tags as they are; the model at times on lines of their own.
    trims_lines = True
