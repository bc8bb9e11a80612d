"""
Counts requests for Prometheus: an observer that turns each ended request into a few increments.

One process keeps its numbers in memory. Several workers of one service keep them in files of ``prometheus_client``'s
multiprocess mode, which whoever answers a scrape adds up: see :func:`share_between_workers` for what that takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import prometheus_client.values
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.values import MultiProcessValue, MutexValue

from triton_openai.errors import ConfigurationError, ServiceError, UpstreamError
from triton_openai.telemetry import instruments as names
from triton_openai.telemetry.instruments import PROVIDER, Instrument
from triton_openai.telemetry.observation import CLIENT_CLOSED_REQUEST, Observation, Observer
from triton_openai.telemetry.tallied import Tallied
from triton_openai.worker import Worker

_log = structlog.get_logger(__name__)

#: How a request ended, in one word; alerts are built on it.
Outcome: TypeAlias = Literal["answered", "invalid", "refused", "failed", "cancelled"]
#: Operation of a request that asks for no inference, or was turned away before it was known for what it asks.
OTHER = "other"
_REFUSED = frozenset({401, 403, 429, 503})
# The files that prometheus_client keeps for a worker, and a size that some hundred series of histograms need.
_FILES = ("counter", "gauge_livesum", "histogram")
_FILE_BYTES = 1024 * 1024


def metrics_folder(directory: Path) -> Path:
    """Return where the workers of the service with this private *directory* keep their numbers."""
    return directory / "metrics"


def share_between_workers(worker: Worker) -> bool:
    """
    Make metrics that are created from now on those of *worker*, kept in a file that all workers read.

    ``prometheus_client`` finds the folder in ``PROMETHEUS_MULTIPROC_DIR``, and looks when it is imported: whoever
    starts a worker sets that to :func:`metrics_folder` in its environment. Returns ``False`` where nobody did, and then
    each worker shows its own numbers. A file belongs to a worker's index and not to its process id, so that the one
    which takes a dead worker's place goes on counting where that one ended, and files do not pile up. Two processes
    must therefore never have one index at a time.
    """
    values = prometheus_client.values
    if worker.directory is None:
        # Whatever the environment says, for a program that is not this one.
        values.ValueClass = MutexValue
        return False
    if not values.ValueClass._multiprocess:
        _log.warning("workers do not share their metrics: PROMETHEUS_MULTIPROC_DIR is not set", worker=worker.index)
        return False
    metrics_folder(worker.directory).mkdir(parents=True, exist_ok=True)
    forget_worker(worker.directory, worker.index)
    reserve(metrics_folder(worker.directory), worker.index)
    values.ValueClass = MultiProcessValue(lambda: worker.index)
    return True


def reserve(folder: Path, index: int) -> None:
    """
    Give the files of worker *index* their place on the disk, before the library makes files of holes.

    To count into a hole on a disk that is full by then kills the process (SIGBUS). Raises :class:`ConfigurationError`.
    """
    try:
        for kind in _FILES:
            file = os.open(folder / f"{kind}_{index}.db", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(file, 0, _FILE_BYTES)
            finally:
                os.close(file)
    except OSError as error:
        raise ConfigurationError(f"Metrics cannot be kept in {folder}: {error.strerror or error}.") from error


def forget_worker(directory: Path, index: int) -> None:
    """Drop what a dead worker had running and queued; what it has counted stays. Called by whoever supervises it."""
    mark_process_dead(index, str(metrics_folder(directory)))


class SharedNumbers(Collector):
    """What all workers have counted, added up from their files in *folder*."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterable[Metric]:
        """Return it. A file that a worker is only just making, or died while making, is empty and says nothing yet."""
        files = [str(path) for path in sorted(self._folder.glob("*.db")) if _size(path)]
        metrics: Iterable[Metric] = MultiProcessCollector.merge(files)
        return metrics


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class _Served:
    """The series of one operation on one model: looked up once, since a look-up costs more than an increment."""

    def __init__(self, metrics: Metrics, operation: str, model: str, adapter: str) -> None:
        served, gen_ai = (model, adapter), (operation, PROVIDER, model, adapter)
        self.running = metrics.child(names.RUNNING, *served)
        self.queued = metrics.child(names.QUEUED, *served)
        self.first_token = metrics.child(names.FIRST_TOKEN, *gen_ai)
        self.per_token = metrics.child(names.PER_TOKEN, *gen_ai)
        self.gaps: Tallied = metrics.child(names.GAPS, *served)
        self.queue = metrics.child(names.QUEUE, *served)
        self.preparation = metrics.child(names.PREPARATION, *served)
        self.input_tokens = metrics.child(names.INPUT_TOKENS, *served)
        self.output_tokens = metrics.child(names.OUTPUT_TOKENS, *served)
        self.input = metrics.child(names.TOKENS, *served, "input")
        self.output = metrics.child(names.TOKENS, *served, "output")
        self.duration = metrics.child(names.DURATION, *gen_ai, "")


class Metrics(Observer):
    """
    All counted metrics of this process.

    Models become labels only once they are known to be served, so a client that makes up names makes no series.
    ``folder`` is where the numbers of all workers are, if there are several.
    """

    def __init__(self, worker: Worker) -> None:
        folder = None if worker.directory is None else metrics_folder(worker.directory)
        # Who finds a file of its own number goes on for another one. That one could not say that it died.
        replaces = folder is not None and (folder / f"counter_{worker.index}.db").exists()
        shared = share_between_workers(worker)
        self.folder = folder if shared else None
        #: Not the library's global one: two services in one process must not count for each other.
        self.registry = CollectorRegistry()
        self._metrics = {one.name: _made(one, self.registry) for one in names.INSTRUMENTS}
        self._served: dict[tuple[str, str, str], _Served] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        self._running: dict[Observation, _Served] = {}
        self._queued: set[Observation] = set()
        self._loop_lag: Tallied = self._metrics[names.LOOP_LAG.name]
        if shared and replaces:
            self._metrics[names.WORKERS_REPLACED.name].inc()

    def child(self, instrument: Instrument, *labels: str) -> Any:
        """Return the series of *instrument* with these values of its labels."""
        key = (instrument.name, *labels)
        found = self._children.get(key)
        if found is None:
            found = self._children[key] = self._metrics[instrument.name].labels(*labels)
        return found

    def show(self, model: str, adapter: str) -> None:
        """Have gauges of a served model, 0 until somebody asks it: what scales by them must not find nothing."""
        for gauge in (names.RUNNING, names.QUEUED):
            self.child(gauge, model, adapter)

    def identified(self, observation: Observation) -> None:
        """Count a running request."""
        operation, model, adapter = observation.operation, observation.model, observation.adapter
        if observation in self._running or operation is None or model is None or adapter is None:
            return
        key = (operation, model, adapter)
        served = self._served.get(key)
        if served is None:
            served = self._served[key] = _Served(self, *key)
        self._running[observation] = served
        served.running.inc()

    def queued(self, observation: Observation) -> None:
        """Count a request that waits, and does not run meanwhile."""
        served = self._running.get(observation)
        if served is not None and observation not in self._queued:
            self._queued.add(observation)
            served.running.dec()
            served.queued.inc()

    def admitted(self, observation: Observation) -> None:
        """Count the end of its wait."""
        if observation in self._queued:
            self._queued.remove(observation)
            served = self._running[observation]
            served.queued.dec()
            served.running.inc()

    def ended(self, observation: Observation) -> None:
        """Count everything that is known of it now."""
        self.admitted(observation)
        served = self._running.pop(observation, None)
        operation, model, adapter = OTHER, "", ""
        if served is not None:
            operation, model, adapter = (
                observation.operation or OTHER,
                observation.model or "",
                observation.adapter or "",
            )
        outcome, status = outcome_of(observation), str(observation.status)
        if observation.client_left:
            # What was sent before is no matter: nobody has got the answer.
            status = str(CLIENT_CLOSED_REQUEST)
        self.child(names.REQUESTS, operation, model, adapter, status, outcome).inc()
        code = ""
        if observation.client_left:
            code = "cancelled"
        elif observation.error is not None:
            code = observation.error.code or "unknown"
            self.child(names.ERRORS, operation, model, adapter, outcome, code).inc()
        if served is None:
            return
        served.running.dec()
        if code:
            self.child(names.DURATION, operation, PROVIDER, model, adapter, code).observe(observation.duration)
        else:
            served.duration.observe(observation.duration)
        served.queue.observe(observation.queued_seconds)
        self._count_answers(observation, served, model, adapter)

    def _count_answers(self, observation: Observation, served: _Served, model: str, adapter: str) -> None:
        first = observation.time_to_first_token
        if first is not None:
            served.first_token.observe(first)
        answers = observation.answers
        sent = [answer.sent for answer in answers if answer.sent is not None]
        if sent:
            served.preparation.observe(max(0.0, min(sent) - observation.began - observation.queued_seconds))
        # A prompt counts once, however many answers it has, and only when Triton has got it.
        prompts = 0 if observation.input_tokens is None else observation.input_tokens
        known = observation.input_tokens is not None
        for number, answer in enumerate(answers):
            usage = answer.usage_so_far
            served.gaps.add(answer.gaps)
            if answer.finish_reason is not None:
                self.child(names.FINISHED, model, adapter, answer.finish_reason.value).inc()
            if usage is None:
                continue
            if not number % observation.n:
                prompts, known = prompts + usage.prompt_tokens, True
            served.output.inc(usage.completion_tokens)
            if answer.usage is not None:
                served.output_tokens.observe(usage.completion_tokens)
            if answer.first is not None and answer.ended is not None and answer.steps > 1 < usage.completion_tokens:
                served.per_token.observe((answer.ended - answer.first) / (usage.completion_tokens - 1))
        if known:
            served.input.inc(prompts)
            served.input_tokens.observe(prompts)

    def note_loop_lag(self, seconds: float) -> None:
        """Take in by how many seconds a timer came too late."""
        self._loop_lag.observe(seconds)


def outcome_of(observation: Observation) -> Outcome:
    """Return the one word for how a request ended."""
    if observation.client_left:
        return "cancelled"
    error = observation.error
    if error is None:
        return "answered"
    if error.status in _REFUSED and not isinstance(error, UpstreamError):
        return "refused"
    return "invalid" if error.status < ServiceError.status else "failed"


def _made(instrument: Instrument, registry: CollectorRegistry) -> Any:
    name, about, labels = instrument.name, instrument.help, instrument.labels
    makers: dict[str, Callable[[], Any]] = {
        "counter": lambda: Counter(name, about, labels, registry=registry),
        # Only what lives runs something.
        "gauge": lambda: Gauge(name, about, labels, registry=registry, multiprocess_mode="livesum"),
        "histogram": lambda: Tallied(name, about, labels, registry=registry, buckets=instrument.buckets),
    }
    return makers[instrument.kind]()
