"""Settings of the traces, and what OpenTelemetry's own environment variables say in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from triton_openai.errors import ConfigurationError


class MetricsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What Prometheus is given."""

    enabled: Annotated[bool, Meta(description="Answer at /metrics.", extra={"file_only": True, "name": "metrics"})] = (
        True
    )
    vllm_names: Annotated[
        bool,
        Meta(
            description="Give the main metrics under vLLM's names too; dashboards, autoscalers and gateways "
            "read those.",
            extra={"common": True, "name": "vllm-metrics"},
        ),
    ] = False
    relay_triton: Annotated[
        bool,
        Meta(
            description="Give Triton's own metrics too, read from triton-metrics-url.",
            extra={"name": "relay-triton-metrics"},
        ),
    ] = False
    triton_url: Annotated[
        str | None,
        Meta(
            description="Where Triton has its metrics; by default port 8002 of the host in triton-url, or where a "
            "Triton that is started here has them.",
            extra={"name": "triton-metrics-url", "metavar": "URL"},
        ),
    ] = None


Protocol = Literal["grpc", "http/protobuf"]

#: Ports that OTLP has for itself, by protocol.
OTLP_PORTS: Mapping[Protocol, int] = {"grpc": 4317, "http/protobuf": 4318}
#: What is behind the address of a collector that is spoken to over HTTP.
_TRACES_PATH = "/v1/traces"
_CONTENT_VARIABLE = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"
# What it can say, of OpenTelemetry's instrumentations of generative AI; there are no events here, only spans.
_CONTENT_WORDS = {
    "true": True,
    "span_only": True,
    "span_and_event": True,
    "false": False,
    "no_content": False,
    "event_only": False,
}
#: What the program says, before the SDK's own words, of variables that are read by nobody but the SDK.
SDK_REFUSES = "OpenTelemetry's SDK does not accept one of its environment variables (OTEL_...)"
#: Characters of each text where that variable wants content, and no setting says how much.
CONTENT_CHARACTERS = 1024


class TracesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """
    Spans of each request, for OpenTelemetry. The SDK's environment variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS and so on) say the rest.
    """

    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="Send traces to this collector: http(s)://HOST:PORT. By default what "
            "OTEL_EXPORTER_OTLP_ENDPOINT says; without either there are none.",
            extra={"common": True, "metavar": "URL"},
        ),
    ] = None
    otlp_protocol: Annotated[
        Protocol | None,
        Meta(
            description="How the collector is spoken to. By default what OTEL_EXPORTER_OTLP_PROTOCOL says, else grpc "
            "on port 4317 and http/protobuf on every other.",
            extra={"file_only": True},
        ),
    ] = None
    continue_traces: Annotated[
        bool,
        Meta(
            description="Continue the trace that a client's traceparent header names, and carry it to Triton, also "
            "where no traces are sent from here.",
            extra={"file_only": True},
        ),
    ] = True
    content: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Put prompts and answers into spans too, each text cut to this many characters. By default "
            "what OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT says; without either there are none.",
            extra={"file_only": True, "name": "trace-content"},
        ),
    ] = None

    @property
    def protocol(self) -> Protocol:
        """How the collector is spoken to."""
        if self.otlp_protocol is not None:
            return self.otlp_protocol
        port = urlsplit(self.otlp_endpoint or "").port
        return "grpc" if port == OTLP_PORTS["grpc"] else "http/protobuf"

    @property
    def exporter_url(self) -> str | None:
        """Where spans are sent, as the exporter of :attr:`protocol` takes it: over HTTP with a path."""
        url = self.otlp_endpoint
        if url is None or self.protocol == "grpc" or urlsplit(url).path.strip("/"):
            return url
        # A URL that ends with its port, or with a slash after it, is a whole collector's, whichever variable has it.
        return url.rstrip("/") + _TRACES_PATH


class StandardVariables(msgspec.Struct, frozen=True, kw_only=True):
    """What OpenTelemetry's variables say, each with the name of the variable; ``None`` where none of them does."""

    disabled: bool = False
    endpoint: tuple[str, str] | None = None
    protocol: tuple[str, str] | None = None
    content: tuple[int, str] | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> StandardVariables:
        """
        Read them; an empty variable counts as one that is not set.

        Source: OpenTelemetry's specification, "Environment Variable Specification" and "OpenTelemetry Protocol
        Exporter". Raises :class:`ConfigurationError` for an exporter that is not here.
        """
        content = environ.get(_CONTENT_VARIABLE, "").strip().lower() or "false"
        if content not in _CONTENT_WORDS:
            raise ConfigurationError(
                f"{_CONTENT_VARIABLE}: {content!r} is not accepted: expected SPAN_ONLY, SPAN_AND_EVENT, true, or "
                "NO_CONTENT, EVENT_ONLY, false."
            )
        exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
        if exporter not in ("", "otlp", "none"):
            raise ConfigurationError(f"OTEL_TRACES_EXPORTER: {exporter!r} is not accepted: expected otlp or none.")
        protocol = _first(environ, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
        endpoint = None if exporter == "none" else _endpoint(environ, None if protocol is None else protocol[0])
        if endpoint is None and exporter == "otlp":
            port = OTLP_PORTS["grpc" if protocol is not None and protocol[0] == "grpc" else "http/protobuf"]
            endpoint = (f"http://localhost:{port}", "OTEL_TRACES_EXPORTER")
        return cls(
            disabled=environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true",
            endpoint=endpoint,
            protocol=protocol,
            content=(CONTENT_CHARACTERS, _CONTENT_VARIABLE) if _CONTENT_WORDS[content] else None,
        )


def _endpoint(environ: Mapping[str, str], protocol: str | None) -> tuple[str, str] | None:
    """Return the address, in the form of :attr:`TracesSettings.otlp_endpoint`."""
    found = _first(environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if found is None:
        return None
    url, variable = found
    if "://" not in url:
        # Allowed for gRPC, whose own addresses have no scheme.
        insecure = _first(environ, "OTEL_EXPORTER_OTLP_TRACES_INSECURE", "OTEL_EXPORTER_OTLP_INSECURE")
        url = f"{'http' if insecure is not None and insecure[0].lower() == 'true' else 'https'}://{url}"
    if variable == "OTEL_EXPORTER_OTLP_ENDPOINT" and urlsplit(url).path.strip("/") and protocol != "grpc":
        # The address of a whole collector: each kind of data has its path below it.
        url = url.rstrip("/") + _TRACES_PATH
    return url, variable


def _first(environ: Mapping[str, str], *names: str) -> tuple[str, str] | None:
    return next(((value, name) for name in names if (value := environ.get(name, "").strip())), None)


def check_endpoint(url: str, origin: str) -> None:
    """Raise :class:`ConfigurationError` for what cannot be a collector's address."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{origin}: {url!r} is not an address: {error}.") from error
    if parts.scheme not in {"http", "https"} or "://" not in url:
        raise ConfigurationError(
            f"{origin}: {url!r} is not accepted: it has to begin with http:// or https://, for gRPC too."
        )
    if not host:
        raise ConfigurationError(f"{origin}: {url!r} names no host.")
    if parts.username or parts.password or parts.fragment:
        raise ConfigurationError(
            f"{origin}: {parts.scheme}://{host} takes no user, password or fragment; OTEL_EXPORTER_OTLP_HEADERS can "
            "hold a token."
        )
