"""Errors as Anthropic's API has them: their form, their types, and the status of a service that is overloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec
from aiohttp import web

from triton_openai.errors import (
    ContextLengthExceeded,
    Overloaded,
    RateLimited,
    ServiceError,
    ServiceOverloaded,
)
from triton_openai.telemetry.observation import OBSERVATION, Observation

OVERLOADED = 529
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_PATHS = re.compile(r"(/v1)?/messages(/.*)?")
_MODEL_PATHS = re.compile(r"(/v1)?/models(/.*)?")


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong: its class, and a sentence."""

    type: str
    message: str


class AnthropicEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Every error, as the body of an answer or as the last event of a stream."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str


def asks_anthropic(request: web.BaseRequest) -> bool:
    """Return whether *request* is of Anthropic's API, which shares the paths of the models with OpenAI's."""
    if _PATHS.fullmatch(request.path):
        return True
    return "anthropic-version" in request.headers and _MODEL_PATHS.fullmatch(request.path) is not None


def status_of(kind: type[ServiceError]) -> int:
    """Return the status of errors of *kind*."""
    busy = issubclass(kind, Overloaded | ServiceOverloaded) and not issubclass(kind, RateLimited)
    return OVERLOADED if busy else kind.status


def type_of(status: int) -> str:
    """Return the type of errors with *status*."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def envelope(error: ServiceError, request_id: str) -> bytes:
    """Return the body of *error*. Anthropic's errors have no field for the parameter: the message begins with it."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        if error.tokens is not None:
            message = f"{error.tokens} tokens > {min(error.limit or 0, error.tokens - 1)} maximum"
        # Clients read these words to find out that they have to shorten the conversation.
        message = f"prompt is too long: {message}"
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = type_of(status_of(type(error)))
    found = AnthropicEnvelope(error=AnthropicError(type=kind, message=message), request_id=request_id)
    return msgspec.json.encode(found)


def add_request_id(observation: Observation) -> None:
    """Let the answer have the header ``request-id``, which Anthropic's clients read."""
    observation.headers = {**observation.headers, "request-id": observation.request_id}


def error_body(request: web.Request, error: ServiceError) -> tuple[int, bytes] | None:
    """Return the status and the body of *error* for a request of Anthropic's API; ``None`` for other requests."""
    if not asks_anthropic(request):
        return None
    observation = request[OBSERVATION]
    add_request_id(observation)
    return status_of(type(error)), envelope(error, observation.request_id)
