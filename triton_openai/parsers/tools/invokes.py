"""Calls written as ``<invoke name="f">`` with ``<parameter name="k">`` in it, in the dialects of two families."""

from __future__ import annotations

import re
from typing import ClassVar

from triton_openai.parsers.tools.markers import markers
from triton_openai.parsers.tools.reader import SPACE, Malformed, Step, discard
from triton_openai.parsers.tools.tagged_calls import TaggedCalls

_ATTRIBUTE_NAME = re.compile(r"[a-z]*")
_ATTRIBUTE = re.compile(r'[^"<>\n]*')
_LONGEST = 1_000


class Invokes(TaggedCalls):
    """A block of invocations, each with parameters; between tags stands white space."""

    #: What closes a block: one for each marker, in any order.
    closings: ClassVar[tuple[str, ...]]
    #: Opening tag (without attributes) and closing tag.
    invoke: ClassVar[tuple[str, str]]
    parameter: ClassVar[tuple[str, str]]
    #: Whether one line break on either side of a value is markup.
    trims_lines: ClassVar[bool] = False

    def _block(self, marker: str) -> Step[None]:
        reader = self._reader
        yield from reader.space()
        yield from reader.literal(self.invoke[0])
        while True:
            yield from self._invocation()
            yield from reader.space()
            tag = yield from reader.one_of((self.invoke[0], *self.closings))
            if tag in self.closings:
                self._behind_call()
                return
            self._before_call(tag)

    def _invocation(self) -> Step[None]:
        attributes = yield from self._attributes()
        self._open(attributes.get("name", ""))
        ends = markers(self.parameter[0], self.invoke[1])
        value_ends = markers(*((f"\n{self.parameter[1]}",) if self.trims_lines else ()), self.parameter[1])
        while (yield from self._marker(ends, discard)) == self.parameter[0]:
            attributes = yield from self._attributes()
            if not attributes.get("name"):
                raise Malformed
            if self.trims_lines:
                yield from self._reader.optional("\n")
            text = {"true": True, "false": False}.get(attributes.get("string", ""))
            yield from self._value(attributes["name"], value_ends, text=text)
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
