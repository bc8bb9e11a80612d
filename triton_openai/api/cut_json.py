"""JSON objects of which a limit of tokens has cut the end: the arguments of calls."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

# What precedes a member's value, and what has to follow it: a number without that may have gone on.
_MEMBER = re.compile(r'\s*[{,]\s*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)
_MEMBER_END = re.compile(r"\s*[,}]")
# An object before its first value.
_BEGINNING = re.compile(r"\s*(\{[^:]*)?")
# A text up to its end, or to where it was cut, without an escape that was cut.
_TEXT = re.compile(r'"((?:[^"\\]|\\[^u]|\\u[\da-fA-F]{4})*)(?:"\s*|\\(?:u[\da-fA-F]{0,3})?)?')


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


# Python's own reader takes NaN and infinite numbers.
_decoder = json.JSONDecoder(parse_constant=_refuse)


class CutObject(NamedTuple):
    """What is left of an object whose end was cut."""

    #: Those that are whole.
    members: dict[str, Any]
    #: The text of the member after them, as far as it came: empty before the first value. None if it is no text.
    text: str | None


def read_cut_object(arguments: str) -> CutObject:
    """
    Return what is left of the object that *arguments* begin with.

    Where a member has half of a surrogate pair, which no UTF-8 has, it gets a replacement character.
    """
    members: dict[str, Any] = {}
    place = 0
    while (member := _MEMBER.match(arguments, place)) is not None:
        place = member.end()
        try:
            value, end = _decoder.raw_decode(arguments, place)
            name = json.loads(member[1])
        except (ValueError, RecursionError):
            break
        if _MEMBER_END.match(arguments, end) is None:
            break
        members[_encodable(name)] = _encodable(value)
        place = end
    if place == 0:
        return CutObject(members, "" if _BEGINNING.fullmatch(arguments) else None)
    return CutObject(members, _text(arguments[place:]))


def _encodable(value: Any) -> Any:
    """Return *value* with a replacement character for each half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
    return value


def _text(cut: str) -> str | None:
    """Return the text that *cut* begins, or None if it is no text."""
    match = _TEXT.fullmatch(cut)
    if match is None:
        if not cut:
            return ""
        return None
    try:
        text: str = json.loads(f'"{match[1]}"')
        if "\ud800" <= text[-1:] <= "\udbff":
            # The other half of the character was cut.
            text = text[:-1]
        text.encode()
    except ValueError:
        return None
    return text
