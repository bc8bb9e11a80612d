"""The answer to ``GET /metrics``: counted metrics, the service's state, vLLM's names and Triton's own metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from triton_openai.config.tree import MetricsSettings
from triton_openai.generation import EngineLoad
from triton_openai.telemetry import gauges, instruments
from triton_openai.telemetry.gauges import BatchState, ServedName, State
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.triton_metrics import TritonMetrics, cache_blocks
from triton_openai.telemetry.vllm_names import RENAMED, SCRAPED_RENAMED, cache_metrics, lora_requests, renamed

# How long a model's load counts as current, and how long an answer may wait for Triton's part of it.
_LOAD_SECONDS = 1.0
_LOAD_TIMEOUT = 0.1
# How long a scrape waits for the load of engines.
_ENGINE_TIMEOUT = 0.5


class ServiceLoad(msgspec.Struct, frozen=True, kw_only=True):
    """
    The load of the whole service, over all models: requests now, and sums since its start.
    """

    running: int = 0
    queued: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    #: The requests that got a first token; the mean time to it is the next sum divided by this one.
    first_tokens: int = 0
    first_token_seconds: float = 0.0


async def no_engines(timeout: float) -> Mapping[str, EngineLoad]:
    """Return no loads: no engine reports them by request."""
    return {}


class _Families(list[Metric], Collector):
    """Families that are already collected, for the library's renderers."""

    def collect(self) -> Iterable[Metric]:
        return self


class Exposition:
    """
    Renders ``/metrics``. *state* returns the state of Triton, whose metrics are at *triton_url*.

    *batches* returns the state of batches, ``None`` while their tables cannot be read. *engines* takes a time in
    seconds, and returns the load of each Triton model whose engine reports it by request within this time.
    """

    def __init__(
        self,
        counted: Metrics,
        state: Callable[[], State],
        settings: MetricsSettings,
        triton_url: str,
        batches: Callable[[], Awaitable[BatchState | None]] | None = None,
        engines: Callable[[float], Awaitable[Mapping[str, EngineLoad]]] = no_engines,
    ) -> None:
        self._metrics = counted
        self._state = state
        self._batches = batches
        self._engines = engines
        self._relay = settings.relay_triton
        self._vllm_names = settings.vllm_names
        self._triton = TritonMetrics(triton_url) if self._relay or self._vllm_names else None
        # Kept when a model is unloaded: the counts of its aliases must stay in the same series.
        self._triton_models: dict[str, str] = {}
        self._loads: Mapping[str, Mapping[str, float]] = {}
        self._loads_until = 0.0
        self._reading = asyncio.Lock()

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """
        Return the body and its content type: OpenMetrics where *accept* names it, else the text format.

        With Triton's metrics in it, it is always the text format: their names break OpenMetrics's rules.
        """
        if self._triton is None:
            triton = None
        else:
            triton = await self._triton.read()
        loads = await self._engines(_ENGINE_TIMEOUT)
        state = self._current_state()
        families = [*gauges.state_metrics(state), *gauges.engine_metrics(loads)]
        batches = None
        if self._batches is not None:
            batches = await self._batches()
        if batches is not None:
            families += gauges.batch_metrics(batches)
        if self._triton is not None:
            families.append(gauges.gauge(gauges.TRITON_METRICS_UP, {(): triton is not None}))
        if self._vllm_names:
            families += cache_metrics(state, cache_blocks(triton or {}), loads)
        openmetrics = not self._relay and "application/openmetrics-text" in accept.lower()
        # Reading the files of many workers takes a while.
        body = await asyncio.to_thread(
            self._text, families, openmetrics, dict(self._triton_models), state.served, loads
        )
        if triton is not None and self._relay:
            # A name may be in an exposition once: ours have precedence, also while they have no samples.
            ours: set[str] = set()
            if self._vllm_names:
                ours = {*RENAMED, *(instrument.name for instrument in SCRAPED_RENAMED)}
            for name, lines in triton.items():
                if name not in ours:
                    body += "".join(f"{line}\n" for line in lines).encode()
        if openmetrics:
            return body, "application/openmetrics-text; version=1.0.0; charset=utf-8"
        return body, "text/plain; version=0.0.4; charset=utf-8"

    async def load(self, name: str) -> Mapping[str, float]:
        """
        Return the gauges by which load balancers weigh the Triton model behind *name*, in the words of vLLM's server.

        They are a second old at most. The KV cache is left out where Triton does not report it at once.
        """
        async with self._reading:
            if time.monotonic() >= self._loads_until:
                self._loads = await self._read_loads()
                self._loads_until = time.monotonic() + _LOAD_SECONDS
        return self._loads.get(self._triton_models.get(name, name), {})

    async def _read_loads(self) -> Mapping[str, Mapping[str, float]]:
        triton = None
        if self._triton is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOAD_TIMEOUT):
                    triton = await self._triton.read()
        engines = await self._engines(_LOAD_TIMEOUT)
        state = self._current_state()
        shown = cache_metrics(state, cache_blocks(triton or {}), engines)[:1]
        counted = await asyncio.to_thread(self._counted)
        shown += renamed("vllm:num_requests_waiting", counted, self._triton_models, engines)
        loads: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for metric in shown:
            for sample in metric.samples:
                loads[sample.labels["model_name"]][sample.name.removeprefix("vllm:")] = sample.value
        return loads

    def _current_state(self) -> State:
        """Return the state, once all its names have their gauges."""
        state = self._state()
        for name in state.served:
            self._metrics.add_served_name(name.name, name.adapter, alias=name.name != name.triton_model)
            self._triton_models[name.name] = name.triton_model
        return state

    def service_load(self) -> ServiceLoad:
        """Return the load of all workers together. Reads their files: call it in a thread."""
        sums: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        for metric in self._counted().values():
            for sample in metric.samples:
                sums[sample.name, sample.labels.get("type")] += sample.value
        return ServiceLoad(
            running=int(sums[instruments.RUNNING.name, None]),
            queued=int(sums[instruments.QUEUED.name, None]),
            input_tokens=int(sums[instruments.TOKENS.name, "input"]),
            output_tokens=int(sums[instruments.TOKENS.name, "output"]),
            first_tokens=int(sums[f"{instruments.FIRST_TOKEN.name}_count", None]),
            first_token_seconds=sums[f"{instruments.FIRST_TOKEN.name}_sum", None],
        )

    def _text(
        self,
        families: list[Metric],
        openmetrics: bool,
        triton_models: Mapping[str, str],
        served: Sequence[ServedName],
        loads: Mapping[str, EngineLoad],
    ) -> bytes:
        counted = self._counted()
        if self._vllm_names:
            families.append(lora_requests(served, counted))
        families = [family for family in (*families, *counted.values()) if family.samples]
        if self._vllm_names:
            for name in RENAMED:
                families += renamed(name, counted, triton_models, loads)
        body: bytes
        if openmetrics:
            body = generate_openmetrics(_Families(families))
        else:
            body = generate_latest(_Families(families))
        return body

    def _counted(self) -> Mapping[str, Metric]:
        # Workers that have counted nothing have no empty metrics, unlike a single process.
        return {metric.name: metric for metric in self._metrics.collect() if metric.samples}


EXPOSITION: web.AppKey[Exposition] = web.AppKey("exposition", Exposition)
