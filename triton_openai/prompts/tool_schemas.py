"""
Tools in the form that a chat template takes.

OpenAI's API has optional fields that templates read without a check: the description and the parameters of a function,
and in its schema types, descriptions and properties. Some templates know one type for a parameter, and fail on a union.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

#: How much of a tool is changed: nothing; what is missing is filled; and types become single ones.
ToolStyle: TypeAlias = Literal["any", "complete", "single types"]

_STYLES: Sequence[ToolStyle] = ("any", "complete", "single types")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
#: Schemas inside of schemas are changed up to this depth.
_MAX_DEPTH = 20
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}

_NAME = "probed_tool"
_KEY = "probed_parameter"

#: Renders a question with a tool; ``None`` if the template refuses the tool.
Render = Callable[[Mapping[str, Any]], str | None]


def _tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _NAME, **function}}


def _with_parameter(schema: Mapping[str, Any], **parameters: Any) -> dict[str, Any]:
    return _tool(
        description="Probe.",
        parameters={"type": "object", "properties": {_KEY: schema}, "required": [_KEY], **parameters},
    )


#: A tool with all that templates read, and tools with less or other forms.
_USUAL = _with_parameter({"type": "string", "description": "Probe."})
_UNUSUAL = (
    _tool(),
    _tool(description="Probe."),
    _tool(description=None, parameters=None),
    _tool(description="Probe.", parameters={}),
    _tool(description="Probe.", parameters={"type": "object"}),
    _tool(parameters={"type": "object", "properties": {_KEY: {"type": "string", "description": "Probe."}}}),
    _with_parameter({"type": "string"}),
    _with_parameter({"type": "string", "description": None, "enum": None, "default": None}),
    _with_parameter({}),
    _with_parameter({"enum": ["a", "b"]}),
    _with_parameter({"type": "array"}),
    _with_parameter({"type": "array", "items": {"type": "object", "properties": {"a": {}}}}),
    _with_parameter({"type": "object"}),
    _with_parameter({"type": ["string", "null"], "description": "Probe."}),
    _with_parameter({"type": ["array", "null"], "items": {"type": ["integer", "string"]}}),
    _with_parameter({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    _with_parameter({"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}], "default": None}, **{"$defs": {"A": {}}}),
    _with_parameter({"$ref": "#/$defs/A"}, **{"$defs": {"A": {"type": "object", "properties": {"a": {}}}}}),
)


def tool_style(render: Render) -> ToolStyle:
    """Return the smallest change after which a template, rendered by *render*, shows all kinds of tools."""
    if _NAME not in (render(_USUAL) or ""):
        # It shows no tools.
        return "any"
    best: ToolStyle = "any"
    most = -1
    for style in _STYLES:
        count = sum(_NAME in (render(fit_tool(tool, style)) or "") for tool in _UNUSUAL)
        if count > most:
            best = style
            most = count
    return best


def fit_tools(tools: Sequence[Mapping[str, Any]], style: ToolStyle) -> Sequence[Mapping[str, Any]]:
    """Return *tools* in a *style*."""
    if style == "any":
        return tools
    return [fit_tool(tool, style) for tool in tools]


def fit_tool(tool: Mapping[str, Any], style: ToolStyle) -> Mapping[str, Any]:
    """Return *tool* in a *style*. Raises ``RecursionError`` for a schema that is nested beyond reason."""
    function = tool.get("function")
    if style == "any" or not isinstance(function, Mapping):
        return tool
    fitted = {key: value for key, value in function.items() if value is not None}
    fitted.setdefault("description", "")
    parameters = fitted.get("parameters")
    if not isinstance(parameters, Mapping):
        parameters = {}
    fitted["parameters"] = _object_schema(parameters, style)
    return {"type": "function", **tool, "function": fitted}


def _object_schema(schema: Mapping[str, Any], style: ToolStyle) -> dict[str, Any]:
    """Return the *schema* of a tool's parameters."""
    fitted = {"type": "object", "properties": {}, **_schema(schema, style, _MAX_DEPTH, described=False)}
    if not isinstance(fitted["properties"], Mapping):
        fitted["properties"] = {}
    return fitted


def _schema(schema: Any, style: ToolStyle, depth: int, *, described: bool = True) -> Any:
    """Return the *schema* of a value with a type and, if it is *described*, a description."""
    if not isinstance(schema, Mapping) or not depth:
        return schema
    fitted = {key: value for key, value in schema.items() if value is not None or key in ("default", "const")}
    if fitted.get("default", "") is None:
        del fitted["default"]
    if isinstance(fitted.get("properties"), Mapping):
        properties = fitted["properties"]
        fitted["properties"] = {name: _schema(inner, style, depth - 1) for name, inner in properties.items()}
    for key in ("items", "additionalProperties"):
        if isinstance(fitted.get(key), Mapping):
            fitted[key] = _schema(fitted[key], style, depth - 1)
    for key in _ALTERNATIVES:
        if isinstance(fitted.get(key), list):
            fitted[key] = [_schema(option, style, depth - 1, described=False) for option in fitted[key]]
    if "type" not in fitted or style == "single types":
        fitted["type"] = _type_of(fitted)
    if fitted["type"] == "array":
        fitted.setdefault("items", {"type": "string"})
    if fitted["type"] == "object":
        fitted.setdefault("properties", {})
    if described:
        fitted.setdefault("description", "")
    return fitted


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return the type of *schema*, or one of its types: the first one that is not null."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return declared
    if isinstance(declared, list):
        return _first_type([item for item in declared if isinstance(item, str)])
    for key in _ALTERNATIVES:
        options = schema.get(key)
        if isinstance(options, list):
            return _first_type([_type_of(option) for option in options if isinstance(option, Mapping)])
    if "properties" in schema or "$ref" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = schema.get("enum")
    if not isinstance(values, list):
        values = [schema[key] for key in ("const", "default") if key in schema]
    return _first_type([_TYPES.get(type(value), "null") for value in values])


def _first_type(types: Sequence[str]) -> str:
    for name in types:
        if name != "null":
            return name
    return "string"
