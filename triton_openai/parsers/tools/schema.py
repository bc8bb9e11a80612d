"""Values of parameters that come as bare text, made JSON by the type that the tool's schema gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from triton_openai.parsers.tools.json_text import NUMBER, quote
from triton_openai.parsers.tools.literals import to_json

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_STRING = frozenset({"string"})
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array"}
#: Schemas refer to each other, and to themselves.
_DEEPEST = 8
#: Alternatives of alternatives multiply; a schema that needs more looks than this leaves the type open.
_MOST_LOOKS = 200


class Parameters:
    """The parameters of one tool. A schema that says nothing of a parameter leaves its type open."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        properties = self._root.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._types: dict[str, frozenset[str]] = {}

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that the parameter *name* may have; none where that is open."""
        if name not in self._properties:
            return frozenset()
        if name not in self._types:
            looks = iter(range(_MOST_LOOKS))
            found = _types(self._properties[name], self._root, _DEEPEST, looks)
            self._types[name] = found if next(looks, None) is not None else frozenset()
        return self._types[name]

    def is_text(self, name: str) -> bool:
        """Return whether the parameter *name* is a string and nothing else."""
        return self.types(name) == _STRING

    def value(self, name: str, text: str) -> str:
        """
        Return the JSON text for the parameter *name* from the bare *text*.

        Valid JSON of a type that the schema allows stays as it was written; Python's spelling of a value is translated;
        what fits no type is a string, as the model's servers do it, rather than an error.
        """
        types = self.types(name)
        bare = text.strip()
        lower = bare.lower()
        if lower in {"null", "none"} and (not types or "null" in types):
            return "null"
        if (not types or "integer" in types) and _INTEGER.fullmatch(bare):
            return bare
        # JSON has no infinity.
        if (not types or types & {"number", "integer"}) and NUMBER.fullmatch(bare) and math.isfinite(float(bare)):
            return bare
        if lower in {"true", "false"} and (not types or "boolean" in types):
            return lower
        if bare[:1] in {"{", "["} and (not types or types & {"object", "array"}):
            structure = _structure(bare)
            if structure is not None:
                return structure
        return quote(text)


def _structure(text: str) -> str | None:
    try:
        msgspec.json.decode(text)
        return text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    return to_json(text)


def _types(schema: Any, root: Mapping[str, Any], depth: int, looks: Iterator[int]) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth or next(looks, None) is None:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(item for item in declared if isinstance(item, str))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolve(reference, root), root, depth - 1, looks)
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        if isinstance(options, list) and options:
            found = [_types(option, root, depth - 1, looks) for option in options]
            if word == "allOf":
                return next((types for types in found if types), frozenset())
            # One alternative of open type leaves the type of the whole open.
            return frozenset().union(*found) if all(found) else frozenset()
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema[w] for w in ("const",) if w in schema]
    return frozenset(_TYPES.get(type(value), "object") for value in values)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference into the same schema (``#/$defs/Name``) points at; nothing for other references."""
    found: Any = root
    beginning, *steps = reference.split("/")
    if beginning != "#":
        return None
    for step in steps:
        if not isinstance(found, Mapping):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found
