"""Metrics of the state of Triton, its models and batches, which are read at each scrape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from triton_openai import __version__
from triton_openai.generation import EngineLoad
from triton_openai.telemetry.instruments import Instrument, instruments_in

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
ENGINE_REQUESTS = Instrument(
    "triton_openai_engine_requests", ("model", "state"),
    "Requests in the engine of a Triton model, by state: running, or waiting for the engine; only of companion models.",
)  # fmt: skip
ENGINE_CACHE = Instrument(
    "triton_openai_engine_cache_usage", ("model",),
    "Usage of the engine's KV cache, from 0 to 1; only of companion models.",
)  # fmt: skip
STORE_UP = Instrument(
    "triton_openai_store_up", (), "Whether the store of responses answers, as far as this process knows."
)
BATCHES = Instrument("triton_openai_batches", ("status",), "Batches that have not ended, by status.")
BATCH_LAG = Instrument(
    "triton_openai_batch_lag_seconds", (), "Age of the oldest batch that has waiting lines; 0 without one."
)
BATCH_NEEDED = Instrument(
    "triton_openai_batch_needed_lines_per_second", (),
    "How many lines have to end each second for every batch to end within its window. Batches that are still validated "
    "do not count.",
)  # fmt: skip
FILES_BYTES = Instrument("triton_openai_files_bytes", (), "Bytes of the files that are kept, uploads included.")
#: All of the above.
SCRAPED = instruments_in(vars())


class ServedName(msgspec.Struct, frozen=True, kw_only=True):
    """A public name of a model."""

    name: str
    triton_model: str
    adapter: str
    #: Whether the chat template works; ``None`` while that is not known.
    can_chat: bool | None
    #: The Triton models that do the work.
    engines: Collection[str]
    #: Whether the name stands for a LoRA adapter.
    lora: bool
    #: How many LoRA adapters the engine runs at once; ``None`` where that is not known.
    max_loras: int | None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The state of Triton and of the store in this process: the models by state, and the served names."""

    workers: int
    triton_up: bool
    store_up: bool = True
    triton_models: Mapping[str, int]
    served: Sequence[ServedName]


class BatchState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of files and of the batches that have not ended, from their tables."""

    statuses: Mapping[str, int]
    #: Age in seconds of the oldest one that has waiting lines.
    lag: float
    #: Lines per second.
    needed: float
    files_bytes: float


def gauge(instrument: Instrument, series: Mapping[tuple[str, ...], float]) -> Metric:
    """Return the metric *instrument* with its *series*: a value for each tuple of labels."""
    family = GaugeMetricFamily(instrument.name, instrument.help, labels=instrument.labels)
    for labels, value in series.items():
        family.add_metric(labels, value)
    return family


def state_metrics(state: State) -> list[Metric]:
    """Return the metrics of *state*."""
    # Nothing is served while Triton does not answer, though its models stay known.
    if state.triton_up:
        served = state.served
    else:
        served = ()
    return [
        gauge(BUILD, {(__version__,): 1}),
        gauge(WORKERS, {(): state.workers}),
        gauge(UP, {(): state.triton_up}),
        gauge(STORE_UP, {(): state.store_up}),
        gauge(TRITON_MODELS, {(name,): number for name, number in state.triton_models.items()}),
        gauge(SERVED, {(): len(served)}),
        gauge(MODEL, {(name.name, name.triton_model, name.adapter): 1 for name in served}),
        gauge(CHAT, {(name.triton_model,): name.can_chat for name in served if name.can_chat is not None}),
    ]


def engine_metrics(loads: Mapping[str, EngineLoad]) -> list[Metric]:
    """Return the metrics of the engines' *loads*, by Triton model."""
    requests: dict[tuple[str, ...], float] = {}
    cache: dict[tuple[str, ...], float] = {}
    for model, load in loads.items():
        requests[model, "running"] = load.running
        requests[model, "waiting"] = load.waiting
        if load.cache_usage is not None:
            cache[(model,)] = load.cache_usage
    return [gauge(ENGINE_REQUESTS, requests), gauge(ENGINE_CACHE, cache)]


def batch_metrics(state: BatchState) -> list[Metric]:
    """Return the metrics of *state*."""
    return [
        gauge(BATCHES, {(name,): number for name, number in state.statuses.items()}),
        gauge(BATCH_LAG, {(): state.lag}),
        gauge(BATCH_NEEDED, {(): state.needed}),
        gauge(FILES_BYTES, {(): state.files_bytes}),
    ]
