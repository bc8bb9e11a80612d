"""
What the spans say, in the words of OpenTelemetry's semantic conventions.

``gen_ai.*`` are those of the conventions for generative AI ("Semantic conventions for generative client AI spans"),
``http.*``, ``url.*``, ``server.*`` those of HTTP servers, ``triton.*`` those that Triton's own spans have; what there
is no name for begins with ``triton_openai.``. Prompts and answers are in none of them but those of
:func:`content_attributes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from triton_openai.errors import ServiceError
from triton_openai.telemetry.content import input_messages, output_messages
from triton_openai.telemetry.instruments import PROVIDER
from triton_openai.telemetry.observation import CLIENT_CLOSED_REQUEST, Observation
from triton_openai.triton.tensors import InferRequest

Value: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = dict[str, Value]

#: ``error.type`` of a request whose client left; metrics say it with the same word.
CANCELLED = "cancelled"

# Fields of requests whose values are numbers, by their names in the conventions.
_NUMBERS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "seed": "seed",
}
_WHOLE = frozenset({"seed"})
_OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}
# What a client writes is its own, and may be long.
_LONGEST_TEXT = 256
_INT64 = 2**63


def name_of(observation: Observation) -> str:
    """Return the name of a request's span: before it is known what it asks for, that of an HTTP server."""
    if observation.operation is not None:
        return f"{observation.operation} {observation.model}"
    route = _route(observation.request)
    return observation.method if route is None else f"{observation.method} {route}"


def head_attributes(observation: Observation) -> Attributes:
    """Return what is known when the request comes: where it came to, over what."""
    found: Attributes = {
        "http.request.method": observation.method,
        "url.path": clean(observation.path),
        "triton_openai.request_id": observation.request_id,
    }
    request = observation.request
    if request is None:
        return found
    route = _route(request)
    if route is not None:
        found["http.route"] = route
    found["url.scheme"] = request.scheme
    found["network.protocol.version"] = f"{request.version.major}.{request.version.minor}"
    found |= _server(f"//{request.headers.get('Host', '')}")
    agent = request.headers.get("User-Agent")
    if agent:
        found["user_agent.original"] = clean(agent)
    return found


def request_attributes(observation: Observation) -> Attributes:
    """Return what the client asked for."""
    operation, model = observation.operation, observation.model
    if operation is None or model is None:
        return {}
    found: Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": clean(model),
    }
    if observation.adapter is not None:
        found["triton_openai.adapter"] = observation.adapter
    if observation.stream:
        found["gen_ai.request.stream"] = True
    found |= _parameters(observation.parameters)
    return found


def _parameters(body: object) -> Attributes:
    found: Attributes = {}
    for field, name in _NUMBERS.items():
        value = getattr(body, field, None)
        # More than 64 bits would cost every span of the same batch.
        if isinstance(value, int | float) and abs(value) < _INT64:
            found[f"gen_ai.request.{name}"] = int(value) if field in _WHOLE else float(value)
    limit = getattr(body, "max_completion_tokens", None) or getattr(body, "max_tokens", None)
    if limit is not None and limit < _INT64:
        found["gen_ai.request.max_tokens"] = limit
    stop = getattr(body, "stop", None)
    if stop:
        found["gen_ai.request.stop_sequences"] = [clean(text) for text in ([stop] if isinstance(stop, str) else stop)]
    choices = getattr(body, "n", None)
    if choices is not None and choices != 1:
        found["gen_ai.request.choice.count"] = choices
    form = getattr(body, "response_format", None)
    kind = _OUTPUT_TYPES.get(str(form.get("type"))) if isinstance(form, Mapping) else None
    if kind is not None:
        found["gen_ai.output.type"] = kind
    encoding = getattr(body, "encoding_format", None)
    if encoding is not None:
        found["gen_ai.request.encoding_formats"] = [encoding]
    dimensions = getattr(body, "dimensions", None)
    if dimensions is not None and dimensions < _INT64:
        found["gen_ai.embeddings.dimension.count"] = dimensions
    return found


def response_attributes(observation: Observation) -> Attributes:
    """Return what became of the request."""
    found: Attributes = {}
    if observation.status != CLIENT_CLOSED_REQUEST:
        found["http.response.status_code"] = observation.status
    if observation.client_left:
        found["error.type"] = CANCELLED
        found["triton_openai.client_left"] = True
    elif observation.error is not None:
        found["error.type"] = error_type(observation.error)
    if observation.operation is None:
        return found
    if observation.response_model is not None and observation.response_id is not None:
        found["gen_ai.response.model"] = clean(observation.response_model)
    if observation.response_id is not None:
        found["gen_ai.response.id"] = observation.response_id
    if observation.finish_reasons:
        found["gen_ai.response.finish_reasons"] = list(observation.finish_reasons)
    first = observation.time_to_first_token
    if first is not None and observation.stream:
        found["gen_ai.response.time_to_first_chunk"] = first
    if observation.queued_seconds:
        found["triton_openai.queued_seconds"] = observation.queued_seconds
    return found | _usage(observation)


def _usage(observation: Observation) -> Attributes:
    usage = observation.usage
    if usage is None:
        return {}
    found: Attributes = {"gen_ai.usage.input_tokens": usage.prompt_tokens}
    if observation.answers:
        found["gen_ai.usage.output_tokens"] = usage.completion_tokens
    if usage.cached_tokens is not None:
        found["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    reasoning = observation.reasoning_tokens()
    if reasoning is not None:
        found["gen_ai.usage.reasoning.output_tokens"] = reasoning
    return found


def content_attributes(observation: Observation, longest: int) -> Attributes:
    """Return the prompt and the answers, each text cut to *longest* characters, as JSON: values of spans are flat."""
    if observation.operation is None:
        return {}
    found = {
        "gen_ai.input.messages": input_messages(observation.parameters, longest),
        "gen_ai.output.messages": output_messages(observation.answers, longest),
    }
    return {name: msgspec.json.encode(messages).decode() for name, messages in found.items() if messages}


def call_attributes(request: InferRequest, url: str | None, lora: str | None = None) -> Attributes:
    """Return what a request to the Triton at *url* says of itself; *lora* is the adapter that it asks for."""
    found: Attributes = {
        # As in Triton's own spans
        "triton.model_name": request.model,
        "triton.request_id": request.id,
    }
    if url is not None:
        found["network.protocol.name"] = "grpc" if urlsplit(url).scheme.startswith("grpc") else "http"
        found |= _server(url)
    if lora is not None:
        found["triton_openai.lora"] = clean(lora)
    return found


def error_type(error: BaseException) -> str:
    """Return the name of *error*: its code, which is from a list, and not its message, which may quote a client."""
    if isinstance(error, ServiceError):
        return error.code or type(error).__name__
    return type(error).__name__


def clean(text: str) -> str:
    """Return *text* of a client as it can be sent: cut, and without bytes that are no text."""
    return text[:_LONGEST_TEXT].encode("utf-8", "replace").decode("utf-8")


def _route(request: web.BaseRequest | None) -> str | None:
    if not isinstance(request, web.Request):
        return None
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def _server(url: str) -> Attributes:
    """Return the host and the port of *url*."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return {}
    if not host:
        return {}
    return {"server.address": clean(host), **({} if port is None else {"server.port": port})}
