"""
GLM 4.5, 4.6 and, without the line breaks, 4.7 and 5::

    <tool_call>f
    <arg_key>k</arg_key>
    <arg_value>value</arg_value>
    </tool_call>
"""

from __future__ import annotations

import re

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Step
from triton_openai.parsers.tools.tagged_calls import TaggedCalls

_KEY = re.compile(r"[^<]*")
_VALUE_END = Markers("</arg_value>")


class Glm45(TaggedCalls):
    """As the chat templates of Z.ai's GLM 4.5 and later ask for calls: strings as they are, all else as JSON."""

    markers = Markers("<tool_call>")

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        name = yield from self._name()
        yield from reader.space()
        part = yield from reader.one_of(("<arg_key>", "</tool_call>"))
        self._open(name)
        while part == "<arg_key>":
            key = yield from self._key(_KEY)
            yield from reader.literal("</arg_key>")
            yield from reader.space()
            yield from reader.literal("<arg_value>")
            yield from self._value(key, _VALUE_END)
            yield from reader.space()
            part = yield from reader.one_of(("<arg_key>", "</tool_call>"))
        self._finish()
