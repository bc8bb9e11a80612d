"""
Mistral: ``[TOOL_CALLS][{"name": "f", "arguments": {…}}]``, and from tokenizer version 11 on
``[TOOL_CALLS]f[ARGS]{…}``, repeated for each call, with ``[CALL_ID]id`` before ``[ARGS]`` in some releases.
"""

from __future__ import annotations

import re
import uuid

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Malformed, Step
from triton_openai.parsers.tools import json_text
from triton_openai.parsers.tools.json_calls import JsonCalls

_ID = re.compile(r"[A-Za-z0-9]*")


class Mistral(JsonCalls):
    """
    Both forms, told apart by what follows on the marker.

    Mistral's templates (and ``mistral-common``'s validator) take ids of exactly nine letters and digits; an id that the
    model gives itself, as version 11 may, is kept.
    """

    special_tokens = True
    markers = Markers("[TOOL_CALLS]")

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits."""
        return uuid.uuid4().hex[:9]

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        if (yield from reader.next()) in "[{":
            yield from super()._block(marker)
            return
        name = yield from self._name()
        call_id: str | None = None
        if (yield from reader.next()) != "{":
            marker = yield from reader.one_of(("[CALL_ID]", "[ARGS]"))
            if marker == "[CALL_ID]":
                call_id = yield from reader.collect(_ID, 64)
                yield from reader.literal("[ARGS]")
        yield from reader.space()
        if (yield from reader.next()) != "{":
            raise Malformed
        self._start_call(name, call_id)
        yield from json_text.value(reader, self._output.arguments)
        self._behind_call()
