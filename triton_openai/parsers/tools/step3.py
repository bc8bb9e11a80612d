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

from triton_openai.parsers.tools.invokes import Invokes
from triton_openai.parsers.tools.markers import Markers
from triton_openai.parsers.tools.reader import Step

_SECTION = "<｜tool_calls_begin｜>"
_CALL = "<｜tool_call_begin｜>"


class Step3(Invokes):
    """As StepFun's Step 3 writes calls. Parameters carry no type: the tool's schema has it."""

    special_tokens = True
    markers = Markers(_SECTION, _CALL)
    closings = ("<｜tool_calls_end｜>",)
    invoke = ("<steptml:invoke", "</steptml:invoke>")
    parameter = ("<steptml:parameter", "</steptml:parameter>")

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        if marker == _SECTION:
            yield from reader.space()
            yield from reader.literal(_CALL)
        while True:
            yield from reader.space()
            yield from reader.literal("function")
            yield from reader.literal("<｜tool_sep｜>")
            yield from reader.space()
            yield from reader.literal(self.invoke[0])
            yield from self._invocation()
            yield from reader.space()
            yield from self._close("<｜tool_call_end｜>")
            yield from reader.space()
            tag = yield from reader.one_of((_CALL, *self.closings))
            if tag != _CALL:
                self._behind_call()
                return
            self._before_call(tag)
