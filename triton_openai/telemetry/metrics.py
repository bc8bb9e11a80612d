"""
Metrics for Prometheus: the table of them, the observer that counts each request when it ends, and what workers share.

``gen_ai_server_*`` are the model server metrics of OpenTelemetry's semantic conventions for generative AI, in
Prometheus's spelling and with the conventions' buckets. What the conventions have no name for begins with
``triton_openai_``. The table in the documents is generated from this one.

A single process keeps its numbers in memory. Workers write theirs also to the files of ``prometheus_client``'s
multiprocess mode; the worker that answers a scrape adds them up.
"""

from __future__ import annotations

import collections
import json
import os
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
import structlog
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from prometheus_client.values import MultiProcessValue

from triton_openai.config.worker import Worker
from triton_openai.errors import ConfigurationError, RateLimited, ServiceError, UpstreamError
from triton_openai.telemetry.request_record import CLIENT_CLOSED_REQUEST, Observer, RequestRecord

_log = structlog.get_logger(__name__)

#: How a request ended; alerts are built on it.
Outcome: TypeAlias = Literal["answered", "invalid", "refused", "failed", "cancelled"]
#: Operation of a request that is no inference, or was refused before its operation was known.
OTHER = "other"
#: ``gen_ai.provider.name``; the conventions have no name for Triton, and allow others.
PROVIDER = "triton"
# Keys with a label of their own, and the one for requests without a key.
_MAX_KEYS = 101

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# The higher ones are those of vLLM's server.
_INTER_TOKEN_LATENCY = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
# The buckets of gen_ai.client.token.usage, up to the size of a context.
_TOKENS = tuple(4.0**power for power in range(11))
_QUEUE = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREPARATION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_GEN_AI = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "adapter")
_MODEL = ("model", "adapter")
_OPERATION = ("operation", "model", "adapter")


class Instrument(msgspec.Struct, frozen=True, eq=False):
    """A metric as Prometheus sees it; a counter's name is that of its samples, with ``_total``."""

    name: str
    labels: Sequence[str]
    help: str
    buckets: Sequence[float] = ()

    @property
    def kind(self) -> Literal["counter", "gauge", "histogram"]:
        """Its type."""
        if self.buckets:
            return "histogram"
        if self.name.endswith("_total"):
            return "counter"
        return "gauge"

    @property
    def bounds(self) -> Sequence[str]:
        """The upper bounds of its buckets as Prometheus writes them."""
        if self.buckets:
            return [*map(floatToGoString, self.buckets), "+Inf"]
        return []


REQUESTS = Instrument(
    "triton_openai_requests_total", (*_OPERATION, "status", "outcome"),
    "Requests that ended, by HTTP status and outcome: answered, invalid (the client's mistake), refused (no "
    "permission, or no capacity), failed (also after the status was sent), cancelled (the client left).",
)  # fmt: skip
ERRORS = Instrument(
    "triton_openai_errors_total", (*_OPERATION, "outcome", "code"),
    "Requests that ended with an error, by its code, including errors after the status was sent.",
)  # fmt: skip
RUNNING = Instrument("triton_openai_requests_running", _MODEL, "Running requests for a model, without queued ones.")
QUEUED = Instrument("triton_openai_requests_queued", _MODEL, "Requests for a model in this service's queue.")
TOKENS = Instrument(
    "triton_openai_tokens_total", (*_MODEL, "type"),
    "Tokens of prompts (input) and answers (output), where known. Tokens generated before an answer failed or its "
    "client left count if the backend counts with every step.",
)  # fmt: skip
FINISHED = Instrument(
    "triton_openai_answers_finished_total", (*_MODEL, "reason"),
    "Answers that ended, by finish reason; a request with n or several prompts has several answers.",
)  # fmt: skip
DURATION = Instrument(
    "gen_ai_server_request_duration_seconds", (*_GEN_AI, "error_type"),
    "From a request's head to the last byte of its answer. error_type is empty, an error's code, or 'cancelled'.",
    _DURATION,
)  # fmt: skip
FIRST_TOKEN = Instrument(
    "gen_ai_server_time_to_first_token_seconds", _GEN_AI,
    "From a request's head to the first token from Triton, queues included; not of answers that come whole.",
    _FIRST_TOKEN,
)  # fmt: skip
PER_TOKEN = Instrument(
    "gen_ai_server_time_per_output_token_seconds", _GEN_AI,
    "Mean time between an answer's tokens after the first; answers in one piece are not included.", _PER_TOKEN,
)  # fmt: skip
INTER_TOKEN_LATENCY = Instrument(
    "triton_openai_time_between_tokens_seconds", _MODEL,
    "Time between arrivals of an answer's text from Triton; tokens that arrive together are one arrival.",
    _INTER_TOKEN_LATENCY,
)  # fmt: skip
QUEUE = Instrument(
    "triton_openai_queue_seconds", _MODEL,
    "Time in this service's queue, 0 for requests that did not wait; Triton's queues are not included.", _QUEUE,
)  # fmt: skip
PREPARATION = Instrument(
    "triton_openai_preparation_seconds", _MODEL,
    "From a request's head until it was sent to Triton (reading, template, tokenizer), without the wait in the queue.",
    _PREPARATION,
)  # fmt: skip
INPUT_TOKENS = Instrument("triton_openai_input_tokens", _MODEL, "Tokens of a request's prompts.", _TOKENS)
OUTPUT_TOKENS = Instrument("triton_openai_output_tokens", _MODEL, "Tokens of a complete answer.", _TOKENS)
AUDIO_SECONDS = Instrument(
    "triton_openai_audio_seconds_total", (*_MODEL, "direction"),
    "Seconds of audio in requests (input) and in answers (output), as far as they were sent.",
)  # fmt: skip
TOOL_CALLS = Instrument(
    "triton_openai_tool_calls_total", (*_MODEL, "outcome", "repair"),
    "Calls of tools in answers, by outcome: strict (as the format has it), repaired (repair says what: brackets, "
    "commas, escapes, literals, name, notation, quotes, tags, types), unknown_tool, cut (its arguments are not whole), "
    "text (what began like a call and could not be read as one).",
)  # fmt: skip
UNKNOWN_FIELDS = Instrument(
    "triton_openai_unknown_fields_total", (*_MODEL, "field"),
    "Requests with an unknown field that was ignored, by its name; 'other' stands for names beyond the first hundred, "
    "and for names that are not identifiers.",
)  # fmt: skip
NOT_ANSWERING = Instrument(
    "triton_openai_model_not_answering", _MODEL,
    "Processes of this service that get no answer from a ready Triton model: neither to several clients' requests in a "
    "row, nor to the service's own small requests since.",
)  # fmt: skip
EVENT_LOOP_LAG = Instrument(
    "triton_openai_event_loop_lag_seconds", (),
    "Delay of the event loop's timers, measured ten times a second in each process.", _LAG,
)  # fmt: skip
WORKERS_REPLACED = Instrument(
    "triton_openai_workers_replaced_total", (),
    "Worker processes that died and were replaced. Their running requests are in no counter.",
)  # fmt: skip
LOG_LINES_LOST = Instrument(
    "triton_openai_log_lines_lost_total", (),
    "Log lines that could not be written: stderr failed, or was not read fast enough.",
)  # fmt: skip
KEY_TOKENS = Instrument(
    "triton_openai_key_tokens_total", ("key", "type"),
    "Tokens of prompts (input) and answers (output) by the name of the API key or of the gateway's tenant, batches "
    "included, where known. Beyond 100 names, 'other' stands for the rest.",
)  # fmt: skip
KEY_REFUSALS = Instrument(
    "triton_openai_key_refusals_total", ("key", "reason"),
    "Refused requests by key, as above, empty without one, and by reason: the limit of the key that was reached "
    "(requests, tokens, audio_seconds), else the error's code.",
)  # fmt: skip
TRACES_LOST = Instrument(
    "triton_openai_traces_lost_total", (),
    "Requests whose spans were lost: the collector did not take them, or too many waited.",
)  # fmt: skip

# The name of a Triton is the first label.
_ENDPOINT = ("endpoint", "model")
# Room for the series of 64 Tritons with three models each, in either file.
_ENDPOINT_BYTES = 256 * 1024
# The place of the labels in the key of a number: JSON of the metric, the sample, the labels and the help text.
_LABELS = 2
ENDPOINT_UP = Instrument(
    "triton_openai_endpoint_up", ("endpoint",), "Processes of this service to which one of several Tritons answers."
)
ENDPOINT_REQUESTS = Instrument(
    "triton_openai_endpoint_requests_total", (*_ENDPOINT, "outcome"),
    "Requests that one of several Tritons has got, by outcome: answered, failed, cancelled. One that was sent to two "
    "Tritons counts for both. 'other' stands for those beyond 64 at a time. The series of a Triton end when it leaves.",
)  # fmt: skip
ENDPOINT_RUNNING = Instrument(
    "triton_openai_endpoint_requests_running", _ENDPOINT, "Running requests of a model at one of several Tritons."
)
ENDPOINT_EJECTED = Instrument(
    "triton_openai_endpoint_ejected", _ENDPOINT,
    "Processes of this service that send no requests for a model to a Triton, because it failed several in a row.",
)  # fmt: skip
EJECTIONS = Instrument(
    "triton_openai_endpoint_ejections_total", (*_ENDPOINT, "reason"), "Ejections, by the code of the last failure."
)
ENDPOINT_PANIC = Instrument(
    "triton_openai_endpoint_panic", ("model",),
    "Processes of this service for which so many Tritons are ejected that requests go to all again.",
)  # fmt: skip
FAILOVERS = Instrument(
    "triton_openai_failovers_total", ("model", "reason"),
    "Requests that were sent to another Triton before their first token, by the code of the failure.",
)  # fmt: skip
RETRY_BUDGET_EXHAUSTED = Instrument(
    "triton_openai_retry_budget_exhausted_total", (),
    "Requests that could have gone to another Triton, and did not because too many had.",
)  # fmt: skip
LOOKUP_FAILURES = Instrument(
    "triton_openai_endpoint_lookup_failures_total", (),
    "Lookups of the name of Tritons that failed or found no address. The old addresses stay.",
)  # fmt: skip
LIMITS_STORE_UP = Instrument(
    "triton_openai_limits_store_up", (),
    "Processes of this service to which the Redis for rate limits answers; missing without one.",
)  # fmt: skip

BATCH_LINES = Instrument(
    "triton_openai_batch_lines_total", ("outcome",),
    "Lines of batches that have a result: succeeded, failed, or never_ran, because their batch was cancelled, has "
    "expired or failed.",
)  # fmt: skip
BATCHES_ENDED = Instrument(
    "triton_openai_batches_ended_total", ("status",),
    "Batches that ended, by status: completed, failed, expired, cancelled.",
)  # fmt: skip
BATCH_RUNNING = Instrument("triton_openai_batch_running", (), "Running lines of batches.")
BATCH_LIMIT = Instrument(
    "triton_openai_batch_limit", ("model",),
    "Lines that may run for a Triton model now, if live requests leave room. Missing before its first line.",
)  # fmt: skip
BATCHES_PAUSED = Instrument(
    "triton_openai_batches_paused", (),
    "Batches that wait because the disk is full or the database fails, at least 1 in each process where it does.",
)  # fmt: skip

BATCH_MODELS_AWAY = Instrument(
    "triton_openai_batch_models_away", (),
    "Models for which lines of batches wait because they are not served or do not answer.",
)  # fmt: skip
BATCH_QUARANTINED = Instrument(
    "triton_openai_batch_quarantined", (),
    "Lines of batches that wait to run alone because they ran when a process or Triton ended.",
)  # fmt: skip

# By the event of a fleet of several Tritons.
_OF_FLEETS = {
    "up": ENDPOINT_UP,
    "running": ENDPOINT_RUNNING,
    "ended": ENDPOINT_REQUESTS,
    "ejected": ENDPOINT_EJECTED,
    "ejections": EJECTIONS,
    "panics": ENDPOINT_PANIC,
    "failovers": FAILOVERS,
    "budget_exhausted": RETRY_BUDGET_EXHAUSTED,
    "lookup_failures": LOOKUP_FAILURES,
}
#: All of the above.
INSTRUMENTS: Sequence[Instrument] = [one for one in tuple(vars().values()) if isinstance(one, Instrument)]


def share_between_workers(folder: Path, index: int) -> bool:
    """
    Make the files in *folder* in which worker *index* keeps its numbers; return whether it had files already.

    The workers' parent sets ``PROMETHEUS_MULTIPROC_DIR`` to this folder, for ``prometheus_client``. Files belong to a
    worker's index, not to its process id: the process that replaces a dead worker goes on with its counters. Raises
    :class:`ConfigurationError`.
    """
    files = [folder / f"{kind}_{index}.db" for kind in ("counter", "gauge_livesum", "histogram")]
    replaces = files[0].exists()
    try:
        forget_worker(folder, index)
        for path in files:
            # Room for some hundred histograms.
            _allocate(path, 1024 * 1024)
        for path in _endpoint_files(folder, index).values():
            _allocate(path, _ENDPOINT_BYTES)
    except OSError as error:
        raise ConfigurationError(f"Metrics cannot be kept in {folder}: {error.strerror or error}.") from error
    return replaces


def forget_worker(folder: Path, index: int) -> None:
    """Drop the gauges of a dead worker; its counters stay. Called by the process that supervises it."""
    mark_process_dead(index, str(folder))
    mark_process_dead(f"endpoints_{index}", str(folder))


def _endpoint_files(folder: Path, index: int) -> Mapping[str, Path]:
    """Return where worker *index* keeps the series of Tritons, by the kind of metric."""
    return {
        "counter": folder / f"counter_endpoints_{index}.db",
        "gauge": folder / f"gauge_livesum_endpoints_{index}.db",
    }


def _allocate(path: Path, size: int) -> None:
    """Make a file of *size* bytes at least. On a full disk, a write into a sparse file would kill the process."""
    with path.open("ab") as file:
        os.posix_fallocate(file.fileno(), 0, size)


class _EndpointFile:
    """The series of Tritons in a file like those of ``prometheus_client``, which drop nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = MmapedDict(str(path))

    def __del__(self) -> None:
        self._numbers.close()

    def get(self, key: str) -> float:
        """Return the number of *key*, 0 for a new one."""
        return float(self._numbers.read_value(key)[0])

    def set(self, key: str, number: float) -> None:
        """Set the number of *key*."""
        self._numbers.write_value(key, number, 0.0)

    def retain(self, endpoints: Collection[str]) -> None:
        """Drop the series of all Tritons but *endpoints*. Whoever reads the file sees it before or after that."""
        entries = [(key, value) for key, value, _ in self._numbers.read_all_values()]
        kept = [entry for entry in entries if json.loads(entry[0])[_LABELS]["endpoint"] in endpoints]
        if len(kept) == len(entries):
            return
        new = self._path.with_suffix(".new")
        try:
            new.unlink(missing_ok=True)
            _allocate(new, _ENDPOINT_BYTES)
        except OSError as error:
            _log.warning("series of Tritons that have left stay in the metrics", reason=str(error))
            return
        numbers = MmapedDict(str(new))
        for key, value in kept:
            numbers.write_value(key, value, 0.0)
        new.replace(self._path)
        self._numbers.close()
        self._numbers = numbers


class _EndpointCell(NamedTuple):
    """One number in a file."""

    file: _EndpointFile
    key: str

    def get(self) -> float:
        return self.file.get(self.key)

    def set(self, number: float) -> None:
        self.file.set(self.key, number)


class _Shared(list[float]):
    """Numbers that are also in *cells* of the files that all workers read."""

    def __init__(self, cells: Sequence[Any]) -> None:
        super().__init__(cell.get() for cell in cells)
        self._cells = cells

    def __setitem__(self, index: Any, number: Any) -> None:
        super().__setitem__(index, number)
        self._cells[index].set(number)


class Series:
    """
    The numbers of one series: one, or those of a histogram with these upper *bounds* of its buckets.

    ``prometheus_client``'s own take several times as long for a value, and one at a time. Here nothing is
    locked: only the event loop's thread writes.
    """

    __slots__ = ("_bounds", "numbers")

    def __init__(self, bounds: Sequence[float], numbers: list[float]) -> None:
        self._bounds = bounds
        #: Of a histogram: the count of each bucket, not of those below it, and the sum.
        self.numbers = numbers

    def inc(self, amount: float = 1) -> None:
        """Add to a counter or a gauge."""
        self.numbers[0] += amount

    def set(self, number: float) -> None:
        """Set a gauge."""
        self.numbers[0] = number

    def observe(self, amount: float) -> None:
        """Count one value."""
        numbers = self.numbers
        numbers[bisect_left(self._bounds, amount)] += 1
        numbers[-1] += amount

    def observe_intervals(self, times: Sequence[float]) -> None:
        """Count a value for each interval between *times*; equal times are one."""
        intervals = (after - before for before, after in pairwise(times) if after != before)
        counts = collections.Counter(bisect_left(self._bounds, interval) for interval in intervals)
        for bucket, count in counts.items():
            self.numbers[bucket] += count
        if counts:
            self.numbers[-1] += times[-1] - times[0]


class Metrics(Observer, Collector):
    """
    The metrics of this process.

    Only names of served models and of keys become labels, so a client cannot create series. ``folder`` is where all
    workers keep their metrics, ``None`` for a single process.
    """

    def __init__(self, worker: Worker) -> None:
        self.folder = worker.directory
        replaces = self.folder is not None and share_between_workers(self.folder, worker.index)
        if self.folder is None:
            self._cell = None
        else:
            self._cell = MultiProcessValue(lambda: worker.index)
        # The kinds of repairs that the log has named, with their models
        self._repairs: set[tuple[str, str]] = set()
        self._made: list[tuple[Instrument, Sequence[str], Series]] = []
        # The keys that have a label of their own.
        self._keys = {""}
        # Those of Tritons, which come and go.
        self._of_endpoints: dict[tuple[Instrument, Sequence[str]], Series] = {}
        files = {} if self.folder is None else _endpoint_files(self.folder, worker.index)
        self._endpoint_files = {kind: _EndpointFile(path) for kind, path in files.items()}
        #: Returns the series of an instrument with these values of its labels.
        self.child = cache(self._make)
        for one in INSTRUMENTS:
            if not one.labels:
                self.child(one)
        if replaces:
            self.child(WORKERS_REPLACED).inc()

    def _make(self, instrument: Instrument, *labels: str) -> Series:
        one = instrument
        names = tuple(instrument.labels)
        if self._cell is None:
            numbers = [0.0] * (len(one.bounds) + 1)
        else:
            parts = [(f"{one.name}_bucket", (*names, "le"), (*labels, bound)) for bound in one.bounds]
            parts.append((f"{one.name}_sum" if one.buckets else one.name, names, labels))
            family = one.kind, one.name.removesuffix("_total")
            # A gauge is the sum over the workers that live.
            numbers = _Shared([self._cell(*family, *part, one.help, multiprocess_mode="livesum") for part in parts])
        series = Series(one.buckets, numbers)
        self._made.append((one, labels, series))
        return series

    def collect(self) -> Sequence[Metric]:
        """Return what was counted, by all workers together, with the memory and CPU time of a single process."""
        if self.folder is not None:
            # Memory and CPU time of one process mean nothing where each scrape meets another process.
            return list(MultiProcessCollector(None, str(self.folder)).collect())
        families: dict[Instrument, Any] = {
            one: _FAMILIES[one.kind](one.name, one.help, labels=one.labels) for one in INSTRUMENTS
        }
        of_endpoints = [(*made, series) for made, series in self._of_endpoints.items()]
        for one, labels, series in [*self._made, *of_endpoints]:
            *counts, total = series.numbers
            buckets = list(zip(one.bounds, accumulate(counts), strict=True))
            families[one].add_metric(labels, *([buckets] if buckets else ()), total)
        return [*families.values(), *ProcessCollector(registry=None).collect()]

    def add_gauges(self, model: str, adapter: str, *, alias: bool = False) -> None:
        """Create the gauges of a served name, with 0: an autoscaler must find them before the first request."""
        for gauge in (RUNNING, QUEUED) if alias else (RUNNING, QUEUED, NOT_ANSWERING):
            self.child(gauge, model, adapter)
        if not alias:
            self.child(TOOL_CALLS, model, adapter, "strict", "")

    def tell(self, event: str, *labels: str, by: int = 1) -> None:
        """
        Count what happens among several Tritons.

        The event ``endpoints`` has the labels of all that there are: the series of others are dropped.
        """
        if event == "endpoints":
            self._retain(labels)
            return
        instrument = _OF_FLEETS[event]
        if "endpoint" in instrument.labels:
            self._endpoint_child(instrument, labels).inc(by)
        else:
            self.child(instrument, *labels).inc(by)

    def _endpoint_child(self, instrument: Instrument, labels: Sequence[str]) -> Series:
        series = self._of_endpoints.get((instrument, labels))
        if series is None:
            numbers = [0.0]
            if self._endpoint_files:
                name = instrument.name
                key = mmap_key(name.removesuffix("_total"), name, [*instrument.labels], [*labels], instrument.help)
                numbers = _Shared([_EndpointCell(self._endpoint_files[instrument.kind], key)])
            series = self._of_endpoints[instrument, labels] = Series((), numbers)
        return series

    def _retain(self, endpoints: Collection[str]) -> None:
        """Drop the series of all Tritons but *endpoints*."""
        for instrument, labels in list(self._of_endpoints):
            if labels[0] not in endpoints:
                del self._of_endpoints[instrument, labels]
        for file in self._endpoint_files.values():
            file.retain(endpoints)

    def identified(self, record: RequestRecord) -> None:
        self.child(RUNNING, *_model(record)).inc()

    def queued(self, record: RequestRecord) -> None:
        self.child(RUNNING, *_model(record)).inc(-1)
        self.child(QUEUED, *_model(record)).inc()

    def admitted(self, record: RequestRecord) -> None:
        self.child(QUEUED, *_model(record)).inc(-1)
        self.child(RUNNING, *_model(record)).inc()

    def _key(self, key: str) -> str:
        """Return the label of *key*: tenants of a gateway have names without end."""
        if key not in self._keys:
            if len(self._keys) >= _MAX_KEYS:
                return OTHER
            self._keys.add(key)
        return key

    def ended(self, record: RequestRecord) -> None:
        child = self.child
        left = record.client_left
        error = record.error
        model, adapter = _model(record)
        operation = record.operation or OTHER
        outcome = outcome_of(record)
        # The client did not get the answer, whatever status was sent.
        if left:
            status = CLIENT_CLOSED_REQUEST
        else:
            status = record.status
        child(REQUESTS, operation, model, adapter, str(status), outcome).inc()
        if left:
            code = "cancelled"
        elif error is None:
            code = ""
        else:
            code = error.code
        if error is not None and not left:
            child(ERRORS, operation, model, adapter, outcome, code).inc()
            if outcome == "refused":
                if isinstance(error, RateLimited):
                    reason = error.kind
                else:
                    reason = code
                child(KEY_REFUSALS, self._key(record.key or ""), reason).inc()
        if record.operation is None:
            return
        child(RUNNING, model, adapter).inc(-1)
        child(DURATION, operation, PROVIDER, model, adapter, code).observe(record.duration)
        child(QUEUE, model, adapter).observe(record.queued_seconds)
        first = record.time_to_first_token
        if first is not None and not record.answers[0].whole:
            child(FIRST_TOKEN, operation, PROVIDER, model, adapter).observe(first)
        sent = [answer.sent for answer in record.answers if answer.sent is not None]
        if sent:
            preparation = min(sent) - record.began - record.queued_seconds
            child(PREPARATION, model, adapter).observe(max(0.0, preparation))
        prompt_tokens = record.input_tokens
        for number, answer in enumerate(record.answers):
            if answer.steps > 1:
                child(INTER_TOKEN_LATENCY, model, adapter).observe_intervals(answer.arrivals)
            if answer.finish_reason is not None:
                child(FINISHED, model, adapter, str(answer.finish_reason)).inc()
            usage = answer.usage_so_far
            if usage is None:
                continue
            # A prompt counts once, however many answers it has.
            if number % record.n == 0:
                prompt_tokens = (prompt_tokens or 0) + usage.prompt_tokens
            child(TOKENS, model, adapter, "output").inc(usage.completion_tokens)
            if record.key is not None:
                child(KEY_TOKENS, self._key(record.key), "output").inc(usage.completion_tokens)
            if answer.usage is not None:
                child(OUTPUT_TOKENS, model, adapter).observe(usage.completion_tokens)
            if answer.first is not None and answer.ended is not None and answer.steps > 1 < usage.completion_tokens:
                mean = (answer.ended - answer.first) / (usage.completion_tokens - 1)
                child(PER_TOKEN, operation, PROVIDER, model, adapter).observe(mean)
        for outcome_of_call, repair in record.tool_calls():
            self._count_call(model, adapter, outcome_of_call, repair)
        for direction, seconds in record.audio_seconds.items():
            child(AUDIO_SECONDS, model, adapter, direction).inc(seconds)
        if prompt_tokens is not None:
            child(TOKENS, model, adapter, "input").inc(prompt_tokens)
            if record.key is not None:
                child(KEY_TOKENS, self._key(record.key), "input").inc(prompt_tokens)
            child(INPUT_TOKENS, model, adapter).observe(prompt_tokens)

    def _count_call(self, model: str, adapter: str, outcome: str, repair: str) -> None:
        """Count a call of a tool; the first repair of each kind is in the log."""
        self.child(TOOL_CALLS, model, adapter, outcome, repair).inc()
        if repair and (model, repair) not in self._repairs:
            self._repairs.add((model, repair))
            _log.warning("a tool call of the model is repaired", model=model, repair=repair)


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


def _model(record: RequestRecord) -> tuple[str, str]:
    """Return the values of the labels ``model`` and ``adapter``."""
    return record.model or "", record.adapter or ""


def outcome_of(record: RequestRecord) -> Outcome:
    """Return how the request ended."""
    if record.client_left:
        return "cancelled"
    error = record.error
    if error is None:
        return "answered"
    if error.status in (401, 403, 429, 503) and not isinstance(error, UpstreamError):
        return "refused"
    if error.status < ServiceError.status:
        return "invalid"
    return "failed"
