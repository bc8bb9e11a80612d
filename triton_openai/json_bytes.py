"""
JSON as bytes: what is checked before it is decoded, and what is escaped before clients read it line by line.

Checks are passes of compiled code. To decode JSON that is deeper, or has longer numbers, than the limits here takes
long, and holds the interpreter.
"""

from __future__ import annotations

from itertools import accumulate

#: The levels of a request's JSON.
MAX_DEPTH = 100
#: Twice the digits of any number in use; the time to read a number grows with the square of its digits.
MAX_DIGITS = 40
#: The values of a request's JSON. Each has two quotes at most, and its key two.
MAX_VALUES = 50_000
MAX_QUOTES_PER_VALUE = 4

_BRACKETS = b"[]{}"
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(_BRACKETS))
_OPENS = bytes.maketrans(_BRACKETS, b"\2\0\2\0")
_AS_ZEROS = bytes.maketrans(b"0123456789.", b"0" * 11)
_TOO_LONG = b"0" * (MAX_DIGITS + 1)
# Python's ``str.splitlines``, by which ``iter_lines`` of httpx and so of ``openai`` splits text, ends a line at these
# too, here in UTF-8 and as JSON's escapes. The other characters that end a line there are control characters below
# U+0020, which JSON always escapes.
_LINE_BREAKS = (
    (b"\xc2\x85", rb"\u0085"),
    (b"\xe2\x80\xa8", rb"\u2028"),
    (b"\xe2\x80\xa9", rb"\u2029"),
)


def without_escapes(text: bytes) -> bytes:
    """Return JSON without escaped quotes and backslashes: every second part between quotes is then a string."""
    if b"\\" not in text:
        return text
    return text.replace(b"\\\\", b"__").replace(b'\\"', b"__")


def without_strings(plain: bytes) -> bytes:
    """Return what of JSON without escapes stands outside of strings, without white space."""
    return b"".join(plain.split(b'"')[::2]).translate(None, b" \t\r\n")


def has_long_number(text: bytes) -> bool:
    """Return whether *text* has more than :data:`MAX_DIGITS` digits in a row."""
    # Faster than `in`, which raises and catches an exception inside of CPython.
    return text.translate(_AS_ZEROS).find(_TOO_LONG) >= 0


def opened(text: bytes) -> int:
    """Return how many brackets open in *text*."""
    return text.count(b"[") + text.count(b"{")


def depth(bare: bytes) -> int:
    """Return how many levels JSON without strings has."""
    brackets = bare.translate(_OPENS, _ALL_BUT_BRACKETS)
    # With more closing than opening brackets it is not JSON.
    return max(accumulate(kind - 1 for kind in brackets[: 2 * opened(bare)]), default=0)


def is_within_limits(text: str) -> bool:
    """
    Return whether the numbers and the levels of JSON *text* are within the limits.

    False also for more lists, objects and strings than a request may have. Other values are not counted.
    """
    data = text.encode("utf-8", "replace")
    if opened(data) <= MAX_DEPTH and not has_long_number(data):
        return True
    plain = without_escapes(data)
    if plain.count(b'"') > MAX_QUOTES_PER_VALUE * MAX_VALUES:
        return False
    bare = without_strings(plain)
    return opened(bare) <= MAX_VALUES and not has_long_number(bare) and depth(bare) <= MAX_DEPTH


def escape_line_breaks(data: bytes) -> bytes:
    """Return the JSON *data* with escapes in place of the characters at which a client might break it."""
    if data.isascii():
        # Most are, and tokens come one by one.
        return data
    for character, escape in _LINE_BREAKS:
        data = data.replace(character, escape)
    return data
