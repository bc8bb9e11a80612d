# ruff: noqa: RUF001, RUF002 - StepFun's markers are made of full-width bars
"""
Step 3::

    <｜tool_calls_begin｜>
    <｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
    <steptml:parameter name="k">value</steptml:parameter>
    </steptml:invoke><｜tool_call_end｜>
    <｜tool_calls_end｜>
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Step
from triton_openai.parsers.tools.invokes import Invokes

_CALL = "<｜tool_call_begin｜>"


class Step3(Invokes):
    """As StepFun's Step 3 writes calls. Parameters carry no type: the tool's schema has it."""

    special_tokens = True
    markers = Markers("<｜tool_calls_begin｜>", _CALL)
    call = _CALL
    call_end = "</steptml:invoke>"
    closings = ("<｜tool_calls_end｜>",)
    parameter = ("<steptml:parameter", "</steptml:parameter>")

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        yield from reader.literal("function")
        yield from reader.literal("<｜tool_sep｜>")
        yield from reader.space()
        yield from reader.literal("<steptml:invoke")
        yield from super()._call()
        yield from reader.space()
        yield from self._close("<｜tool_call_end｜>")
