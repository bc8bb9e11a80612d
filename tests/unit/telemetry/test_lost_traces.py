"""Spans that are lost are counted: the operator sees that traces are missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.proxy_fixture import Proxy, serving
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


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return settings whose traces go to a collector that takes nothing, from a queue of two requests."""
    monkeypatch.setattr(otlp, "exporter_class", lambda _: _Exporter)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    return Settings(traces=TracesSettings(otlp_endpoint="http://127.0.0.1:1"))


async def _complete(proxy: Proxy) -> None:
    await proxy.post("/v1/completions", {"model": "m", "prompt": "a"})


async def _until_lost(proxy: Proxy, number: int) -> None:
    """Wait until the metrics count *number* requests whose traces are lost."""
    async with asyncio.timeout(120):
        while f"triton_openai_traces_lost_total {number}.0" not in (await proxy.get("/metrics")).body.decode():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_a_collector_that_takes_nothing(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request whose spans the collector does not take shows in the metrics."""
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    # The SDK's thread forgets a span that arrives while it ends a batch, until this many milliseconds have passed.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    async with serving(settings) as proxy:
        for number in range(1, 6):
            await _complete(proxy)
            # Else the queue can become full.
            await _until_lost(proxy, number)


async def test_a_full_queue(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request whose spans do not fit into the queue shows in the metrics."""
    monkeypatch.setattr("opentelemetry.sdk._shared_internal.BatchProcessor._export", lambda *_: None)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    before = list(logging.getLogger(otlp._QUEUE_LOGGER).filters)
    async with serving(settings) as proxy:
        for _ in range(5):
            await _complete(proxy)
        await _until_lost(proxy, 3)
    assert before == logging.getLogger(otlp._QUEUE_LOGGER).filters
