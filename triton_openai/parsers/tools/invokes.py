"""Calls written as ``<invoke name="f">`` with ``<parameter name="k">`` in it, in the dialects of two families."""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.markers import markers
from triton_openai.parsers.reader import SPACE, Malformed, Step, discard
from triton_openai.parsers.tools.base import SectionCalls
from triton_openai.parsers.tools.tagged_calls import TaggedCalls

_ATTRIBUTE_NAME = re.compile(r"[a-z]*")
_ATTRIBUTE = re.compile(r'[^"<>\n]*')
_LONGEST = 1_000


class Invokes(SectionCalls, TaggedCalls):
    """A section of invocations, each with parameters; between tags stands white space. Opening tags have attributes."""

    #: What closes a call.
    call_end: ClassVar[str]
    #: Opening tag (without attributes) and closing tag.
    parameter: ClassVar[tuple[str, str]]
    #: Whether one line break on either side of a value is markup.
    trims_lines: ClassVar[bool] = False

    def _call(self) -> Step[None]:
        attributes = yield from self._attributes()
        self._open(attributes.get("name", ""))
        ends = markers(self.parameter[0], self.call_end)
        value_ends = markers(*((f"\n{self.parameter[1]}",) if self.trims_lines else ()), self.parameter[1])
        while (yield from self._marker(ends, discard)) == self.parameter[0]:
            attributes = yield from self._attributes()
            if not attributes.get("name"):
                raise Malformed
            if self.trims_lines:
                yield from self._reader.optional("\n")
            yield from self._value(attributes["name"], value_ends, is_text=attributes.get("string") == "true")
        self._finish()

    def _attributes(self) -> Step[dict[str, str]]:
        """Read ``a="b"`` as often as it stands there, and ``>``."""
        reader = self._reader
        attributes: dict[str, str] = {}
        while True:
            yield from reader.run(SPACE, discard)
            if (yield from reader.next()) == ">":
                reader.take()
                return attributes
            name = yield from reader.collect(_ATTRIBUTE_NAME, 32)
            yield from reader.literal('="')
            attributes[name] = yield from reader.collect(_ATTRIBUTE, _LONGEST)
            yield from reader.literal('"')
