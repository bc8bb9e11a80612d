"""
Python literals read as they come and written as JSON: the arguments of pythonic calls.

Strings stream; numbers and names are read to their end first. JSON's own ``true``, ``false`` and ``null`` are
understood too (Olmo 3 is asked to write them), and a string may hold plain line breaks, which models put there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import ClassVar

from triton_openai.parsers.reader import Ended, Malformed, Reader, Sink, Step
from triton_openai.parsers.tools.json_text import escape
from triton_openai.parsers.tools.literals import Literals

_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = re.compile(r"""[^'"\\]*""")
#: Python reference, "String and Bytes literals"; ``\N{…}`` is left out.
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES["v"] = "\v"
_CODES = {"x": 2, "u": 4, "U": 8}
_LONGEST_WORD = 1_000


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
    return None if reader.rest().strip() else "".join(parts)


class PythonLiterals(Literals):
    """Python's literals; a tuple is an array."""

    arrays: ClassVar[Mapping[str, str]] = {"[": "]", "(": ")"}

    def _key(self) -> Step[str]:
        if (yield from self._reader.next()) not in "'\"":
            # As json.dumps writes such keys.
            return (yield from _word(self._reader))
        parts: list[str] = []
        yield from _string(self._reader, parts.append)
        return "".join(parts)

    def _simple(self, first: str, sink: Sink) -> Step[None]:
        if first not in "'\"":
            sink((yield from _word(self._reader)))
            return
        sink('"')
        yield from _string(self._reader, lambda text: sink(escape(text)))
        sink('"')


def _word(reader: Reader) -> Step[str]:
    word = yield from reader.collect(_WORD, _LONGEST_WORD)
    yield from reader.next()
    return _WORDS.get(word) or _number(word)


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


def _string(reader: Reader, sink: Sink) -> Step[None]:
    """Give what a string means to *sink*."""
    quote_mark = yield from reader.next()
    reader.take()
    quotes = 1
    if (yield from reader.next()) == quote_mark:
        reader.take()
        if (yield from reader.next()) != quote_mark:
            return
        reader.take()
        quotes = 3
    seen = 0
    while True:
        if not seen:
            yield from reader.run(_PLAIN, sink)
        character = yield from reader.next()
        if character == quote_mark:
            reader.take()
            seen += 1
            if seen == quotes:
                return
            continue
        sink(quote_mark * seen)
        seen = 0
        if character == "\\":
            reader.take()
            sink((yield from _escape(reader)))
        elif character in "'\"":
            sink(reader.take())


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
