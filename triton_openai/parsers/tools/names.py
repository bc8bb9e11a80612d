"""
Which of a request's tools a call means, where the model did not write the name of one.

A name is resolved only if exactly one tool fits: with prefix, namespace, index, case or separators changed, or, where
the model wrote a mere id in the name's place, by the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from triton_openai.parsers.tools.schema import Parameters

_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_SEPARATOR = re.compile(r"\.|::?|/|->|__")
#: The number of a call behind the name of its tool.
_INDEX = re.compile(r"(?:[:._#-]\d+|\[\d+\])$")
_DIGITS = re.compile(r"\d+$")
#: What some formats put in front of a name; the first also without a separator.
_PREFIX = re.compile(r"functions?[._:/-]*|(?:tools?|call|default_api)[._:/-]+", re.IGNORECASE)
#: Ids, and words that stand for any tool.
_OPAQUE = re.compile(
    r"(?:functions?|tools?|tool_calls?|calls?)?[._:-]?\d*"
    r"|(?:call|toolu|tool|chatcmpl-tool)[_-]?(?=\w*\d|[0-9a-f]{6})\w+"
    r"|(?=[0-9a-f-]*\d)[0-9a-f-]{6,}",
    re.IGNORECASE,
)
_NAME_KEYS = ("name", "tool_name", "function", "tool")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_RESOLVED = 256


def resolve(written: str, tools: Mapping[str, Any]) -> str | None:
    """Return the name of the one of *tools* that the name *written* means; nothing if it is none, or one of several."""
    if written in tools:
        return written
    if len(written) > _MAX_RESOLVED or not tools:
        return None
    forms = set(_forms(written))
    # A namespace of the tool that the model left out.
    bare = _plain(_INDEX.sub("", written))
    fitting = [name for name in tools if _plain(name) in forms or (bare and bare in _suffixes(name))]
    if len(fitting) == 1:
        return fitting[0]
    return None


def is_opaque(written: str) -> bool:
    """Return whether *written* names no tool: it is an id, or a word for any tool."""
    return _OPAQUE.fullmatch(written) is not None


def tool_for_arguments(
    arguments: Mapping[str, Any], tools: Mapping[str, Mapping[str, Any]]
) -> tuple[str, Mapping[str, Any]] | None:
    """Return the name of the one of *tools* that takes *arguments*, and the arguments; nothing if several do."""
    for key in _NAME_KEYS:
        written = arguments.get(key)
        name = None
        if isinstance(written, str):
            name = resolve(written, tools)
        if name is None or Parameters(tools[name]).has(key):
            continue
        rest = {other: value for other, value in arguments.items() if other != key}
        inner = [rest[other] for other in _ARGUMENT_KEYS if isinstance(rest.get(other), dict)]
        if len(rest) == 1 and inner and fits(inner[0], tools[name]):
            return name, inner[0]
        if fits(rest, tools[name]):
            return name, rest
    if not arguments:
        return None
    fitting = [name for name, schema in tools.items() if fits(arguments, schema)]
    if len(fitting) == 1:
        return (fitting[0], arguments)
    return None


def fits(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Return whether *arguments* are such as *schema* names, with all that it requires."""
    parameters = Parameters(schema)
    if any(not parameters.has(key) for key in arguments) or not parameters.required <= arguments.keys():
        return False
    return all(parameters.allows(key, value) for key, value in arguments.items())


def _plain(name: str) -> str:
    return _NOT_ALPHANUMERIC.sub("", name).lower()


def _forms(written: str) -> Iterator[str]:
    """Yield what *written* may mean, in lower case and without separators."""
    whole = written.strip().removesuffix("()")
    for text in {whole, _INDEX.sub("", whole), whole.removesuffix(".call")}:
        parts = _SEPARATOR.split(text)
        for start in range(len(parts)):
            yield _plain("".join(parts[start:]))
        prefix = _PREFIX.match(text)
        if prefix is not None:
            rest = _plain(text[prefix.end() :])
            yield rest
            yield _DIGITS.sub("", rest)


def _suffixes(name: str) -> set[str]:
    """Return the names that are left of *name* without its namespaces."""
    parts = _SEPARATOR.split(name)
    return {_plain("".join(parts[start:])) for start in range(1, len(parts))}
