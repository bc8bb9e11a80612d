"""A collector for OpenTelemetry traces on loopback: OTLP over HTTP (protobuf and JSON) and over gRPC."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Thread
from typing import Any

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.http_server import QuietHttpServer


@dataclass(frozen=True, kw_only=True)
class CollectedSpan:
    """A span as it came; ids are in hexadecimal, *parent* is empty for a root, times are in nanoseconds."""

    resource: Mapping[str, Any]
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    state: str
    began: int
    ended: int
    attributes: Mapping[str, Any]
    schemas: set[str]
    events: Sequence[str]
    failed: bool

    @property
    def service(self) -> str:
        """Who made it."""
        return str(self.resource["service.name"])


@dataclass
class Collector:
    """What has come so far, and where more can be sent."""

    http_url: str = ""
    grpc_url: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    headers: list[Mapping[str, str]] = field(default_factory=list)

    def of(self, trace: str, service: str | None = None) -> list[CollectedSpan]:
        """Return the spans of a trace, those of one *service* only if it is given."""
        return [span for span in self.spans if span.trace == trace and service in (None, span.service)]

    def url(self, protocol: str) -> str:
        """Return where *protocol* is spoken."""
        return self.grpc_url if protocol == "grpc" else self.http_url

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what has come fulfils *condition*."""

        async def wait() -> None:
            while not condition():  # noqa: ASYNC110 - the servers' threads know no loop
                await asyncio.sleep(0.01)

        try:
            await asyncio.wait_for(wait(), 120)
        except TimeoutError:
            last = [(span.service, span.kind, span.name, span.trace, span.parent) for span in self.spans[-40:]]
            raise AssertionError(f"what was waited for has not come; the last spans are {last}") from None

    def add(self, request: ExportTraceServiceRequest, headers: Mapping[str, str]) -> None:
        """Take what one call brought."""
        found = [
            CollectedSpan(
                resource=_values(resource.resource.attributes),
                name=span.name,
                kind=span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                state=span.trace_state,
                began=span.start_time_unix_nano,
                ended=span.end_time_unix_nano,
                attributes=_values(span.attributes),
                schemas={resource.schema_url, scope.schema_url},
                events=[event.name for event in span.events],
                failed=span.status.code == span.status.STATUS_CODE_ERROR,
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        self.headers.append(headers)
        self.spans += found


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector = Collector()
    http = QuietHttpServer(("127.0.0.1", 0), _handler(collector))
    collector.http_url = f"http://127.0.0.1:{http.server_port}"
    serving = Thread(target=http.serve_forever, daemon=True)
    serving.start()
    server = grpc.server(ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Servicer(collector), server)
    collector.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
        http.shutdown()
        http.server_close()
        serving.join()


class _Servicer(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(self, request: Any, context: Any) -> ExportTraceServiceResponse:  # noqa: N802 - the protocol's name
        self._collector.add(request, {key: str(value) for key, value in context.invocation_metadata()})
        return ExportTraceServiceResponse()


def _handler(collector: Collector) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # Senders keep their connections.
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            status = 200 if self.path == "/v1/traces" else 404
            if status == 200:
                # Triton sends JSON, for which OTLP has a rule of its own: ids are in hexadecimal.
                read = _from_json if self.headers["Content-Type"] == "application/json" else _from_protobuf
                collector.add(read(body), {key.lower(): value for key, value in self.headers.items()})
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _from_protobuf(body: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(body)


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    def with_ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: base64.b64encode(bytes.fromhex(inner)).decode()
                if key in {"traceId", "spanId", "parentSpanId"}
                else with_ids(inner)
                for key, inner in value.items()
            }
        return [with_ids(inner) for inner in value] if isinstance(value, list) else value

    request = ExportTraceServiceRequest()
    json_format.ParseDict(with_ids(json.loads(body)), request, ignore_unknown_fields=True)
    return request


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
