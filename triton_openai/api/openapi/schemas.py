"""JSON schemas (2020-12) of the types that requests and answers are made of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import inspect

REFERENCE = "#/components/schemas/"
Struct = type[msgspec.Struct]

# What the service's docstrings are marked up with, for renderers of CommonMark.
_LITERAL = re.compile(r"``([^`]*)``")
_ROLE = re.compile(r":\w+:`~?([^`]*)`")
_SPACE = re.compile(r"\s+")


class Schemas:
    """
    The schemas of *requests* and *answers*, and of everything in them.

    *names* are what types are called whose own name another has too. A request may have more than is written down,
    unless it is said to be *strict*; its fields may be null, which is the same as leaving them out. What an answer
    always has is required, a default of ours included.
    """

    def __init__(
        self,
        requests: Sequence[Struct],
        answers: Sequence[Struct],
        *,
        names: Mapping[type, str],
        strict: bool = False,
    ) -> None:
        asked, answered = _inside(requests), _inside(answers)
        if both := asked & answered:
            raise ValueError(f"types of requests and of answers at once: {sorted(map(str, both))}")
        types = sorted(asked | answered, key=lambda kind: (kind.__name__, kind.__module__))
        references, found = msgspec.json.schema_components(types, ref_template=f"{REFERENCE}{{name}}")
        keys = {
            kind: reference["$ref"].removeprefix(REFERENCE) for kind, reference in zip(types, references, strict=True)
        }
        self._names = {kind: names.get(kind, kind.__name__) for kind in types}
        renamed = {f"{REFERENCE}{keys[kind]}": f"{REFERENCE}{self._names[kind]}" for kind in types}
        #: By name, in the order of the names.
        self.components: dict[str, dict[str, Any]] = {}
        for kind in sorted(types, key=lambda kind: self._names[kind]):
            schema = _moved(found[keys[kind]], renamed)
            schema["title"] = self._names[kind]
            if "description" in schema:
                schema["description"] = prose(schema["description"])
            if issubclass(kind, msgspec.Struct):
                if kind in asked:
                    _as_request(schema, strict=strict and kind in requests)
                else:
                    schema["required"] = sorted(_always(kind))
                    _without_defaults(schema)
            self.components[self._names[kind]] = schema

    def reference(self, kind: type) -> dict[str, str]:
        """Return what refers to the schema of *kind*."""
        return {"$ref": f"{REFERENCE}{self._names[kind]}"}

    def refuse(self, kind: Struct, refused: Mapping[str, tuple[Any, ...]]) -> None:
        """Say that the fields of *kind* in *refused* take nothing but the values that mean "not used"."""
        properties = self.components[self._names[kind]]["properties"]
        for name, neutral in refused.items():
            properties[name] = {"enum": [*neutral, None], "description": "Not supported: any other value is refused."}


def prose(docstring: str | None) -> str:
    """Return a docstring as a text for people, in CommonMark."""
    text = _ROLE.sub(r"`\1`", _LITERAL.sub(r"`\1`", docstring or ""))
    return "\n\n".join(_SPACE.sub(" ", paragraph).strip() for paragraph in text.split("\n\n")).strip()


def _inside(kinds: Sequence[Struct]) -> set[type]:
    """Return *kinds* and every type in them that has a schema of its own."""
    found: set[type] = set()
    for information in inspect.multi_type_info(kinds):
        _collect(information, found)
    return found


def _collect(node: Any, found: set[type]) -> None:
    if isinstance(node, inspect.StructType):
        if node.cls in found:
            return
        found.add(node.cls)
    elif isinstance(node, inspect.EnumType):
        found.add(node.cls)
    elif isinstance(node, tuple | list):
        for item in node:
            _collect(item, found)
        return
    if isinstance(node, msgspec.Struct):
        for name in node.__struct_fields__:
            _collect(getattr(node, name), found)


def _moved(node: Any, names: Mapping[str, str]) -> Any:
    """Return a copy of *node* with its references by *names*."""
    if isinstance(node, list):
        return [_moved(item, names) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: names.get(value, value) if isinstance(value, str) else _moved(value, names) for key, value in node.items()
    }


def _as_request(schema: dict[str, Any], *, strict: bool) -> None:
    _without_defaults(schema)
    if strict:
        schema["additionalProperties"] = False
    if not schema["required"]:
        del schema["required"]


def _without_defaults(schema: dict[str, Any]) -> None:
    """Drop the defaults: a request's are all null, and an answer's are always there."""
    for field in schema["properties"].values():
        field.pop("default", None)


def _always(kind: Struct) -> Iterator[str]:
    """Yield the fields that are in every answer."""
    omits = kind.__struct_config__.omit_defaults
    for field in msgspec.structs.fields(kind):
        if field.required or not (omits or field.default is msgspec.UNSET):
            yield field.encode_name
