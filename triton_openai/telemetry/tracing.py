"""
Trace context and spans.

Where spans are made, a request has one from its head to its last byte; under it, one for each stage that takes time and
one for each request to Triton, whose ids are the parents of Triton's own spans. A span has its ids when it begins, and
all else when it has ended, from the record; nothing happens per token. Where no spans are made, the client's trace
context goes on to Triton. Needs OpenTelemetry's API only; ``otlp`` sends spans.

Attributes follow OpenTelemetry's semantic conventions: ``gen_ai.*`` for generative AI, ``http.*``, ``url.*`` and
``server.*`` for HTTP servers. ``triton.*`` are those of Triton's own spans; ``triton_openai.*`` is what neither has a
name for. Only :func:`content_attributes` has prompts and answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
from aiohttp import HttpVersion, web
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, SpanKind, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_openai.errors import ServiceError, masked, printable
from triton_openai.generation import AnswerState
from triton_openai.telemetry.access_log import input_messages, output_messages
from triton_openai.telemetry.metrics import PROVIDER
from triton_openai.telemetry.request_record import (
    CLIENT_CLOSED_REQUEST,
    Destination,
    Observer,
    Request,
    RequestRecord,
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
#: Seconds that a stage must take for a span of its own, unless it fails. A chat is rendered and tokenized in a fraction
#: of a millisecond: to say that, two spans more would cost a third of a trace.
SHORTEST_STAGE = 0.001
_NANOSECONDS = 1_000_000_000
# Clients choose the length of texts.
_MAX_CHARS = 256
_LONGEST_HEADER = 1024
#: The fields of a request that are numbers: their attributes and types. Of two for one attribute, the later one counts.
NUMBERS: Mapping[str, tuple[str, type[int | float]]] = {
    **{
        name: (f"gen_ai.request.{name}", float)
        for name in ("temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty")
    },
    "seed": ("gen_ai.request.seed", int),
    "max_tokens": ("gen_ai.request.max_tokens", int),
    "max_completion_tokens": ("gen_ai.request.max_tokens", int),
    "dimensions": ("gen_ai.embeddings.dimension.count", int),
}
_OUTPUT_TYPES = {"text": "text", "json_object": "json", "json_schema": "json"}
_propagator = TraceContextTextMapPropagator()


class Span(msgspec.Struct, kw_only=True):
    """A span while it is made. Times are nanoseconds of the wall clock."""

    name: str
    #: Its ids, if anybody has to know them before it is sent.
    context: SpanContext | None = None
    #: ``None`` where a trace begins.
    parent: SpanContext | None
    #: The span of what a line of a batch goes back to.
    link: SpanContext | None = None
    kind: SpanKind = SpanKind.INTERNAL
    began: int
    ended: int = 0
    attributes: Attributes
    #: When the first token came: an event in it.
    first_token: int | None = None
    failed: bool = False


class Spans(Protocol):
    """Decides which traces are recorded, and takes the spans of those."""

    def begin(self, name: str, parent: Context, attributes: Attributes) -> SpanContext:
        """Return the ids of a request's span, and whether its trace is recorded; a sampler may add *attributes*."""

    def child(self, parent: SpanContext) -> SpanContext:
        """Return the ids of a span under one that is recorded."""

    def end(self, context: SpanContext, spans: Sequence[Span]) -> None:
        """Take *spans* that have ended, of the trace of *context*."""


def trace_context(record: RequestRecord) -> Context:
    """Return the trace context in a request's headers; an empty one if there is none, or an invalid one."""
    if record.request is None or "traceparent" not in (headers := record.request.headers):
        return Context()
    # Several headers of one name count as one with a list (RFC 9110, section 5.3).
    found = {name: ",".join(headers.getall(name)) for name in _propagator.fields if name in headers}
    return _propagator.extract(found, Context())


class Tracing(Observer):
    """
    Makes the spans of requests for ``spans``, which is set before the first one. Without it, passes the client's trace
    context on to Triton.

    Only POST requests have spans: the others are health checks, lists and metrics. With *content*, spans have prompts
    and answers, each text cut to that many characters.
    """

    def __init__(self, *, content: int | None = None) -> None:
        self.spans: Spans | None = None
        self._content = content

    def started(self, record: RequestRecord) -> None:
        """Start the request's span, in the client's trace if there is one."""
        if record.method != "POST":
            return
        parent = trace_context(record)
        # Triton records every request with a traceparent, also if its flag is "not sampled": such a request gets none.
        if self.spans is None:
            if parent and get_current_span(parent).get_span_context().trace_flags.sampled:
                headers = dict(record.upstream.headers)
                _propagator.inject(headers, parent)
                record.upstream = Upstream(headers)
            return
        attributes: Attributes = {"http.request.method": record.method, "url.path": record.path}
        context = self.spans.begin(span_name(record), parent, attributes)
        # Spans have wall-clock times, the record those of time.monotonic. It may have begun a while ago.
        zero = time.time_ns() - int(time.monotonic() * _NANOSECONDS)
        began = zero + int(record.began * _NANOSECONDS)
        # The names are those of OpenTelemetry's specification for logs. The flags say whether the trace is recorded.
        record.log_fields = {
            **record.log_fields,
            "trace_id": f"{context.trace_id:032x}",
            "span_id": f"{context.span_id:016x}",
            "trace_flags": f"{context.trace_flags:02x}",
        }
        if context.trace_flags.sampled:
            found = get_current_span(parent).get_span_context() if parent else None
            above = found if found and found.is_valid else None
            kind = SpanKind.SERVER
            span = Span(name="", context=context, parent=above, kind=kind, began=began, attributes=attributes)
            if record.batch_trace:
                made_by = _propagator.extract({"traceparent": record.batch_trace}, Context())
                span.link = get_current_span(made_by).get_span_context()
            record.upstream = Trace(self.spans, context, span, record, zero=zero)

    def ended(self, record: RequestRecord) -> None:
        trace = record.upstream
        if isinstance(trace, Trace):
            if self._content is not None:
                trace.span.attributes |= content_attributes(record, self._content)
            trace.end()


class Trace(Upstream):
    """The *span* of one request, and the spans under it. *zero* is the wall clock's time at zero of time.monotonic."""

    def __init__(
        self,
        spans: Spans,
        context: SpanContext,
        span: Span,
        record: RequestRecord,
        *,
        zero: int,
    ) -> None:
        super().__init__(record.upstream.headers)
        self.span = span
        self._spans = spans
        self._context = context
        self._done: list[Span] = []
        self._record = record
        self._zero = zero
        self._calls: dict[int, tuple[Span, AnswerState]] = {}

    def begin(self, request: Request, answer: AnswerState, to: Destination, *, lora: str | None = None) -> Request:
        """Start the span of a request to Triton. It ends with the client's request, at the answer's own end."""
        span, sent = self._start(request, to, lora)
        if id(answer) in self._calls:
            # The request is sent once more: to another Triton, or with the LoRA weights that the first one lacked.
            first = self._calls[id(answer)][0]
            first.failed = True
            self._end(first, span.began)
        self._calls[id(answer)] = span, answer
        return sent

    @contextmanager
    def call(self, request: Request, to: Destination) -> Iterator[Request]:
        """Make the span of a request to Triton."""
        span, sent = self._start(request, to)
        try:
            yield sent
        except ServiceError as error:
            _fail(span, error)
            raise
        except BaseException:
            span.attributes["error.type"] = CANCELLED
            raise
        finally:
            self._end(span, time.time_ns())
            if self.span.ended:
                # The request did not wait for it.
                self._spans.end(self._context, [span])

    def _start(self, request: Request, to: Destination, lora: str | None = None) -> tuple[Span, Request]:
        attributes = call_attributes(request, to.address_of(request), lora)
        if to.name is not None:
            attributes["triton_openai.endpoint"] = to.name
        name, began = f"infer {attributes['triton.model_name']}", time.time_ns()
        context = self._spans.child(self._context)
        span = Span(
            name=name, context=context, parent=self._context, kind=SpanKind.CLIENT, began=began, attributes=attributes
        )
        parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
        headers = {**self.headers, "traceparent": parent}
        if context.trace_state:
            headers["tracestate"] = context.trace_state.to_header()
        return span, msgspec.structs.replace(request, headers=headers)

    def _end(self, span: Span, ended: int) -> None:
        span.ended = ended
        self._done.append(span)

    def end(self) -> None:
        """End all spans."""
        record, span = self._record, self.span
        now = time.monotonic()
        for stage in record.stages:
            if stage.failed or (stage.ended or now) - stage.began >= SHORTEST_STAGE:
                self._add(stage)
        for call in self._calls.values():
            self._end_call(*call)
        span.name = span_name(record)
        found = {**head_attributes(record), **request_attributes(record), **response_attributes(record)}
        span.attributes |= _known(found)
        error = record.error
        # By the conventions, a client's mistake is no error of the server.
        if error is not None and error.status >= ServiceError.status and not record.client_left:
            span.failed = True
        self._end(span, time.time_ns())
        self._spans.end(self._context, self._done)

    def _end_call(self, span: Span, answer: AnswerState) -> None:
        # The answer's times are those of the event loop's clock, which lags behind.
        if answer.first is not None:
            span.first_token = max(span.began, self._at(answer.first))
        if answer.error is not None:
            _fail(span, answer.error)
        elif answer.cancelled:
            span.attributes["error.type"] = CANCELLED
        self._end(span, time.time_ns() if answer.ended is None else max(span.began, self._at(answer.ended)))

    def _add(self, stage: Stage) -> None:
        began = self._at(stage.began)
        span = Span(name=stage.name, parent=self._context, began=began, attributes={}, failed=stage.failed)
        self._end(span, time.time_ns() if stage.ended is None else self._at(stage.ended))

    def _at(self, moment: float) -> int:
        return self._zero + int(moment * _NANOSECONDS)


def _fail(span: Span, error: ServiceError) -> None:
    span.attributes["error.type"] = error.code
    # By the conventions, every refusal is an error for a client of Triton. Its message may quote a prompt.
    span.failed = True


def span_name(record: RequestRecord) -> str:
    """Return the name of a request's span: that of an HTTP server's while the operation is not known."""
    if record.operation is not None:
        return f"{record.operation} {record.model}"
    route = _route(record.request)
    return record.method if route is None else f"{record.method} {route}"


def head_attributes(record: RequestRecord) -> _Found:
    """Return what the head of a request tells."""
    request = record.request
    found: _Found = {
        "http.request.method": record.method,
        "url.path": record.path,
        "triton_openai.request_id": record.request_id,
        "triton_openai.batch": record.batch,
    }
    if request is not None:
        headers = request.headers
        host, agent = headers.get("Host", "")[:_LONGEST_HEADER], headers.get("User-Agent", "")[:_LONGEST_HEADER]
        found |= shared_attributes(_route(request), request.scheme, request.version, host, agent)
    return found


@lru_cache(128)
def shared_attributes(route: str | None, scheme: str, version: HttpVersion, host: str, agent: str) -> Attributes:
    """Return what the heads of many requests have alike."""
    found = _server(f"//{host}") | {
        "http.route": route,
        "url.scheme": scheme,
        "network.protocol.version": f"{version.major}.{version.minor}",
        "user_agent.original": printable(agent, _MAX_CHARS) if agent else None,
    }
    return _known(found)


def request_attributes(record: RequestRecord) -> _Found:
    """Return what the client asked for."""
    operation, model, body = record.operation, record.model, record.parameters
    if operation is None or model is None:
        return {}
    found: _Found = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": _clean(model),
        "triton_openai.adapter": record.adapter,
        "gen_ai.request.stream": record.stream or None,
    }
    for name, (attribute, kind) in NUMBERS.items():
        if (value := getattr(body, name, None)) is not None:
            found[attribute] = _number(kind, value)
    if stop := getattr(body, "stop", None):
        stops = [stop] if isinstance(stop, str) else stop
        found["gen_ai.request.stop_sequences"] = tuple([masked(_clean(text)) for text in stops])
    if (choices := getattr(body, "n", None)) != 1:
        found["gen_ai.request.choice.count"] = choices
    if (form := getattr(body, "response_format", None)) is not None:
        form = msgspec.to_builtins(form)
        found["gen_ai.output.type"] = _OUTPUT_TYPES.get(str(form.get("type"))) if isinstance(form, Mapping) else None
    if (encoding := getattr(body, "encoding_format", None)) is not None:
        found["gen_ai.request.encoding_formats"] = (encoding,)
    return found


def _number(kind: type[int | float], value: Any) -> int | float | None:
    # A larger number fails the export of the whole batch.
    return kind(value) if isinstance(value, int | float) and abs(value) < 2**63 else None


def response_attributes(record: RequestRecord) -> _Found:
    """Return how the request was answered."""
    left, error = record.client_left, record.error
    found: _Found = {
        "http.response.status_code": None if record.status == CLIENT_CLOSED_REQUEST else record.status,
        "error.type": CANCELLED if left else None if error is None else error.code,
        "triton_openai.client_left": left or None,
        "triton_openai.chat_template": record.chat_template,
    }
    if record.operation is not None:
        usage, answered_as = record.usage, record.response_model
        found |= {
            "gen_ai.response.id": record.response_id,
            "gen_ai.response.model": _clean(answered_as) if record.response_id and answered_as else None,
            "gen_ai.response.finish_reasons": tuple(record.finish_reasons) or None,
            "gen_ai.response.time_to_first_chunk": record.time_to_first_token if record.stream else None,
            "triton_openai.queued_seconds": record.queued_seconds or None,
        }
        if usage is not None:
            found |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens if record.answers else None,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens(),
            }
    return found


def content_attributes(record: RequestRecord, max_chars: int) -> Attributes:
    """Return the prompt and the answers as JSON, each text cut to *max_chars* characters."""
    if record.operation is None:
        return {}
    found = {
        "gen_ai.input.messages": input_messages(record.parameters, max_chars),
        "gen_ai.output.messages": output_messages(record.answers, max_chars),
    }
    return {name: msgspec.json.encode(messages).decode() for name, messages in found.items() if messages}


def call_attributes(request: Any, url: str | None, lora: str | None = None) -> Attributes:
    """Return those of a request to the Triton at *url*; *lora* is the name of its LoRA adapter."""
    found: Attributes = {"triton.model_name": request.model, "triton.request_id": request.id}
    if lora is not None:
        found["triton_openai.lora"] = _clean(lora)
    if url is not None:
        found |= upstream_attributes(url)
    return found


@lru_cache(16)
def upstream_attributes(url: str) -> Attributes:
    """Return those of all requests to the Triton at *url*."""
    return _known({"network.protocol.name": "grpc" if url.startswith("grpc") else "http", **_server(url)})


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
