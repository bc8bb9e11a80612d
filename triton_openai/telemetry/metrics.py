"""
Metrics for Prometheus: the table of instruments, and the observer that counts each request when it ends.

``gen_ai_server_*`` are the model server metrics of OpenTelemetry's semantic conventions for generative AI, in
Prometheus's spelling and with the conventions' buckets. What the conventions have no name for begins with
``triton_openai_``. The table in the documents is generated from the instruments.

A single process keeps its values in memory. Workers keep theirs in the files of ``prometheus_client``'s multiprocess
mode; the worker that answers a scrape adds them up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, values
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MultiProcessValue, MutexValue, get_value_class

from triton_openai.config.worker import Worker
from triton_openai.errors import ConfigurationError, ServiceError, UpstreamError
from triton_openai.telemetry.observation import (
    CLIENT_CLOSED_REQUEST,
    LATENCY_BOUNDS,
    InterTokenLatency,
    Observation,
    Observer,
)

_log = structlog.get_logger(__name__)

#: How a request ended; alerts are built on it.
Outcome: TypeAlias = Literal["answered", "invalid", "refused", "failed", "cancelled"]
#: Operation of a request that is no inference, or was refused before its operation was known.
OTHER = "other"
#: ``gen_ai.provider.name``; the conventions have no name for Triton, and allow others.
PROVIDER = "triton"

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Those of gen_ai.client.token.usage, up to the size of a context.
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)
_QUEUE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREPARATION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "adapter")
_MODEL = ("model", "adapter")
_OPERATION = ("operation", "model", "adapter")


class Instrument(msgspec.Struct, frozen=True):
    """A metric as Prometheus sees it; a counter's name is that of its samples, with ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: Sequence[str] = ()
    buckets: Sequence[float] = ()


REQUESTS = Instrument(
    "triton_openai_requests_total",
    "counter",
    "Requests that have ended, by HTTP status and by outcome: answered, invalid (the client's mistake), refused (no "
    "right to it, or no room for it), failed (also after the status had left), cancelled (the client left).",
    (*_OPERATION, "status", "outcome"),
)
ERRORS = Instrument(
    "triton_openai_errors_total",
    "counter",
    "Requests that have ended with an error, by its code, also those whose status had left.",
    (*_OPERATION, "outcome", "code"),
)
RUNNING = Instrument(
    "triton_openai_requests_running", "gauge", "Requests for a model that are being answered, without queued ones.",
    _MODEL,
)  # fmt: skip
QUEUED = Instrument(
    "triton_openai_requests_queued", "gauge", "Requests for a model that wait here for others to end.", _MODEL
)
TOKENS = Instrument(
    "triton_openai_tokens_total",
    "counter",
    "Tokens of prompts (input) and of answers (output), as far as they are known; what was generated before an answer "
    "failed or its client left counts where the backend counts with every step.",
    (*_MODEL, "type"),
)
FINISHED = Instrument(
    "triton_openai_answers_finished_total",
    "counter",
    "Answers that have ended, by the reason that the backend gave; a request has several with n or several prompts.",
    (*_MODEL, "reason"),
)
DURATION = Instrument(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "From a request's head to the last byte of its answer. error_type is empty, an error's code, or 'cancelled'.",
    (*_GEN_AI, "error_type"),
    _DURATION,
)
FIRST_TOKEN = Instrument(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "From a request's head to the first token that Triton sent, queues included; of every request that got one.",
    _GEN_AI,
    _FIRST_TOKEN,
)
PER_TOKEN = Instrument(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "Mean time between the tokens of an answer after its first; answers that came in one piece have none.",
    _GEN_AI,
    _PER_TOKEN,
)
INTER_TOKEN_LATENCY = Instrument(
    "triton_openai_time_between_tokens_seconds",
    "histogram",
    "Between one arrival of an answer's text from Triton and the next; tokens that came together are one arrival.",
    _MODEL,
    LATENCY_BOUNDS,
)
QUEUE = Instrument(
    "triton_openai_queue_seconds",
    "histogram",
    "How long requests waited here for others to end; 0 for those that did not. Triton's queues are not in it.",
    _MODEL,
    _QUEUE,
)
PREPARATION = Instrument(
    "triton_openai_preparation_seconds",
    "histogram",
    "From a request's head until it was sent to Triton (reading, template, tokenizer), without the wait in the queue.",
    _MODEL,
    _PREPARATION,
)
INPUT_TOKENS = Instrument("triton_openai_input_tokens", "histogram", "Tokens of a request's prompts.", _MODEL, _TOKENS)
OUTPUT_TOKENS = Instrument(
    "triton_openai_output_tokens", "histogram", "Tokens of an answer that ended by itself.", _MODEL, _TOKENS
)
UNKNOWN_FIELDS = Instrument(
    "triton_openai_unknown_fields_total",
    "counter",
    "Requests with a field that nobody knows and that was ignored, by its name; 'other' stands for names beyond the "
    "first hundred, and for what does not look like one.",
    (*_MODEL, "field"),
)
RELAYED = Instrument(
    "triton_openai_relayed_requests_total",
    "counter",
    "Requests and calls of Triton's own protocol that have ended (--enable-kserve-frontends), by protocol, by Triton's "
    "group of what they asked for, and by HTTP status or gRPC's name of it; 'cancelled' when the client left.",
    ("protocol", "group", "status"),
)
RELAYING = Instrument(
    "triton_openai_relayed_requests_running", "gauge", "Requests and calls of Triton's own protocol, and open streams.",
    ("protocol",),
)  # fmt: skip
NOT_ANSWERING = Instrument(
    "triton_openai_model_not_answering",
    "gauge",
    "Processes of the service that a ready Triton model leaves without an answer: several requests of clients in a "
    "row, and small ones of the service's own since.",
    _MODEL,
)
LOOP_LAG = Instrument(
    "triton_openai_event_loop_lag_seconds",
    "histogram",
    "How late the event loop's timers come, measured ten times a second in each process.",
    (),
    _LAG,
)
WORKERS_REPLACED = Instrument(
    "triton_openai_workers_replaced_total",
    "counter",
    "Processes of several workers that have died and were replaced. Requests that one had running are in no counter.",
)

INSTRUMENTS = (
    REQUESTS, ERRORS, RUNNING, QUEUED, TOKENS, FINISHED, DURATION, FIRST_TOKEN, PER_TOKEN, INTER_TOKEN_LATENCY,
    QUEUE, PREPARATION, INPUT_TOKENS, OUTPUT_TOKENS, UNKNOWN_FIELDS, RELAYED, RELAYING, NOT_ANSWERING, LOOP_LAG,
    WORKERS_REPLACED,
)  # fmt: skip


def metrics_folder(directory: Path) -> Path:
    """Return the folder for the metrics of the workers that share this private *directory*."""
    return directory / "metrics"


def share_between_workers(worker: Worker) -> bool:
    """
    Keep metrics that are created from now on in files that all workers read. Return whether they do.

    ``prometheus_client`` takes the folder from ``PROMETHEUS_MULTIPROC_DIR``: whoever starts a worker sets that to
    :func:`metrics_folder`. Without it each worker shows its own values. A file belongs to a worker's index, not to its
    process id: the process that replaces a dead worker goes on with its counters, and files do not pile up. Two
    processes must not have the same index at the same time.
    """
    if worker.directory is None:
        # Whatever the environment says: it may be meant for another program.
        values.ValueClass = MutexValue
        return False
    if get_value_class() is MutexValue:
        _log.warning("workers do not share their metrics: PROMETHEUS_MULTIPROC_DIR is not set", worker=worker.index)
        return False
    folder = metrics_folder(worker.directory)
    folder.mkdir(parents=True, exist_ok=True)
    forget_worker(worker.directory, worker.index)
    reserve(folder, worker.index)
    values.ValueClass = MultiProcessValue(lambda: worker.index)
    return True


def reserve(folder: Path, index: int) -> None:
    """
    Allocate the files of worker *index* on the disk; ``prometheus_client`` would make sparse files.

    Writing to a sparse file on a full disk kills the process (SIGBUS). Raises :class:`ConfigurationError`.
    """
    try:
        for kind in ("counter", "gauge_livesum", "histogram"):
            file = os.open(folder / f"{kind}_{index}.db", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                # Enough for some hundred series of histograms.
                os.posix_fallocate(file, 0, 1024 * 1024)
            finally:
                os.close(file)
    except OSError as error:
        raise ConfigurationError(f"Metrics cannot be kept in {folder}: {error.strerror or error}.") from error


def forget_worker(directory: Path, index: int) -> None:
    """Drop the gauges of a dead worker; its counters stay. Called by the process that supervises it."""
    mark_process_dead(index, str(metrics_folder(directory)))


class SharedMetrics(Collector):
    """The sums over the files of all workers in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Return the sums. The file of a worker that is just being started, or died then, may be empty."""
        files = [str(path) for path in sorted(self._folder.glob("*.db")) if _size(path)]
        metrics: Iterable[Metric] = MultiProcessCollector.merge(files)
        return metrics


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class LatencyHistogram(Collector):
    """
    The histogram of inter-token latencies, which takes all latencies of an answer at once.

    ``prometheus_client``'s own one takes one observation at a time, about a microsecond each, and more with several
    workers: too much for every token.
    """

    def __init__(self, instrument: Instrument, registry: CollectorRegistry) -> None:
        self._instrument = instrument
        self._bounds = [*map(floatToGoString, instrument.buckets), "+Inf"]
        # By the values of the labels: one value for each bucket, and the sum.
        self._series: dict[tuple[str, ...], list[Any]] = {}
        registry.register(self)

    def add(self, labels: tuple[str, ...], latency: InterTokenLatency) -> None:
        """Observe every latency of an answer."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = self._new(labels)
        if latency.counts:
            for value, count in zip(series, (*latency.counts, latency.seconds), strict=True):
                if count:
                    value.inc(count)

    def _new(self, labels: tuple[str, ...]) -> list[Any]:
        one = self._instrument
        names = tuple(one.labels)
        buckets = [
            values.ValueClass("histogram", one.name, f"{one.name}_bucket", (*names, "le"), (*labels, bound), one.help)
            for bound in self._bounds
        ]
        return [*buckets, values.ValueClass("histogram", one.name, f"{one.name}_sum", names, labels, one.help)]

    def collect(self) -> Iterable[Metric]:
        """Return the histogram of this process."""
        family = HistogramMetricFamily(self._instrument.name, self._instrument.help, labels=self._instrument.labels)
        for labels, series in list(self._series.items()):
            *counts, seconds = (value.get() for value in series)
            buckets = list(zip(self._bounds, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, seconds)
        return [family]


class _ModelSeries:
    """The series of an operation on a model: made once, with 0, and cheaper than a look-up for each request."""

    def __init__(self, metrics: Metrics, operation: str, model: str, adapter: str) -> None:
        self.operation, self.model = operation, (model, adapter)
        self.gen_ai = (operation, PROVIDER, model, adapter)
        self.running, self.queued, self.queue, self.preparation, self.input_tokens, self.output_tokens = (
            metrics.child(one, model, adapter)
            for one in (RUNNING, QUEUED, QUEUE, PREPARATION, INPUT_TOKENS, OUTPUT_TOKENS)
        )
        self.input, self.output = (metrics.child(TOKENS, model, adapter, kind) for kind in ("input", "output"))
        self.first_token, self.per_token = (metrics.child(one, *self.gen_ai) for one in (FIRST_TOKEN, PER_TOKEN))
        self.duration = metrics.child(DURATION, *self.gen_ai, "")


class Metrics(Observer):
    """
    The metrics of this process.

    Only names of served models become labels, so a client cannot create series. ``folder`` is where all workers keep
    their metrics, ``None`` for a single process.
    """

    def __init__(self, worker: Worker) -> None:
        folder = None if worker.directory is None else metrics_folder(worker.directory)
        # Only the worker that replaces a dead one finds a file with its own index.
        replaces = folder is not None and (folder / f"counter_{worker.index}.db").exists()
        self.folder = folder if share_between_workers(worker) else None
        # Workers cannot sum up when their series began.
        disable_created_metrics()
        #: Not the library's global one: two services in one process must not count for each other.
        self.registry = CollectorRegistry()
        self._latency = LatencyHistogram(INTER_TOKEN_LATENCY, self.registry)
        self._metrics = {one.name: self._made(one) for one in INSTRUMENTS if one is not INTER_TOKEN_LATENCY}
        self._children: dict[tuple[str, ...], Any] = {}
        self._models: dict[tuple[str, str, str], _ModelSeries] = {}
        self._running: dict[Observation, _ModelSeries] = {}
        self._queued: set[Observation] = set()
        if self.folder is not None and replaces:
            self.child(WORKERS_REPLACED).inc()

    def _made(self, one: Instrument) -> Any:
        if one.kind == "counter":
            return Counter(one.name, one.help, one.labels, registry=self.registry)
        if one.kind == "gauge":
            # The sum over the workers that live.
            return Gauge(one.name, one.help, one.labels, registry=self.registry, multiprocess_mode="livesum")
        return Histogram(one.name, one.help, one.labels, registry=self.registry, buckets=one.buckets)

    def child(self, instrument: Instrument, *labels: str) -> Any:
        """Return the series of *instrument* with these values of its labels. The library's own look-up is slower."""
        key = (instrument.name, *labels)
        found = self._children.get(key)
        if found is None:
            metric = self._metrics[instrument.name]
            found = self._children[key] = metric.labels(*labels) if labels else metric
        return found

    def add_gauges(self, model: str, adapter: str, *, alias: bool = False) -> None:
        """Create the gauges of a served name, with 0: an autoscaler must find them before the first request."""
        for gauge in (RUNNING, QUEUED) if alias else (RUNNING, QUEUED, NOT_ANSWERING):
            self.child(gauge, model, adapter)

    def identified(self, observation: Observation) -> None:
        """Count a running request."""
        operation, model, adapter = observation.operation, observation.model, observation.adapter
        if observation in self._running or operation is None or model is None or adapter is None:
            return
        series = self._models.get((operation, model, adapter))
        if series is None:
            series = self._models[operation, model, adapter] = _ModelSeries(self, operation, model, adapter)
            self._latency.add(series.model, InterTokenLatency())
        self._running[observation] = series
        series.running.inc()

    def queued(self, observation: Observation) -> None:
        """Count a request that waits; it does not run meanwhile."""
        series = self._running.get(observation)
        if series is not None and observation not in self._queued:
            self._queued.add(observation)
            series.running.dec()
            series.queued.inc()

    def admitted(self, observation: Observation) -> None:
        """Count the end of the wait."""
        if observation in self._queued:
            self._queued.remove(observation)
            series = self._running[observation]
            series.queued.dec()
            series.running.inc()

    def ended(self, observation: Observation) -> None:
        """Count the request and its answers."""
        self.admitted(observation)
        series = self._running.pop(observation, None)
        operation, model = (OTHER, ("", "")) if series is None else (series.operation, series.model)
        # The client did not get the answer, whatever status was sent.
        status = CLIENT_CLOSED_REQUEST if observation.client_left else observation.status
        outcome = outcome_of(observation)
        self.child(REQUESTS, operation, *model, str(status), outcome).inc()
        code = "cancelled" if observation.client_left else ""
        if observation.error is not None and not observation.client_left:
            code = observation.error.code or "unknown"
            self.child(ERRORS, operation, *model, outcome, code).inc()
        if series is None:
            return
        series.running.dec()
        duration = self.child(DURATION, *series.gen_ai, code) if code else series.duration
        duration.observe(observation.duration)
        series.queue.observe(observation.queued_seconds)
        first = observation.time_to_first_token
        if first is not None:
            series.first_token.observe(first)
        sent = [answer.sent for answer in observation.answers if answer.sent is not None]
        if sent:
            series.preparation.observe(max(0.0, min(sent) - observation.began - observation.queued_seconds))
        self._count_answers(observation, series)

    def _count_answers(self, observation: Observation, series: _ModelSeries) -> None:
        prompt_tokens = observation.input_tokens
        for number, answer in enumerate(observation.answers):
            self._latency.add(series.model, answer.inter_token_latency)
            if answer.finish_reason is not None:
                self.child(FINISHED, *series.model, answer.finish_reason.value).inc()
            usage = answer.usage_so_far
            if usage is None:
                continue
            # A prompt counts once, however many answers it has.
            if number % observation.n == 0:
                prompt_tokens = (prompt_tokens or 0) + usage.prompt_tokens
            series.output.inc(usage.completion_tokens)
            if answer.usage is not None:
                series.output_tokens.observe(usage.completion_tokens)
            if answer.first is not None and answer.ended is not None and answer.steps > 1 < usage.completion_tokens:
                series.per_token.observe((answer.ended - answer.first) / (usage.completion_tokens - 1))
        if prompt_tokens is not None:
            series.input.inc(prompt_tokens)
            series.input_tokens.observe(prompt_tokens)

    def count_unknown_field(self, model: str, adapter: str, field: str) -> None:
        """Count a request with an unknown field. The caller bounds the number of names."""
        self.child(UNKNOWN_FIELDS, model, adapter, field).inc()

    def set_answering(self, model: str, adapter: str, answers: bool) -> None:
        """Set whether a Triton model answers."""
        self.child(NOT_ANSWERING, model, adapter).set(not answers)

    def observe_loop_lag(self, seconds: float) -> None:
        """Observe by how many seconds a timer of the event loop was late."""
        self.child(LOOP_LAG).observe(seconds)


def outcome_of(observation: Observation) -> Outcome:
    """Return how the request ended."""
    if observation.client_left:
        return "cancelled"
    error = observation.error
    if error is None:
        return "answered"
    if error.status in (401, 403, 429, 503) and not isinstance(error, UpstreamError):
        return "refused"
    return "invalid" if error.status < ServiceError.status else "failed"
