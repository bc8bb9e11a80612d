"""
The queues in front of engines, from Triton's own metrics.

Triton counts the requests that wait for a model (``nv_inference_pending_request_count``) and the time that requests
have waited (``nv_inference_queue_duration_us``). An engine that schedules by itself counts its own queue
(``nv_trt_llm_request_metrics`` with the type ``waiting``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from prometheus_client.parser import text_string_to_metric_families

from triton_openai.telemetry.triton_metrics import TritonMetrics

_PENDING = "nv_inference_pending_request_count"
_DURATION = "nv_inference_queue_duration_us"
_ENGINE = "nv_trt_llm_request_metrics"
# Metrics that cannot be reached are tried again after so many seconds.
_RETRY_SECONDS = 60.0


class EngineQueue:
    """The queue of one Triton, whose metrics are at *url*."""

    def __init__(self, url: str) -> None:
        self._metrics = TritonMetrics(url, quiet=True)
        self._next_read = 0.0
        # When the time in queues was read last, and the microseconds by model.
        self._read_at = 0.0
        self._durations: Mapping[str, float] = {}
        self._families: Mapping[str, Sequence[str]] | None = None

    async def refresh(self) -> None:
        """Read the metrics now, unless they could not be reached lately."""
        now = time.monotonic()
        if now < self._next_read:
            return
        self._durations = self._values(_DURATION)
        before = self._read_at
        self._families = await self._metrics.read()
        self._read_at = time.monotonic()
        self._seconds = self._read_at - before
        if self._families is None:
            self._next_read = now + _RETRY_SECONDS

    def _values(self, name: str, **labels: str) -> Mapping[str, float]:
        """Return the sum of a metric by model, of samples with these *labels*."""
        values: dict[str, float] = {}
        lines = (self._families or {}).get(name, ())
        for metric in text_string_to_metric_families("\n".join([*lines, ""])):
            for sample in metric.samples:
                if labels.items() <= sample.labels.items():
                    model = sample.labels.get("model", "")
                    values[model] = values.get(model, 0.0) + sample.value
        return values

    def waiting(self, models: Collection[str]) -> float | None:
        """Return how many requests wait for *models*, a model and its steps; ``None`` if that is not known."""
        if self._families is None:
            return None
        pending = self._values(_PENDING)
        durations = self._values(_DURATION)
        engines = self._values(_ENGINE, request_type="waiting")
        waiting = 0.0
        for model in models:
            if model in pending:
                waiting += pending[model]
            elif model in durations and model in self._durations:
                # By Little's law: the time in the queue that a second has is the number of requests there.
                spent = max(0.0, durations[model] - self._durations[model])
                waiting += spent / 1e6 / max(self._seconds, 0.001)
            waiting += engines.get(model, 0.0)
        return waiting


class EngineQueues:
    """The queues of all Tritons, by the addresses of their metrics."""

    def __init__(self) -> None:
        self._queues: dict[str, EngineQueue] = {}

    async def refresh(self, urls: Collection[str]) -> None:
        """Read the metrics at *urls*, and forget those of other Tritons."""
        self._queues = {url: self._queues.get(url) or EngineQueue(url) for url in urls}
        await asyncio.gather(*(queue.refresh() for queue in self._queues.values()))

    def waiting(self, url: str, models: Collection[str]) -> float | None:
        """Return how many requests wait at a Triton for *models*; ``None`` if that is not known."""
        queue = self._queues.get(url)
        if queue is None:
            return None
        return queue.waiting(models)
