"""
The main metrics once more, under the names of vLLM's own server: what dashboards, autoscalers and the Gateway API
inference extension already read.

Nothing is counted twice: they are made from ours when they are asked for, with ``model_name`` as their label and our
buckets. Source of the names: vLLM's ``vllm/v1/metrics/loggers.py`` (0.11 and later; the older
``time_per_output_token_seconds`` is given as well).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from triton_openai.telemetry import instruments as names
from triton_openai.telemetry.instruments import Instrument


class Renamed(msgspec.Struct, frozen=True):
    """One of its names: the metric of ours that it shows, which series of it (*only*), and a further label."""

    name: str
    source: Instrument
    help: str
    only: Mapping[str, str] = {}
    label: str | None = None
    label_source: str | None = None

    @property
    def labels(self) -> Sequence[str]:
        """The labels that it has."""
        return ("model_name",) if self.label is None else ("model_name", self.label)


RENAMED = (
    Renamed("vllm:num_requests_running", names.RUNNING, "Requests that are being answered."),
    Renamed("vllm:num_requests_waiting", names.QUEUED, "Requests that wait here for others to end."),
    Renamed("vllm:prompt_tokens_total", names.TOKENS, "Tokens of prompts.", {"type": "input"}),
    Renamed("vllm:generation_tokens_total", names.TOKENS, "Tokens of answers.", {"type": "output"}),
    Renamed("vllm:request_success_total", names.FINISHED, "Answers that have ended.", {}, "finished_reason", "reason"),
    Renamed("vllm:time_to_first_token_seconds", names.FIRST_TOKEN, "Time to the first token."),
    Renamed("vllm:inter_token_latency_seconds", names.GAPS, "Time between the arrivals of an answer's tokens."),
    Renamed("vllm:time_per_output_token_seconds", names.PER_TOKEN, "Mean time between an answer's tokens."),
    Renamed("vllm:request_time_per_output_token_seconds", names.PER_TOKEN, "Mean time between an answer's tokens."),
    Renamed("vllm:e2e_request_latency_seconds", names.DURATION, "Time of a whole request.", {"error_type": ""}),
    Renamed("vllm:request_queue_time_seconds", names.QUEUE, "Time that requests waited here for others to end."),
    Renamed("vllm:request_prompt_tokens", names.INPUT_TOKENS, "Tokens of a request's prompts."),
    Renamed("vllm:request_generation_tokens", names.OUTPUT_TOKENS, "Tokens of an answer."),
)
CACHE_USAGE = Instrument(
    "vllm:kv_cache_usage_perc",
    "gauge",
    "How full the engine's KV cache is, 1 is full; of engines that report it in Triton's metrics.",
    ("model_name",),
)


def renamed(
    counted: Iterable[Metric], cache_usage: Mapping[str, float], owners: Mapping[str, str] = MappingProxyType({})
) -> Iterable[Metric]:
    """
    Yield the metrics that *counted* and *cache_usage* (by Triton model) have under these names.

    *owners* are the Triton models behind served names: aliases and LoRA adapters count for their model, as they do in
    that server. What reads these names may well take one series for all that there is.
    """
    ours = {metric.name: metric for metric in counted}
    for one in RENAMED:
        source = ours.get(one.source.name.removesuffix("_total"))
        if source is not None:
            yield _renamed(one, source, owners)
    if cache_usage:
        usage = GaugeMetricFamily(CACHE_USAGE.name, CACHE_USAGE.help, labels=CACHE_USAGE.labels)
        for model, value in cache_usage.items():
            usage.add_metric([model], value)
        yield usage


def _renamed(one: Renamed, source: Metric, owners: Mapping[str, str]) -> Metric:
    sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for sample in source.samples:
        labels: dict[str, Any] = sample.labels
        if any(labels.get(name) != value for name, value in one.only.items()):
            continue
        model = labels["model"] if "model" in labels else labels["gen_ai_request_model"]
        kept = {"model_name": owners.get(model, model)}
        if one.label is not None and one.label_source is not None:
            kept[one.label] = labels[one.label_source]
        if "le" in labels:
            kept["le"] = labels["le"]
        key = sample.name.removeprefix(source.name), tuple(kept.items())
        sums[key] = sums.get(key, 0.0) + sample.value
    metric = Metric(one.name.removesuffix("_total"), one.help, source.type)
    for (suffix, pairs), value in sums.items():
        metric.add_sample(metric.name + suffix, dict(pairs), value)
    return metric
