"""
Counts each request in metrics for Prometheus when it ends.

A single process keeps its numbers in memory. Workers also write theirs to files, see ``metric_files``.
"""

from __future__ import annotations

import collections
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import structlog
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.mmap_dict import mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.values import MultiProcessValue

from triton_openai.config.worker import Worker
from triton_openai.errors import RateLimited, ServiceError, UpstreamError
from triton_openai.telemetry.instruments import (
    AUDIO_SECONDS,
    DURATION,
    EJECTIONS,
    ENDPOINT_EJECTED,
    ENDPOINT_PANIC,
    ENDPOINT_REQUESTS,
    ENDPOINT_RUNNING,
    ENDPOINT_UP,
    ERRORS,
    FAILOVERS,
    FINISHED,
    FIRST_TOKEN,
    INPUT_TOKENS,
    INSTRUMENTS,
    INTER_TOKEN_LATENCY,
    KEY_REFUSALS,
    KEY_TOKENS,
    LOOKUP_FAILURES,
    NOT_ANSWERING,
    OTHER,
    OUTPUT_TOKENS,
    PER_TOKEN,
    PREPARATION,
    PROVIDER,
    QUEUE,
    QUEUED,
    REQUESTS,
    RETRY_BUDGET_EXHAUSTED,
    RUNNING,
    TOKENS,
    TOOL_CALLS,
    WORKERS_REPLACED,
    Instrument,
)
from triton_openai.telemetry.metric_files import (
    EndpointCell,
    EndpointFile,
    SharedNumbers,
    endpoint_files,
    prepare_files,
)
from triton_openai.telemetry.request_record import CLIENT_CLOSED_REQUEST, Observer, RequestRecord

_log = structlog.get_logger(__name__)

#: How a request ended; alerts are built on it.
Outcome: TypeAlias = Literal["answered", "invalid", "refused", "failed", "cancelled"]
# Keys with a label of their own, and the label of requests without a key.
_MAX_KEYS = 101
_FLEET_EVENTS: Mapping[str, Instrument] = {
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
_FAMILIES: Mapping[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


class Series:
    """
    The numbers of one series: a single one, or those of a histogram whose buckets have these upper *bounds*.

    The series of ``prometheus_client`` take several times as long for each value. Here nothing is locked: only the
    thread of the event loop writes.
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

    Only names of served models and of keys become labels, so a client cannot create series.
    """

    def __init__(self, worker: Worker) -> None:
        #: Where all workers keep their metrics; ``None`` for a single process.
        self.folder = worker.directory
        self._value: Any = None
        self._endpoint_files: dict[str, EndpointFile] = {}
        replaces = False
        if self.folder is not None:
            replaces = prepare_files(self.folder, worker.index)
            self._value = MultiProcessValue(lambda: worker.index)
            for kind, path in endpoint_files(self.folder, worker.index).items():
                self._endpoint_files[kind] = EndpointFile(path)
        # The models and the kinds of repairs that the log has named.
        self._logged_repairs: set[tuple[str, str]] = set()
        # The keys that have a label of their own.
        self._keys = {""}
        self._series: list[tuple[Instrument, Sequence[str], Series]] = []
        # The series of Tritons are apart, because Tritons come and go.
        self._endpoint_series: dict[tuple[Instrument, Sequence[str]], Series] = {}
        #: Returns the series of an instrument with these values of its labels.
        self.child = cache(self._new_series)
        for instrument in INSTRUMENTS:
            if not instrument.labels:
                self.child(instrument)
        if replaces:
            self.child(WORKERS_REPLACED).inc()

    def _new_series(self, instrument: Instrument, *labels: str) -> Series:
        if self._value is None:
            numbers = [0.0] * (len(instrument.bounds) + 1)
        else:
            numbers = SharedNumbers(self._cells(instrument, labels))
        series = Series(instrument.buckets, numbers)
        self._series.append((instrument, labels, series))
        return series

    def _cells(self, instrument: Instrument, labels: Sequence[str]) -> list[Any]:
        """Return the cells of a series in this worker's files: one for each bucket, then that of the number or sum."""
        label_names = tuple(instrument.labels)
        family = instrument.name.removesuffix("_total")

        def cell(sample: str, names: Sequence[str], values: Sequence[str]) -> Any:
            # A gauge is the sum over the workers that live.
            return self._value(
                instrument.kind, family, sample, names, values, instrument.help, multiprocess_mode="livesum"
            )

        if not instrument.buckets:
            return [cell(instrument.name, label_names, labels)]
        bucket_names = (*label_names, "le")
        cells = [cell(f"{instrument.name}_bucket", bucket_names, (*labels, bound)) for bound in instrument.bounds]
        cells.append(cell(f"{instrument.name}_sum", label_names, labels))
        return cells

    def collect(self) -> Sequence[Metric]:
        """Return what was counted, by all workers together, with the memory and CPU time of a single process."""
        if self.folder is not None:
            # Memory and CPU time of one process are no use here: each scrape may reach another process.
            return list(MultiProcessCollector(None, str(self.folder)).collect())
        families: dict[Instrument, Any] = {}
        for instrument in INSTRUMENTS:
            family = _FAMILIES[instrument.kind]
            families[instrument] = family(instrument.name, instrument.help, labels=instrument.labels)
        for instrument, labels, series in self._series:
            if instrument.buckets:
                *counts, total = series.numbers
                buckets = list(zip(instrument.bounds, accumulate(counts), strict=True))
                families[instrument].add_metric(labels, buckets, total)
            else:
                families[instrument].add_metric(labels, series.numbers[0])
        for (instrument, labels), series in self._endpoint_series.items():
            families[instrument].add_metric(labels, series.numbers[0])
        return [*families.values(), *ProcessCollector(registry=None).collect()]

    def add_served_name(self, model: str, adapter: str, *, alias: bool = False) -> None:
        """Create the series of a served name, with 0: an autoscaler must find them before the first request."""
        self.child(RUNNING, model, adapter)
        self.child(QUEUED, model, adapter)
        if not alias:
            self.child(NOT_ANSWERING, model, adapter)
            self.child(TOOL_CALLS, model, adapter, "strict", "")

    def count_fleet_event(self, event: str, *labels: str, by: int = 1) -> None:
        """
        Count an event of a fleet of several Tritons.

        The event ``endpoints`` has the names of all Tritons as labels: the series of other Tritons are dropped.
        """
        if event == "endpoints":
            self._keep_endpoints(labels)
            return
        instrument = _FLEET_EVENTS[event]
        if "endpoint" in instrument.labels:
            self._endpoint_child(instrument, labels).inc(by)
        else:
            self.child(instrument, *labels).inc(by)

    def _endpoint_child(self, instrument: Instrument, labels: Sequence[str]) -> Series:
        series = self._endpoint_series.get((instrument, labels))
        if series is not None:
            return series
        numbers = [0.0]
        if self._endpoint_files:
            name = instrument.name
            key = mmap_key(name.removesuffix("_total"), name, [*instrument.labels], [*labels], instrument.help)
            numbers = SharedNumbers([EndpointCell(self._endpoint_files[instrument.kind], key)])
        series = Series((), numbers)
        self._endpoint_series[instrument, labels] = series
        return series

    def _keep_endpoints(self, endpoints: Collection[str]) -> None:
        """Drop the series of all Tritons but *endpoints*."""
        for instrument, labels in list(self._endpoint_series):
            if labels[0] not in endpoints:
                del self._endpoint_series[instrument, labels]
        for file in self._endpoint_files.values():
            file.keep_endpoints(endpoints)

    def identified(self, record: RequestRecord) -> None:
        self.child(RUNNING, *_model(record)).inc()

    def queued(self, record: RequestRecord) -> None:
        self.child(RUNNING, *_model(record)).inc(-1)
        self.child(QUEUED, *_model(record)).inc()

    def admitted(self, record: RequestRecord) -> None:
        self.child(QUEUED, *_model(record)).inc(-1)
        self.child(RUNNING, *_model(record)).inc()

    def ended(self, record: RequestRecord) -> None:
        child = self.child
        error = record.error
        model = record.model or ""
        adapter = record.adapter or ""
        operation = record.operation or OTHER
        outcome = outcome_of(record)
        status = record.status
        code = ""
        if record.client_left:
            # The client did not get the answer, whatever status was sent.
            status = CLIENT_CLOSED_REQUEST
            code = "cancelled"
        elif error is not None:
            code = error.code
            child(ERRORS, operation, model, adapter, outcome, code).inc()
        child(REQUESTS, operation, model, adapter, str(status), outcome).inc()
        if outcome == "refused":
            self._count_refusal(record, code)
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
        self._count_answers(record, operation, model, adapter)
        for outcome_of_call, repair in record.tool_calls():
            self._count_tool_call(model, adapter, outcome_of_call, repair)
        for direction, seconds in record.audio_seconds.items():
            child(AUDIO_SECONDS, model, adapter, direction).inc(seconds)

    def _count_answers(self, record: RequestRecord, operation: str, model: str, adapter: str) -> None:
        child = self.child
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
                child(KEY_TOKENS, self._key_label(record.key), "output").inc(usage.completion_tokens)
            if answer.usage is not None:
                child(OUTPUT_TOKENS, model, adapter).observe(usage.completion_tokens)
            if answer.first is None or answer.ended is None:
                continue
            if answer.steps > 1 and usage.completion_tokens > 1:
                mean = (answer.ended - answer.first) / (usage.completion_tokens - 1)
                child(PER_TOKEN, operation, PROVIDER, model, adapter).observe(mean)
        if prompt_tokens is not None:
            child(TOKENS, model, adapter, "input").inc(prompt_tokens)
            if record.key is not None:
                child(KEY_TOKENS, self._key_label(record.key), "input").inc(prompt_tokens)
            child(INPUT_TOKENS, model, adapter).observe(prompt_tokens)

    def _count_refusal(self, record: RequestRecord, code: str) -> None:
        reason = code
        if isinstance(record.error, RateLimited):
            reason = record.error.kind
        self.child(KEY_REFUSALS, self._key_label(record.key or ""), reason).inc()

    def _count_tool_call(self, model: str, adapter: str, outcome: str, repair: str) -> None:
        """Count a call of a tool; the first repair of each kind is in the log."""
        self.child(TOOL_CALLS, model, adapter, outcome, repair).inc()
        if repair and (model, repair) not in self._logged_repairs:
            self._logged_repairs.add((model, repair))
            _log.warning("a tool call of the model is repaired", model=model, repair=repair)

    def _key_label(self, key: str) -> str:
        """Return the label of *key*: the names of a gateway's tenants are unlimited."""
        if key not in self._keys:
            if len(self._keys) >= _MAX_KEYS:
                return OTHER
            self._keys.add(key)
        return key


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
