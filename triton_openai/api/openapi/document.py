"""Puts the description together from the routes, the table of operations, and the types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from triton_openai import __version__
from triton_openai.api.groups import ROUTE_GROUPS
from triton_openai.api.openapi.access import Access
from triton_openai.api.openapi.operations import COMMON, NAMES, OPERATIONS, Handler, Operation
from triton_openai.api.openapi.schemas import Schemas, prose
from triton_openai.api.openapi.shapes import ErrorEnvelope
from triton_openai.config import Group, Settings
from triton_openai.errors import ServiceError

_JSON = "application/json"
_EVENTS = "text/event-stream"
_ANSWER_HEADERS = {"x-request-id": {"$ref": "#/components/headers/RequestId"}}
_STREAM = (
    "With `stream`: server-sent events, each the JSON of one chunk; the last one is `[DONE]`. What goes wrong after "
    "the first one is an event with an error, and ends the stream. Lines that begin with a colon are comments."
)
_REQUEST_ID = "The request's id: the client's own `x-request-id`, or one that was made for it."
_ABOUT = (
    "The OpenAI API in front of NVIDIA Triton Inference Server.\n\nWhat cannot be read as a request is answered with "
    "errors of the form of those below: 400 (`invalid_http`), 408 (`request_timeout`) or 431 (`headers_too_large`)."
)
_RETRY = "Seconds after which trying again may work."
_PARAMETER = re.compile(r"\{(\w+)\}")


class Route(NamedTuple):
    """One path with one method."""

    path: str
    method: str
    group: Group
    handler: Handler


def describe(app: web.Application, settings: Settings) -> dict[str, Any]:
    """Return the OpenAPI document of *app* as *settings* have it."""
    served = [route for route in routes(app) if route.handler in OPERATIONS]
    operations = [OPERATIONS[handler] for handler in dict.fromkeys(route.handler for route in served)]
    access = Access(settings.access)
    schemas = Schemas(
        [operation.request for operation in operations if operation.request is not None],
        [ErrorEnvelope, *(kind for operation in operations for kind in _answers(operation))],
        names=NAMES,
        strict=settings.api.strict_parameters,
    )
    for operation in operations:
        if operation.request is not None:
            schemas.refuse(operation.request, operation.refused)
    paths: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    errors: dict[int, dict[type[ServiceError], None]] = {}
    for route in served:
        path, method, operation = route.path, route.method, OPERATIONS[route.handler]
        kinds = [*COMMON, *access.errors(route.group), *operation.errors]
        for kind in kinds:
            errors.setdefault(kind.status, {})[kind] = None
        described: dict[str, Any] = {
            "operationId": operation.name,
            "tags": [operation.group],
            "summary": prose(route.handler.__doc__),
            "parameters": [*_path_parameters(path), *_headers(operation, settings)],
            "responses": _responses(operation, schemas, {kind.status for kind in kinds}, access.headers(route.group)),
        }
        security = access.security(route.group)
        if security is not None:
            described["security"] = security
        if operation.name in first:
            described["operationId"] += f"_{method}{re.sub(r'[^a-z0-9]+', '_', path).rstrip('_')}"
            described["description"] = f"The same as {first[operation.name]}."
        first.setdefault(operation.name, f"`{method.upper()} {path}`")
        if operation.request is not None:
            content = {_JSON: {"schema": schemas.reference(operation.request)}}
            described["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path, {})[method] = described
    failures = {status: _failure(status, list(kinds), schemas, access) for status, kinds in sorted(errors.items())}
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
        "tags": [{"name": name} for name in dict.fromkeys(operation.group for operation in operations)],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {f"Error{status}": failure for status, failure in failures.items()},
            "headers": {
                "RequestId": {"description": _REQUEST_ID, "required": True, "schema": {"type": "string"}},
                "RetryAfter": {"description": _RETRY, "schema": {"type": "integer", "minimum": 1}},
                **access.header_components,
            },
            **({"securitySchemes": access.schemes} if access.schemes else {}),
        },
    }


def routes(app: web.Application) -> Iterator[Route]:
    """Yield all that *app* serves."""
    groups = app[ROUTE_GROUPS]
    for route in app.router.routes():
        resource = route.resource
        if resource is not None:
            yield Route(resource.canonical, route.method.lower(), groups[route], route.handler)


def _answers(operation: Operation) -> Iterator[type[msgspec.Struct]]:
    for kind in (operation.answer, operation.event, *operation.failures.values()):
        if kind is not None:
            yield kind


def _path_parameters(path: str) -> list[dict[str, Any]]:
    text = {"type": "string", "minLength": 1}
    return [{"name": name, "in": "path", "required": True, "schema": text} for name in _PARAMETER.findall(path)]


def _headers(operation: Operation, settings: Settings) -> list[dict[str, Any]]:
    found = [_header("x-request-id", "A name for the request, in logs too.", {"type": "string"})]
    if operation.limited:
        triton = settings.triton
        longest = [triton.request_timeout]
        if operation.event is not None:
            found.append(
                _seconds("x-first-token-timeout", "Longest wait for the first token", triton.first_token_timeout)
            )
            found.append(_seconds("x-idle-timeout", "Longest silence between two tokens", triton.idle_timeout))
            longest.append(triton.stream_timeout or math.inf)
        found.append(_seconds("x-request-timeout", "Longest time that the answer may take", max(longest)))
    return found


def _seconds(name: str, description: str, most: float) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "number", "exclusiveMinimum": 0}
    if most < math.inf:
        schema["maximum"] = most
    return _header(name, f"{description}, in seconds.", schema)


def _header(name: str, description: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": description, "schema": schema}


def _responses(
    operation: Operation, schemas: Schemas, failures: set[int], headers: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the answers to *operation*, which may be *failures*, and have *headers* when they are none."""
    schema = {"type": "object"} if operation.answer is None else schemas.reference(operation.answer)
    content: dict[str, Any] = {_JSON: {"schema": schema}}
    if operation.text:
        content = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
    description = "The answer."
    if operation.event is not None:
        event = [schemas.reference(operation.event), schemas.reference(ErrorEnvelope)]
        content[_EVENTS] = {"schema": {"anyOf": event}}
        description = f"{description} {_STREAM}"
    answer = {"description": description, "headers": {**_ANSWER_HEADERS, **headers}, "content": content}
    found: dict[str, Any] = {"200": answer}
    for status in sorted({*failures, *operation.failures}):
        found[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
        if status in operation.failures:
            types = [schemas.reference(operation.failures[status]), schemas.reference(ErrorEnvelope)]
            found[str(status)] = _refusal(status, (), {"anyOf": types}, {})
    return found


def _failure(status: int, kinds: Sequence[type[ServiceError]], schemas: Schemas, access: Access) -> dict[str, Any]:
    return _refusal(status, kinds, schemas.reference(ErrorEnvelope), access.failure_headers(status))


def _refusal(
    status: int, kinds: Sequence[type[ServiceError]], schema: dict[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    lines = [f"{HTTPStatus(status).phrase}."]
    lines += [f"- `{kind.code}`: {prose(kind.__doc__).partition(chr(10))[0]}" for kind in kinds]
    headers = {**_ANSWER_HEADERS, **more}
    if status in (429, 503):
        headers["Retry-After"] = {"$ref": "#/components/headers/RetryAfter"}
    return {"description": "\n".join(lines), "headers": headers, "content": {_JSON: {"schema": schema}}}


def _without_bodies(operation: Mapping[str, Any], failures: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Return a GET *operation* as HEAD has it: the same answers, of which nothing but the head comes."""
    answers = {
        status: {key: value for key, value in failures[int(status)].items() if key != "content"}
        if "$ref" in answer
        else {key: value for key, value in answer.items() if key != "content"}
        for status, answer in operation["responses"].items()
    }
    return {**operation, "responses": answers}
