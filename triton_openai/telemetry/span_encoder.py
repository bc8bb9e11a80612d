"""
Encodes spans as OpenTelemetry's exporters do, at a tenth of the cost.

Most attributes of a service's spans are the same in span after span, and encoded once. Imported where an exporter is:
its package brings protobuf's messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
from opentelemetry.proto.trace.v1.trace_pb2 import SpanFlags, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind

from triton_openai.telemetry.otlp import Batch
from triton_openai.telemetry.tracing import FIRST_TOKEN, Attributes, SharedAttributes, Span, SpanIds

_FIELDS: Mapping[type, str] = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
_LOCAL = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
_REMOTE = _LOCAL | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
_KINDS = {kind.name: Message.SpanKind.Value(f"SPAN_KIND_{kind.name}") for kind in SpanKind}
_OK, _FAILED = Status(), Status(code=Status.STATUS_CODE_ERROR)


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """Return the message with *spans*."""
    if not isinstance(spans, Batch):
        return trace_encoder.encode_spans(spans)
    message = trace_encoder.encode_spans(spans[:1])
    found = message.resource_spans[0].scope_spans[0].spans
    del found[:]
    try:
        for ids, span in spans.spans:
            _add(found, ids, span)
    except (LookupError, TypeError, ValueError):
        # Of a sampler's attributes, the SDK's encoder takes more, and leaves out what cannot be sent.
        return trace_encoder.encode_spans(spans)
    return message


def _add(found: Any, ids: SpanIds, span: Span) -> None:
    message = found.add(
        trace_id=ids.trace_id.to_bytes(16, "big"),
        span_id=span.id.to_bytes(8, "big"),
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.began,
        end_time_unix_nano=span.ended,
        attributes=_attributes(span.attributes),
        status=_FAILED if span.failed else _OK,
        flags=_REMOTE if span.remote else _LOCAL,
    )
    for shared in span.shared:
        message.MergeFromString(shared.encoded or _encoded(shared))
    if span.parent is not None:
        message.parent_span_id = span.parent.to_bytes(8, "big")
    if ids.state:
        message.trace_state = ids.state.to_header()
    if span.first_token is not None:
        message.events.add(name=FIRST_TOKEN, time_unix_nano=span.first_token)
    if span.link is not None:
        trace_id, span_id = span.link.trace_id.to_bytes(16, "big"), span.link.span_id.to_bytes(8, "big")
        message.links.add(trace_id=trace_id, span_id=span_id, flags=_REMOTE if span.link.is_remote else _LOCAL)


def _encoded(shared: SharedAttributes) -> bytes:
    """Return a span that has these attributes alone, and keep it."""
    shared.encoded = Message(attributes=_attributes(shared.values)).SerializeToString()
    return shared.encoded


def _attributes(found: Attributes) -> Any:
    """Return *found* as protobuf takes it for messages, which would take twice as long to make."""
    return [
        {"key": name, "value": _array(value) if type(value) is tuple else {_FIELDS[type(value)]: value}}
        for name, value in found.items()
    ]


def _array(values: Sequence[Any]) -> Mapping[str, Any]:
    return {"array_value": {"values": [{_FIELDS[type(value)]: value} for value in values]}}
