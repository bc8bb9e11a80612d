"""
Sends spans to a collector over OTLP, with OpenTelemetry's SDK.

Imported only where traces are wanted: the SDK takes a quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncIterator

import structlog
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from triton_openai import __version__
from triton_openai.config.sources import SDK_REFUSES
from triton_openai.config.tree import TracesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.telemetry.tracing import SCHEMA_URL

_log = structlog.get_logger(__name__)


def exporter_class(settings: TracesSettings) -> type[SpanExporter]:
    """Return the exporter that *settings* need. Raises :class:`ConfigurationError` where it is not installed."""
    try:
        protocol = "grpc" if settings.protocol == "grpc" else "http"
        module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter")
    except ImportError as error:
        raise ConfigurationError(
            f"Traces are to be sent to {settings.otlp_endpoint}, but the exporter is not installed ({error.name}): "
            "install triton-openai[otlp], or switch traces off with OTEL_SDK_DISABLED=true.",
            param="otlp_endpoint",
        ) from error
    exporter: type[SpanExporter] = module.OTLPSpanExporter
    return exporter


def resource() -> Resource:
    """Return the resource that the environment describes, with this program's name and version as defaults."""
    defaults = Resource.create({"service.name": "triton-openai", "service.version": __version__}, SCHEMA_URL)
    return defaults.merge(OTELResourceDetector().detect())


@contextlib.asynccontextmanager
async def tracer(settings: TracesSettings, *, flush_timeout: float) -> AsyncIterator[Tracer]:
    """
    Yield a tracer whose spans are sent as *settings* say; the last ones have *flush_timeout* seconds at the end.

    Enter it in the process that serves: its thread does not survive a fork. Raises :class:`ConfigurationError` for
    variables that the SDK refuses.
    """
    try:
        provider = TracerProvider(resource=resource(), shutdown_on_exit=False)
        exporter = exporter_class(settings)(endpoint=settings.exporter_url)  # type: ignore[call-arg]
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except Exception as error:
        # Any exception: only the SDK's own variables can still be wrong.
        raise ConfigurationError(f"{SDK_REFUSES}: {error}") from error
    try:
        yield provider.get_tracer("triton_openai", __version__, schema_url=SCHEMA_URL)
    finally:
        # In a thread: the SDK may take 30 seconds.
        thread = threading.Thread(target=provider.shutdown, name="last-spans", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, flush_timeout)
        if thread.is_alive():
            _log.warning("the last spans were not sent", seconds=flush_timeout)
            # Stops the attempts to reach a collector.
            threading.Thread(target=exporter.shutdown, daemon=True).start()
