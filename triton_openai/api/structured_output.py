"""
Structured output: OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_*``, as one guide.
"""

from __future__ import annotations

from typing import Any

import msgspec

from triton_openai.api.parameters import SamplingRequest
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.generation import Guide
from triton_openai.prompts.json_values import decoder

_encode = msgspec.json.Encoder().encode


def guide_of(request: SamplingRequest, supported: frozenset[str]) -> Guide | None:
    """
    Return the guide that *request* asks for.

    Raises :class:`InvalidRequest` for one that is malformed or for several, and :class:`UnsupportedParameter` for a
    kind that is not among *supported*: a model that cannot be held to a format must not pretend.
    """
    guides = [guide for guide in (_response_format(request.response_format), *_extensions(request)) if guide]
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


def _response_format(value: Any) -> Guide | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(kind="json")
    if kind == "json_schema":
        wrapper = value.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, dict):
            raise InvalidRequest(
                "'response_format.json_schema.schema' must be a JSON schema.",
                param="response_format.json_schema.schema",
                code="missing_required_parameter",
            )
        return Guide(kind="json_schema", value=_text(schema))
    if kind == "structural_tag":
        return Guide(kind="structural_tag", value=_text(value))
    raise InvalidRequest(
        "'response_format.type' must be one of text, json_object, json_schema and structural_tag.",
        param="response_format.type",
        code="invalid_value",
    )


def _extensions(request: SamplingRequest) -> list[Guide | None]:
    fields = request.structured_outputs
    if fields is not None and not isinstance(fields, dict):
        raise InvalidRequest("'structured_outputs' must be an object.", param="structured_outputs", code="invalid_type")
    given = {
        "guided_json": ("json", request.guided_json),
        "guided_regex": ("regex", request.guided_regex),
        "guided_choice": ("choice", request.guided_choice),
        "guided_grammar": ("grammar", request.guided_grammar),
        **{
            f"structured_outputs.{name}": (name, (fields or {}).get(name))
            for name in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        },
    }
    return [
        _extension(kind, value, param)
        for param, (kind, value) in given.items()
        if value is not None and value is not False
    ]


def _extension(kind: str, value: Any, param: str) -> Guide:
    if kind == "json_object":
        if value is not True:
            raise InvalidRequest(f"'{param}' must be a boolean.", param=param, code="invalid_type")
        return Guide(kind="json", param=param)
    if kind == "json":
        if not isinstance(value, dict | str):
            raise InvalidRequest(f"'{param}' must be a JSON schema.", param=param, code="invalid_type")
        return Guide(kind="json_schema", value=_text(_schema(value, param)), param=param)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
            raise InvalidRequest(f"'{param}' must be a list of at least one string.", param=param, code="invalid_type")
        return Guide(kind="choice", value=_text(value), param=param)
    if kind == "structural_tag":
        if not isinstance(value, dict | str) or not value:
            raise InvalidRequest(f"'{param}' must be an object or a string.", param=param, code="invalid_type")
        return Guide(kind="structural_tag", value=value if isinstance(value, str) else _text(value), param=param)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"'{param}' must be a string.", param=param, code="invalid_type")
    return Guide(kind="regex" if kind == "regex" else "grammar", value=value, param=param)


def _schema(value: dict[str, Any] | str, param: str) -> Any:
    """Return a JSON schema given as an object or as its text. Raises :class:`InvalidRequest` for text that is none."""
    if isinstance(value, dict):
        return value
    try:
        return decoder(dict[str, Any]).decode(value)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"'{param}' must be a JSON schema.", param=param, code="invalid_value") from error


def _text(value: Any) -> str:
    return _encode(value).decode()
