"""
Trace context and spans.

Where spans are made, a request has one from its head to its last byte; under it, one for each stage of the work and one
for each request to Triton, whose ids are the parents of Triton's own spans. Those of the stages are made at the end,
from the times in the record, and nothing happens per token. Where no spans are made, the client's trace context goes on
to Triton. Needs OpenTelemetry's API only; ``otlp`` sends spans.

Attributes follow OpenTelemetry's semantic conventions: ``gen_ai.*`` for generative AI, ``http.*``, ``url.*`` and
``server.*`` for HTTP servers. ``triton.*`` are those of Triton's own spans; ``triton_openai.*`` is what neither has a
name for. Only :func:`content_attributes` has prompts and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_openai.errors import ServiceError, masked, printable
from triton_openai.generation import Progress
from triton_openai.telemetry.access_log import input_messages, output_messages
from triton_openai.telemetry.metrics import PROVIDER
from triton_openai.telemetry.observation import (
    CLIENT_CLOSED_REQUEST,
    RENDER,
    TOKENIZE,
    Observation,
    Observer,
    Request,
    Stage,
    Upstream,
)

Attributes: TypeAlias = dict[str, str | bool | int | float | Sequence[str]]
_Found: TypeAlias = dict[str, str | bool | int | float | Sequence[str] | None]

#: The conventions that the attributes follow: the last version that has those for generative AI, which then moved into
#: a repository of their own.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
#: ``error.type`` of a request whose client left; metrics use the same word.
CANCELLED = "cancelled"
_NANOSECONDS = 1_000_000_000
# Clients choose the length of texts.
_MAX_CHARS = 256
_NUMBERS = ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
_OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}
_propagator = TraceContextTextMapPropagator()


def trace_context(observation: Observation) -> Context:
    """Return the trace context in a request's headers; an empty one if there is none, or an invalid one."""
    if observation.request is None or "traceparent" not in (headers := observation.request.headers):
        return Context()
    # Several headers of one name count as one with a list (RFC 9110, section 5.3).
    found = {name: ",".join(headers.getall(name)) for name in _propagator.fields if name in headers}
    return _propagator.extract(found, Context())


class Tracing(Observer):
    """
    Makes the spans of requests with ``tracer``, which is set before the first one. Without it, passes the client's
    trace context on to Triton.

    Only POST requests have spans: the others are health checks, lists and metrics. *locate* returns Triton's address
    for a request. With *content*, spans have prompts and answers, each text cut to that many characters.
    """

    def __init__(self, locate: Callable[[Any], str] | None = None, *, content: int | None = None) -> None:
        self.tracer: Tracer | None = None
        self._locate = locate
        self._content = content

    def started(self, observation: Observation) -> None:
        """Start the request's span, in the client's trace if there is one."""
        if observation.method != "POST":
            return
        parent = trace_context(observation)
        # Triton records every request with a traceparent, also if its flag is "not sampled": such a request gets none.
        if self.tracer is None:
            if parent and get_current_span(parent).get_span_context().trace_flags.sampled:
                headers = dict(observation.upstream.headers)
                _propagator.inject(headers, parent)
                observation.upstream = Upstream(headers)
            return
        attributes = head_attributes(observation)
        # Spans have wall-clock times, the record those of time.monotonic. It may have begun a while ago.
        zero = time.time_ns() - int(time.monotonic() * _NANOSECONDS)
        began = zero + int(observation.began * _NANOSECONDS)
        span = self.tracer.start_span(
            span_name(observation), parent, SpanKind.SERVER, attributes=attributes, start_time=began
        )
        context = span.get_span_context()
        # The names are those of OpenTelemetry's specification for logs. The flags say whether the trace is recorded.
        observation.log_fields = {
            **observation.log_fields,
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "trace_flags": f"{context.trace_flags:02x}",
        }
        if span.is_recording():
            observation.upstream = Trace(self.tracer, span, observation, self._locate, zero=zero)

    def identified(self, observation: Observation) -> None:
        trace = observation.upstream
        if isinstance(trace, Trace):
            trace.span.update_name(span_name(observation))

    def ended(self, observation: Observation) -> None:
        trace = observation.upstream
        if isinstance(trace, Trace):
            if self._content is not None:
                trace.span.set_attributes(content_attributes(observation, self._content))
            trace.end()


class Trace(Upstream):
    """The *span* of one request, and the spans under it. *zero* is the wall clock's time at zero of time.monotonic."""

    def __init__(
        self, tracer: Tracer, span: Span, observation: Observation, locate: Callable[[Any], str] | None, *, zero: int
    ) -> None:
        super().__init__(observation.upstream.headers)
        self.span = span
        self._tracer = tracer
        self._context = set_span_in_context(span, Context())
        self._observation = observation
        self._locate = locate
        self._zero = zero
        self._calls: dict[int, tuple[Span, int, Progress]] = {}

    def begin(self, request: Request, answer: Progress, *, lora: str | None = None) -> Request:
        """Start the span of a request to Triton. It ends with the client's request, at the answer's own end."""
        span, sent = self._start(request, lora)
        now = time.time_ns()
        if id(answer) in self._calls:
            # The request is sent once more, with the LoRA weights that the first one lacked.
            first = self._calls[id(answer)][0]
            first.set_status(Status(StatusCode.ERROR))
            first.end(now)
        self._calls[id(answer)] = span, now, answer
        return sent

    @contextmanager
    def call(self, request: Request) -> Iterator[Request]:
        """Make the span of a request to Triton."""
        span, sent = self._start(request)
        try:
            yield sent
        except ServiceError as error:
            _fail(span, error)
            raise
        except BaseException:
            span.set_attribute("error.type", CANCELLED)
            raise
        finally:
            span.end()

    def _start(self, request: Request, lora: str | None = None) -> tuple[Span, Request]:
        url = None if self._locate is None else self._locate(request)
        attributes = call_attributes(request, url, lora)
        name = f"infer {attributes['triton.model_name']}"
        span = self._tracer.start_span(name, self._context, SpanKind.CLIENT, attributes=attributes)
        headers = dict(self.headers)
        _propagator.inject(headers, set_span_in_context(span, self._context))
        return span, msgspec.structs.replace(request, headers=headers)

    def end(self) -> None:
        """End all spans."""
        observation, span = self._observation, self.span
        for stage in observation.stages:
            self._add(stage)
        for call in self._calls.values():
            self._end_call(*call)
        span.set_attributes(request_attributes(observation) | response_attributes(observation))
        error = observation.error
        # By the conventions, a client's mistake is no error of the server.
        if error is not None and error.status >= ServiceError.status and not observation.client_left:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def _end_call(self, span: Span, began: int, answer: Progress) -> None:
        if answer.first is not None:
            span.add_event("first_token", timestamp=max(began, self._at(answer.first)))
        if answer.error is not None:
            _fail(span, answer.error)
        elif answer.cancelled:
            span.set_attribute("error.type", CANCELLED)
        # The answer's times are those of the event loop's clock, which lags behind.
        span.end(None if answer.ended is None else max(began, self._at(answer.ended)))

    def _add(self, stage: Stage) -> None:
        attributes = stage_attributes(stage.name, self._observation)
        began = self._at(stage.began)
        span = self._tracer.start_span(stage.name, self._context, attributes=attributes, start_time=began)
        if stage.failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(None if stage.ended is None else self._at(stage.ended))

    def _at(self, moment: float) -> int:
        return self._zero + int(moment * _NANOSECONDS)


def _fail(span: Span, error: ServiceError) -> None:
    span.set_attribute("error.type", error.code)
    # By the conventions, every refusal is an error for a client of Triton. Its message may quote a prompt.
    span.set_status(Status(StatusCode.ERROR))


def span_name(observation: Observation) -> str:
    """Return the name of a request's span: that of an HTTP server's while the operation is not known."""
    if observation.operation is not None:
        return f"{observation.operation} {observation.model}"
    route = _route(observation.request)
    return observation.method if route is None else f"{observation.method} {route}"


def head_attributes(observation: Observation) -> Attributes:
    """Return what is known of a request when its head has come."""
    request = observation.request
    found: _Found = {
        "http.request.method": observation.method,
        "url.path": observation.path,
        "triton_openai.request_id": observation.request_id,
    }
    if request is not None:
        agent = request.headers.get("User-Agent")
        found |= _server(f"//{request.headers.get('Host', '')}") | {
            "http.route": _route(request),
            "url.scheme": request.scheme,
            "network.protocol.version": f"{request.version.major}.{request.version.minor}",
            "user_agent.original": printable(agent, _MAX_CHARS) if agent else None,
        }
    return _known(found)


def request_attributes(observation: Observation) -> Attributes:
    """Return what the client asked for."""
    operation, model = observation.operation, observation.model
    if operation is None or model is None:
        return {}

    def asked(name: str) -> Any:
        return getattr(observation.parameters, name, None)

    stop, choices, encoding = asked("stop"), asked("n"), asked("encoding_format")
    form = msgspec.to_builtins(asked("response_format"))
    stops = [stop] if isinstance(stop, str) else stop or ()
    return _known(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": _clean(model),
            "triton_openai.adapter": observation.adapter,
            "gen_ai.request.stream": observation.stream or None,
            **{f"gen_ai.request.{name}": _number(float, asked(name)) for name in _NUMBERS},
            "gen_ai.request.seed": _number(int, asked("seed")),
            "gen_ai.request.max_tokens": _number(int, asked("max_completion_tokens") or asked("max_tokens")),
            "gen_ai.request.stop_sequences": [masked(_clean(text)) for text in stops] or None,
            "gen_ai.request.choice.count": None if choices == 1 else choices,
            "gen_ai.output.type": _OUTPUT_TYPES.get(str(form.get("type"))) if isinstance(form, Mapping) else None,
            "gen_ai.request.encoding_formats": None if encoding is None else [encoding],
            "gen_ai.embeddings.dimension.count": _number(int, asked("dimensions")),
        }
    )


def _number(kind: type[int | float], value: Any) -> int | float | None:
    # A larger number fails the export of the whole batch.
    return kind(value) if isinstance(value, int | float) and abs(value) < 2**63 else None


def response_attributes(observation: Observation) -> Attributes:
    """Return how the request was answered."""
    left, error = observation.client_left, observation.error
    found: _Found = {
        "http.response.status_code": None if observation.status == CLIENT_CLOSED_REQUEST else observation.status,
        "error.type": CANCELLED if left else None if error is None else error.code,
        "triton_openai.client_left": left or None,
    }
    if observation.operation is not None:
        usage, answered_as = observation.usage, observation.response_model
        found |= {
            "gen_ai.response.id": observation.response_id,
            "gen_ai.response.model": _clean(answered_as) if observation.response_id and answered_as else None,
            "gen_ai.response.finish_reasons": list(observation.finish_reasons) or None,
            "gen_ai.response.time_to_first_chunk": observation.time_to_first_token if observation.stream else None,
            "triton_openai.queued_seconds": observation.queued_seconds or None,
        }
        if usage is not None:
            found |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens if observation.answers else None,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": observation.reasoning_tokens(),
            }
    return _known(found)


def content_attributes(observation: Observation, max_chars: int) -> Attributes:
    """Return the prompt and the answers as JSON, each text cut to *max_chars* characters."""
    if observation.operation is None:
        return {}
    found = {
        "gen_ai.input.messages": input_messages(observation.parameters, max_chars),
        "gen_ai.output.messages": output_messages(observation.answers, max_chars),
    }
    return {name: msgspec.json.encode(messages).decode() for name, messages in found.items() if messages}


def stage_attributes(name: str, observation: Observation) -> Attributes:
    """Return those of the stage *name*: how the prompt was rendered, and the tokens that came of it."""
    if name == RENDER:
        return _known({"triton_openai.chat_template": observation.chat_template})
    usage = observation.usage if name == TOKENIZE else None
    return {} if usage is None else {"triton_openai.prompt_tokens": usage.prompt_tokens}


def call_attributes(request: Any, url: str | None, lora: str | None = None) -> Attributes:
    """Return those of a request to the Triton at *url*; *lora* is the name of its LoRA adapter."""
    found: _Found = {
        "triton.model_name": request.model,
        "triton.request_id": request.id,
        "triton_openai.lora": None if lora is None else _clean(lora),
    }
    if url is not None:
        found |= {"network.protocol.name": "grpc" if url.startswith("grpc") else "http", **_server(url)}
    return _known(found)


def _known(found: _Found) -> Attributes:
    return {name: value for name, value in found.items() if value is not None}


def _clean(text: str) -> str:
    """Return a client's *text* cut, and without lone surrogates, which cannot be sent."""
    return text[:_MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


def _route(request: web.BaseRequest | None) -> str | None:
    if not isinstance(request, web.Request):
        return None
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical


def _server(url: str) -> _Found:
    """Return the host and the port of *url*."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return {}
    return {"server.address": printable(host, _MAX_CHARS), "server.port": port} if host else {}
