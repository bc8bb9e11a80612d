"""
Guided answers: what a request asks the text to conform to, in OpenAI's and vLLM's options, as one guide.

Sources: OpenAI's ``response_format`` (openai-openapi 2.3.0), and vLLM's ``structured_outputs`` and ``guided_*``.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
from msgspec import Meta

from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.generation import Guide
from triton_openai.offload import json_decoder
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins


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
#: A text that has characters.
Text: TypeAlias = Annotated[str, Meta(min_length=1)]
#: A JSON schema.
Schema: TypeAlias = dict[str, Any] | Annotated[str, Meta(description="A JSON schema as text.")]
#: The only texts that the answer may be.
Choices: TypeAlias = Annotated[list[str], Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct):
    """``structured_outputs``: one of these."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    structural_tag: dict[str, Any] | Text | None = None


class GuideOptions(Protocol):
    """The options of a request for what its answer has to conform to, of which only one can be used."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: Schema | None
    guided_regex: Text | None
    guided_choice: Choices | None
    guided_grammar: Text | None


#: Returns all these options.
guide_options = attrgetter(
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"
)


def guide_of(options: GuideOptions, supported: frozenset[str], origins: Origins = CHAT_ORIGINS) -> Guide | None:
    """
    Return the guide that *options* ask for, of a *supported* kind.

    *origins* has the client's names, for errors. Raises :class:`InvalidRequest`.
    """
    guides: list[Guide] = []
    if options.response_format is not None:
        guides += _format_guides(options.response_format, origins.name("response_format"))
    for kind in ("json", "regex", "choice", "grammar"):
        param = f"guided_{kind}"
        value = getattr(options, param)
        if value is not None:
            guides.append(_guide(kind, value, param))
    if options.structured_outputs is not None:
        for kind, value in msgspec.structs.asdict(options.structured_outputs).items():
            if value is not None and value is not False:
                guides.append(_guide(kind, value, f"structured_outputs.{kind}"))
    if not guides:
        return None
    if len(guides) > 1:
        raise InvalidRequest(
            f"Only one of '{guides[0].param}' and '{guides[1].param}' can be used.", param=guides[1].param
        )
    guide = guides[0]
    if guide.kind not in supported:
        if supported:
            reason = f"it supports {', '.join(sorted(supported))}"
        else:
            reason = "it has no guided decoding"
        raise UnsupportedParameter(f"The model does not support '{guide.kind}' output: {reason}.", param=guide.param)
    return guide


def _format_guides(form: ResponseFormat, param: str) -> Sequence[Guide]:
    """Return the guide for a ``response_format``, if it needs one; *param* is the client's name of it."""
    if isinstance(form, JsonObjectFormat):
        return [Guide(kind="json", param=param)]
    if isinstance(form, JsonSchemaFormat):
        return [Guide(kind="json_schema", value=_encoded(form.json_schema.schema), param=param)]
    if isinstance(form, StructuralTagFormat):
        return [Guide(kind="structural_tag", value=_encoded(form), param=param)]
    return ()


def _guide(kind: Any, value: Any, param: str) -> Guide:
    if kind == "json_object":
        return Guide(kind="json", param=param)
    if kind != "json":
        return Guide(kind=kind, value=value if isinstance(value, str) else _encoded(value), param=param)
    try:
        if isinstance(value, str):
            schema = json_decoder(dict[str, Any]).decode(value)
        else:
            schema = value
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidValue(f"'{param}' must be a JSON schema.", param) from error
    return Guide(kind="json_schema", value=_encoded(schema), param=param)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()
