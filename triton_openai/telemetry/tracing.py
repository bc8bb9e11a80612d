"""
Trace context and spans.

Where spans are made, a request has one from its head to its last byte; under it, one for each stage that takes time and
one for each request to Triton, whose ids are the parents of Triton's own spans. A span has its id when it begins, and
all else when it has ended, from the record; nothing happens per token. Where no spans are made, the client's trace
context goes on to Triton. Needs OpenTelemetry's API only; ``otlp`` sends spans.

Attributes follow OpenTelemetry's semantic conventions: ``gen_ai.*`` for generative AI, ``http.*``, ``url.*`` and
``server.*`` for HTTP servers. ``triton.*`` are those of Triton's own spans; ``triton_openai.*`` is what neither has a
name for. Only :func:`content_attributes` has prompts and answers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

import msgspec
from aiohttp import HttpVersion, web
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from triton_openai.errors import ServiceError, masked, printable
from triton_openai.telemetry.access_log import input_messages, output_messages
from triton_openai.telemetry.instruments import PROVIDER
from triton_openai.telemetry.request_record import (
    CLIENT_CLOSED_REQUEST,
    CallOutcome,
    CallTracer,
    Destination,
    Observer,
    Request,
    RequestRecord,
    Stage,
)

Attributes: TypeAlias = dict[str, str | bool | int | float | Sequence[str]]
_OptionalAttributes: TypeAlias = dict[str, str | bool | int | float | Sequence[str] | None]

#: The conventions that the attributes follow: the last version that has those for generative AI, which then moved into
#: a repository of their own.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.0"
#: ``error.type`` of a request whose client left; metrics use the same word.
CANCELLED = "cancelled"
#: The event when the first token came.
FIRST_TOKEN = "first_token"
#: Seconds that a stage must take for a span of its own, unless it fails. A chat is rendered and tokenized in a fraction
#: of a millisecond: to say that, two spans more would cost a third of a trace.
SHORTEST_STAGE = 0.001
_NANOSECONDS = 1_000_000_000
# Clients choose the length of texts.
_MAX_CHARS = 256
_MAX_HEADER_CHARS = 1024
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


class SpanIds(msgspec.Struct, gc=False, frozen=True):
    """The ids of a request's span. The SDK's own type takes ten calls to make and to read."""

    trace_id: int
    span_id: int
    #: Whether the trace is recorded.
    sampled: bool
    state: TraceState | None = None


class Span(msgspec.Struct, gc=False, kw_only=True):
    """A span. Times are nanoseconds of the wall clock."""

    name: str
    id: int
    #: The id of the span above; ``None`` where a trace begins.
    parent: int | None
    #: Whether the parent is a span of the client.
    remote: bool = False
    #: The span of the request that created the batch of this line.
    link: SpanContext | None = None
    kind: Literal["INTERNAL", "SERVER", "CLIENT"] = "INTERNAL"
    began: int
    ended: int = 0
    shared: Sequence[Attributes] = ()
    #: Those of this span alone.
    attributes: Attributes
    #: When the first token came: an event in it.
    first_token: int | None = None
    failed: bool = False

    @property
    def all_attributes(self) -> Attributes:
        """The attributes that it shares with others, and its own."""
        attributes = {**self.attributes}
        for shared in self.shared:
            attributes |= shared
        return attributes


class Spans(Protocol):
    """Decides which traces are recorded, and exports their spans."""

    #: Returns the id of a new span.
    new_id: Callable[[], int]

    def begin(self, record: RequestRecord, parent: Context, attributes: Attributes) -> SpanIds:
        """Return the ids of a request's span, and whether its trace is recorded; a sampler may add *attributes*."""

    def end(self, ids: SpanIds, spans: Sequence[Span]) -> None:
        """Export *spans* that have ended, of the request whose span has *ids*."""


def trace_context(record: RequestRecord) -> Context:
    """Return the trace context in a request's headers; an empty one if there is none, or an invalid one."""
    if record.request is None or "traceparent" not in (headers := record.request.headers):
        return Context()
    # Several headers of one name count as one with a list (RFC 9110, section 5.3).
    carrier = {name: ",".join(headers.getall(name)) for name in _propagator.fields if name in headers}
    return _propagator.extract(carrier, Context())


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
                headers = dict(record.call_tracer.headers)
                _propagator.inject(headers, parent)
                record.call_tracer = CallTracer(headers)
            return
        attributes: Attributes = {"http.request.method": record.method, "url.path": record.path}
        ids = self.spans.begin(record, parent, attributes)
        # Spans have wall-clock times, the record those of time.monotonic. It may have begun a while ago.
        zero = time.time_ns() - int(time.monotonic() * _NANOSECONDS)
        began = zero + int(record.began * _NANOSECONDS)
        # The names are those of OpenTelemetry's specification for logs. The flags say whether the trace is recorded.
        trace_id = ids.trace_id.to_bytes(16, "big").hex()
        span_id = ids.span_id.to_bytes(8, "big").hex()
        if ids.sampled:
            flags = "01"
        else:
            flags = "00"
        record.log_fields = {**record.log_fields, "trace_id": trace_id, "span_id": span_id, "trace_flags": flags}
        if ids.sampled:
            span = Span(name="", id=ids.span_id, parent=None, kind="SERVER", began=began, attributes=attributes)
            if parent and (caller := get_current_span(parent).get_span_context()).is_valid:
                span.parent = caller.span_id
                span.remote = True
            if record.batch_trace:
                made_by = _propagator.extract({"traceparent": record.batch_trace}, Context())
                span.link = get_current_span(made_by).get_span_context()
            record.call_tracer = Trace(self.spans, ids, span, record, zero=zero)

    def ended(self, record: RequestRecord) -> None:
        trace = record.call_tracer
        if isinstance(trace, Trace):
            if self._content is not None:
                trace.span.attributes |= content_attributes(record, self._content)
            trace.end()


class Trace(CallTracer):
    """The *span* of one request, and the spans under it. *zero* is the wall clock's time at zero of time.monotonic."""

    def __init__(self, spans: Spans, ids: SpanIds, span: Span, record: RequestRecord, *, zero: int) -> None:
        self.headers = record.call_tracer.headers
        self.span = span
        self._spans = spans
        self._ids = ids
        self._parent = f"00-{record.log_fields['trace_id']}-%016x-{record.log_fields['trace_flags']}"
        self._done: list[Span] = []
        self._record = record
        self._zero = zero
        self._calls: dict[int, tuple[Span, CallOutcome]] = {}

    def begin(self, request: Request, outcome: CallOutcome, to: Destination, *, lora: str | None = None) -> Request:
        """Start the span of a request to Triton. It ends with the client's request, at the time in *outcome*."""
        span, sent = self._start(request, to, lora)
        if id(outcome) in self._calls:
            # The request is sent once more: to another Triton, or with the LoRA weights that the first one lacked.
            first = self._calls[id(outcome)][0]
            first.failed = True
            if outcome.error is not None:
                _fail(first, outcome.error)
            first.ended = span.began
            self._done.append(first)
        self._calls[id(outcome)] = span, outcome
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
            span.ended = time.time_ns()
            self._done.append(span)
            if self.span.ended:
                # The request did not wait for it.
                self._spans.end(self._ids, [span])

    def _start(self, request: Request, to: Destination, lora: str | None = None) -> tuple[Span, Request]:
        called: Any = request
        span = Span(
            name=f"infer {called.model}",
            id=self._spans.new_id(),
            parent=self.span.id,
            kind="CLIENT",
            began=time.time_ns(),
            shared=(call_attributes(called.model, to.address_of(request), to.name, lora),),
            attributes={"triton.request_id": called.id},
        )
        headers = {**self.headers, "traceparent": self._parent % span.id}
        if self._ids.state:
            headers["tracestate"] = self._ids.state.to_header()
        return span, msgspec.structs.replace(request, headers=headers)

    def end(self) -> None:
        """End all spans."""
        record = self._record
        span = self.span
        done = self._done
        now = time.monotonic()
        for stage in record.stages:
            if stage.failed or (stage.ended or now) - stage.began >= SHORTEST_STAGE:
                self._add(stage)
        for call, outcome in self._calls.values():
            # The outcome's times are those of the event loop's clock, which lags behind.
            if outcome.first is not None:
                call.first_token = max(call.began, self._at(outcome.first))
            if outcome.error is not None:
                _fail(call, outcome.error)
            elif outcome.cancelled:
                call.attributes["error.type"] = CANCELLED
            if outcome.ended is None:
                call.ended = time.time_ns()
            else:
                call.ended = max(call.began, self._at(outcome.ended))
            done.append(call)
        # Breaks a reference cycle: an error's traceback has frames that refer to this trace.
        self._calls.clear()
        span.name = span_name(record)
        span.shared = shared_attributes(record)
        span.attributes |= own_attributes(record)
        error = record.error
        # By the conventions, a client's mistake is no error of the server.
        if error is not None and error.status >= ServiceError.status and not record.client_left:
            span.failed = True
        span.ended = time.time_ns()
        done.append(span)
        self._spans.end(self._ids, done)

    def _add(self, stage: Stage) -> None:
        began = self._at(stage.began)
        id = self._spans.new_id()
        above = self.span.id
        span = Span(name=stage.name, id=id, parent=above, began=began, attributes={}, failed=stage.failed)
        if stage.ended is None:
            span.ended = time.time_ns()
        else:
            span.ended = self._at(stage.ended)
        self._done.append(span)

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
    if route is None:
        return record.method
    return f"{record.method} {route}"


def shared_attributes(record: RequestRecord) -> Sequence[Attributes]:
    """Return the attributes that a request's span may share with others: of its head, its model, and the answer."""
    shared = []
    request = record.request
    left = record.client_left
    error = record.error
    if request is not None:
        headers = request.headers
        host = headers.get("Host", "")[:_MAX_HEADER_CHARS]
        agent = headers.get("User-Agent", "")[:_MAX_HEADER_CHARS]
        shared.append(head_attributes(_route(request), request.scheme, request.version, host, agent))
    operation = record.operation
    model = record.model
    if operation is not None and model is not None:
        answered_as = None
        if record.response_id:
            answered_as = record.response_model
        shared.append(model_attributes(operation, model, record.adapter, answered_as, record.chat_template))
    if left:
        failure = CANCELLED
    elif error is None:
        failure = None
    else:
        failure = error.code
    shared.append(answer_attributes(record.status, failure, left, record.stream, tuple(record.finish_reasons)))
    return shared


@lru_cache(128)
def head_attributes(route: str | None, scheme: str, version: HttpVersion, host: str, agent: str) -> Attributes:
    """Return what the heads of many requests have alike."""
    return _known(
        {
            **_server(f"//{host}"),
            "http.route": route,
            "url.scheme": scheme,
            "network.protocol.version": f"{version.major}.{version.minor}",
            "user_agent.original": printable(agent, _MAX_CHARS) if agent else None,
        }
    )


@lru_cache(128)
def model_attributes(
    operation: str, model: str, adapter: str | None, answered_as: str | None, template: str | None
) -> Attributes:
    """Return what requests for a model have alike."""
    return _known(
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": _clean(model),
            "gen_ai.response.model": _clean(answered_as) if answered_as else None,
            "triton_openai.adapter": adapter,
            "triton_openai.chat_template": template,
        }
    )


@lru_cache(128)
def answer_attributes(
    status: int, failure: str | None, left: bool, stream: bool, finish_reasons: tuple[str, ...]
) -> Attributes:
    """Return the attributes of the end of an answer."""
    return _known(
        {
            "http.response.status_code": None if status == CLIENT_CLOSED_REQUEST else status,
            "error.type": failure,
            "triton_openai.client_left": left or None,
            "gen_ai.request.stream": stream or None,
            "gen_ai.response.finish_reasons": finish_reasons or None,
        }
    )


def own_attributes(record: RequestRecord) -> Attributes:
    """Return the attributes of a request's span alone."""
    attributes: _OptionalAttributes = {
        "triton_openai.request_id": record.request_id,
        "triton_openai.batch": record.batch,
    }
    if record.operation is not None and record.model is not None:
        attributes |= {
            **request_attributes(record.parameters),
            "gen_ai.response.id": record.response_id,
            "gen_ai.response.time_to_first_chunk": record.time_to_first_token if record.stream else None,
            "triton_openai.queued_seconds": record.queued_seconds or None,
        }
        if (usage := record.usage) is not None:
            attributes |= {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens if record.answers else None,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": record.reasoning_tokens(),
            }
    return {name: value for name, value in attributes.items() if value is not None}


def request_attributes(body: object) -> _OptionalAttributes:
    """Return the attributes for the request fields in *body*."""
    attributes: _OptionalAttributes = {}
    for name in _fields_of(type(body)) if isinstance(body, msgspec.Struct) else ():
        value = getattr(body, name)
        if value is None:
            continue
        if name in NUMBERS:
            attribute, kind = NUMBERS[name]
            # A larger number fails the export of the whole batch.
            fits = isinstance(value, int | float) and abs(value) < 2**63
            if fits:
                attributes[attribute] = kind(value)
            else:
                attributes[attribute] = None
        elif name == "stop":
            if isinstance(value, str):
                stops = [value]
            else:
                stops = value
            attributes["gen_ai.request.stop_sequences"] = tuple([masked(_clean(text)) for text in stops]) or None
        elif name == "n":
            if value == 1:
                attributes["gen_ai.request.choice.count"] = None
            else:
                attributes["gen_ai.request.choice.count"] = value
        elif name == "response_format":
            form = msgspec.to_builtins(value)
            if isinstance(form, Mapping):
                attributes["gen_ai.output.type"] = _OUTPUT_TYPES.get(str(form.get("type")))
        else:
            attributes["gen_ai.request.encoding_formats"] = (value,)
    return attributes


@lru_cache(64)
def _fields_of(kind: type[msgspec.Struct]) -> Sequence[str]:
    """Return the fields of bodies of *kind* that spans have."""
    names = (*NUMBERS, "stop", "n", "response_format", "encoding_format")
    return [name for name in names if hasattr(kind, name)]


def content_attributes(record: RequestRecord, max_chars: int) -> Attributes:
    """Return the prompt and the answers as JSON, each text cut to *max_chars* characters."""
    if record.operation is None:
        return {}
    contents = {
        "gen_ai.input.messages": input_messages(record.parameters, max_chars, record.messages),
        "gen_ai.output.messages": output_messages(record.answers, max_chars),
    }
    return {name: msgspec.json.encode(messages).decode() for name, messages in contents.items() if messages}


@lru_cache(64)
def call_attributes(model: str, url: str | None, endpoint: str | None, lora: str | None) -> Attributes:
    """
    Return the attributes of requests for *model* to the Triton at *url*; *lora* is the name of their LoRA adapter.
    """
    attributes: _OptionalAttributes = {
        "triton.model_name": model,
        "triton_openai.endpoint": endpoint,
        "triton_openai.lora": None if lora is None else _clean(lora),
    }
    if url is not None:
        attributes |= {"network.protocol.name": "grpc" if url.startswith("grpc") else "http", **_server(url)}
    return _known(attributes)


def _known(attributes: _OptionalAttributes) -> Attributes:
    return {name: value for name, value in attributes.items() if value is not None}


def _clean(text: str) -> str:
    """Return a client's *text* cut, and without lone surrogates, which cannot be sent."""
    return text[:_MAX_CHARS].encode("utf-8", "replace").decode("utf-8")


def _route(request: web.BaseRequest | None) -> str | None:
    if not isinstance(request, web.Request):
        return None
    resource = request.match_info.route.resource
    if resource is None:
        return None
    return resource.canonical


def _server(url: str) -> _OptionalAttributes:
    """Return the host and the port of *url*."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
        port = parts.port
    except ValueError:
        return {}
    if host:
        return {"server.address": printable(host, _MAX_CHARS), "server.port": port}
    return {}
