"""
The types of request fields that are checked by hand, for the API's description.

msgspec takes them as anything: what is wrong with them is said in our own words, by the module that reads them, and
only where they are used. What they should be is written down here, for ``/openapi.json``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

from msgspec import Meta

_NULL = {"type": "null"}
_SCHEMA = {"type": "object", "description": "A JSON schema."}
_WRAPPED = {"type": "object", "required": ["schema"], "properties": {"schema": _SCHEMA}}
_TEXT = {"type": "string", "minLength": 1}
_SCHEMA_OR_TEXT = {"anyOf": [_SCHEMA, {"type": "string", "description": "A JSON schema as text."}]}
_CHOICE = {"type": "array", "items": {"type": "string"}, "minItems": 1}

_FUNCTION_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": _FUNCTION_NAME,
        "description": {"type": ["string", "null"]},
        "parameters": {"anyOf": [_SCHEMA, _NULL]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_NAMED = {"type": "object", "required": ["name"], "properties": {"name": _FUNCTION_NAME}}
_TEXT_OBJECT = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
_ONE_TEXT = {"anyOf": [{"type": "string"}, _TEXT_OBJECT]}


def _typed(kind: str, **properties: Any) -> dict[str, Any]:
    """Return an object with ``type`` *kind* and *properties*, all of them needed."""
    return {
        "type": "object",
        "required": ["type", *properties],
        "properties": {"type": {"const": kind}, **properties},
    }


def _one_of(*schemas: Any) -> Meta:
    return Meta(extra_json_schema={"anyOf": list(schemas)})


def _or_null(*schemas: Any) -> Meta:
    return _one_of(*schemas, _NULL)


#: Documented by OpenAI or in common use, and without influence on the answer here.
Accepted: TypeAlias = Annotated[Any, Meta(description="Accepted, and without influence on the answer.")]

#: ``response_format``
ResponseFormat: TypeAlias = Annotated[
    Any,
    _or_null(
        _typed("text"),
        _typed("json_object"),
        _typed("json_schema", json_schema=_WRAPPED),
        {**_typed("structural_tag"), "description": "A structural tag, as the backend takes it."},
    ),
]
#: ``guided_json``, ``guided_regex``, ``guided_choice``, ``guided_grammar``; false asks for nothing, as null does.
GuidedJson: TypeAlias = Annotated[Any, _or_null(_SCHEMA_OR_TEXT, {"const": False})]
GuidedText: TypeAlias = Annotated[Any, _or_null(_TEXT, {"const": False})]
GuidedChoice: TypeAlias = Annotated[Any, _or_null(_CHOICE, {"const": False})]
#: ``structured_outputs``
StructuredOutputs: TypeAlias = Annotated[
    Any,
    _or_null(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [_SCHEMA_OR_TEXT, {"const": False}, _NULL]},
                "json_object": {"type": ["boolean", "null"]},
                "regex": {"anyOf": [_TEXT, {"const": False}, _NULL]},
                "choice": {"anyOf": [_CHOICE, {"const": False}, _NULL]},
                "grammar": {"anyOf": [_TEXT, {"const": False}, _NULL]},
                "structural_tag": {"anyOf": [{"type": "object", "minProperties": 1}, _TEXT, {"const": False}, _NULL]},
            },
        }
    ),
]

#: One of ``tools``, and one of ``functions``.
Tool: TypeAlias = Annotated[
    Any,
    _one_of(
        {
            "type": "object",
            "required": ["function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        }
    ),
]
Function: TypeAlias = Annotated[Any, _one_of(_FUNCTION)]
#: ``tool_choice`` and ``function_call``
ToolChoice: TypeAlias = Annotated[
    Any,
    _or_null(
        {"enum": ["none", "auto", "required"]},
        _typed("function", function=_NAMED),
        _typed(
            "allowed_tools",
            allowed_tools={
                "type": "object",
                "required": ["tools"],
                "properties": {
                    "mode": {"enum": ["auto", "required"]},
                    "tools": {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "object", "required": ["function"], "properties": {"function": _NAMED}},
                    },
                },
            },
        ),
    ),
]
FunctionChoice: TypeAlias = Annotated[Any, _or_null({"enum": ["none", "auto", "required"]}, _NAMED)]

#: A text to score: bare, or as an object; and one or several of them.
OneText: TypeAlias = Annotated[Any, _one_of(_ONE_TEXT)]
Texts: TypeAlias = Annotated[
    Any, _one_of({"type": "string"}, _TEXT_OBJECT, {"type": "array", "minItems": 1, "items": _ONE_TEXT})
]
TextsOrNull: TypeAlias = Annotated[
    Any, _or_null({"type": "string"}, _TEXT_OBJECT, {"type": "array", "minItems": 1, "items": _ONE_TEXT})
]
