"""Values of parameters that come as bare text, made JSON by the type that the tool's schema gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from triton_openai.parsers.tools.json_text import NUMBER, dump
from triton_openai.parsers.tools.literals import to_json

_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]*)")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_STRING = frozenset({"string"})
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array"}
#: Schemas refer to each other, and to themselves.
_MAX_DEPTH = 8
#: Alternatives of alternatives multiply; a schema that needs more looks than this leaves the type open.
_MAX_LOOKS = 200


#: The characters of a value in Python's spelling that is translated: the event loop waits for it, 40 ms at most.
_MAX_LITERAL = 16_384


class Parameters:
    """
    The parameters of one tool, or of one object in them.

    A schema that says nothing of a parameter leaves its type open.

    Alternatives at the schema's root count together: a parameter may be what any of them says of it.
    """

    def __init__(self, schema: Mapping[str, Any] | None, root: Mapping[str, Any] | None = None) -> None:
        """Read *schema*, whose references count from *root*, or from itself."""
        own: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        if root is None:
            self._root = own
        else:
            self._root = root
        looks = iter(range(_MAX_LOOKS))
        self._branches = list(_branches(own, self._root, _MAX_DEPTH, looks))
        self._properties: dict[str, list[Any]] = {}
        for branch in self._branches:
            properties = branch.get("properties")
            if not isinstance(properties, Mapping):
                continue
            for name, schema_of_name in properties.items():
                self._properties.setdefault(name, []).append(schema_of_name)
        #: The parameters that a call must have.
        self.required: frozenset[str] = frozenset(_strings(own.get("required")))
        self._types: dict[str, frozenset[str]] = {}

    @property
    def names(self) -> Collection[str]:
        """The names of the parameters; none where the schema leaves them open."""
        return self._properties.keys()

    def has(self, name: str) -> bool:
        """Return whether the schema has the parameter *name*."""
        return name in self._properties

    def types(self, name: str) -> frozenset[str]:
        """Return the JSON types that the parameter *name* may have; none where that is open."""
        if name not in self._properties:
            return frozenset()
        if name not in self._types:
            looks = iter(range(_MAX_LOOKS))
            options = [_types(option, self._root, _MAX_DEPTH, looks) for option in self._properties[name]]
            self._types[name] = frozenset()
            # An option of open type, and a schema that needs too many looks, leave the type open.
            if all(options) and next(looks, None) is not None:
                self._types[name] = frozenset().union(*options)
        return self._types[name]

    def inside(self, name: str) -> Parameters:
        """Return the parameters of the object *name*, or of the objects in the array of that name."""
        looks = iter(range(_MAX_LOOKS))
        for option in self._properties.get(name, ()):
            for branch in _branches(option, self._root, _MAX_DEPTH, looks):
                items = branch.get("items")
                if "properties" not in branch and isinstance(items, Mapping):
                    return Parameters(items, self._root)
                return Parameters(branch, self._root)
        return Parameters(None)

    def allows(self, name: str, value: Any) -> bool:
        """Return whether *value* is of a type that the parameter *name* may have."""
        types = self.types(name)
        kind = _TYPES.get(type(value), "object")
        return not types or kind in types or (kind == "integer" and "number" in types)

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
        return dump(text)


def _structure(text: str) -> str | None:
    try:
        msgspec.json.decode(text)
        return text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    if len(text) > _MAX_LITERAL:
        return None
    return to_json(text)


def _strings(value: Any) -> list[str]:
    if isinstance(value, list):
        return [item for item in value if isinstance(item, str)]
    return []


def _branches(schema: Any, root: Mapping[str, Any], depth: int, looks: Iterator[int]) -> Iterator[Mapping[str, Any]]:
    """Yield *schema*, what it refers to, and its alternatives."""
    if not isinstance(schema, Mapping) or not depth or next(looks, None) is None:
        return
    yield schema
    reference = schema.get("$ref")
    if isinstance(reference, str):
        yield from _branches(_resolve(reference, root), root, depth - 1, looks)
    for word in _ALTERNATIVES:
        options = schema.get(word)
        if not isinstance(options, list):
            continue
        for option in options:
            yield from _branches(option, root, depth - 1, looks)


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
    for word in _ALTERNATIVES:
        options = schema.get(word)
        if isinstance(options, list) and options:
            known = [_types(option, root, depth - 1, looks) for option in options]
            if word == "allOf":
                return next((types for types in known if types), frozenset())
            # One alternative of open type leaves the type of the whole open.
            if all(known):
                return frozenset().union(*known)
            return frozenset()
    values: list[Any] = []
    if isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif "const" in schema:
        values = [schema["const"]]
    return frozenset(_TYPES.get(type(value), "object") for value in values)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference into the same schema (``#/$defs/Name``) points at; nothing for other references."""
    target: Any = root
    beginning, *steps = reference.split("/")
    if beginning != "#":
        return None
    for step in steps:
        if not isinstance(target, Mapping):
            return None
        target = target.get(step.replace("~1", "/").replace("~0", "~"))
    return target
