"""
JSON (RFC 8259) read as it comes: checked character by character, passed on piece by piece, never read twice.

The text goes on exactly as it was written, with one repair: control characters inside of strings, which JSON forbids
and models write when an argument is code, become escapes.

Whether a value ends where it seems to end, only what follows shows: a quote may be one of the string that nobody
escaped. So the ends of values go to a sink of their own, where they can wait.
"""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import msgspec

from triton_openai.parsers.reader import Malformed, Reader, Sink, Step
from triton_openai.parsers.tools import tags

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f<]*(?:<[^"\\\x00-\x1f</|\uff5cet][^"\\\x00-\x1f<]*)*')
#: What may stand at the end of a string that was not closed.
_CLOSERS = ",]} \t"
_NUMBER_CHARACTERS = re.compile(r"[-+.0-9eE]*")
#: A number, as JSON writes it.
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_WORD_CHARACTERS = re.compile(r"[a-z]*")
_WORDS = frozenset({"true", "false", "null"})
_HEXADECIMAL = frozenset("0123456789abcdefABCDEF")
_ESCAPED = frozenset('"\\/bfnrtu')
_CONTROL = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}

#: Whole items of an array, or members of an object, that hold no others, with the comma after each and the beginning of
#: what follows, which is not consumed. Numbers that come near the limit below are left to the reading step by step,
#: which keeps it.
_SIMPLE = (
    r'(?:"[^"\\\x00-\x1f]*"|-?(?:0|[1-9][0-9]{0,99})(?:\.[0-9]{1,99})?(?:[eE][-+]?[0-9]{1,99})?|true|false|null)'
    r"[ \t\n\r]*,"
)
_ITEMS = re.compile(rf'(?:[ \t\n\r]*{_SIMPLE}(?=[ \t\n\r]*["\[{{0-9-]))*')
_MEMBERS = re.compile(
    rf'(?:[ \t\n\r]*"[^"\\\x00-\x1f]*"[ \t\n\r]*:[ \t\n\r]*{_SIMPLE}'
    r'(?=[ \t\n\r]*"[^"\\\x00-\x1f]*"[ \t\n\r]*:))*'
)

#: Reads arguments.
OBJECT = msgspec.json.Decoder(dict[str, Any])

#: Longer numbers exist in no arguments; they would be held back until their end.
_MAX_NUMBER = 1_000


class MemberTypes(Protocol):
    """Decides about the types of the members of an object."""

    def fits(self, key: str, first: str) -> bool:
        """Return whether a value of *key* that begins with the character *first* stays as it is."""

    def converted(self, key: str, text: str) -> str:
        """Return what takes the place of *text*, a value of *key* that does not."""


def value(reader: Reader, sink: Sink, ends: Sink | None = None, types: MemberTypes | None = None) -> Step[None]:
    """
    Read one value into *sink*, and the ends of values and what stands between them into *ends*, if that is another.

    *types* converts members of an object; such a member is read to its end first. Nesting is limited by memory only.
    Raises Malformed or Ended.
    """
    ends = ends or sink
    closing: list[str] = []
    key = ""
    while True:
        if closing and closing[-1] == "]":
            reader.ahead(_ITEMS, sink)
            yield from reader.run(_SPACE, ends)
        character = yield from reader.next()
        if types is not None and closing == ["}"] and not types.fits(key, character):
            parts: list[str] = []
            yield from value(reader, parts.append)
            ends(types.converted(key, "".join(parts)))
        elif character in "{[":
            ends(reader.take())
            closing.append("}" if character == "{" else "]")
            yield from reader.run(_SPACE, ends)
            if (yield from reader.next()) != closing[-1]:
                if character == "{":
                    # No value is before it that it could confirm.
                    key = yield from _next_key(
                        reader, sink, ends, ends, is_alone=types is not None and len(closing) == 1
                    )
                continue
        elif character == '"':
            yield from string(reader, sink, ends)
        else:
            yield from _scalar(reader, ends, character)
        # A value, or the inside of an empty object or array, was read.
        while closing:
            yield from reader.run(_SPACE, ends)
            character = yield from reader.next()
            if character == closing[-1]:
                ends(reader.take())
                closing.pop()
                continue
            if character != ",":
                raise Malformed
            ends(reader.take())
            yield from reader.run(_SPACE, ends)
            if closing[-1] == "}":
                # The key confirms the value before it.
                key = yield from _next_key(reader, sink, ends, sink, is_alone=types is not None and len(closing) == 1)
            break
        else:
            return


def string(reader: Reader, sink: Sink, ends: Sink | None = None) -> Step[None]:
    """
    Read one string, its quotes included, into *sink*, but what may be its end, or behind its end, into *ends*.

    Raises Malformed or Ended.
    """
    ends = ends or sink
    yield from reader.literal('"')
    sink('"')

    content = sink

    def plain(text: str) -> None:
        if text[-1] not in _CLOSERS:
            content(text)
            return
        certain = text.rstrip(_CLOSERS)
        if certain:
            content(certain)
        ends(text[len(certain) :])

    while True:
        yield from reader.run(_PLAIN, plain)
        character = yield from reader.next()
        if character == "<":
            marker = yield from reader.marker(tags.CLOSING_MARKERS)
            if marker:
                # If the last quote is missing, the call has ended here.
                ends(marker)
                content = ends
            else:
                content(reader.take())
            continue
        if character == "\\":
            escape = yield from _escape(reader)
            if escape == '\\"':
                ends(escape)
            else:
                content(escape)
            continue
        reader.take()
        if character == '"':
            ends(character)
            return
        escape = _CONTROL.get(character) or f"\\u{ord(character):04x}"
        if character == "\n":
            ends(escape)
        else:
            content(escape)


def dump(value: Any) -> str:
    """Return *value* as JSON."""
    return json.dumps(value, ensure_ascii=False)


def escape(text: str) -> str:
    """Return *text* as it stands inside of a JSON string."""
    return dump(text)[1:-1]


def string_value(text: str) -> str | None:
    """Return what the JSON string *text* means; ``None`` if it is none, or has a lone surrogate."""
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return None


def decoded_string(reader: Reader) -> Step[str]:
    """Read one string and return what it means. Raises Malformed (for lone surrogates too) or Ended."""
    parts: list[str] = []
    yield from string(reader, parts.append)
    text = string_value("".join(parts))
    if text is None:
        raise Malformed
    return text


def is_scalar(text: str) -> bool:
    """Return whether *text* is a number or a word of JSON."""
    return text in _WORDS or NUMBER.fullmatch(text) is not None


def is_object(text: str) -> bool:
    """Return whether *text* is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _next_key(reader: Reader, sink: Sink, ends: Sink, colon: Sink, *, is_alone: bool) -> Step[str]:
    """
    Read a key and its colon, which goes to *colon*; unless it *is_alone*, after members that are at hand as a whole.

    Return the key if it *is_alone*: only then it is asked for.
    """
    if not is_alone:
        reader.ahead(_MEMBERS, sink)
        yield from reader.run(_SPACE, ends)
        yield from string(reader, ends)
        yield from _colon(reader, ends, colon)
        return ""
    parts: list[str] = []
    yield from string(reader, parts.append)
    text = "".join(parts)
    ends(text)
    yield from _colon(reader, ends, colon)
    # No schema has a lone surrogate.
    return string_value(text) or ""


def _colon(reader: Reader, ends: Sink, colon: Sink) -> Step[None]:
    """Read the colon behind a key into *colon*, and the white space around it into *ends*."""
    yield from reader.run(_SPACE, ends)
    yield from reader.literal(":")
    colon(":")
    yield from reader.run(_SPACE, ends)


def _escape(reader: Reader) -> Step[str]:
    """Read an escape to its end. Raises Malformed, having consumed nothing of what is wrong."""
    escape = reader.take()
    character = yield from reader.next()
    if character not in _ESCAPED:
        raise Malformed
    escape += reader.take()
    if character != "u":
        return escape
    for _ in range(4):
        if (yield from reader.next()) not in _HEXADECIMAL:
            raise Malformed
        escape += reader.take()
    return escape


def _scalar(reader: Reader, ends: Sink, first: str) -> Step[None]:
    if first == "-" or "0" <= first <= "9":
        text = yield from reader.collect(_NUMBER_CHARACTERS, _MAX_NUMBER)
    else:
        text = yield from reader.collect(_WORD_CHARACTERS, 5)
    # What is wrong goes on too: where it can be given back, it will be; where not, it must not be lost.
    ends(text)
    if not is_scalar(text):
        # A number or a word that the end of the text cuts is an end and no fault.
        yield from reader.next()
        raise Malformed
