"""Literals in a notation like JSON's, read as they come and written as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from triton_openai.parsers.reader import Malformed, Reader, Sink, Step
from triton_openai.parsers.tools.json_text import quote

#: Each level is a generator within a generator.
_DEEPEST = 50


class Literals(ABC):
    """Arrays and objects, in which a comma may follow the last item; a subclass reads the keys and all other values."""

    #: What opens an array, and what closes it.
    arrays: ClassVar[Mapping[str, str]] = {"[": "]"}

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def value(self, sink: Sink, depth: int = 0) -> Step[None]:
        """Read one literal and write it into *sink* as JSON. Raises Malformed or Ended."""
        if depth > _DEEPEST:
            raise Malformed
        yield from self._reader.space()
        first = yield from self._reader.next()
        if first == "{":
            self._reader.take()
            yield from self.members(sink, depth)
        elif first in self.arrays:
            self._reader.take()
            sink("[")
            separator = ""
            while not (yield from self.closes(self.arrays[first], separator)):
                sink(separator)
                yield from self.value(sink, depth + 1)
                separator = ", "
            sink("]")
        else:
            yield from self._simple(first, sink)

    def members(self, sink: Sink, depth: int = 0) -> Step[None]:
        """Read an object after its opening brace."""
        sink("{")
        separator = ""
        while not (yield from self.closes("}", separator)):
            key = yield from self._key()
            yield from self._reader.space()
            yield from self._reader.literal(":")
            sink(f"{separator}{quote(key)}: ")
            yield from self.value(sink, depth + 1)
            separator = ", "
        sink("}")

    def closes(self, closing: str, separator: str) -> Step[bool]:
        """Read up to the next item, or past *closing* and a comma before it. Return whether it was closed."""
        yield from self._reader.space()
        if (yield from self._reader.optional(closing)):
            return True
        if not separator:
            return False
        yield from self._reader.literal(",")
        yield from self._reader.space()
        return (yield from self._reader.optional(closing))

    @abstractmethod
    def _key(self) -> Step[str]:
        """Read the key of an object's member. Raises Malformed or Ended."""

    @abstractmethod
    def _simple(self, first: str, sink: Sink) -> Step[None]:
        """Read a value that is no array or object and begins with *first*. Raises Malformed or Ended."""
