"""
JSON (RFC 8259) read as it comes: checked character by character, passed on piece by piece, never read twice.

The text goes on exactly as it was written, with one repair: control characters inside of strings, which JSON forbids
and models write when an argument is code, become escapes.
"""

from __future__ import annotations

import json
import re

import msgspec

from triton_openai.parsers.reader import Malformed, Reader, Sink, Step

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
#: A number, as JSON writes it.
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD_CHARACTERS = re.compile(r"[a-z]*")
_WORDS = frozenset({"true", "false", "null"})
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrtu')
_CONTROL = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}

#: Whole items of an array, or members of an object, that hold no others, with the comma after each. Numbers that come
#: near the limit below are left to the reading step by step, which keeps it.
_SIMPLE = (
    r'(?:"[^"\\\x00-\x1f]*"|-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][-+]?[0-9]{1,99})?|true|false|null)'
    r"[ \t\n\r]*,"
)
_ITEMS = re.compile(rf"(?:[ \t\n\r]*{_SIMPLE})*")
_MEMBERS = re.compile(rf'(?:[ \t\n\r]*"[^"\\\x00-\x1f]*"[ \t\n\r]*:[ \t\n\r]*{_SIMPLE})*')

#: Longer numbers exist in no arguments; they would be held back until their end.
_LONGEST_NUMBER = 1_000


def value(reader: Reader, sink: Sink) -> Step[None]:
    """Read one value into *sink*. Nesting is limited by memory only. Raises Malformed or Ended."""
    closing: list[str] = []
    while True:
        if closing and closing[-1] == "]":
            reader.ahead(_ITEMS, sink)
            yield from reader.run(_SPACE, sink)
        character = yield from reader.next()
        if character in "{[":
            sink(reader.take())
            closing.append("}" if character == "{" else "]")
            yield from reader.run(_SPACE, sink)
            if (yield from reader.next()) != closing[-1]:
                if character == "{":
                    yield from _key(reader, sink)
                continue
        elif character == '"':
            yield from string(reader, sink)
        else:
            yield from _scalar(reader, sink, character)
        # A value, or the inside of an empty object or array, was read.
        while closing:
            yield from reader.run(_SPACE, sink)
            character = yield from reader.next()
            if character == closing[-1]:
                sink(reader.take())
                closing.pop()
                continue
            if character != ",":
                raise Malformed
            sink(reader.take())
            yield from reader.run(_SPACE, sink)
            if closing[-1] == "}":
                yield from _key(reader, sink)
            break
        else:
            return


def string(reader: Reader, sink: Sink) -> Step[None]:
    """Read one string, its quotes included, into *sink*. Raises Malformed or Ended."""
    yield from reader.literal('"')
    sink('"')
    while True:
        yield from reader.run(_PLAIN, sink)
        character = yield from reader.next()
        reader.take()
        if character == '"':
            sink(character)
            return
        if character == "\\":
            sink(character)
            yield from _escape(reader, sink)
        else:
            sink(_CONTROL.get(character) or f"\\u{ord(character):04x}")


def quote(text: str) -> str:
    """Return *text* as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escape(text: str) -> str:
    """Return *text* as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def decoded_string(reader: Reader) -> Step[str]:
    """Read one string and return what it means. Raises Malformed (for lone surrogates too) or Ended."""
    parts: list[str] = []
    yield from string(reader, parts.append)
    try:
        return msgspec.json.decode("".join(parts), type=str)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Malformed from error


def is_scalar(text: str) -> bool:
    """Return whether *text* is a number or a word of JSON."""
    return text in _WORDS or NUMBER.fullmatch(text) is not None


def is_object(text: str) -> bool:
    """Return whether *text* is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _key(reader: Reader, sink: Sink) -> Step[None]:
    reader.ahead(_MEMBERS, sink)
    yield from reader.run(_SPACE, sink)
    yield from string(reader, sink)
    yield from reader.run(_SPACE, sink)
    yield from reader.literal(":")
    sink(":")
    yield from reader.run(_SPACE, sink)


def _escape(reader: Reader, sink: Sink) -> Step[None]:
    character = yield from reader.next()
    if character not in _ESCAPED:
        raise Malformed
    sink(reader.take())
    for _ in range(4 if character == "u" else 0):
        if (yield from reader.next()) not in _HEXADECIMAL:
            raise Malformed
        sink(reader.take())


def _scalar(reader: Reader, sink: Sink, first: str) -> Step[None]:
    if first == "-" or "0" <= first <= "9":
        text = yield from reader.collect(_NUMBER_CHARACTERS, _LONGEST_NUMBER)
    else:
        text = yield from reader.collect(_WORD_CHARACTERS, 5)
    # What is wrong goes on too: where it can be given back, it will be; where not, it must not be lost.
    sink(text)
    if not is_scalar(text):
        # A number or a word that the end of the text cuts is an end and no fault.
        yield from reader.next()
        raise Malformed
