"""
Structured output: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``, as one guide.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.api.bodies import ModelRequest
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.generation import Guide
from triton_openai.prompts.json_values import decoder


class TextFormat(msgspec.Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(msgspec.Struct):
    """A JSON schema; its name and whether it is strict change nothing."""

    schema: dict[str, Any]


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """What a JSON schema describes."""

    json_schema: NamedSchema


class StructuralTagFormat(msgspec.Struct, tag_field="type", tag="structural_tag", omit_defaults=True):
    """A structural tag, as the backend takes it."""

    format: Any = None
    structures: Any = None
    triggers: Any = None


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
_Text = Annotated[str, Meta(min_length=1)]
_Schema = dict[str, Any] | Annotated[str, Meta(description="A JSON schema as text.")]
_Choices = Annotated[list[str], Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct):
    """``structured_outputs``: one of these."""

    json: _Schema | None = None
    json_object: bool | None = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    structural_tag: dict[str, Any] | _Text | None = None


class GuidedRequest(ModelRequest, kw_only=True):
    """Base of the requests whose answer can be held to a format."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None


def guide_of(request: GuidedRequest, supported: frozenset[str]) -> Guide | None:
    """
    Return the guide that *request* asks for.

    Raises :class:`InvalidRequest` for one that is malformed or for several, and :class:`UnsupportedParameter` for a
    kind that is not among *supported*: a model that cannot be held to a format must not pretend.
    """
    guides = list(_guides(request))
    if not guides:
        return None
    if len(guides) > 1:
        raise InvalidRequest(
            f"Only one of '{guides[0].param}' and '{guides[1].param}' can be used.", param=guides[1].param
        )
    guide = guides[0]
    if guide.kind not in supported:
        can = f"it supports {', '.join(sorted(supported))}" if supported else "it has no guided decoding"
        raise UnsupportedParameter(f"The model cannot be held to '{guide.kind}' output: {can}.", param=guide.param)
    return guide


def _guides(request: GuidedRequest) -> Iterator[Guide]:
    wanted = request.response_format
    if isinstance(wanted, JsonObjectFormat):
        yield Guide(kind="json")
    elif isinstance(wanted, JsonSchemaFormat):
        yield Guide(kind="json_schema", value=_encoded(wanted.json_schema.schema))
    elif isinstance(wanted, StructuralTagFormat):
        yield Guide(kind="structural_tag", value=_encoded(wanted))
    for kind in ("json", "regex", "choice", "grammar"):
        value = getattr(request, f"guided_{kind}")
        if value is not None:
            yield _guide(kind, value, f"guided_{kind}")
    outputs = request.structured_outputs
    if outputs is None:
        return
    if outputs.json_object:
        yield Guide(kind="json", param="structured_outputs.json_object")
    for kind in ("json", "regex", "choice", "grammar", "structural_tag"):
        value = getattr(outputs, kind)
        if value is not None:
            yield _guide(kind, value, f"structured_outputs.{kind}")


def _guide(kind: Any, value: Any, param: str) -> Guide:
    if kind != "json":
        return Guide(kind=kind, value=value if isinstance(value, str) else _encoded(value), param=param)
    try:
        schema = decoder(dict[str, Any]).decode(value) if isinstance(value, str) else value
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidValue(f"'{param}' must be a JSON schema.", param) from error
    return Guide(kind="json_schema", value=_encoded(schema), param=param)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
