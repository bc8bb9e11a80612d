"""The answer to ``GET /metrics``: counted metrics, the service's state, vLLM's names and Triton's own metrics."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import aiohttp
import msgspec
import structlog
from aiohttp import web
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from triton_openai import __version__
from triton_openai.config.tree import MetricsSettings
from triton_openai.telemetry import metrics
from triton_openai.telemetry.metrics import Instrument, Metrics

_log = structlog.get_logger(__name__)

BUILD = Instrument("triton_openai_build_info", ("version",), "The version of this service; always 1.")
WORKERS = Instrument("triton_openai_workers", (), "Processes that this service is configured to have.")
UP = Instrument("triton_openai_triton_up", (), "Whether Triton answered the last request for its models.")
TRITON_MODELS = Instrument(
    "triton_openai_triton_models", ("state",),
    "Models in Triton's repository, by state: ready, not_ready (loading, or failed to load), or unloaded (in explicit "
    "mode).",
)  # fmt: skip
SERVED = Instrument("triton_openai_models_served", (), "Names under which models are served, aliases included.")
MODEL = Instrument(
    "triton_openai_model_info", ("model", "triton_model", "adapter"),
    "A served name, its Triton model and its adapter; always 1.",
)  # fmt: skip
CHAT = Instrument(
    "triton_openai_model_can_chat", ("model",),
    "Whether a Triton model that generates text has a working tokenizer and chat template; missing until they are "
    "loaded.",
)  # fmt: skip
TRITON_METRICS_UP = Instrument(
    "triton_openai_triton_metrics_up", (),
    "Whether Triton's own metrics could be read for this response; only with --relay-triton-metrics.",
)  # fmt: skip
STORE_UP = Instrument(
    "triton_openai_store_up", (), "Whether the store of responses answers, as far as this process knows."
)
LOOKED_UP = (BUILD, WORKERS, UP, STORE_UP, TRITON_MODELS, SERVED, MODEL, CHAT, TRITON_METRICS_UP)

#: vLLM's names: the metric that each shows, and which of its series.
RENAMED: Mapping[str, tuple[Instrument, Mapping[str, str]]] = {
    "vllm:num_requests_running": (metrics.RUNNING, {}),
    "vllm:num_requests_waiting": (metrics.QUEUED, {}),
    "vllm:prompt_tokens_total": (metrics.TOKENS, {"type": "input"}),
    "vllm:generation_tokens_total": (metrics.TOKENS, {"type": "output"}),
    "vllm:request_success_total": (metrics.FINISHED, {}),
    "vllm:time_to_first_token_seconds": (metrics.FIRST_TOKEN, {}),
    "vllm:inter_token_latency_seconds": (metrics.INTER_TOKEN_LATENCY, {}),
    "vllm:time_per_output_token_seconds": (metrics.PER_TOKEN, {}),
    "vllm:request_time_per_output_token_seconds": (metrics.PER_TOKEN, {}),
    "vllm:e2e_request_latency_seconds": (metrics.DURATION, {"error_type": ""}),
    "vllm:request_queue_time_seconds": (metrics.QUEUE, {}),
    "vllm:request_prompt_tokens": (metrics.INPUT_TOKENS, {}),
    "vllm:request_generation_tokens": (metrics.OUTPUT_TOKENS, {}),
}
#: Our labels under vLLM's names; sums are taken over the others.
RENAMED_LABELS = {"model": "model_name", "gen_ai_request_model": "model_name", "reason": "finished_reason", "le": "le"}
CACHE_USAGE = Instrument(
    "vllm:kv_cache_usage_perc", ("model_name",),
    "Usage of the engine's KV cache, from 0 to 1; only engines that report it in Triton's metrics.",
)  # fmt: skip
CACHE_CONFIG = Instrument(
    "vllm:cache_config_info", ("model_name", "block_size", "num_gpu_blocks"),
    "Tokens in a block of the engine's KV cache, and its blocks; always 1. Only engines that report them in Triton's "
    "metrics.",
)  # fmt: skip
LORA_REQUESTS = Instrument(
    "vllm:lora_requests_info", ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "Names of the LoRA adapters with running and with queued requests, separated by commas, and how many adapters the "
    "engine runs at once, where the model's files say it. The value is the time of the scrape.",
)  # fmt: skip
LOOKED_UP_RENAMED = (CACHE_USAGE, CACHE_CONFIG, LORA_REQUESTS)


class ServedName(msgspec.Struct, frozen=True, kw_only=True):
    """
    A public name of a model: the Triton model behind it, and its adapter.

    ``can_chat`` is whether the chat template works, ``None`` while that is not known. ``engines`` are the Triton models
    that do the work. ``lora`` is whether the name stands for a LoRA adapter, ``max_loras`` how many the engine runs at
    once, ``None`` where that is not known.
    """

    name: str
    triton_model: str
    adapter: str
    can_chat: bool | None
    engines: Collection[str]
    lora: bool
    max_loras: int | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """
    What the whole service does, over all models: requests now, and sums since its start.

    The time to the first token is ``first_token_seconds`` divided by ``first_tokens``, which counts the requests that
    got one; what happened between two readings is the difference of the sums.
    """

    running: int = 0
    queued: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    first_tokens: int = 0
    first_token_seconds: float = 0.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What this process knows of Triton, the number of its models by state and the served names, and of the store."""

    workers: int
    triton_up: bool
    store_up: bool = True
    triton_models: Mapping[str, int]
    served: Sequence[ServedName]


def _gauge(one: Instrument, series: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(one.name, one.help, labels=one.labels)
    for labels, value in series.items():
        family.add_metric(labels, value)
    return family


def _state_metrics(state: State) -> list[Metric]:
    # Nothing is served while Triton does not answer, though its models stay known.
    served = state.served if state.triton_up else ()
    return [
        _gauge(BUILD, {(__version__,): 1}),
        _gauge(WORKERS, {(): state.workers}),
        _gauge(UP, {(): state.triton_up}),
        _gauge(STORE_UP, {(): state.store_up}),
        _gauge(TRITON_MODELS, {(name,): number for name, number in state.triton_models.items()}),
        _gauge(SERVED, {(): len(served)}),
        _gauge(MODEL, {(one.name, one.triton_model, one.adapter): 1 for one in served}),
        _gauge(CHAT, {(one.triton_model,): one.can_chat for one in served if one.can_chat is not None}),
    ]


def _renamed(name: str, counted: Mapping[str, Metric], triton_models: Mapping[str, str]) -> Iterable[Metric]:
    """
    Yield the metric that vLLM calls *name*, if any of it is *counted*.

    *triton_models* are those of served names. Aliases and LoRA adapters count for their model: a reader of these names
    may take one series for the whole model.
    """
    instrument, only = RENAMED[name]
    source = counted.get(instrument.name.removesuffix("_total"))
    if source is None:
        return
    sums: defaultdict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    for sample in source.samples:
        if only.items() <= sample.labels.items():
            labels = {RENAMED_LABELS[label]: value for label, value in sample.labels.items() if label in RENAMED_LABELS}
            labels["model_name"] = triton_models.get(labels["model_name"], labels["model_name"])
            sums[sample.name.removeprefix(source.name), tuple(labels.items())] += sample.value
    metric = Metric(name.removesuffix("_total"), instrument.help, source.type)
    for (suffix, pairs), value in sums.items():
        metric.add_sample(metric.name + suffix, dict(pairs), value)
    yield metric


# Prometheus gives up after 10 seconds, and our own metrics must reach it all the same.
_TIMEOUT = 2.0
# How long a model's load counts as current, and how long an answer may wait for Triton's part of it.
_LOAD_SECONDS = 1.0
_LOAD_TIMEOUT = 0.1
_MAX_BYTES = 32 * 1024 * 1024
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{(?:{_LABEL}(?:,{_LABEL})*)?,?\}})? (\S+)(?: -?[0-9]+)?")
_COMMENT = re.compile(r"# (?:HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*)(?= |$)")
_SUFFIX = re.compile(r"_(?:bucket|sum|count)$")
# The name under which an engine reports its cache: blocks, by kind.
_KV_BLOCKS = "nv_trt_llm_kv_cache_block_metrics"


def parse(text: str) -> Mapping[str, Sequence[str]]:
    """
    Return the lines of each metric of an exposition in Prometheus's text format 0.0.4.

    They stay as Triton wrote them: its counters have no ``_total``, which every library would add. Raises
    ``ValueError`` for any other text, and for an exposition that is cut off.
    """
    families: dict[str, list[str]] = {}
    comments: set[str] = set()
    for line in filter(str.strip, text.split("\n")):
        if line.startswith("#"):
            comment = _COMMENT.match(line)
            # Each may stand there once only.
            if comment is not None and comment[0] not in comments:
                comments.add(comment[0])
                families.setdefault(comment[1], []).append(line)
            continue
        sample = _SAMPLE.fullmatch(line)
        if sample is None:
            raise ValueError(f"no line of an exposition: {line[:80]!r}")
        float(sample[2])
        name = _SUFFIX.sub("", sample[1])
        families.setdefault(name if name in families else sample[1], []).append(line)
    return families


def cache_blocks(families: Mapping[str, Sequence[str]]) -> Mapping[str, Mapping[str, float]]:
    """Return, by the engine's name in Triton, the blocks of its KV cache by kind; of engines that report their use."""
    blocks: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for metric in text_string_to_metric_families("\n".join([*families.get(_KV_BLOCKS, ()), ""])):
        for sample in metric.samples:
            blocks[sample.labels.get("model", "")][sample.labels.get("kv_cache_block_type", "")] = sample.value
    return {model: kinds for model, kinds in blocks.items() if "used" in kinds and kinds.get("max", 0) > 0}


class TritonMetrics:
    """Reads Triton's own metrics at *url*."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._failing = False

    async def read(self) -> Mapping[str, Sequence[str]] | None:
        """Return them as :func:`parse` does, or ``None`` when Triton does not give them in time, which is logged."""
        headers, body = {"Accept": "text/plain;version=0.0.4"}, bytearray()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT)) as session,
                session.get(self._url, headers=headers, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise ValueError(f"HTTP status {response.status}")
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > _MAX_BYTES:
                        raise ValueError(f"more than {_MAX_BYTES} bytes")
            # Hundreds of models have thousands of lines.
            families = await asyncio.to_thread(parse, body.decode())
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if not self._failing:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("Triton's metrics cannot be read", url=self._url, reason=reason)
            self._failing = True
            return None
        self._failing = False
        return families


class _Families(list[Metric], Collector):
    """Families that are already collected, for the library's renderers."""

    def collect(self) -> Iterable[Metric]:
        return self


class Exposition:
    """Renders ``/metrics``. *state* returns what this process knows of Triton, whose metrics are at *triton_url*."""

    def __init__(
        self, counted: Metrics, state: Callable[[], State], settings: MetricsSettings, triton_url: str
    ) -> None:
        self._metrics = counted
        self._state = state
        self._relay, self._vllm_names = settings.relay_triton, settings.vllm_names
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
        triton = None if self._triton is None else await self._triton.read()
        state = self._current_state()
        families = _state_metrics(state)
        if self._triton is not None:
            families.append(_gauge(TRITON_METRICS_UP, {(): triton is not None}))
        if self._vllm_names and triton is not None:
            families += _cache_metrics(state, cache_blocks(triton))
        openmetrics = not self._relay and "application/openmetrics-text" in accept.lower()
        # Reading the files of many workers takes a while.
        body = await asyncio.to_thread(self._text, families, openmetrics, dict(self._triton_models), state.served)
        if triton is not None and self._relay:
            # A name may stand in an exposition once: ours stay where names meet, also while they have counted nothing.
            ours = {*RENAMED, *(one.name for one in LOOKED_UP_RENAMED)} if self._vllm_names else ()
            lines = [line for name, family in triton.items() if name not in ours for line in family]
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
        state = self._current_state()
        gauges = [] if triton is None else _cache_metrics(state, cache_blocks(triton))[:1]
        gauges += _renamed("vllm:num_requests_waiting", await asyncio.to_thread(self._counted), self._triton_models)
        loads: defaultdict[str, dict[str, float]] = defaultdict(dict)
        for sample in (sample for gauge in gauges for sample in gauge.samples):
            loads[sample.labels["model_name"]][sample.name.removeprefix("vllm:")] = sample.value
        return loads

    def _current_state(self) -> State:
        """Return the state, once all its names have their gauges."""
        state = self._state()
        for name in state.served:
            self._metrics.add_gauges(name.name, name.adapter, alias=name.name != name.triton_model)
            self._triton_models[name.name] = name.triton_model
        return state

    def figures(self) -> Figures:
        """Return the figures of all workers together. Reads their files: call it in a thread."""
        sums: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        for sample in (sample for metric in self._counted().values() for sample in metric.samples):
            sums[sample.name, sample.labels.get("type")] += sample.value
        return Figures(
            running=int(sums[metrics.RUNNING.name, None]),
            queued=int(sums[metrics.QUEUED.name, None]),
            input_tokens=int(sums[metrics.TOKENS.name, "input"]),
            output_tokens=int(sums[metrics.TOKENS.name, "output"]),
            first_tokens=int(sums[f"{metrics.FIRST_TOKEN.name}_count", None]),
            first_token_seconds=sums[f"{metrics.FIRST_TOKEN.name}_sum", None],
        )

    def _text(
        self, families: list[Metric], openmetrics: bool, triton_models: Mapping[str, str], served: Sequence[ServedName]
    ) -> bytes:
        counted = self._counted()
        if self._vllm_names:
            families.append(_lora_requests(served, counted))
        families = [one for one in (*families, *counted.values()) if one.samples]
        if self._vllm_names:
            families += [metric for name in RENAMED for metric in _renamed(name, counted, triton_models)]
        return (generate_openmetrics if openmetrics else generate_latest)(_Families(families))

    def _counted(self) -> Mapping[str, Metric]:
        # Workers that have counted nothing have no empty metrics, unlike a single process.
        return {metric.name: metric for metric in self._metrics.collect() if metric.samples}


EXPOSITION: web.AppKey[Exposition] = web.AppKey("exposition", Exposition)


def _cache_metrics(state: State, engines: Mapping[str, Mapping[str, float]]) -> list[Metric]:
    """Return the KV cache of each Triton model: that of the fullest of its *engines*."""
    usage: dict[tuple[str, ...], float] = {}
    config: dict[tuple[str, ...], float] = {}
    for one in state.served:
        known = [engines[engine] for engine in one.engines if engine in engines]
        if known:
            kinds = max(known, key=lambda kinds: kinds["used"] / kinds["max"])
            usage[(one.triton_model,)] = kinds["used"] / kinds["max"]
            if "tokens_per" in kinds:
                config[one.triton_model, f"{kinds['tokens_per']:.0f}", f"{kinds['max']:.0f}"] = 1
    return [_gauge(CACHE_USAGE, usage), _gauge(CACHE_CONFIG, config)]


def _lora_requests(served: Iterable[ServedName], counted: Mapping[str, Metric]) -> Metric:
    """Return the LoRA adapters with requests: one series for each Triton model that has any adapters."""
    names: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for one in served:
        if one.lora:
            names[one.triton_model, one.max_loras].append(one.name)

    def busy(instrument: Instrument, names: Iterable[str]) -> str:
        metric = counted.get(instrument.name)
        models = {sample.labels["model"] for sample in metric.samples if sample.value} if metric is not None else ()
        return ",".join(name for name in names if name in models)

    series: dict[tuple[str, ...], float] = {}
    for (model, most), loras in names.items():
        running, queued = busy(metrics.RUNNING, loras), busy(metrics.QUEUED, loras)
        series[model, "" if most is None else str(most), running, queued] = time.time()
    return _gauge(LORA_REQUESTS, series)
