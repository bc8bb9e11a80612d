"""
Types of the request fields that handlers read by themselves, to name what is wrong in their own words.

For msgspec they are open; the annotations say in ``GET /openapi.json`` what the handlers take.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta


def _object(required: Sequence[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _typed(kind: str, **properties: Any) -> dict[str, Any]:
    """Return an object with ``type`` *kind* and *properties*, all of them required."""
    return _object(["type", *properties], type={"const": kind}, **properties)


def _array(items: Any) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": items}


def _any_of(*schemas: Any) -> Meta:
    return Meta(extra_json_schema={"anyOf": list(schemas)})


_NULL = {"type": "null"}
_OFF = {"const": False}
_STRING = {"type": "string"}
_TEXT = {"type": "string", "minLength": 1}
_SCHEMA = {"type": "object", "description": "A JSON schema."}
_SCHEMA_OR_TEXT = {"anyOf": [_SCHEMA, {"type": "string", "description": "A JSON schema as text."}]}
_CHOICES = _array(_STRING)
_FUNCTION_NAME = {"type": "string", "pattern": "^[A-Za-z0-9_.:/-]{1,128}$"}
_NAMED = _object(["name"], name=_FUNCTION_NAME)
_FUNCTION = _object(
    ["name"],
    name=_FUNCTION_NAME,
    description={"type": ["string", "null"]},
    parameters={"anyOf": [_SCHEMA, _NULL]},
    strict={"type": ["boolean", "null"]},
)
_TEXT_OBJECT = _object(["text"], text=_STRING)
_ONE_TEXT = {"anyOf": [_STRING, _TEXT_OBJECT]}
_TEXTS = (_STRING, _TEXT_OBJECT, _array(_ONE_TEXT))

#: A field without influence on the answer: documented by OpenAI or in common use, accepted, never decoded.
Accepted: TypeAlias = Annotated[msgspec.Raw, Meta(description="Accepted, and without influence on the answer.")]
#: The default of such a field.
ABSENT: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)

#: ``response_format``
ResponseFormat: TypeAlias = Annotated[
    Any,
    _any_of(
        _typed("text"),
        _typed("json_object"),
        _typed("json_schema", json_schema=_object(["schema"], schema=_SCHEMA)),
        {**_typed("structural_tag"), "description": "A structural tag, as the backend takes it."},
        _NULL,
    ),
]
#: ``guided_json``, ``guided_regex`` and ``guided_grammar``, ``guided_choice``; false means the same as null.
GuidedJson: TypeAlias = Annotated[Any, _any_of(_SCHEMA_OR_TEXT, _OFF, _NULL)]
GuidedText: TypeAlias = Annotated[Any, _any_of(_TEXT, _OFF, _NULL)]
GuidedChoice: TypeAlias = Annotated[Any, _any_of(_CHOICES, _OFF, _NULL)]
#: ``structured_outputs``
StructuredOutputs: TypeAlias = Annotated[
    Any,
    _any_of(
        {
            "type": "object",
            "properties": {
                "json": {"anyOf": [_SCHEMA_OR_TEXT, _OFF, _NULL]},
                "json_object": {"type": ["boolean", "null"]},
                "regex": {"anyOf": [_TEXT, _OFF, _NULL]},
                "choice": {"anyOf": [_CHOICES, _OFF, _NULL]},
                "grammar": {"anyOf": [_TEXT, _OFF, _NULL]},
                "structural_tag": {"anyOf": [{"type": "object", "minProperties": 1}, _TEXT, _OFF, _NULL]},
            },
        },
        _NULL,
    ),
]
#: ``logit_bias``: token ids with what is added to their logits.
LogitBias: TypeAlias = Annotated[
    dict[str, Any],
    Meta(extra_json_schema={"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
#: An item of ``tools``, and one of ``functions``.
Tool: TypeAlias = Annotated[Any, _any_of(_object(["function"], type={"const": "function"}, function=_FUNCTION))]
Function: TypeAlias = Annotated[Any, _any_of(_FUNCTION)]
#: ``tool_choice`` and ``function_call``
ToolChoice: TypeAlias = Annotated[
    Any,
    _any_of(
        {"enum": ["none", "auto", "required"]},
        _typed("function", function=_NAMED),
        _typed(
            "allowed_tools",
            allowed_tools=_object(
                ["tools"],
                mode={"enum": ["auto", "required"]},
                tools=_array(_object(["function"], function=_NAMED)),
            ),
        ),
        _NULL,
    ),
]
FunctionChoice: TypeAlias = Annotated[Any, _any_of({"enum": ["none", "auto", "required"]}, _NAMED, _NULL)]
#: A text to score, bare or as an object; one or several of them; and the same where the field may be missing.
OneText: TypeAlias = Annotated[Any, _any_of(_STRING, _TEXT_OBJECT)]
Texts: TypeAlias = Annotated[Any, _any_of(*_TEXTS)]
TextsOrNull: TypeAlias = Annotated[Any, _any_of(*_TEXTS, _NULL)]
