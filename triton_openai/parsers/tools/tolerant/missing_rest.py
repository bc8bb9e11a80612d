"""What the beginning of a JSON text lacks to be the text of known arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from triton_openai.parsers.tools.json_text import dump

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_SCALAR = re.compile(r"[-+.0-9a-zA-Z]+")

#: A member of an object with its key, or an item of an array without one.
_Item: TypeAlias = tuple[str | None, Any]


class _Other(Exception):
    """The text is the beginning of another value."""


def missing_rest(begun: str, arguments: Mapping[str, Any]) -> str | None:
    """Return what to append to *begun* for the JSON text of *arguments*; ``None`` if *begun* does not begin it."""
    try:
        at, lacking = _value(begun, _after_space(begun, 0), arguments)
    except (_Other, ValueError, RecursionError):
        return None
    if lacking is not None:
        return lacking
    if begun[at:].strip():
        return None
    return ""


def _value(begun: str, at: int, value: Any) -> tuple[int, str | None]:
    """Return where *value* ends in *begun*, or what *begun* lacks of it. Raises :class:`_Other` or ``ValueError``."""
    if at >= len(begun):
        return at, dump(value)
    if isinstance(value, Mapping):
        return _items(begun, at, "{}", list(value.items()))
    if isinstance(value, list):
        return _items(begun, at, "[]", [(None, item) for item in value])
    if isinstance(value, str):
        return _string(begun, at, value)
    scalar = _SCALAR.match(begun, at)
    if scalar is None or json.loads(scalar[0]) != value:
        raise _Other
    return scalar.end(), None


def _string(begun: str, at: int, value: str) -> tuple[int, str | None]:
    whole = _STRING.match(begun, at)
    if whole is not None:
        if json.loads(whole[0], strict=False) != value:
            raise _Other
        return whole.end(), None
    part = json.loads(begun[at:] + '"', strict=False)
    if not isinstance(part, str) or not value.startswith(part):
        raise _Other
    return len(begun), dump(value[len(part) :])[1:]


def _items(begun: str, at: int, brackets: str, items: Sequence[_Item]) -> tuple[int, str | None]:
    """Do :func:`_value` for the *items* of an object or an array between *brackets*."""
    at = _after(begun, at, brackets[0])
    for number, (key, value) in enumerate(items):
        ending = _following(items[number + 1 :]) + brackets[1]
        if number:
            if at >= len(begun):
                return at, ", " + _member(key, value) + ending
            at = _after(begun, at, ",")
        if at >= len(begun):
            return at, _member(key, value) + ending
        if key is not None:
            at, lacking = _key(begun, at, key)
            if lacking is not None:
                return at, lacking + dump(value) + ending
        at, lacking = _value(begun, at, value)
        if lacking is not None:
            return at, lacking + ending
        at = _after_space(begun, at)
    if at >= len(begun):
        return at, brackets[1]
    if begun[at] != brackets[1]:
        raise _Other
    return at + 1, None


def _key(begun: str, at: int, key: str) -> tuple[int, str | None]:
    """Return the position after *key* and its colon, or what *begun* lacks of them."""
    name = dump(key)
    written = _STRING.match(begun, at)
    if written is None:
        if not name.startswith(begun[at:]):
            raise _Other
        return len(begun), name[len(begun) - at :] + ": "
    if json.loads(written[0], strict=False) != key:
        raise _Other
    at = _after_space(begun, written.end())
    if at >= len(begun):
        return at, ": "
    return _after(begun, at, ":"), None


def _after(begun: str, at: int, character: str) -> int:
    """Return the position after *character* and white space. Raises :class:`_Other` if another character is there."""
    if begun[at] != character:
        raise _Other
    return _after_space(begun, at + 1)


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _following(items: Sequence[_Item]) -> str:
    """Return the text of *items* that follow another item."""
    return "".join([", " + _member(key, value) for key, value in items])


def _member(key: str | None, value: Any) -> str:
    if key is None:
        return dump(value)
    return f"{dump(key)}: {dump(value)}"
