"""
Literals in notations like JSON's, Python's among them, read as they come and written as JSON.

Strings stream; numbers and names are read to their end first. As in JSON, the ends of values go to a sink of their own.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from triton_openai.parsers.reader import Ended, Malformed, Reader, Sink, Step
from triton_openai.parsers.tools.json_text import MemberTypes, dump, escape

#: Each level is a generator within a generator.
_MAX_DEPTH = 50


class Literals(ABC):
    """Arrays and objects, in which a comma may follow the last item; a subclass reads strings, words and numbers."""

    #: What opens an array, and what closes it.
    arrays: ClassVar[Mapping[str, str]] = {"[": "]"}
    #: The characters with which strings begin.
    quotes: str

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def value(self, sink: Sink, ends: Sink | None = None, depth: int = 0) -> Step[None]:
        """
        Read one literal and write it into *sink* as JSON, and the ends of values into *ends*, if that is another.

        Raises Malformed or Ended.
        """
        ends = ends or sink
        if depth > _MAX_DEPTH:
            raise Malformed
        yield from self._reader.space()
        first = yield from self._reader.next()
        if first == "{":
            self._reader.take()
            yield from self.members(sink, ends, depth)
        elif first in self.arrays:
            self._reader.take()
            ends("[")
            separator = ""
            while not (yield from self.closes(self.arrays[first], separator)):
                ends(separator)
                yield from self.value(sink, ends, depth + 1)
                separator = ", "
            ends("]")
        elif first in self.quotes:
            sink('"')
            yield from self._string(lambda text: sink(escape(text)))
            ends('"')
        else:
            yield from self._bare(first, ends)

    def member(self, key: str, sink: Sink, ends: Sink, types: MemberTypes | None, depth: int = 0) -> Step[None]:
        """Do :meth:`value` for the value of *key*, which *types* converts."""
        yield from self._reader.space()
        first = yield from self._reader.next()
        if first in self.quotes:
            first = '"'
        if types is None or types.fits(key, first):
            yield from self.value(sink, ends, depth)
            return
        parts: list[str] = []
        yield from self.value(parts.append, depth=depth)
        ends(types.converted(key, "".join(parts)))

    def members(
        self, sink: Sink, ends: Sink | None = None, depth: int = 0, types: MemberTypes | None = None
    ) -> Step[None]:
        """Read an object after its opening brace; *types* converts its values."""
        ends = ends or sink
        ends("{")
        separator = ""
        while not (yield from self.closes("}", separator)):
            parts: list[str] = []
            if (yield from self._reader.next()) in self.quotes:
                yield from self._string(parts.append)
            else:
                yield from self._bare_key(parts.append)
            key = "".join(parts)
            yield from self._reader.token(":")
            written = f"{separator}{dump(key)}: "
            if separator:
                # The key confirms the value before it.
                sink(written)
            else:
                ends(written)
            yield from self.member(key, sink, ends, types, depth + 1)
            separator = ", "
        ends("}")

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
    def _string(self, sink: Sink) -> Step[None]:
        """Read a string and give what it means to *sink*. Raises Malformed or Ended."""

    @abstractmethod
    def _bare_key(self, sink: Sink) -> Step[None]:
        """Read the key of an object's member, which has no quotes. Raises Malformed or Ended."""

    @abstractmethod
    def _bare(self, first: str, sink: Sink) -> Step[None]:
        """Read another value, which begins with *first*, and write it as JSON. Raises Malformed or Ended."""


_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
#: Python reference, "String and Bytes literals"; ``\N{…}`` is left out.
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES["v"] = "\v"
_CODES = {"x": 2, "u": 4, "U": 8}
_PLAIN = re.compile(r"""[^'"\\]*""")
_MAX_WORD = 1_000


def to_json(text: str) -> str | None:
    """Return *text*, one whole literal, as JSON; nothing if it is none."""
    reader = Reader()
    # Something must follow a word or an empty string to show that it ends there.
    reader.add(text + "\n")
    reader.end()
    parts: list[str] = []
    try:
        for _ in PythonLiterals(reader).value(parts.append):
            pass
    except (Malformed, Ended):
        return None
    if reader.rest().strip():
        return None
    return "".join(parts)


class PythonLiterals(Literals):
    """
    Python's literals; a tuple is an array.

    JSON's own ``true``, ``false`` and ``null`` are understood too: Olmo 3 is asked to write them. A string may hold
    plain line breaks, which models put there.
    """

    arrays: ClassVar[Mapping[str, str]] = {"[": "]", "(": ")"}
    quotes = "'\""

    def _bare_key(self, sink: Sink) -> Step[None]:
        # As json.dumps writes such keys.
        yield from self._bare("", sink)

    def _bare(self, first: str, sink: Sink) -> Step[None]:
        word = yield from self._reader.collect(_WORD, _MAX_WORD)
        yield from self._reader.next()
        sink(_WORDS.get(word) or _number(word))

    def _string(self, sink: Sink) -> Step[None]:
        reader = self._reader
        mark = yield from reader.literal(*self.quotes)
        if (yield from reader.next()) == mark:
            reader.take()
            if (yield from reader.next()) != mark:
                return
            mark *= 3
            reader.take()
        while True:
            yield from reader.run(_PLAIN, sink)
            if (yield from reader.next()) == "\\":
                reader.take()
                sink((yield from _escape(reader)))
                continue
            try:
                yield from reader.literal(mark)
                return
            except Malformed:
                # A quote of the text.
                sink(reader.take())


def _number(word: str) -> str:
    if not word or word[0] not in "+-.0123456789":
        raise Malformed
    try:
        return str(int(word, 0))
    except ValueError:
        pass
    try:
        number = float(word)
    except ValueError as error:
        raise Malformed from error
    if not math.isfinite(number):
        raise Malformed
    return repr(number)


def _escape(reader: Reader) -> Step[str]:
    """Return what the escape means whose backslash was read."""
    character = yield from reader.next()
    if character in "01234567":
        return chr(int((yield from _digits(reader, "01234567", 3)), 8))
    reader.take()
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character not in _CODES:
        # Python keeps the backslash of what is no escape.
        return "\\" + character
    digits = yield from _digits(reader, "0123456789abcdefABCDEF", _CODES[character])
    if len(digits) < _CODES[character]:
        raise Malformed
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Malformed
    return chr(code)


def _digits(reader: Reader, allowed: str, most: int) -> Step[str]:
    digits = ""
    while len(digits) < most and (yield from reader.next()) in allowed:
        digits += reader.take()
    return digits
