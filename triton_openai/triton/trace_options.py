"""How a Triton that is started here joins the traces of the service."""

from __future__ import annotations

from triton_openai.config.traces import TracesSettings


def trace_options(traces: TracesSettings) -> list[str]:
    """
    Return the flags with which Triton sends its own spans to the same collector: none where it cannot.

    It records what the service asks for and nothing else (a rate of 0), and speaks OTLP over HTTP only. Source:
    Triton's ``trace.md``; its exporter takes headers and certificates from ``OTEL_EXPORTER_OTLP_*`` as ours does.
    """
    if traces.exporter_url is None or traces.protocol == "grpc":
        return []
    options = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={traces.exporter_url}")
    return [f"--trace-config={option}" for option in options]
