"""
The arguments of past calls, as clients send them back: whatever a model once wrote, or a client made of it.

A chat template takes an object. What is none becomes one: JSON in a string is read, what a limit cut is closed, slips
are read with the request's tools, and a value goes to the only parameter that takes it. The rest is shown to the model
as it is, under :data:`AS_TEXT`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.json_bytes import is_within_limits
from triton_openai.offload import json_decoder
from triton_openai.parsers.tools import tolerant
from triton_openai.parsers.tools.schema import Parameters

#: The key of arguments that are no object.
AS_TEXT = "arguments"

_JSON: msgspec.json.Decoder[Any] = json_decoder(Any)
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+("?)', re.DOTALL)
_TOKEN = re.compile(r'["{}\[\]]')
_DANGLING = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_HALF_WORD = re.compile(r"(?<![\w.+-])(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|[-+.\w]*[.eE+-])\Z")
# Longer arguments, and those after so many characters in a request, are shown to the model as text.
_MAX_REPAIRED = 65_536
_MAX_REPAIRED_IN_REQUEST = 524_288
#: About how many microseconds the repair of a character takes.
_COST_PER_CHARACTER = 10.0
_MAX_DEPTH = 200


class PastCalls(msgspec.Struct, kw_only=True):
    """Reads the arguments of the past calls of one request."""

    #: The request's tools, as a chat template gets them.
    tools: Sequence[Mapping[str, Any]] = ()
    #: Collects the names of the functions whose arguments were no object.
    repaired: list[str] | None = None
    #: How many more characters are repaired.
    remaining: int = _MAX_REPAIRED_IN_REQUEST
    #: The schemas of the tools by name, once they are needed.
    schemas: Mapping[str, Mapping[str, Any]] | None = None

    def read(self, name: str, arguments: Any) -> tuple[dict[str, Any], bool]:
        """Return the *arguments* of a past call of *name* as an object, and whether they were another value."""
        if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
            # What several clients send for a call without arguments.
            return {}, False
        if isinstance(arguments, dict):
            return arguments, False
        if isinstance(arguments, str):
            value, is_json = _decoded(arguments)
        else:
            value = arguments
            is_json = True
        if isinstance(value, dict):
            return value, False
        if self.repaired is not None:
            self.repaired.append(name)
        return self._object(name, value, is_json=is_json), True

    def _object(self, name: str, value: Any, *, is_json: bool) -> dict[str, Any]:
        """Return the object that *value* means; it is broken JSON, unless *is_json*."""
        if value is None:
            return {}
        if is_json and isinstance(value, str):
            # Encoded twice
            inner, _ = _decoded(value)
            if isinstance(inner, dict):
                return inner
        if self.schemas is None:
            self.schemas = _schemas_of(self.tools)
        if not is_json and len(value) <= min(_MAX_REPAIRED, self.remaining):
            self.remaining -= len(value)
            repaired = _repaired(name, value, self.schemas)
            if repaired is not None:
                return repaired
        return {_only_parameter(value, self.schemas.get(name)) or AS_TEXT: value}


def repair_cost(arguments: Iterable[Any]) -> float:
    """
    Return about how many microseconds :meth:`PastCalls.read` takes for *arguments* that are broken JSON.

    Decodes the strings among them, so those of a request whose rendering has a low cost.
    """
    cost = 0.0
    for text in arguments:
        if isinstance(text, str) and text.strip() and not _decoded(text)[1]:
            cost += _COST_PER_CHARACTER * min(len(text), _MAX_REPAIRED)
    return cost


def _schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of *tools* by name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            if isinstance(parameters, Mapping):
                schemas[function["name"]] = parameters
            else:
                schemas[function["name"]] = {}
    return schemas


def _decoded(text: str) -> tuple[Any, bool]:
    """Return the value of JSON *text*, or the text, and whether it is JSON within the limits of a request's."""
    if not is_within_limits(text):
        return text, False
    try:
        return _JSON.decode(text), True
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text, False


def _repaired(name: str, text: str, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the object that the broken JSON *text* means; nothing if it means none."""
    if name in tools:
        try:
            (call,) = tolerant.read(text, tools, ended=True, cut=False, name=name).calls
            return dict(call.arguments)
        except (tolerant.Unreadable, tolerant.Incomplete):
            pass
    value, _ = _decoded(_closed(text))
    if isinstance(value, dict):
        return value
    return None


def _closed(text: str) -> str:
    """Return JSON *text* that ends too early with what it lacks."""
    closing: list[str] = []
    closing_of = {"{": "}", "[": "]"}
    at = 0
    in_string = False
    while (match := _TOKEN.search(text, at)) is not None:
        at = match.end()
        if match[0] == '"':
            string = _STRING.match(text, match.start())
            assert string is not None
            at = string.end()
            in_string = not string[1]
        elif match[0] in closing_of:
            closing.append(closing_of[match[0]])
        elif not closing or closing.pop() != match[0]:
            return text
    if len(closing) > _MAX_DEPTH:
        return text
    if in_string:
        text = _DANGLING.sub("", text) + '"'
    else:
        text = _HALF_WORD.sub("", text)
    text = text.rstrip().removesuffix(",")
    ending = "".join(reversed(closing))
    # A key whose value has not come
    for rest in ("", " null", ": null"):
        if _decoded(text + rest + ending)[1]:
            return text + rest + ending
    return text


def _only_parameter(value: Any, schema: Mapping[str, Any] | None) -> str | None:
    """Return the name of the only parameter of a tool, if it takes *value*."""
    parameters = Parameters(schema)
    names = list(parameters.names)
    if len(names) == 1 and parameters.types(names[0]) and parameters.allows(names[0], value):
        return names[0]
    return None
