# ruff: noqa: RUF001, RUF002 - DeepSeek's markers are made of full-width bars
"""
DeepSeek V3 and R1 0528::

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
    ```json
    {…}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

and V3.1, which writes ``f<｜tool▁sep｜>{…}`` between begin and end of a call.
"""

from __future__ import annotations

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Malformed, Step
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.base import SectionCalls

_CALL = "<｜tool▁call▁begin｜>"


class DeepSeekV3(SectionCalls):
    """As DeepSeek's chat templates write calls; both forms, told apart by what follows on the separator."""

    special_tokens = True
    markers = Markers("<｜tool▁calls▁begin｜>", _CALL)
    call = _CALL
    closings = ("<｜tool▁calls▁end｜>",)

    def _call(self) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        name = yield from self._name()
        yield from reader.space()
        yield from reader.literal("<｜tool▁sep｜>")
        yield from reader.space()
        fenced = (yield from reader.next()) != "{"
        if fenced:
            name = yield from self._name()
            yield from reader.space()
            yield from reader.literal("```json")
            yield from reader.space()
            if (yield from reader.next()) != "{":
                raise Malformed
        self._start_call(name)
        yield from json_text.value(reader, self._output.arguments)
        self._behind_call()
        yield from reader.space()
        if fenced:
            yield from reader.literal("```")
            yield from reader.space()
        yield from self._close("<｜tool▁call▁end｜>")
