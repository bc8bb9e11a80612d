"""Metrics that are not counted but looked up when they are asked for: the service's version, its models, its Triton."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily, Metric

from triton_openai import __version__
from triton_openai.models import Models
from triton_openai.telemetry.instruments import Instrument
from triton_openai.worker import Worker

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
TRITON_METRICS_UP = Instrument(
    "triton_openai_triton_metrics_up",
    "gauge",
    "Whether Triton's own metrics could be read for this answer; only where they are asked for.",
)

# What Triton's index says of a model that was unloaded, and of one that was never loaded (seen with 24.10).
_UNLOADED = frozenset({"unloaded", ""})

LOOKED_UP = (BUILD, WORKERS, UP, TRITON_MODELS, SERVED, MODEL, TRITON_METRICS_UP)


def state(models: Models, worker: Worker, *, triton_metrics: bool | None) -> Iterable[Metric]:
    """Yield them, as this process sees them; *triton_metrics*: whether Triton's could be read, if they were wanted."""
    yield InfoMetricFamily(BUILD.name.removesuffix("_info"), BUILD.help, {"version": __version__})
    yield GaugeMetricFamily(WORKERS.name, WORKERS.help, worker.count)
    snapshot = models.catalog.snapshot
    yield GaugeMetricFamily(UP.name, UP.help, snapshot.reachable)
    found = GaugeMetricFamily(TRITON_MODELS.name, TRITON_MODELS.help, labels=TRITON_MODELS.labels)
    found.add_metric(["ready"], len(snapshot.configs))
    unloaded = sum(reason in _UNLOADED for reason in snapshot.waiting.values())
    found.add_metric(["not_ready"], len(snapshot.waiting) - unloaded)
    found.add_metric(["unloaded"], unloaded)
    yield found
    # A Triton that is away serves nobody, though its models stay known.
    served = models.served if snapshot.reachable else {}
    yield GaugeMetricFamily(SERVED.name, SERVED.help, len(served))
    info = InfoMetricFamily(MODEL.name.removesuffix("_info"), MODEL.help, labels=MODEL.labels)
    for name, model in served.items():
        info.add_metric([name, model.owner, model.adapter.name], {})
    yield info
    if triton_metrics is not None:
        yield GaugeMetricFamily(TRITON_METRICS_UP.name, TRITON_METRICS_UP.help, triton_metrics)
