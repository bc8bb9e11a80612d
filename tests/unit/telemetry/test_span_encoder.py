"""The encoder of spans writes what OpenTelemetry's own writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from tests.collector import collecting
from triton_openai.config.tree import TracesSettings
from triton_openai.telemetry import otlp
from triton_openai.telemetry.otlp import Batch
from triton_openai.telemetry.span_encoder import encode_spans
from triton_openai.telemetry.tracing import SharedAttributes, Span, SpanIds

RESOURCE = otlp.resource()
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=100)
_FLOATS = st.floats(allow_nan=False)
_VALUES = _TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _FLOATS | st.lists(_TEXTS, max_size=6).map(tuple)
_ATTRIBUTES = st.dictionaries(_TEXTS, _VALUES, max_size=8)
_IDS, _TIMES = st.integers(1, 2**64 - 1), st.integers(0, 2**63)
_TRACE_IDS = st.integers(1, 2**128 - 1)
_STATES = st.sampled_from([TraceState(), TraceState([("a", "1"), ("b", "2")])])
_REQUESTS = st.builds(SpanIds, _TRACE_IDS, _IDS, st.just(True), st.none() | _STATES)
_LINKS = st.builds(SpanContext, _TRACE_IDS, _IDS, st.booleans(), st.just(TraceFlags(TraceFlags.SAMPLED)), _STATES)
_SHARED = st.builds(SharedAttributes, _ATTRIBUTES.map(lambda found: {f"shared.{name}": found[name] for name in found}))
_SPANS = st.builds(
    Span,
    name=_TEXTS,
    id=_IDS,
    parent=st.none() | _IDS,
    link=st.none() | _LINKS,
    kind=st.sampled_from(["INTERNAL", "SERVER", "CLIENT"]),
    began=_TIMES,
    ended=_TIMES,
    shared=st.lists(_SHARED, max_size=1),
    attributes=_ATTRIBUTES,
    first_token=st.none() | _TIMES,
    failed=st.booleans(),
)


def batch_of(*spans: tuple[SpanIds, Span]) -> Batch:
    """Return what is given to an exporter for *spans*."""
    batches: list[Batch] = []

    class Exporter(InMemorySpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            batches.append(spans)
            return SpanExportResult.SUCCESS

    sdk = otlp.SdkSpans(TracerProvider(resource=RESOURCE, shutdown_on_exit=False), Exporter(), SimpleSpanProcessor)
    sdk.export([otlp.Ended(request, [span]) for request, span in spans])
    return batches[0]


@given(st.lists(st.tuples(_REQUESTS, _SPANS), min_size=1, max_size=3))
def test_spans_are_encoded_as_by_the_sdk(spans: list[tuple[SpanIds, Span]]) -> None:
    """Attributes that were sent before among them."""
    batch = batch_of(*spans)
    for _ in range(2):
        assert trace_encoder.encode_spans(batch) == encode_spans(batch)


@pytest.mark.parametrize("value", [["a", "b"], 2**64, "\ud800", b"bytes", {"a": 1}])
def test_other_attributes_are_encoded_by_the_sdk(value: Any) -> None:
    """A sampler may add what our own spans do not have. What cannot be sent is left out, and costs no batch."""
    span = Span(name="a", id=2, parent=None, began=1, ended=2, attributes={"x": 1, "y": value})
    batch = batch_of((SpanIds(1, 2, True), span))
    assert trace_encoder.encode_spans(batch) == encode_spans(batch)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_exporters_use_it(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two spans, the SDK's own encoder sees one: it has the resource."""
    seen: list[int] = []
    own = trace_encoder.encode_spans

    def counted(spans: Any) -> Any:
        seen.append(len(spans))
        return own(spans)

    monkeypatch.setattr(trace_encoder, "encode_spans", counted)
    span = SpanIds(1, 2, True), Span(name="a", id=2, parent=None, began=1, ended=2, attributes={})
    with collecting() as collector:
        settings = TracesSettings(otlp_endpoint=collector.url(protocol), otlp_protocol=protocol)
        exporter = otlp.exporter_class(settings)(endpoint=settings.exporter_url)  # type: ignore[call-arg]
        exporter.export(batch_of(span, span))
        exporter.shutdown()
    assert (2, [1]) == (len(collector.spans), seen)
