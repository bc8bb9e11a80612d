"""
Sends spans to a collector over OTLP, with OpenTelemetry's SDK.

Imported only where traces are wanted: the SDK takes a quarter of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import threading
from collections.abc import AsyncIterator, Callable

import structlog
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer

from triton_openai import __version__
from triton_openai.config.observability import SDK_REFUSES, TracesSettings
from triton_openai.errors import ConfigurationError

# How long the exporter takes to give up.
_ABORT_SECONDS = 0.5
_log = structlog.get_logger(__name__)


def exporter_class(settings: TracesSettings) -> type[SpanExporter]:
    """Return the exporter that *settings* need. Raises :class:`ConfigurationError` where it is not installed."""
    protocol = "grpc" if settings.protocol == "grpc" else "http"
    try:
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
    found = Resource.create()
    if str(found.attributes.get("service.name", "")).startswith("unknown_service"):
        found = found.merge(Resource({"service.name": "triton-openai"}))
    return Resource({"service.version": __version__}).merge(found)


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
        # Of whatever kind: only the SDK's variables can still be wrong.
        raise ConfigurationError(f"{SDK_REFUSES}: {error}") from error
    try:
        yield provider.get_tracer("triton_openai", __version__)
    finally:
        if not await _call_in_thread(provider.shutdown, flush_timeout):
            _log.warning("the last spans were not sent", seconds=flush_timeout)
            # Ends the attempts to reach a collector, for which the provider waits.
            await _call_in_thread(exporter.shutdown, _ABORT_SECONDS)


async def _call_in_thread(function: Callable[[], None], timeout: float) -> bool:
    """
    Call *function* in a thread; return whether it ended within *timeout* seconds.

    The process does not wait for the thread, as it would for one of the loop's pool: the SDK may take 30 seconds.
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def call() -> None:
        function()
        # The loop may be closed by now.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=call, name="last-spans", daemon=True).start()
    try:
        async with asyncio.timeout(timeout):
            await done.wait()
    except TimeoutError:
        return False
    return True
