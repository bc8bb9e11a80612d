"""What ``/metrics`` answers: everything that is counted, looked up, renamed and relayed, as one valid exposition."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from triton_openai.models import Models, ServedModel
from triton_openai.telemetry.metrics import Metrics, SharedNumbers
from triton_openai.telemetry.state import state
from triton_openai.telemetry.vllm_names import renamed
from triton_openai.triton.metrics import Family, TritonMetrics, cache_usage
from triton_openai.worker import Worker

_FAMILY = re.compile(rb"^# TYPE (\S+)", re.MULTILINE)
_OPENMETRICS = "application/openmetrics-text"
_CONTENT_TYPES = {
    False: "text/plain; version=0.0.4; charset=utf-8",
    True: "application/openmetrics-text; version=1.0.0; charset=utf-8",
}


class Exposition:
    """
    Everything that ``/metrics`` shows.

    *triton* are Triton's own metrics where they are wanted: to be passed on (*relay*), or for what the names of vLLM's
    server (*vllm_names*) tell of the engine. Whoever makes it must :meth:`close` it.
    """

    def __init__(
        self,
        metrics: Metrics,
        models: Models,
        worker: Worker,
        *,
        triton: TritonMetrics | None = None,
        relay: bool = False,
        vllm_names: bool = False,
    ) -> None:
        self._models = models
        self._worker = worker
        self._triton = triton
        self._relay = relay
        self._vllm_names = vllm_names
        self._metrics = metrics
        # Kept when a model goes: what was counted for its aliases must not move to another series.
        self._owners: dict[str, str] = {}
        self._collectors: Sequence[Collector] = (metrics.registry, ProcessCollector(registry=None))
        if metrics.folder is not None:
            # A process's own memory and time say nothing where each scrape meets another process.
            self._collectors = (SharedNumbers(metrics.folder),)

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """
        Return the body and its content type: OpenMetrics where *accept* prefers it, else the text format.

        With Triton's metrics in it, it is always the text format: those do not follow OpenMetrics's rules for names.
        """
        relayed = None if self._triton is None else await self._triton.read()
        openmetrics = not self._relay and prefers_openmetrics(accept)
        up = None if self._triton is None else relayed is not None
        usage = {} if relayed is None or not self._vllm_names else self._cache_usage(cache_usage(relayed))
        for model in self._models.served.values():
            self._metrics.show(model.name, model.adapter.name)
            self._owners[model.name] = model.owner
        looked_up = list(state(self._models, self._worker, triton_metrics=up))
        # Reading the files of many workers takes a while.
        body = await asyncio.to_thread(self._text, looked_up, usage, openmetrics, dict(self._owners))
        if relayed is not None and self._relay:
            body += _rest(relayed, frozenset(_FAMILY.findall(body)))
        return body, _CONTENT_TYPES[openmetrics]

    def _text(
        self, looked_up: Sequence[Metric], usage: Mapping[str, float], openmetrics: bool, owners: Mapping[str, str]
    ) -> bytes:
        counted = [metric for one in self._collectors for metric in _without_times(one.collect())]
        # Workers that have counted nothing leave no trace of a metric, a process alone an empty one.
        families = [*looked_up, *(metric for metric in counted if metric.samples)]
        if self._vllm_names:
            families += renamed(counted, usage, owners)
        collected = _Collected(families)
        return generate_openmetrics(collected) if openmetrics else generate_latest(collected)

    def _cache_usage(self, engines: Mapping[str, float]) -> Mapping[str, float]:
        """Return the usage of *engines* by the Triton models that they work for."""
        found = {model.owner: _engines(model) & engines.keys() for model in self._models.served.values()}
        return {name: max(engines[engine] for engine in known) for name, known in found.items() if known}

    async def close(self) -> None:
        """Close the connection to Triton's metrics."""
        if self._triton is not None:
            await self._triton.close()


class _Collected(Collector):
    """Families that have been collected already, for functions that want something to collect from."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return them."""
        return self._families


def prefers_openmetrics(accept: str) -> bool:
    """Say whether an ``Accept`` header asks for OpenMetrics at least as much as for the text format."""
    wanted: dict[str, float] = {}
    for part in accept.split(","):
        media, *parameters = (piece.strip().lower() for piece in part.split(";"))
        quality = next((value[2:] for value in parameters if value.startswith("q=")), "1")
        try:
            wanted[media] = max(wanted.get(media, 0.0), float(quality))
        except ValueError:
            continue
    openmetrics = wanted.get(_OPENMETRICS, 0.0)
    return openmetrics > 0 and openmetrics >= wanted.get("text/plain", 0.0)


def _without_times(metrics: Iterable[Metric]) -> Iterable[Metric]:
    """Yield *metrics* without the times at which their series began: several workers cannot give them."""
    for metric in metrics:
        metric.samples = [sample for sample in metric.samples if sample.name != f"{metric.name}_created"]
        yield metric


def _engines(model: ServedModel) -> set[str]:
    adapter = model.adapter
    inner = adapter.token_level
    return {adapter.config.name, *(step.model for step in adapter.config.steps), *([inner.name] if inner else [])}


def _rest(relayed: Mapping[str, Family], ours: frozenset[bytes]) -> bytes:
    """Return the families of *relayed* that are not among *ours*: a name may stand in an exposition once."""
    lines = [line for name, family in relayed.items() if name.encode() not in ours for line in family.lines]
    return "".join(f"{line}\n" for line in lines).encode()
