# ruff: noqa: RUF001, RUF002 - DeepSeek's markers are made of full-width bars
"""
DeepSeek V3.2 ("DSML")::

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="f">
    <｜DSML｜parameter name="k" string="true">value</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

V4 calls the outer tag ``tool_calls``.
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.tools.invokes import Invokes


class DeepSeekV32(Invokes):
    """As DeepSeek's encoding of V3.2 writes calls: ``string`` says whether a value is a string or JSON."""

    special_tokens = True
    markers = Markers("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>")
    closings = ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")
    call = "<｜DSML｜invoke"
    call_end = "</｜DSML｜invoke>"
    parameter = ("<｜DSML｜parameter", "</｜DSML｜parameter>")
