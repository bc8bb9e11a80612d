"""The metrics that dashboards and gateways read under the names of vLLM's server."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric

from triton_openai.generation import EngineLoad
from triton_openai.telemetry import instruments
from triton_openai.telemetry.gauges import ServedName, State, gauge
from triton_openai.telemetry.instruments import Instrument

_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
#: vLLM's names: the metric that each shows, and which of its series.
RENAMED: Mapping[str, tuple[Instrument, Mapping[str, str]]] = {
    _RUNNING: (instruments.RUNNING, {}),
    _WAITING: (instruments.QUEUED, {}),
    "vllm:prompt_tokens_total": (instruments.TOKENS, {"type": "input"}),
    "vllm:generation_tokens_total": (instruments.TOKENS, {"type": "output"}),
    "vllm:request_success_total": (instruments.FINISHED, {}),
    "vllm:time_to_first_token_seconds": (instruments.FIRST_TOKEN, {}),
    "vllm:inter_token_latency_seconds": (instruments.INTER_TOKEN_LATENCY, {}),
    "vllm:time_per_output_token_seconds": (instruments.PER_TOKEN, {}),
    "vllm:request_time_per_output_token_seconds": (instruments.PER_TOKEN, {}),
    "vllm:e2e_request_latency_seconds": (instruments.DURATION, {"error_type": ""}),
    "vllm:request_queue_time_seconds": (instruments.QUEUE, {}),
    "vllm:request_prompt_tokens": (instruments.INPUT_TOKENS, {}),
    "vllm:request_generation_tokens": (instruments.OUTPUT_TOKENS, {}),
}
#: Our labels under vLLM's names; sums are taken over the others.
RENAMED_LABELS = {"model": "model_name", "gen_ai_request_model": "model_name", "reason": "finished_reason", "le": "le"}
CACHE_USAGE = Instrument(
    "vllm:kv_cache_usage_perc", ("model_name",),
    "Usage of the engine's KV cache, from 0 to 1; only companion models, and engines that report it in Triton's "
    "metrics.",
)  # fmt: skip
CACHE_CONFIG = Instrument(
    "vllm:cache_config_info", ("model_name", "block_size", "num_gpu_blocks"),
    "Tokens in a block of the engine's KV cache, and its blocks; always 1. Only companion models, and engines that "
    "report them in Triton's metrics.",
)  # fmt: skip
LORA_REQUESTS = Instrument(
    "vllm:lora_requests_info", ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    "Names of the LoRA adapters with running and with queued requests, separated by commas, and how many adapters the "
    "engine runs at once, where the model's files say it. The value is the time of the scrape.",
)  # fmt: skip
SCRAPED_RENAMED = (CACHE_USAGE, CACHE_CONFIG, LORA_REQUESTS)


def renamed(
    name: str, counted: Mapping[str, Metric], triton_models: Mapping[str, str], loads: Mapping[str, EngineLoad]
) -> Iterable[Metric]:
    """
    Yield the metric that vLLM calls *name*, if any of it is *counted*.

    *triton_models* are those of served names. Aliases and LoRA adapters count for their model: a reader of these names
    may take one series for the whole model. Requests that wait in an engine, by its *loads*, do not run.
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
    if name in (_RUNNING, _WAITING):
        for series, value in sums.items():
            load = loads.get(dict(series[1])["model_name"])
            if load is not None:
                sums[series] = _with_engine(name, value, load)
    metric = Metric(name.removesuffix("_total"), instrument.help, source.type)
    for (suffix, pairs), value in sums.items():
        metric.add_sample(metric.name + suffix, dict(pairs), value)
    yield metric


def _with_engine(name: str, value: float, load: EngineLoad) -> float:
    """Return how many requests run, or wait, where *load* says how many of those that were sent to the engine wait."""
    if name == _WAITING:
        return value + load.waiting
    return max(value - load.waiting, 0.0)


def cache_metrics(
    state: State, engines: Mapping[str, Mapping[str, float]], loads: Mapping[str, EngineLoad]
) -> list[Metric]:
    """
    Return the KV cache of each Triton model: that of the fullest of its *engines*.

    Of models in *loads* it is what their engine reports by request.
    """
    usage: dict[tuple[str, ...], float] = {}
    config: dict[tuple[str, ...], float] = {}
    for name in state.served:
        known = [engines[engine] for engine in name.engines if engine in engines]
        if known:
            kinds = max(known, key=lambda kinds: kinds["used"] / kinds["max"])
            usage[(name.triton_model,)] = kinds["used"] / kinds["max"]
            if "tokens_per" in kinds:
                config[name.triton_model, f"{kinds['tokens_per']:.0f}", f"{kinds['max']:.0f}"] = 1
    for model, load in loads.items():
        if load.cache_usage is not None:
            usage[(model,)] = load.cache_usage
        if load.cache_blocks is not None:
            config[model, str(load.block_size), str(load.cache_blocks)] = 1
    return [gauge(CACHE_USAGE, usage), gauge(CACHE_CONFIG, config)]


def lora_requests(served: Iterable[ServedName], counted: Mapping[str, Metric]) -> Metric:
    """Return the LoRA adapters with requests: one series for each Triton model that has any adapters."""
    names: defaultdict[tuple[str, int | None], list[str]] = defaultdict(list)
    for name in served:
        if name.lora:
            names[name.triton_model, name.max_loras].append(name.name)

    def busy(instrument: Instrument, names: Iterable[str]) -> str:
        metric = counted.get(instrument.name)
        models = {sample.labels["model"] for sample in metric.samples if sample.value} if metric is not None else ()
        return ",".join(name for name in names if name in models)

    series: dict[tuple[str, ...], float] = {}
    for (model, max_loras), loras in names.items():
        running = busy(instruments.RUNNING, loras)
        queued = busy(instruments.QUEUED, loras)
        series[model, "" if max_loras is None else str(max_loras), running, queued] = time.time()
    return gauge(LORA_REQUESTS, series)
