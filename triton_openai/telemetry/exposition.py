"""What ``GET /metrics`` answers: counted metrics, the service's state, vLLM's names and Triton's own metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec
from prometheus_client import ProcessCollector
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from triton_openai import __version__
from triton_openai.telemetry.metrics import (
    DURATION,
    FINISHED,
    FIRST_TOKEN,
    INPUT_TOKENS,
    INTER_TOKEN_LATENCY,
    OUTPUT_TOKENS,
    PER_TOKEN,
    QUEUE,
    QUEUED,
    RUNNING,
    TOKENS,
    Instrument,
    Metrics,
    SharedMetrics,
)  # fmt: skip

BUILD = Instrument("triton_openai_build_info", "gauge", "The version of this service; always 1.", ("version",))
WORKERS = Instrument("triton_openai_workers", "gauge", "Processes that this service is configured to have.")
UP = Instrument("triton_openai_triton_up", "gauge", "Whether Triton answered when it was last asked for its models.")
TRITON_MODELS = Instrument(
    "triton_openai_triton_models",
    "gauge",
    "Models in Triton's repository, by state: ready, not_ready (it is loading, or failed to load), or unloaded (where "
    "models are loaded on demand, nobody wants it now).",
    ("state",),
)
SERVED = Instrument("triton_openai_models_served", "gauge", "Names under which models are served, aliases included.")
MODEL = Instrument(
    "triton_openai_model_info",
    "gauge",
    "A served name, the Triton model behind it, and the adapter that answers for it; always 1.",
    ("model", "triton_model", "adapter"),
)
CHAT = Instrument(
    "triton_openai_model_can_chat",
    "gauge",
    "Whether chats with a Triton model that generates text find a tokenizer and a chat template that work; not there "
    "until they have been loaded.",
    ("model",),
)
TRITON_METRICS_UP = Instrument(
    "triton_openai_triton_metrics_up",
    "gauge",
    "Whether Triton's own metrics could be read for this answer; only where they are asked for.",
)

LOOKED_UP = (BUILD, WORKERS, UP, TRITON_MODELS, SERVED, MODEL, CHAT, TRITON_METRICS_UP)


class ServedName(msgspec.Struct, frozen=True, kw_only=True):
    """
    A public name of a model: the Triton model behind it, and its adapter.

    ``can_chat`` is whether the chat template works, ``None`` while that is not known. ``engines`` are the Triton models
    that do the work.
    """

    name: str
    triton_model: str
    adapter: str
    can_chat: bool | None
    engines: Collection[str]


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What this process knows of Triton: the number of its models by state, and the names that are served."""

    workers: int
    triton_up: bool
    triton_models: Mapping[str, int]
    served: Sequence[ServedName]


class TritonMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Triton's own metrics: the lines of each family by its name, and the usage of the KV cache by engine."""

    families: Mapping[str, Sequence[str]]
    cache_usage: Mapping[str, float]


def _state_metrics(state: State, triton_metrics_up: bool | None) -> Iterable[Metric]:
    yield InfoMetricFamily(BUILD.name.removesuffix("_info"), BUILD.help, {"version": __version__})
    yield GaugeMetricFamily(WORKERS.name, WORKERS.help, state.workers)
    yield GaugeMetricFamily(UP.name, UP.help, state.triton_up)
    models = GaugeMetricFamily(TRITON_MODELS.name, TRITON_MODELS.help, labels=TRITON_MODELS.labels)
    for name, number in state.triton_models.items():
        models.add_metric([name], number)
    yield models
    # Nothing is served while Triton is away, though its models stay known.
    served = state.served if state.triton_up else ()
    yield GaugeMetricFamily(SERVED.name, SERVED.help, len(served))
    info = InfoMetricFamily(MODEL.name.removesuffix("_info"), MODEL.help, labels=MODEL.labels)
    for model in served:
        info.add_metric([model.name, model.triton_model, model.adapter], {})
    yield info
    chat = GaugeMetricFamily(CHAT.name, CHAT.help, labels=CHAT.labels)
    for name, can_chat in {model.triton_model: model.can_chat for model in served}.items():
        if can_chat is not None:
            chat.add_metric([name], can_chat)
    yield chat
    if triton_metrics_up is not None:
        yield GaugeMetricFamily(TRITON_METRICS_UP.name, TRITON_METRICS_UP.help, triton_metrics_up)


class Renamed(msgspec.Struct, frozen=True):
    """One of vLLM's names: the metric that it shows, which of its series (*only*), and a further label."""

    name: str
    source: Instrument
    help: str
    only: Mapping[str, str] = {}
    label: str | None = None
    label_source: str | None = None

    @property
    def labels(self) -> Sequence[str]:
        """Its labels."""
        return ("model_name",) if self.label is None else ("model_name", self.label)


RENAMED = (
    Renamed("vllm:num_requests_running", RUNNING, "Requests that are being answered."),
    Renamed("vllm:num_requests_waiting", QUEUED, "Requests that wait here for others to end."),
    Renamed("vllm:prompt_tokens_total", TOKENS, "Tokens of prompts.", {"type": "input"}),
    Renamed("vllm:generation_tokens_total", TOKENS, "Tokens of answers.", {"type": "output"}),
    Renamed("vllm:request_success_total", FINISHED, "Answers that have ended.", {}, "finished_reason", "reason"),
    Renamed("vllm:time_to_first_token_seconds", FIRST_TOKEN, "Time to the first token."),
    Renamed(
        "vllm:inter_token_latency_seconds",
        INTER_TOKEN_LATENCY,
        "Time between the arrivals of an answer's tokens.",
    ),
    Renamed("vllm:time_per_output_token_seconds", PER_TOKEN, "Mean time between an answer's tokens."),
    Renamed("vllm:request_time_per_output_token_seconds", PER_TOKEN, "Mean time between an answer's tokens."),
    Renamed("vllm:e2e_request_latency_seconds", DURATION, "Time of a whole request.", {"error_type": ""}),
    Renamed("vllm:request_queue_time_seconds", QUEUE, "Time that requests waited here for others to end."),
    Renamed("vllm:request_prompt_tokens", INPUT_TOKENS, "Tokens of a request's prompts."),
    Renamed("vllm:request_generation_tokens", OUTPUT_TOKENS, "Tokens of an answer."),
)
CACHE_USAGE = Instrument(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "How full the engine's KV cache is, 1 is full; of engines that report it in Triton's metrics.",
    ("model_name",),
)


def _renamed(renamed: Renamed, source: Metric, owners: Mapping[str, str]) -> Metric:
    """
    Return *source* under vLLM's name.

    *owners* are the Triton models behind served names. Aliases and LoRA adapters count for their model: a reader of
    these names may take one series for the whole model.
    """
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in source.samples:
        labels = sample.labels
        if any(labels.get(name) != value for name, value in renamed.only.items()):
            continue
        model = labels["model"] if "model" in labels else labels["gen_ai_request_model"]
        kept = {"model_name": owners.get(model, model)}
        if renamed.label is not None and renamed.label_source is not None:
            kept[renamed.label] = labels[renamed.label_source]
        if "le" in labels:
            kept["le"] = labels["le"]
        key = sample.name.removeprefix(source.name), tuple(kept.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    metric = Metric(renamed.name.removesuffix("_total"), renamed.help, source.type)
    for (suffix, pairs), value in sums.items():
        metric.add_sample(metric.name + suffix, dict(pairs), value)
    return metric


_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Exposition:
    """
    Renders ``/metrics``.

    *state* returns what this process knows of Triton; *read_triton* reads Triton's own metrics, ``None`` when it
    cannot. They are *relayed*, or read for vLLM's names only (*vllm_names*).
    """

    def __init__(
        self,
        metrics: Metrics,
        state: Callable[[], State],
        *,
        read_triton: Callable[[], Awaitable[TritonMetrics | None]] | None = None,
        relay: bool = False,
        vllm_names: bool = False,
    ) -> None:
        self._metrics = metrics
        self._state = state
        self._read_triton = read_triton
        self._relay = relay
        self._vllm_names = vllm_names
        # Kept when a model goes: the counts of its aliases must not move to another series.
        self._owners: dict[str, str] = {}
        self._collectors: Sequence[Collector] = (metrics.registry, ProcessCollector(registry=None))
        if metrics.folder is not None:
            # Memory and CPU time of one process mean nothing where each scrape meets another process.
            self._collectors = (SharedMetrics(metrics.folder),)

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """
        Return the body and its content type: OpenMetrics where *accept* prefers it, else the text format.

        With Triton's metrics in it, it is always the text format: their names break OpenMetrics's rules.
        """
        triton = None if self._read_triton is None else await self._read_triton()
        state = self._state()
        for name in state.served:
            self._metrics.add_gauges(name.name, name.adapter, alias=name.name != name.triton_model)
            self._owners[name.name] = name.triton_model
        families = list(_state_metrics(state, None if self._read_triton is None else triton is not None))
        if self._vllm_names and triton is not None:
            families += _cache_usage(state, triton.cache_usage)
        openmetrics = not self._relay and prefers_openmetrics(accept)
        # Reading the files of many workers takes a while.
        body = await asyncio.to_thread(self._text, families, openmetrics, dict(self._owners))
        if triton is not None and self._relay:
            # A name may stand in an exposition once.
            ours = set(re.findall(rb"^# TYPE (\S+)", body, re.MULTILINE))
            if self._vllm_names:
                # Ours stay where names meet, also while they have counted nothing.
                ours |= {renamed.name.encode() for renamed in RENAMED}
            lines = [line for name, family in triton.families.items() if name.encode() not in ours for line in family]
            body += "".join(f"{line}\n" for line in lines).encode()
        return body, _OPENMETRICS if openmetrics else _TEXT

    def _text(self, families: list[Metric], openmetrics: bool, owners: Mapping[str, str]) -> bytes:
        # Workers that have counted nothing have no empty metrics, unlike a single process.
        counted = {metric.name: metric for one in self._collectors for metric in one.collect() if metric.samples}
        families = [*families, *counted.values()]
        if self._vllm_names:
            sources = ((one, counted.get(one.source.name.removesuffix("_total"))) for one in RENAMED)
            families += [_renamed(one, source, owners) for one, source in sources if source is not None]
        collected = _Collected(families)
        return generate_openmetrics(collected) if openmetrics else generate_latest(collected)


def _cache_usage(state: State, engines: Mapping[str, float]) -> Iterable[Metric]:
    """Yield the fullest KV cache of each Triton model's *engines*."""
    family = GaugeMetricFamily(CACHE_USAGE.name, CACHE_USAGE.help, labels=CACHE_USAGE.labels)
    for model, names in {name.triton_model: name.engines for name in state.served}.items():
        known = [engines[engine] for engine in names if engine in engines]
        if known:
            family.add_metric([model], max(known))
    if family.samples:
        yield family


class _Collected(Collector):
    """Families that are already collected, for the library's renderers."""

    def __init__(self, families: Iterable[Metric]) -> None:
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
    openmetrics = wanted.get("application/openmetrics-text", 0.0)
    return openmetrics > 0 and openmetrics >= wanted.get("text/plain", 0.0)
