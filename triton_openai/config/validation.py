"""Explains wrong names and values of settings and of their files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from triton_openai.config.options import is_struct
from triton_openai.errors import masked

# msgspec's names of types, in plain English.
_PLAIN_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a mapping of names to values",
}
# Where msgspec says that the value is.
_PLACE = re.compile(r" - at `(?:key` in `)?\$(?P<path>[^`]*)`+\Z")
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?:\d+|\.\.\.)\]")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_UNKNOWN_CHOICE = re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`")
# Likeness from which a word is another with a slip: "prot" is 0.75 like "port". Whole names are not compared, since a
# common beginning or a common word makes unrelated ones alike ("--load-format" and "--log-format").
_SAME_WORD = 0.75


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean X?`` when *name* is one of the *known* names with slips in its words, else nothing."""
    words = _words(name)
    likeness = {candidate: _likeness(words, _words(candidate)) for candidate in known}
    best = max(likeness, key=likeness.__getitem__, default=None)
    if best is None or likeness[best] < _SAME_WORD:
        return ""
    return f" Did you mean {best}?"


def _words(name: str) -> list[str]:
    return re.split(r"[-_./]+", name.strip("-").lower())


def _likeness(left: list[str], right: list[str]) -> float:
    """Return how alike the two words are that differ most; 0 for names of other lengths."""
    if "".join(left) == "".join(right):
        return 1.0
    if len(left) != len(right):
        return 0.0
    return min(map(_word_likeness, left, right))


def _word_likeness(left: str, right: str) -> float:
    shorter, longer = sorted((left, right), key=len)
    if len(shorter) > 2 and longer.startswith(shorter):
        return 0.9
    return difflib.SequenceMatcher(None, left, right).ratio()


def plain_words(problem: str) -> str:
    """Return msgspec's message about a value in plain English, without the value."""
    reason = re.sub(r", got .*|`| \| null", "", problem, flags=re.DOTALL).replace(" | ", " or ")
    reason = re.sub(r"\b(int|float|bool|str|array|object)\b", lambda word: _PLAIN_WORDS[word[0]], reason)
    return f"{reason[0].lower()}{reason[1:]}"


def explained(error: msgspec.ValidationError, annotation: Any) -> str:
    """
    Return the *error* of a value that should have had the type *annotation*, as the end of a sentence.

    It begins with the path of the field, such as ``keys[0].models``, and shows no value: that could be a secret. An
    unknown field is compared with those that there are.
    """
    text = str(error)
    location = _PLACE.search(text)
    if location is None:
        path = ""
    else:
        path = location["path"]
    where = path.removeprefix(".")
    problem = _PLACE.sub("", text)
    kinds = _kinds_at(annotation, path)
    if unknown := _UNKNOWN_FIELD.fullmatch(problem):
        fields: list[str] = []
        for kind in filter(is_struct, kinds):
            fields += [field.encode_name for field in msgspec.structs.fields(kind)]
        hint = did_you_mean(unknown["name"], fields) or f" It can have {', '.join(fields)}."
        return f"{where or 'it'} has no field '{masked(unknown['name'])}'.{hint}"
    if missing := _MISSING_FIELD.fullmatch(problem):
        return f"{where or 'it'} lacks the field '{missing['name']}'."
    # The type that it has, unlike its value, is no secret.
    reason = plain_words(problem.replace(", got ", ", not "))
    choices: list[Any] = []
    for kind in kinds:
        if get_origin(kind) is Literal:
            choices += get_args(kind)
    if choices and (other := _UNKNOWN_CHOICE.fullmatch(problem)):
        reason = f"expected one of {', '.join(map(str, choices))}, not {masked(other['value'])}"
    if where:
        return f"{where}: {reason}."
    return f"{reason}."


def path_of(target: type, value: Any) -> Path:
    """Return *value* as a path, the one type of a setting that msgspec does not have: a hook for its decoders."""
    if isinstance(value, Path):
        return value
    if isinstance(value, str) and value:
        return Path(value).expanduser()
    raise ValueError("Expected a path")


def _kinds_at(annotation: Any, path: str) -> list[Any]:
    """Return the types that a value at *path* in a value of the type *annotation* can have."""
    kinds = list(_members(annotation))
    for step in _STEP.finditer(path):
        members: list[Any] = []
        for kind in kinds:
            for inner in _inside(kind, step["name"]):
                members += _members(inner)
        kinds = members
    return kinds


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value of *annotation* can have, without their limits."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _members(get_args(annotation)[0])
    elif origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    else:
        yield annotation


def _inside(kind: Any, name: str | None) -> Iterator[Any]:
    """Yield the type of the field *name* in a value of *kind*; without a name, that of its items."""
    if is_struct(kind):
        yield from (field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
        return
    arguments = get_args(kind)
    if not arguments:
        return
    origin = get_origin(kind)
    yield arguments[1] if isinstance(origin, type) and issubclass(origin, Mapping) else arguments[0]
