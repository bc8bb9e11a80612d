"""Metrics and traces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from triton_openai.config.tree.fields import Characters, SettingsGroup, common_flag, file_only, flag

#: How OTLP can be spoken, and the port that it has for itself then.
Protocol = Literal["grpc", "http/protobuf"]
OTLP_PORTS: Mapping[Protocol, int] = {"grpc": 4317, "http/protobuf": 4318}
#: The path of traces at a collector that takes OTLP over HTTP.
OTLP_PATH = "/v1/traces"


class MetricsSettings(SettingsGroup, frozen=True):
    """The metrics for Prometheus."""

    vllm_names: Annotated[
        bool,
        flag(
            "Also export the main metrics under vLLM's names, for its dashboards and gateways, and report a model's "
            "load in answers to requests that ask for it.",
            name="vllm-metrics",
        ),
    ] = False
    relay_triton: Annotated[
        bool, flag("Also export Triton's own metrics, read from triton-metrics-url.", name="relay-triton-metrics")
    ] = False
    triton_url: Annotated[
        str | None,
        flag(
            "URL of Triton's metrics; by default port 8002 of the host in triton-url, or that of the Triton that this "
            "service starts.",
            name="triton-metrics-url",
        ),
    ] = None


class TracesSettings(SettingsGroup, frozen=True):
    """
    Spans of each request, for OpenTelemetry. The SDK's environment variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and so on) set the rest.
    """

    otlp_endpoint: Annotated[
        str | None,
        common_flag(
            "Send traces to this collector, http(s)://HOST:PORT; by default OTEL_EXPORTER_OTLP_ENDPOINT, if it is set.",
            metavar="URL",
        ),
    ] = None
    otlp_protocol: Annotated[
        Protocol | None,
        file_only(
            "Protocol of the collector; by default OTEL_EXPORTER_OTLP_PROTOCOL, else grpc on port 4317 and "
            "http/protobuf on every other."
        ),
    ] = None
    content: Annotated[
        Characters | None,
        file_only(
            "Put prompts and answers into spans, each text cut to this many characters; by default only if "
            "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says so."
        ),
    ] = None

    @property
    def protocol(self) -> Protocol:
        """How the collector is spoken to."""
        if self.otlp_protocol is not None:
            return self.otlp_protocol
        port = urlsplit(self.otlp_endpoint or "").port
        if port == OTLP_PORTS["grpc"]:
            return "grpc"
        return "http/protobuf"

    @property
    def exporter_url(self) -> str | None:
        """The address of the collector in the form of the exporter for :attr:`protocol`: over HTTP with a path."""
        url = self.otlp_endpoint
        if url is None or self.protocol == "grpc" or urlsplit(url).path.strip("/"):
            return url
        # A URL that ends with its port, or with a slash after it, is a whole collector's, whichever variable has it.
        return url.rstrip("/") + OTLP_PATH
