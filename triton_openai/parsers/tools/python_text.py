"""
Python literals read as they come and written as JSON: the arguments of pythonic calls.

Strings stream; numbers and names are read to their end first. JSON's own ``true``, ``false`` and ``null`` are
understood too (Olmo 3 is asked to write them), and a string may hold plain line breaks, which models put there.
"""

from __future__ import annotations

import math
import re

from triton_openai.parsers.reader import Ended, Malformed, Reader, Sink, Step
from triton_openai.parsers.tools.json_text import escape, quote

_WORD = re.compile(r"[A-Za-z0-9_.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = re.compile(r"""[^'"\\]*""")
#: Python reference, "String and Bytes literals"; ``\N{…}`` is left out.
_ESCAPES = {"\n": "", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ESCAPES["v"] = "\v"
_CODES = {"x": 2, "u": 4, "U": 8}
_DIGITS = frozenset("0123456789abcdefABCDEF")

_LONGEST_WORD = 1_000
#: Each level is a generator within a generator.
_DEEPEST = 50


def to_json(text: str) -> str | None:
    """Return *text*, one whole literal, as JSON; nothing if it is none."""
    reader = Reader()
    # Something must stand behind a word or an empty string to show that it ends there.
    reader.add(text + "\n")
    reader.end()
    parts: list[str] = []
    try:
        for _ in value(reader, parts.append):
            pass
    except (Malformed, Ended):
        return None
    return None if reader.rest().strip() else "".join(parts)


def value(reader: Reader, sink: Sink, depth: int = 0) -> Step[None]:
    """Read one literal and write it into *sink* as JSON. Raises Malformed or Ended."""
    if depth > _DEEPEST:
        raise Malformed
    yield from reader.space()
    first = yield from reader.next()
    if first in "'\"":
        yield from _string(reader, sink)
    elif first in "[(":
        yield from _items(reader, sink, depth, "]" if first == "[" else ")")
    elif first == "{":
        yield from _entries(reader, sink, depth)
    else:
        sink((yield from _word(reader)))


def _items(reader: Reader, sink: Sink, depth: int, closing: str) -> Step[None]:
    reader.take()
    sink("[")
    separator = ""
    while not (yield from _closes(reader, closing, separator)):
        sink(separator)
        yield from value(reader, sink, depth + 1)
        separator = ", "
    sink("]")


def _entries(reader: Reader, sink: Sink, depth: int) -> Step[None]:
    reader.take()
    sink("{")
    separator = ""
    while not (yield from _closes(reader, "}", separator)):
        sink(separator)
        first = yield from reader.next()
        if first in "'\"":
            yield from _string(reader, sink)
        else:
            # As json.dumps writes such keys.
            sink(quote((yield from _word(reader))))
        yield from reader.space()
        yield from reader.literal(":")
        sink(": ")
        yield from value(reader, sink, depth + 1)
        separator = ", "
    sink("}")


def _closes(reader: Reader, closing: str, separator: str) -> Step[bool]:
    """Read up to the next item, or past *closing*; a comma may stand in front of that. Say whether it was closed."""
    yield from reader.space()
    if (yield from reader.optional(closing)):
        return True
    if not separator:
        yield from reader.next()
        return False
    yield from reader.literal(",")
    yield from reader.space()
    yield from reader.next()
    return (yield from reader.optional(closing))


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
    quote_mark = yield from reader.next()
    reader.take()
    sink('"')
    quotes = 1
    if (yield from reader.next()) == quote_mark:
        reader.take()
        if (yield from reader.next()) != quote_mark:
            sink('"')
            return
        reader.take()
        quotes = 3
    yield from _body(reader, sink, quote_mark, quotes)
    sink('"')


def _body(reader: Reader, sink: Sink, quote_mark: str, quotes: int) -> Step[None]:
    """Read a string up to and with its *quotes* closing quote marks."""

    def write(text: str) -> None:
        sink(escape(text))

    seen = 0
    while True:
        if not seen:
            yield from reader.run(_PLAIN, write)
        character = yield from reader.next()
        if character == quote_mark:
            reader.take()
            seen += 1
            if seen == quotes:
                return
            continue
        write(quote_mark * seen)
        seen = 0
        if character == "\\":
            reader.take()
            write((yield from _escape(reader)))
        elif character in "'\"":
            write(reader.take())


def _escape(reader: Reader) -> Step[str]:
    """Return what the escape means whose backslash was read."""
    character = yield from reader.next()
    if character in "01234567":
        digits = yield from _octal(reader)
        return chr(int(digits, 8))
    reader.take()
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character not in _CODES:
        # Python keeps the backslash of what is no escape.
        return "\\" + character
    digits = ""
    for _ in range(_CODES[character]):
        if (yield from reader.next()) not in _DIGITS:
            raise Malformed
        digits += reader.take()
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Malformed
    return chr(code)


def _octal(reader: Reader) -> Step[str]:
    digits = ""
    while len(digits) < 3 and (yield from reader.next()) in "01234567":
        digits += reader.take()
    return digits
