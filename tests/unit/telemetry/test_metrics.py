"""Counting requests: what of a record goes where, and that nobody can make up labels."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis.strategies import floats, lists
from prometheus_client import Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.registry import Collector

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.scrape import Scrape, scrape
from tests.unit.telemetry.fake_answer import FakeAnswer
from triton_openai.batches.first_tokens import FirstTokens
from triton_openai.config.tree import MetricsSettings, ModelSettings, Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import (
    ConfigurationError,
    InvalidApiKey,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    RateLimited,
    ServiceError,
    ServiceOverloaded,
    UpstreamError,
    UpstreamUnavailable,
)
from triton_openai.generation import FinishReason, Usage
from triton_openai.telemetry.instruments import (
    INSTRUMENTS,
    INTER_TOKEN_LATENCY,
    KEY_REFUSALS,
    KEY_TOKENS,
    PROVIDER,
    Instrument,
)
from triton_openai.telemetry.metric_files import forget_worker
from triton_openai.telemetry.metrics import Metrics, outcome_of
from triton_openai.telemetry.request_record import RequestRecord

SERVED = {"model": "m", "adapter": "a"}


def observed(metrics: Metrics, *answers: FakeAnswer, operation: str = "chat", **fields: Any) -> RequestRecord:
    """Have *metrics* see a request for the model ``m`` from beginning to end."""
    observation = RequestRecord(request_id="r", method="POST", path="/v1/chat/completions")
    observation.began = 0.0
    metrics.started(observation)
    observation.identify(operation, model=fields.pop("model", "m"), adapter="a", triton_model="m")
    metrics.identified(observation)
    observation.answers = answers
    observation.status = 200
    for name, value in fields.items():
        setattr(observation, name, value)
    observation.end(2.0)
    metrics.ended(observation)
    return observation


def shown(metrics: Metrics) -> Scrape:
    """Return what *metrics* have counted."""
    return Scrape(generate_latest(metrics).decode())


@pytest.fixture
def metrics() -> Metrics:
    """The metrics of a process alone."""
    return Metrics(Worker())


def test_an_answer(metrics: Metrics) -> None:
    """Everything that its record tells is counted, in the buckets of the conventions."""
    answer = FakeAnswer(
        sent=0.2,
        first=0.3,
        ended=1.3,
        finish_reason=FinishReason.STOP,
        usage=Usage(prompt_tokens=7, completion_tokens=11),
        steps=11,
    )
    observed(metrics, answer, queued_seconds=0.1)
    found = shown(metrics)
    gen_ai = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": PROVIDER,
        "gen_ai_request_model": "m",
        "adapter": "a",
    }

    assert (
        1
        == found.sum("triton_openai_requests_total", operation="chat", status="200", outcome="answered", **SERVED)
        == found.sum("triton_openai_requests_total")
    )
    assert (7, 11) == tuple(
        found.sum("triton_openai_tokens_total", type=kind, **SERVED) for kind in ("input", "output")
    )
    assert 1 == found.sum("triton_openai_answers_finished_total", reason="stop", **SERVED)
    assert 2.0 == found.sum("gen_ai_server_request_duration_seconds_sum", error_type="", **gen_ai)
    assert 0.3 == found.sum("gen_ai_server_time_to_first_token_seconds_sum", **gen_ai)
    assert 0.1 == found.sum("gen_ai_server_time_per_output_token_seconds_sum", **gen_ai)
    assert 0.1 == found.sum("triton_openai_queue_seconds_sum", **SERVED)
    assert pytest.approx(0.1) == found.sum("triton_openai_preparation_seconds_sum", **SERVED)
    # The bucket's bound belongs to it.
    per_token = "gen_ai_server_time_per_output_token_seconds_bucket"
    assert (0, 1) == (found.sum(per_token, le="0.075"), found.sum(per_token, le="0.1"))
    first = "gen_ai_server_time_to_first_token_seconds_bucket"
    assert (0, 1) == (found.sum(first, le="0.25"), found.sum(first, le="0.5"))
    assert 0 == found.sum("triton_openai_errors_total")


def test_several_answers(metrics: Metrics) -> None:
    """A prompt counts once for all of its answers, and each answer for itself."""
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    answers = [FakeAnswer(first=one, ended=one + 1, usage=usage, finish_reason=FinishReason.LENGTH) for one in (1, 2)]
    observed(metrics, *answers, *answers, n=2)
    found = shown(metrics)

    assert (10, 12) == tuple(found.sum("triton_openai_tokens_total", type=kind) for kind in ("input", "output"))
    assert (1, 10) == tuple(found.sum(f"triton_openai_input_tokens_{what}") for what in ("count", "sum"))
    assert (4, 12) == tuple(found.sum(f"triton_openai_output_tokens_{what}") for what in ("count", "sum"))
    assert 4 == found.sum("triton_openai_answers_finished_total", reason="length")
    assert (1, 1.0) == tuple(
        found.sum(f"gen_ai_server_time_to_first_token_seconds_{what}") for what in ("count", "sum")
    )
    assert 4 == found.sum("gen_ai_server_time_per_output_token_seconds_count")


def test_a_whole_answer_has_no_first_token(metrics: Metrics) -> None:
    """What comes in one response does not show its first token: neither metrics nor batches take its end for one."""
    usage = Usage(prompt_tokens=5, completion_tokens=3)
    answer = FakeAnswer(first=9.0, ended=9.0, usage=usage, steps=1, whole=True)
    record = observed(metrics, answer)

    assert 0 == shown(metrics).sum("gen_ai_server_time_to_first_token_seconds_count")
    assert 3 == shown(metrics).sum("triton_openai_tokens_total", type="output")
    waits = FirstTokens()
    waits.ended(record)
    assert {} == waits._models


def test_preparation(metrics: Metrics) -> None:
    """
    Preparation ends when the first answer is sent; a second wait in the queue, behind that, does not make it
    negative.
    """
    observed(metrics, FakeAnswer(sent=1.0), FakeAnswer(sent=2.0))
    observed(metrics, FakeAnswer(sent=0.25), queued_seconds=0.5)

    assert (2, 1.0) == tuple(
        shown(metrics).sum(f"triton_openai_preparation_seconds_{what}") for what in ("count", "sum")
    )


def test_no_time_between_tokens(metrics: Metrics) -> None:
    """An answer in one piece, or of one token, has no time between tokens."""
    for steps, tokens in ((1, 9), (2, 1), (0, 0)):
        usage = Usage(prompt_tokens=1, completion_tokens=tokens)
        observed(metrics, FakeAnswer(first=1.0, ended=1.0, usage=usage, steps=steps))

    assert 0 == shown(metrics).sum("gen_ai_server_time_per_output_token_seconds_count")


@given(latencies=lists(lists(floats(0.0005, 100)), max_size=3))
def test_latencies_are_observations(latencies: list[list[float]]) -> None:
    """The histograms of whole answers add up to what the library makes of single observations."""
    one_by_one = Histogram(
        INTER_TOKEN_LATENCY.name,
        INTER_TOKEN_LATENCY.help,
        ("model", "adapter"),
        registry=None,
        buckets=INTER_TOKEN_LATENCY.buckets,
    )
    added = Metrics(Worker())
    for answer in latencies:
        arrivals = [0.0]
        one_by_one.labels("m", "a")
        for latency in answer:
            arrivals.append(arrivals[-1] + latency)
            one_by_one.labels("m", "a").observe(arrivals[-1] - arrivals[-2])
        added.child(INTER_TOKEN_LATENCY, "m", "a").observe_intervals(arrivals)

    def values(histogram: Collector) -> list[tuple[str, dict[str, str], Any]]:
        (metric,) = [one for one in histogram.collect() if one.name == INTER_TOKEN_LATENCY.name]
        return [(one.name, one.labels, pytest.approx(one.value)) for one in metric.samples if "created" not in one.name]

    assert values(one_by_one) == values(added)


def test_latencies_of_all_answers(metrics: Metrics) -> None:
    """Latencies of failed answers count too."""
    # Two tokens arrive together at 1.5.
    arrivals = (1.0, 1.5, 1.5, 1.5625, 5.5625)
    failed = FakeAnswer(arrivals=arrivals, error=UpstreamError("x"))
    observed(metrics, FakeAnswer(arrivals=arrivals), failed, FakeAnswer(), n=3)
    found = shown(metrics)

    name = "triton_openai_time_between_tokens_seconds"
    assert (6, 9.125) == tuple(found.sum(f"{name}_{what}", **SERVED) for what in ("count", "sum"))
    assert [0, 2, 4, 6] == [found.sum(f"{name}_bucket", le=le, **SERVED) for le in ("0.05", "0.1", "0.5", "5.0")]


def test_an_answer_that_was_cut_off(metrics: Metrics) -> None:
    """What was generated for a client that left counts; the request is nobody's success."""
    observed(
        metrics,
        FakeAnswer(sent=0.1, first=0.5, ended=1.5, partial=Usage(prompt_tokens=4, completion_tokens=6)),
        client_left=True,
        error=UpstreamUnavailable("gone"),
    )
    found = shown(metrics)

    # The status was sent, and nobody was there to get the answer.
    assert 1 == found.sum("triton_openai_requests_total", status="499", outcome="cancelled")
    assert (4, 6) == tuple(found.sum("triton_openai_tokens_total", type=kind) for kind in ("input", "output"))
    assert 0 == found.sum("triton_openai_output_tokens_count") == found.sum("triton_openai_errors_total")
    assert 1 == found.sum("gen_ai_server_request_duration_seconds_count", error_type="cancelled")


def test_embeddings(metrics: Metrics) -> None:
    """Embeddings have input tokens and nothing else to count."""
    observed(metrics, operation="embeddings", input_tokens=12)
    found = shown(metrics)

    assert 12 == found.sum("triton_openai_tokens_total") == found.sum("triton_openai_tokens_total", type="input")
    assert 0 == found.sum("triton_openai_answers_finished_total")


def test_outcomes() -> None:
    """Each request has one, and each error its code."""
    for error, outcome in (
        (None, "answered"),
        (InvalidRequest("x"), "invalid"),
        (ModelNotFound("x"), "invalid"),
        (Overloaded("x"), "refused"),
        (UpstreamError("x"), "failed"),
        (UpstreamUnavailable("x"), "failed"),
        (ServiceError("x"), "failed"),
    ):
        metrics = Metrics(Worker())
        observation = observed(metrics, error=error, status=200 if error is None else error.status)
        found, requests = shown(metrics), "triton_openai_requests_total"

        assert outcome == outcome_of(observation)
        assert 1 == found.sum(requests, outcome=outcome) == found.sum(requests)
        if error is not None:
            assert 1 == found.sum("triton_openai_errors_total", code=error.code, outcome=outcome)
            assert 1 == found.sum("gen_ai_server_request_duration_seconds_count", error_type=error.code)


def test_an_error_after_the_status(metrics: Metrics) -> None:
    """A stream that fails has a good status and is a failure all the same."""
    observed(metrics, error=UpstreamError("x"), status=200)

    assert 1 == shown(metrics).sum("triton_openai_requests_total", status="200", outcome="failed")


def test_running_and_queued(metrics: Metrics) -> None:
    """A request runs or waits, never both, and leaves nothing behind."""

    def state() -> tuple[float, float]:
        found = shown(metrics)
        return found.sum("triton_openai_requests_running", **SERVED), found.sum(
            "triton_openai_requests_queued", **SERVED
        )

    observation = RequestRecord(request_id="r", method="POST", path="/")
    metrics.started(observation)
    observation.identify("chat", model="m", adapter="a")
    metrics.identified(observation)
    assert (1, 0) == state()
    metrics.queued(observation)
    assert (0, 1) == state()
    metrics.admitted(observation)
    assert (1, 0) == state()
    metrics.ended(observation)
    assert (0, 0) == state()


def test_labels_are_bounded(metrics: Metrics) -> None:
    """Ten thousand made-up names and paths make one series."""
    for number in range(10_000):
        observation = RequestRecord(request_id=str(number), method="POST", path=f"/v1/{number}")
        metrics.started(observation)
        observation.status, observation.error = 404, ModelNotFound(f"model-{number}")
        observation.end(1.0)
        metrics.ended(observation)
    found = shown(metrics)

    assert 10_000 == found.sum("triton_openai_requests_total", operation="other", model="", status="404")
    assert 1 == len([sample for sample in found.samples() if sample.name == "triton_openai_requests_total"])
    assert not any("model-" in str(sample.labels) for sample in found.samples())
    assert 0 == found.sum("triton_openai_requests_running") == found.sum("triton_openai_queue_seconds_count")


def test_two_services_in_one_process() -> None:
    """Two services in one process do not count for each other."""
    one, other = Metrics(Worker()), Metrics(Worker())
    observed(one)

    assert (1, 0) == tuple(shown(each).sum("triton_openai_requests_total") for each in (one, other))


def test_workers_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scrape has the counts of all workers, and the gauges of those that live; one that replaces another goes on."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    running = RequestRecord(request_id="r", method="POST", path="/")
    running.identify("chat", model="m", adapter="a")
    for index in (0, 1, 1):
        worker = Metrics(Worker(index=index, count=2, directory=tmp_path))
        observed(worker, FakeAnswer(arrivals=(1.0, 1.5, 4.5)))
        worker.identified(running)
    found = Scrape(generate_latest(MultiProcessCollector(None, str(tmp_path))).decode())

    assert 3 == found.sum("triton_openai_requests_total", **SERVED)
    assert 2 == found.sum("triton_openai_requests_running", **SERVED)
    assert 1 == found.sum("triton_openai_workers_replaced_total")
    name = "triton_openai_time_between_tokens_seconds"
    assert (6, 10.5) == tuple(found.sum(f"{name}_{what}", **SERVED) for what in ("count", "sum"))
    assert [0, 3, 6] == [found.sum(f"{name}_bucket", le=le, **SERVED) for le in ("0.4", "1.0", "5.0")]
    forget_worker(tmp_path, 1)
    found = Scrape(generate_latest(MultiProcessCollector(None, str(tmp_path))).decode())
    assert (3, 1) == tuple(found.sum(f"triton_openai_requests_{what}", **SERVED) for what in ("total", "running"))


def test_the_series_of_a_triton_end_when_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go from all processes that drop them, and from what a process goes on with that replaces another one."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    single = Metrics(Worker())
    workers = [Metrics(Worker(index=index, count=2, directory=tmp_path)) for index in (0, 1)]
    for metrics in (single, *workers):
        for name in ("a", "b"):
            metrics.count_fleet_event("up", name)
            metrics.count_fleet_event("ended", name, "m", "answered", by=3)
    total, up = "triton_openai_endpoint_requests_total", "triton_openai_endpoint_up"

    def found() -> list[tuple[float, float, float, bool]]:
        scrapes = [shown(single), shown(workers[0])]
        return [
            (one.sum(total, endpoint="a"), one.sum(up, endpoint="a"), one.sum(total), 'endpoint="b"' in str(one.text))
            for one in scrapes
        ]

    assert [(3, 1, 6, True), (6, 2, 12, True)] == found()
    for metrics in (single, *workers):
        metrics.count_fleet_event("endpoints", "a", "other")
        metrics.count_fleet_event("ended", "a", "m", "answered")
    assert [(4, 1, 4, False), (8, 2, 8, False)] == found()
    forget_worker(tmp_path, 1)
    assert (8, 1, 8, False) == found()[1]
    # Whatever it finds of Tritons that left meanwhile.
    workers[1] = Metrics(Worker(index=1, count=2, directory=tmp_path))
    workers[1].count_fleet_event("endpoints", "other")
    assert (4, 1, 4, False) == found()[1]


def test_files_have_their_place_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who counts into a hole of a file is killed when the disk is full by then; a folder that cannot be had is said."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    Metrics(Worker(index=1, count=2, directory=tmp_path))
    files = {path.name: path.stat() for path in tmp_path.iterdir()}

    names = {"counter_1.db", "gauge_livesum_1.db", "histogram_1.db"}
    assert names | {"counter_endpoints_1.db", "gauge_livesum_endpoints_1.db"} == files.keys()
    assert all(0 < found.st_size <= found.st_blocks * 512 for found in files.values())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="Metrics cannot be kept"):
        Metrics(Worker(index=1, count=2, directory=tmp_path / "file"))


def test_a_scrape_while_a_worker_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers answer scrapes while the files of a new one are made."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    other = Metrics(Worker(index=0, count=2, directory=tmp_path))
    allocate = os.posix_fallocate
    workers: list[float] = []

    def scraping(descriptor: int, start: int, size: int) -> None:
        workers.append(shown(other).sum("triton_openai_workers_replaced_total"))
        allocate(descriptor, start, size)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", scraping)
        Metrics(Worker(index=1, count=2, directory=tmp_path))
        # The process that replaces it has its counters, and makes new gauges.
        forget_worker(tmp_path, 1)
        Metrics(Worker(index=1, count=2, directory=tmp_path))
    assert [0] * 10 == workers
    assert 1 == shown(other).sum("triton_openai_workers_replaced_total")


def test_the_table_of_instruments() -> None:
    """Names are unique, have their unit or kind at the end, and buckets rise; what has no labels is there at once."""
    samples = {sample.name for sample in shown(Metrics(Worker())).samples()}
    assert samples >= {one.name + ("_count" if one.buckets else "") for one in INSTRUMENTS if not one.labels}
    found = [one.name for one in INSTRUMENTS]
    assert len(found) == len(set(found))
    for one in INSTRUMENTS:
        assert one.help.endswith(".")
        assert all(low < high for low, high in itertools.pairwise(one.buckets))


async def test_both_formats() -> None:
    """Both say the same, each by its own rules; a service that has answered nothing has its gauges too."""
    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(metrics=MetricsSettings(vllm_names=True), triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        plain = await scrape(proxy)
        async with proxy.client.get("/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
            kind, text = response.headers["Content-Type"], await response.text()

    assert "application/openmetrics-text; version=1.0.0; charset=utf-8" == kind
    assert plain.families.keys() >= {"triton_openai_triton_up", "vllm:num_requests_running", "process_open_fds"}
    assert {"triton_openai_requests_running", "vllm:num_requests_waiting"} <= {
        family.name for family in openmetrics_families(text)
    }
    assert 0 == plain.sum("triton_openai_requests_running", **{**SERVED, "adapter": "vllm"})
    assert {"model", "adapter"} == plain.label_names("triton_openai_requests_running")
    assert 1 == plain.sum("triton_openai_triton_up") == plain.sum("triton_openai_models_served")
    assert "_created" not in plain.text + text


async def test_names_of_one_model_are_one_series_to_others() -> None:
    """What reads vLLM's names may take one series for all that there is: aliases count for their model in them."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "one"}]
        settings = Settings(
            metrics=MetricsSettings(vllm_names=True),
            triton=TritonSettings(url=(triton.url,)),
            models={"m": ModelSettings(aliases=("a", "b"))},
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            for name in ("a", "b", "m"):
                assert 200 == (await proxy.post("/v1/completions", {"model": name, "prompt": "x"})).status
            found = await scrape(proxy)

    lines = found.text.splitlines()
    assert ['vllm:num_requests_running{model_name="m"} 0.0'] == [
        line for line in lines if line.startswith("vllm:num_requests_running")
    ]
    assert 3 == found.sum("vllm:e2e_request_latency_seconds_count", model_name="m")
    assert 3 == found.sum("vllm:e2e_request_latency_seconds_bucket", model_name="m", le="+Inf")
    assert 1 == found.sum("gen_ai_server_request_duration_seconds_count", gen_ai_request_model="a")
    # It is the model that answers or does not.
    models = {
        gauge: {sample.labels["model"] for sample in found.samples() if sample.name == f"triton_openai_{gauge}"}
        for gauge in ("requests_running", "model_not_answering")
    }
    assert {"requests_running": {"a", "b", "m"}, "model_not_answering": {"m"}} == models


async def test_models_that_nobody_wants_now_are_not_broken_ones() -> None:
    """A model that was unloaded, or never loaded, is no reason to wake somebody up."""
    async with FakeTriton(config_of("m")) as triton:
        triton.waiting = {"gone": "unloaded", "never": "", "broken": "no such backend"}
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            found = await scrape(proxy)

    states = ("ready", "not_ready", "unloaded")
    assert [1, 1, 2] == [found.sum("triton_openai_triton_models", state=state) for state in states]


async def test_triton_that_is_away() -> None:
    """Triton that is away is seen, and the rest goes on."""
    async with serving(Settings(triton=TritonSettings(url=("http://127.0.0.1:1",)))) as proxy:
        await proxy.ready()
        found = await scrape(proxy)

    assert 0 == found.sum("triton_openai_triton_up") == found.sum("triton_openai_models_served")


def test_tokens_and_refusals_of_keys() -> None:
    """An operator sees what each key uses and why it is refused; beyond a hundred names they are one."""
    metrics = Metrics(Worker())

    def seen(key: str | None, error: ServiceError | None = None) -> None:
        record = RequestRecord(request_id="r", method="POST", path="/", key=key)
        record.status, record.error = 200 if error is None else error.status, error
        if error is None:
            record.identify("chat", model="m", adapter="a")
            metrics.identified(record)
            record.answers = [FakeAnswer(usage=Usage(prompt_tokens=5, completion_tokens=2))]
        metrics.ended(record)

    seen("a")
    seen("a")
    seen(None)
    seen("a", RateLimited("x", kind="tokens", wait=1))
    seen("a", RateLimited("x", kind="requests", wait=1))
    seen(None, InvalidApiKey("x"))
    seen("a", ServiceOverloaded("x"))
    # A mistake of the client is no refusal.
    seen("a", InvalidRequest("x"))
    for number in range(200):
        seen(f"tenant-{number}")
    families = {family.name: family for family in metrics.collect()}

    def numbers(instrument: Instrument) -> dict[tuple[str, ...], float]:
        samples = families[instrument.name.removesuffix("_total")].samples
        return {tuple(sample.labels.values()): sample.value for sample in samples}

    tokens = numbers(KEY_TOKENS)
    refusals = numbers(KEY_REFUSALS)
    assert (10, 4) == (tokens["a", "input"], tokens["a", "output"])
    assert ("", "input") not in tokens
    assert 101 * 5 == tokens["other", "input"]
    assert 101 == len({key for key, _ in tokens})
    assert {("a", "tokens"): 1, ("a", "requests"): 1, ("a", "overloaded"): 1, ("", "invalid_api_key"): 1} == refusals
