"""The encoder of spans writes what OpenTelemetry's own writes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common import trace_encoder
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tests.collector import collecting
from triton_openai.config.tree import TracesSettings
from triton_openai.telemetry import otlp
from triton_openai.telemetry.span_encoder import encode_spans

RESOURCE = otlp.resource()
SCOPE = InstrumentationScope("triton_openai", "1", "https://example.com/schema")
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=100)
# Without -0.0, which is kept as 0.0.
_FLOATS = st.floats(allow_nan=False).map(lambda number: number + 0.0)
_VALUES = _TEXTS | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _FLOATS
_CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.just(TraceFlags(TraceFlags.SAMPLED)),
    st.sampled_from([TraceState(), TraceState([("a", "1"), ("b", "2")])]),
)
_SPANS = st.builds(
    ReadableSpan,
    name=_TEXTS,
    context=_CONTEXTS,
    parent=st.none() | _CONTEXTS,
    resource=st.just(RESOURCE),
    attributes=st.dictionaries(_TEXTS, _VALUES | st.lists(_TEXTS, max_size=6).map(tuple), max_size=8),
    events=st.lists(st.builds(Event, _TEXTS, timestamp=st.integers(0, 2**63)), max_size=1).map(tuple),
    links=st.lists(st.builds(Link, _CONTEXTS), max_size=2).map(tuple),
    kind=st.sampled_from(SpanKind),
    status=st.sampled_from(StatusCode).map(Status),
    start_time=st.integers(0, 2**63),
    end_time=st.integers(0, 2**63),
    instrumentation_scope=st.just(SCOPE),
)


@given(st.lists(_SPANS, min_size=1, max_size=3))
def test_spans_are_encoded_as_by_the_sdk(spans: list[ReadableSpan]) -> None:
    """Equal values of several types among them, long ones, and those that were there before."""
    for _ in range(2):
        assert trace_encoder.encode_spans(spans) == encode_spans(spans)


@pytest.mark.parametrize("value", [["a", "b"], 2**64, "\ud800", b"bytes", {"a": 1}])
def test_other_attributes_are_encoded_by_the_sdk(value: Any) -> None:
    """A sampler may add what our own spans do not have. What cannot be sent is left out, and costs no batch."""
    context = SpanContext(1, 2, False)
    span = ReadableSpan("a", context, None, RESOURCE, {"x": 1, "y": value}, instrumentation_scope=SCOPE)
    assert trace_encoder.encode_spans([span]) == encode_spans([span])


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_exporters_use_it(protocol: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two spans, the SDK's own encoder sees one: it has the resource."""
    seen: list[int] = []
    own = trace_encoder.encode_spans

    def counted(spans: Any) -> Any:
        seen.append(len(spans))
        return own(spans)

    monkeypatch.setattr(trace_encoder, "encode_spans", counted)
    span = ReadableSpan("a", SpanContext(1, 2, False), None, RESOURCE, start_time=1, end_time=2)
    with collecting() as collector:
        settings = TracesSettings(otlp_endpoint=collector.url(protocol), otlp_protocol=protocol)
        exporter = otlp.exporter_class(settings)(endpoint=settings.exporter_url)  # type: ignore[call-arg]
        exporter.export([span, span])
        exporter.shutdown()
    assert (2, [1]) == (len(collector.spans), seen)
