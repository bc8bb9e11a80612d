"""
Sends spans to a collector over OTLP, with OpenTelemetry's SDK.

Imported only if traces are sent: the SDK takes a quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import structlog
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
)

from triton_openai import __version__
from triton_openai.config.sources import SDK_REFUSES
from triton_openai.config.tree import TracesSettings
from triton_openai.errors import ConfigurationError, install_advice
from triton_openai.telemetry.request_record import RequestRecord
from triton_openai.telemetry.tracing import FIRST_TOKEN, SCHEMA_URL, Attributes, Span, SpanIds, Spans, span_name

_log = structlog.get_logger(__name__)
# Of a message: those of as many requests as the SDK exports at once by default.
_MAX_SPANS = 1024
# The logger in which the SDK reports that its queue is full.
_QUEUE_LOGGER = "opentelemetry.sdk._shared_internal"
# More than our spans have, with those of a sampler: the SDK's own limit.
_MAX_ATTRIBUTES = 128
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)
_FAILED = Status(StatusCode.ERROR)


def exporter_class(settings: TracesSettings) -> type[SpanExporter]:
    """Return the exporter that *settings* need. Raises :class:`ConfigurationError` where it is not installed."""
    try:
        if settings.protocol == "grpc":
            protocol = "grpc"
        else:
            protocol = "http"
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    except ImportError as error:
        raise ConfigurationError(
            f"Traces are to be sent to {settings.otlp_endpoint}, but the exporter is not installed ({error.name}). "
            f"Use {install_advice('otlp')}. To switch traces off, set OTEL_SDK_DISABLED=true.",
            param="otlp_endpoint",
        ) from error
    exporter: type[SpanExporter] = module.OTLPSpanExporter
    return exporter


def resource() -> Resource:
    """Return the resource that the environment describes, with this program's name and version as defaults."""
    defaults = Resource.create({"service.name": "triton-openai", "service.version": __version__}, SCHEMA_URL)
    return defaults.merge(OTELResourceDetector().detect())


class QueuedSpans(msgspec.Struct, gc=False):
    """The spans of one request in the SDK's queue, which reads only ``context``: all are sampled."""

    ids: SpanIds
    spans: Sequence[Span]
    context: ClassVar = SpanContext(1, 1, False, _SAMPLED)


class SdkSpans(Spans, SpanExporter):
    """
    Queues the spans of each request, and sends them by *exporter*.

    *lost* is called with the number of requests whose spans the collector did not take, in the thread that sends.

    The sampler, the ids, the limits and the resource are those of *provider*. The SDK's own way checks and locks for
    every attribute while the event loop waits. Here the SDK's spans are made in the thread that sends them.
    """

    def __init__(
        self,
        provider: TracerProvider,
        exporter: SpanExporter,
        processor: Callable[[SpanExporter], SpanProcessor],
        lost: Callable[[int], object],
    ) -> None:
        self._lost = lost
        self._sampler = provider.sampler
        self._ids = provider.id_generator
        self._resource = provider.resource
        self.new_id = self._ids.generate_span_id
        self._exporter = exporter
        self._scope = InstrumentationScope("triton_openai", __version__, SCHEMA_URL)
        limits = SpanLimits()
        self._max_attributes = limits.max_span_attributes
        self._max_attribute_length = limits.max_span_attribute_length
        self._unlimited = self._max_attribute_length is None and (
            self._max_attributes is None or self._max_attributes >= _MAX_ATTRIBUTES
        )
        self._processor = processor(self)
        provider.add_span_processor(self._processor)

    def begin(self, record: RequestRecord, parent: Context, attributes: Attributes) -> SpanIds:
        trace_id = 0
        sampled = True
        state = None
        if parent:
            above = get_current_span(parent).get_span_context()
            trace_id = above.trace_id
            state = above.trace_state
            sampled = not above.is_valid or above.trace_flags.sampled
        trace_id = trace_id or self._ids.generate_trace_id()
        # What the default decides is known: asking it takes a tenth of the cost of a trace.
        if self._sampler is not DEFAULT_ON:
            name = span_name(record)
            sampling = self._sampler.should_sample(parent, trace_id, name, SpanKind.SERVER, attributes, ())
            attributes.update(sampling.attributes)
            sampled = sampling.decision is Decision.RECORD_AND_SAMPLE
            state = sampling.trace_state
        return SpanIds(trace_id, self.new_id(), sampled, state)

    def end(self, ids: SpanIds, spans: Sequence[Span]) -> None:
        # All that the processor reads of a span.
        ended: Any = QueuedSpans(ids, spans)
        self._processor.on_end(ended)

    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        """Send what :meth:`end` has queued, in messages that collectors take."""
        made: list[ReadableSpan] = []
        for request in spans:
            made += [self._made(request.ids, span) for span in request.spans]
        results = [self._exporter.export(made[at : at + _MAX_SPANS]) for at in range(0, len(made), _MAX_SPANS)]
        if SpanExportResult.FAILURE in results:
            self._lost(len(spans))
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Drop the spans that are not sent."""
        self._exporter.shutdown()

    def _made(self, ids: SpanIds, span: Span) -> ReadableSpan:
        attributes: Mapping[str, Any] = span.all_attributes
        if not self._unlimited:
            attributes = BoundedAttributes(self._max_attributes, attributes, max_value_len=self._max_attribute_length)
        same = _SAMPLED, ids.state
        return ReadableSpan(
            span.name,
            SpanContext(ids.trace_id, span.id, False, *same),
            None if span.parent is None else SpanContext(ids.trace_id, span.parent, span.remote, *same),
            self._resource,
            attributes,
            () if span.first_token is None else (Event(FIRST_TOKEN, timestamp=span.first_token),),
            () if span.link is None else (Link(span.link),),
            kind=SpanKind[span.kind],
            status=_FAILED if span.failed else _UNSET,
            start_time=span.began,
            end_time=span.ended,
            instrumentation_scope=self._scope,
        )


class _GrpcHint(logging.Filter):
    """Logs once that a collector answers HTTP with a frame of HTTP/2, in place of all such lines of the SDK."""

    _logged = False
    _hides_failure = False

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a line of the exporter over HTTP is logged."""
        text = record.getMessage()
        if "BadStatusLine" in text and "\\x00\\x00" in text:
            if not self._logged:
                _log.error("the collector uses gRPC: set traces.otlp_protocol, or OTEL_EXPORTER_OTLP_PROTOCOL, to grpc")
            self._logged = True
            self._hides_failure = True
            return False
        # The line that a batch is given up follows those of its attempts.
        hidden = self._hides_failure
        self._hides_failure = False
        return not hidden


class _QueueFull(logging.Filter):
    """Calls *lost* for each request whose spans did not fit into the queue, which the SDK reports in its log only."""

    def __init__(self, lost: Callable[[int], object]) -> None:
        super().__init__()
        self._lost = lost

    def filter(self, record: logging.LogRecord) -> bool:
        """Count the loss, and keep the line."""
        if record.getMessage().startswith("Queue full, dropping Span"):
            self._lost(1)
        return True


@contextlib.asynccontextmanager
async def spans(
    settings: TracesSettings, *, flush_timeout: float, lost: Callable[[int], object]
) -> AsyncIterator[Spans]:
    """
    Yield the exporter of spans for *settings*; at the end, the last spans have *flush_timeout* seconds to be sent.

    *lost* is called in the event loop with the number of requests whose spans were lost.

    Enter it in the process that serves: its thread does not survive a fork. Raises :class:`ConfigurationError` for
    variables that the SDK refuses.
    """
    loop = asyncio.get_running_loop()

    def lost_later(number: int) -> None:
        # The loop may have ended before the last spans.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(lost, number)

    try:
        provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        exporter = exporter_class(settings)(endpoint=settings.exporter_url)  # type: ignore[call-arg]
        made = SdkSpans(provider, exporter, BatchSpanProcessor, lost=lost_later)
    except Exception as error:
        # Any exception: only the SDK's own variables can still be wrong.
        raise ConfigurationError(f"{SDK_REFUSES}: {error}") from error
    log = logging.getLogger(type(exporter).__module__)
    grpc_hint = _GrpcHint()
    log.addFilter(grpc_hint)
    # First: the SDK's own filter drops lines that are alike.
    queue_log = logging.getLogger(_QUEUE_LOGGER)
    queue_full = _QueueFull(lost)
    queue_log.filters.insert(0, queue_full)
    try:
        yield made
    finally:
        # In a thread: the SDK may take 30 seconds.
        thread = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, flush_timeout)
        if thread.is_alive():
            _log.warning("the last spans were not sent", seconds=flush_timeout)
            # Stops the attempts to reach a collector.
            threading.Thread(target=exporter.shutdown, daemon=True).start()
        log.removeFilter(grpc_hint)
        queue_log.removeFilter(queue_full)
