"""Spans that are lost are counted: the operator sees that traces are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.proxy_fixture import serving
from triton_openai.config.tree import Settings, TracesSettings
from triton_openai.telemetry import otlp


class _Exporter(SpanExporter):
    """A collector that takes nothing."""

    def __init__(self, **_: Any) -> None:
        """Take any arguments."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("queue_is_full", [False, True])
async def test_lost_traces(queue_is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that does not take spans, and a full queue, both show in the metrics."""
    monkeypatch.setattr(otlp, "exporter_class", lambda _: _Exporter)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2" if queue_is_full else "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    if queue_is_full:
        # What is full is not sent.
        monkeypatch.setattr("opentelemetry.sdk._shared_internal.BatchProcessor._export", lambda *_: None)
    before = list(logging.getLogger(otlp._QUEUE_LOGGER).filters)
    settings = Settings(traces=TracesSettings(otlp_endpoint="http://127.0.0.1:1"))
    async with serving(settings) as proxy:
        for _ in range(5):
            await proxy.post("/v1/completions", {"model": "m", "prompt": "a"})
        expected = f"triton_openai_traces_lost_total {3 if queue_is_full else 5}.0"
        async with asyncio.timeout(120):
            while expected not in (await proxy.get("/metrics")).body.decode():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
    assert before == logging.getLogger(otlp._QUEUE_LOGGER).filters
