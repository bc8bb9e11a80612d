"""Calls written as tags: the arguments' JSON is built while the parameters come."""

from __future__ import annotations

import re

from triton_openai.parsers.markers import Markers
from triton_openai.parsers.reader import Ended, Malformed, Sink, Step
from triton_openai.parsers.tools.base import MarkedCalls
from triton_openai.parsers.tools.json_text import escape, quote
from triton_openai.parsers.tools.schema import Parameters

#: A parameter's name is held back until its end.
_LONGEST_KEY = 1_000


class TaggedCalls(MarkedCalls):
    """
    A call is a name and parameters of name and text.

    The text of a parameter that the tool's schema calls a string streams; any other's is read to its end first, since
    what it becomes depends on the whole of it.
    """

    def _open(self, name: str) -> None:
        """Begin the call of *name*."""
        self._start_call(name)
        self._parameters = Parameters(self.tools.get(name))
        self._separator = "{"

    def _finish(self) -> None:
        """End the call."""
        self._output.arguments("}" if self._separator == ", " else "{}")
        self._behind_call()

    def _key(self, characters: re.Pattern[str]) -> Step[str]:
        """Read a parameter's name, made of *characters*."""
        key = (yield from self._reader.collect(characters, _LONGEST_KEY)).strip()
        if not key:
            raise Malformed
        return key

    def _value(self, key: str, ends: Markers, *, is_text: bool = False) -> Step[str]:
        """
        Read a parameter's value up to the first of *ends*, and return that.

        *is_text* says that the value is a string; otherwise the schema says it.
        """
        prefix = f"{self._separator}{quote(key)}: "
        if is_text or self._parameters.is_text(key):
            self._output.arguments(prefix + '"')
            self._separator = ", "
            end = yield from self._marker(ends, lambda piece: self._output.arguments(escape(piece)))
            self._output.arguments('"')
            return end
        parts: list[str] = []
        end = yield from self._marker(ends, parts.append)
        self._output.arguments(prefix + self._parameters.value(key, "".join(parts)))
        self._separator = ", "
        return end

    def _marker(self, ends: Markers, sink: Sink) -> Step[str]:
        """Give the text up to the first of *ends* to *sink*; return it. Raises :class:`Ended`."""
        end = yield from self._reader.until(ends, sink)
        if not end:
            raise Ended
        return end
