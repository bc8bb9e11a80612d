"""``GET /openapi.json``: OpenAPI 3.1 of what is served, made from the table of routes and the types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec

from triton_openai import __version__
from triton_openai.access.restrictions import COUNTED, Restrictions
from triton_openai.api.routes import OPERATIONS, Operation
from triton_openai.config import AccessSettings, Group, Settings
from triton_openai.errors import (
    ApiRestricted,
    InvalidApiKey,
    KeyNotSufficient,
    RateLimited,
    ServiceError,
    UpstreamUnavailable,
)


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong: a sentence for people, and for programs its class, the field to blame and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, kw_only=True):
    """Every error, as the body of an answer or as the last event of a stream."""

    error: ErrorObject


_ABOUT = (
    "The OpenAI API in front of NVIDIA Triton Inference Server.\n\nWhat cannot be read as a request is answered with "
    "errors of the form of those below: 400 (`invalid_http`), 408 (`request_timeout`) or 431 (`headers_too_large`)."
)
_STREAM = (
    "With `stream`: server-sent events, each the JSON of one chunk; the last one is `[DONE]`. What goes wrong after "
    "the first one is an event with an error, and ends the stream. Lines that begin with a colon are comments."
)
_REFUSED = "Not supported: any other value is refused."
_STRING = {"type": "string"}
_SCHEMES: Mapping[str, Mapping[str, str]] = {
    "BearerKey": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "api-key", "description": "As Azure's clients send it."},
    "XApiKeyHeader": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "As Anthropic's clients send it.",
    },
}
# Response headers: where they stand among the components, and what they are.
_COUNT = {"type": "integer", "minimum": 0}
_RATE_LIMITS: Mapping[str, Mapping[str, Any]] = {
    f"{what}-{kind}": {"description": f"{text}: {kind}, for a key with such a limit.", "schema": schema}
    for kind in ("requests", "tokens")
    for what, text, schema in (
        ("limit", "What the key may use in a minute", _COUNT),
        ("remaining", "What is left of it", _COUNT),
        ("reset", "Time until all of it is there again, as `1s` or `6m0s`", _STRING),
    )
}
_REQUEST_ID = {
    "description": "The request's id: the client's own `x-request-id`, or one that was made for it.",
    "required": True,
    "schema": _STRING,
}
_RETRY_AFTER = {
    "description": "Seconds after which trying again may work.",
    "schema": {"type": "integer", "minimum": 1},
}
_AUTHENTICATE = {"description": "How a key is given.", "schema": {"const": "Bearer"}}


def describe(settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI document of a service with *settings*."""
    access = _Access(settings.access)
    schemas = _schemas(strict=settings.api.strict_parameters)
    errors: dict[int, dict[type[ServiceError], None]] = {}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        kinds: list[type[ServiceError]] = [ServiceError, UpstreamUnavailable]
        kinds += [*access.errors(operation.group), *operation.errors]
        for kind in kinds:
            errors.setdefault(kind.status, {})[kind] = None
        statuses = {kind.status for kind in kinds}
        for path, method in _places(operation):
            described = _operation(operation, path, method, settings, access, statuses)
            paths.setdefault(path, {})[method] = described
    failures = {
        status: _failure(status, kinds, _reference("schemas", ErrorEnvelope.__name__), access)
        for status, kinds in sorted(errors.items())
    }
    for methods in paths.values():
        if "head" in methods:
            methods["head"] = _without_bodies(methods["head"], failures)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "triton-openai",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": name} for name in dict.fromkeys(operation.tag for operation in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": {f"Error{status}": failure for status, failure in failures.items()},
            "headers": {"RequestId": _REQUEST_ID, "RetryAfter": _RETRY_AFTER, **access.header_components},
            **({"securitySchemes": _SCHEMES} if access.keys else {}),
        },
    }


class _Access:
    """
    What *settings* ask of a request, by the group of its route.

    The headers that open restricted groups are left out: the operator tells them to those who may know them.
    """

    def __init__(self, settings: AccessSettings) -> None:
        self.keys = bool(settings.api_key) or settings.api_keys_file is not None
        self._restricted = Restrictions(settings.openai_restricted_api).groups

    def counts(self, group: Group) -> bool:
        """Return whether requests count towards the limits of a key."""
        return self.keys and group in COUNTED

    def errors(self, group: Group) -> Iterator[type[ServiceError]]:
        """Yield the errors of requests that are not let in."""
        if self.keys and group != "health":
            yield InvalidApiKey
        if self.keys and group == "metrics":
            yield KeyNotSufficient
        if group in self._restricted:
            yield ApiRestricted
        if self.counts(group):
            yield RateLimited

    @property
    def header_components(self) -> Mapping[str, Any]:
        """The response headers about keys."""
        found = {"Authenticate": _AUTHENTICATE} if self.keys or self._restricted else {}
        return {**found, **({_component(name): header for name, header in _RATE_LIMITS.items()} if self.keys else {})}


def _component(name: str) -> str:
    return "RateLimit" + name.title().replace("-", "")


def _reference(kind: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _schema(kind: type[msgspec.Struct]) -> dict[str, str]:
    return _reference("schemas", kind.__name__)


def _rate_limits() -> dict[str, Any]:
    return {f"x-ratelimit-{name}": _reference("headers", _component(name)) for name in _RATE_LIMITS}


def _places(operation: Operation) -> Iterator[tuple[str, str]]:
    """Yield the paths of *operation* as OpenAPI writes them, with their methods in lower case."""
    for route in operation.routes:
        method, path = route.split()
        for name in ("get", "head") if method == "GET" else ("post",):
            yield re.sub(r":[^}]+", "", path), name


def _operation(
    operation: Operation, path: str, method: str, settings: Settings, access: _Access, failures: set[int]
) -> dict[str, Any]:
    first_path, first_method = next(_places(operation))
    names = re.findall(r"\{(\w+)\}", path)
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": prose(operation.handler.__doc__),
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": {**_STRING, "minLength": 1}} for name in names),
            *_request_headers(operation, settings),
        ],
        "responses": _responses(operation, failures, _rate_limits() if access.counts(operation.group) else {}),
    }
    if access.keys:
        # Any one of them is enough.
        described["security"] = [] if operation.group == "health" else [{name: []} for name in _SCHEMES]
    if (path, method) != (first_path, first_method):
        described["operationId"] += f"_{method}{re.sub(r'[^a-z0-9]+', '_', path).rstrip('_')}"
        described["description"] = f"The same as `{first_method.upper()} {first_path}`."
    if operation.request is not None:
        content = {"application/json": {"schema": _schema(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _request_headers(operation: Operation, settings: Settings) -> Iterator[dict[str, Any]]:
    yield _header("x-request-id", "A name for the request, in logs too.", _STRING)
    if operation.limited:
        triton = settings.triton
        longest = [triton.request_timeout]
        if operation.event is not None:
            yield _seconds("x-first-token-timeout", "Longest wait for the first token", triton.first_token_timeout)
            yield _seconds("x-idle-timeout", "Longest silence between two tokens", triton.idle_timeout)
            longest.append(triton.stream_timeout or math.inf)
        yield _seconds("x-request-timeout", "Longest time that the answer may take", max(longest))


def _seconds(name: str, description: str, most: float) -> dict[str, Any]:
    limit = {"maximum": most} if most < math.inf else {}
    return _header(name, f"{description}, in seconds.", {"type": "number", "exclusiveMinimum": 0, **limit})


def _header(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _responses(operation: Operation, failures: set[int], headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers to *operation*, which may be *failures*; the others have *headers*."""
    description = "The answer."
    schema = {"type": "object"} if operation.answer is None else _schema(operation.answer)
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation.text:
        content = {kind: {"schema": _STRING} for kind in ("text/plain", "application/openmetrics-text")}
    if operation.event is not None:
        events = [_schema(operation.event), _schema(ErrorEnvelope)]
        content["text/event-stream"] = {"schema": {"anyOf": events}}
        description = f"{description} {_STREAM}"
    headers = {"x-request-id": _reference("headers", "RequestId"), **headers}
    found: dict[str, Any] = {"200": {"description": description, "headers": headers, "content": content}}
    for status in sorted({*failures, *operation.failures}):
        found[str(status)] = _reference("responses", f"Error{status}")
    for status, kind in operation.failures.items():
        found[str(status)] = _failure(status, (), {"anyOf": [_schema(kind), _schema(ErrorEnvelope)]}, None)
    return found


def _failure(
    status: int, kinds: Iterable[type[ServiceError]], schema: dict[str, Any], access: _Access | None
) -> dict[str, Any]:
    """Return the answer with *status*, whose body is of *schema*; *kinds* are the errors that have it."""
    lines = [f"{HTTPStatus(status).phrase}."]
    lines += [f"- `{kind.code}`: {prose(kind.__doc__).partition(chr(10))[0]}" for kind in kinds]
    headers = {"x-request-id": _reference("headers", "RequestId")}
    if status == InvalidApiKey.status:
        headers["WWW-Authenticate"] = _reference("headers", "Authenticate")
    if status == RateLimited.status and access is not None and access.keys:
        headers |= _rate_limits()
    if status in (429, 503):
        headers["Retry-After"] = _reference("headers", "RetryAfter")
    return {"description": "\n".join(lines), "headers": headers, "content": {"application/json": {"schema": schema}}}


def _without_bodies(operation: Mapping[str, Any], failures: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a GET *operation* as HEAD has it: with the same answers, but without their bodies."""
    answers = {
        status: {
            key: value
            for key, value in (failures[int(status)] if "$ref" in answer else answer).items()
            if key != "content"
        }
        for status, answer in operation["responses"].items()
    }
    return {**operation, "responses": answers}


def _schemas(*, strict: bool) -> dict[str, Any]:
    """
    Return the schemas of all types by name, as msgspec makes them from the types.

    A request may hold unknown fields unless requests are *strict*, and may leave out every field with a default. An
    answer always has a field with a default; one that can be missing has ``UNSET`` as default, of which msgspec makes
    none.
    """
    bodies = {operation.request: operation.refused for operation in OPERATIONS if operation.request is not None}
    operations = [(each.answer, each.event, *each.failures.values()) for each in OPERATIONS]
    kinds = dict.fromkeys(kind for each in operations for kind in each if kind is not None)
    template = "#/components/schemas/{name}"
    _, asked = msgspec.json.schema_components(list(bodies), ref_template=template)
    _, answered = msgspec.json.schema_components([ErrorEnvelope, *kinds], ref_template=template)
    if both := asked.keys() & answered.keys():
        raise ValueError(f"types of requests and of answers have the same names: {sorted(both)}")
    for schema in answered.values():
        for name, field in schema.get("properties", {}).items():
            if "default" in field:
                schema["required"].append(name)
    for kind, refused in bodies.items():
        schema = asked[kind.__name__]
        if strict:
            schema["additionalProperties"] = False
        for name, neutral in refused.items():
            schema["properties"][name] = {"enum": [*neutral, None], "description": _REFUSED}
    components = dict(sorted({**asked, **answered}.items()))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = prose(schema["description"])
        if not schema.get("required", True):
            del schema["required"]
        for field in schema.get("properties", {}).values():
            field.pop("default", None)
    return components


def prose(docstring: str | None) -> str:
    """Return a docstring as text for people, in CommonMark."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", re.sub(r"``([^`]*)``", r"`\1`", docstring or ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).strip()
