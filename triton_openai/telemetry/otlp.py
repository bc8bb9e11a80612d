"""
Sends spans to a collector: OpenTelemetry's SDK and its exporters, put together.

The SDK reads its own environment variables for whatever is no setting here: headers, certificates, compression,
timeouts, sampling, limits, batches and the resource. Spans are sent by a thread of the SDK: a collector that is slow,
refuses or is not there costs spans and never a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from triton_openai import __version__
from triton_openai.config.traces import SDK_REFUSES, TracesSettings
from triton_openai.errors import ConfigurationError

SERVICE_NAME = "triton-openai"
_SCOPE = "triton_openai"
# Longest time that an exporter takes to give up.
_GIVE_UP_SECONDS = 0.5
_log = structlog.get_logger(__name__)


def check_installed(settings: TracesSettings) -> None:
    """Raise :class:`ConfigurationError` where the exporter of these settings is not installed, before anything runs."""
    try:
        if settings.protocol == "grpc":
            import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
        else:
            import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401
    except ImportError as error:
        raise ConfigurationError(
            f"Traces are to be sent to {settings.otlp_endpoint}, and what sends them is not installed ({error.name}): "
            "install triton-openai[otlp], or switch traces off with OTEL_SDK_DISABLED=true.",
            param="otlp_endpoint",
        ) from error


def _exporter(settings: TracesSettings) -> SpanExporter:
    url = settings.exporter_url
    if settings.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=url)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=url)


def resource() -> Resource:
    """Return who sends the spans: what the environment says, and the name of this program where it says none."""
    found = Resource.create()
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": SERVICE_NAME}))
    return Resource({"service.version": __version__}).merge(found)


@contextlib.asynccontextmanager
async def tracer(settings: TracesSettings, *, flush_timeout: float) -> AsyncIterator[Tracer]:
    """
    Yield what makes spans that are sent as *settings* say.

    To be entered in the process that serves, since its thread does not survive a fork. When left, what is still to be
    sent has *flush_timeout* seconds. Raises :class:`ConfigurationError` for variables that the SDK does not take.
    """
    try:
        provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        exporter = _exporter(settings)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except Exception as error:
        # Of whatever kind: only its variables are left that could be wrong.
        raise ConfigurationError(f"{SDK_REFUSES}: {error}") from error
    try:
        yield provider.get_tracer(_SCOPE, __version__)
    finally:
        await _shut_down(provider, exporter, flush_timeout)


async def _shut_down(provider: TracerProvider, exporter: SpanExporter, timeout: float) -> None:
    if await _within(timeout, provider.shutdown):
        return
    _log.warning("the last spans were not sent", seconds=timeout)
    # Ends the attempts to reach a collector, for which the provider is waiting.
    await _within(_GIVE_UP_SECONDS, exporter.shutdown)


async def _within(timeout: float, function: Callable[[], None]) -> bool:
    """
    Call *function* in a thread, and return whether it has ended within *timeout* seconds.

    Nobody waits for the thread in the end, as they would for those of the loop's own pool: the SDK may take 30 seconds.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def call() -> None:
        function()
        # Too late for a loop that has waited long enough.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="last-spans", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), timeout)
    except asyncio.TimeoutError:
        return False
    return True
