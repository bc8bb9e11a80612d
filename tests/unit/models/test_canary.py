"""Models that leave their requests without an answer, in front of a Triton that calls them ready."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock
from urllib.parse import urlsplit

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.ports import closed_port
from tests.proxy_fixture import Answer, Proxy, serving
from tests.scrape import scrape
from triton_openai.app import SERVICE
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import UpstreamError, UpstreamTimeout
from triton_openai.models import canary as canary_module
from triton_openai.models.canary import FAILURES, Canary
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.request_record import RequestRecord

DEAD = "Error generating stream: EngineCore encountered an issue. See stack trace (above) for the root cause."
EMBEDS = config_of("embedder", inputs=("text BYTES 1",), outputs=("embedding FP32 4",), backend="python")
GAUGE = "triton_openai_model_not_answering"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again without a pause."""
    monkeypatch.setattr(canary_module, "_INTERVAL", 0.01)


@asynccontextmanager
async def in_front_of(*configs: dict[str, Any]) -> AsyncIterator[tuple[Proxy, FakeTriton, Canary]]:
    """Yield the service, its Triton, whose models fail, and what watches them."""
    async with FakeTriton(*configs) as triton:
        triton.failing, triton.failure = math.inf, DEAD
        triton.responses = [{"text_output": "one", "embedding": [1.0] * 4}]
        async with serving(Settings(triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            yield proxy, triton, proxy.client.server.app[SERVICE].canary  # type: ignore[attr-defined]


async def until(true: Callable[[], bool]) -> None:
    """Wait until something is *true*."""
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110 - what happens elsewhere sets no event here
            await asyncio.sleep(0.01)


async def ask(proxy: Proxy, model: str = "m", times: int = 1) -> Answer:
    """Ask *times* times, one after the other; return the last answer."""
    answers = [await proxy.post("/v1/completions", {"model": model, "prompt": "a secret"}) for _ in range(times)]
    return answers[-1]


async def test_a_model_that_does_not_answer() -> None:
    """After three failures in a row it is asked; then readiness and metrics say so, until it answers."""
    async with in_front_of(config_of("m")) as (proxy, triton, canary):
        await ask(proxy, times=2)
        assert 2 == len(triton.asked)
        assert {"status": "ready"} == (await proxy.get("/health/ready")).json
        assert 503 == (await ask(proxy)).status
        await until(lambda: "m" in canary.not_answering)
        answer = await proxy.get("/health/ready")
        assert (503, "not ready", ["m"]) == (answer.status, answer.json["status"], answer.json["not_answering"])
        assert "none of them answers" in answer.json["reason"]
        assert 1 == (await scrape(proxy)).sum(GAUGE, model="m")
        (line,) = (await proxy.get("/status")).json["models"]
        assert "does not answer" == line["state"]
        # Clients are still let through: they find out first when it is back.
        assert 503 == (await ask(proxy)).status
        asked = len(triton.asked)
        await until(lambda: len(triton.asked) > asked)
        _, small = triton.asked[-1]
        assert "secret" not in str(small)
        assert '"max_tokens":1' in small["sampling_parameters"].replace(" ", "")

        triton.failing = 0
        await until(lambda: not canary.not_answering)
        assert {"status": "ready"} == (await proxy.get("/health/ready")).json
        assert 0 == (await scrape(proxy)).sum(GAUGE, model="m")
        # It is left in peace again.
        assert not canary.asking


async def test_another_model_that_answers_keeps_the_service_ready() -> None:
    """One of two generating models is enough; an embedding model is none where there are others."""
    async with in_front_of(config_of("m"), config_of("n"), EMBEDS) as (proxy, _, canary):
        await ask(proxy, "m", times=3)
        await until(lambda: "m" in canary.not_answering)
        answer = await proxy.get("/health/ready")
        assert (200, {"status": "ready", "not_answering": ["m"]}) == (answer.status, answer.json)

        await ask(proxy, "n", times=3)
        await until(lambda: {"m", "n"} <= set(canary.not_answering))
        assert 503 == (await proxy.get("/health/ready")).status


async def test_a_model_that_answers_only_small_requests(capsys: pytest.CaptureFixture[str]) -> None:
    """Three silences in a row show, though the service's own request is answered, until a client's is."""
    asked = asyncio.Event()
    adapter = Mock()
    adapter.name = "a"
    model = Mock(triton_model="m", adapter=adapter, tasks=("generate",))
    models: Any = Mock(served={"m": model}, fleet=Mock(refresh=AsyncMock(), snapshot=Mock(reachable=True)))

    async def answers(_: Any) -> None:
        asked.set()

    canary = Canary(models, answers, Metrics(Worker()))

    def end(error: UpstreamError | None) -> None:
        canary.ended(RequestRecord(request_id="r", method="POST", path="/", operation="chat", model="m", error=error))

    silence = UpstreamTimeout("The model sent no answer for 9 seconds.", code="upstream_silent")
    for error in (silence, silence, None, silence, silence):
        end(error)
    assert not canary.not_answering
    for _ in range(4):
        end(silence)
    await asked.wait()
    await until(lambda: canary.any_answers)
    assert {"m"} == set(canary.not_answering)
    end(None)
    assert not canary.not_answering
    assert canary.any_answers
    assert 1 == capsys.readouterr().out.count("model does not answer")


async def test_ways_to_fall_silent() -> None:
    """After a first token too, as a BLS model does whose engine fails, and where an answer is sent whole."""
    silence = UpstreamTimeout("silent", code="upstream_silent")
    late = UpstreamTimeout("late")
    for error, answer, shown in (
        (silence, Mock(first=1.0, cancelled=True), True),
        (late, Mock(first=None, cancelled=True), True),
        # One that is slow, and one whose queue is full.
        (late, Mock(first=1.0, cancelled=True), False),
        (late, Mock(first=None, cancelled=False), False),
    ):
        model = Mock(triton_model="m", tasks=("generate",))
        models: Any = Mock(served={"m": model}, fleet=Mock(refresh=AsyncMock(), snapshot=Mock(reachable=True)))
        canary = Canary(models, AsyncMock(), Metrics(Worker()))
        for _ in range(FAILURES):
            record = RequestRecord(request_id="r", method="POST", path="/", operation="chat", model="m", error=error)
            record.answers = [answer]
            record.end(2.0)
            canary.ended(record)
        assert shown == ("m" in canary.not_answering)
        await canary.close()


async def test_an_answer_in_between_is_enough() -> None:
    """Only failures in a row count, and mistakes of clients say nothing."""
    async with in_front_of(config_of("m")) as (proxy, triton, canary):
        await ask(proxy, times=2)
        triton.failing = 0
        assert 200 == (await ask(proxy)).status
        triton.failing = math.inf
        await ask(proxy, times=2)
        triton.failure = "Error generating stream: Requested sample logprobs of 50"
        assert 400 == (await ask(proxy, times=3)).status
        assert not canary.asking


async def test_requests_that_fail_by_themselves() -> None:
    """A model that answers the small request is not held to be silent."""
    async with in_front_of(config_of("m")) as (proxy, triton, canary):
        triton.failing = 3
        assert 503 == (await ask(proxy, times=3)).status
        await until(lambda: len(triton.asked) == 4)
        await until(lambda: not canary.asking)
        assert not canary.not_answering


async def test_clients_that_waited_in_vain() -> None:
    """A client that leaves without a token counts if it has waited for long."""
    async with in_front_of(config_of("m")) as (_, _, canary):

        def left(*, after: float, first: float | None = None) -> RequestRecord:
            record = RequestRecord(request_id="1", method="POST", path="/")
            record.identify("chat", model="m", adapter="a")
            record.answers = [Mock(first=first)]
            record.client_left = True
            record.end(record.began + after)
            return record

        for record in (left(after=29), left(after=29), left(after=29), left(after=31), left(after=31)):
            canary.ended(record)
        assert not canary.asking
        canary.ended(left(after=31, first=time.monotonic()))
        canary.ended(left(after=31))
        assert not canary.asking
        for _ in range(2):
            canary.ended(left(after=31))
        await until(lambda: "m" in canary.not_answering)


async def test_a_triton_that_is_away_is_no_silent_model() -> None:
    """A Triton that is away is told as such, and not as a silent model."""
    async with in_front_of(config_of("m")) as (proxy, triton, canary):
        port = urlsplit(triton.url).port
        await triton.__aexit__()
        with closed_port(port or 0):
            assert 503 == (await ask(proxy, times=4)).status
            await until(lambda: not canary.asking)
            answer = await proxy.get("/health/ready")
            assert (503, {"status", "reason"}) == (answer.status, set(answer.json))


async def test_a_model_that_goes() -> None:
    """What is gone is not asked any more, and no longer shown."""
    async with in_front_of(config_of("m"), config_of("n")) as (proxy, triton, canary):
        await ask(proxy, times=3)
        await until(lambda: "m" in canary.not_answering)
        del triton.models["m"]
        await proxy.models.fleet.reload()
        await until(lambda: not canary.not_answering)
        assert {"status": "ready"} == (await proxy.get("/health/ready")).json


async def test_an_embedding_model_is_asked_for_a_vector() -> None:
    """An embedding model is asked for a vector; without a generating model beside it, readiness follows it."""
    async with in_front_of(EMBEDS) as (proxy, _, canary):
        body = {"model": "embedder", "input": "a"}
        answers = [await proxy.post("/v1/embeddings", body) for _ in range(3)]
        assert {503} == {answer.status for answer in answers}
        await until(lambda: "embedder" in canary.not_answering)
        assert 503 == (await proxy.get("/health/ready")).status


async def test_a_triton_that_is_away_is_not_asked() -> None:
    """Failures while nothing can be reached say nothing about a model, even if Triton is back a moment later."""
    models = MagicMock(served={"m": MagicMock(triton_model="m")})
    models.fleet.refresh = AsyncMock()
    models.fleet.snapshot.reachable = False
    small = AsyncMock(side_effect=UpstreamError("nobody is there"))
    canary = Canary(models, small, Metrics(Worker()))
    lost = MagicMock(model="m", time_to_first_token=None, error=UpstreamError("lost"), client_left=False)
    for _ in range(FAILURES):
        canary.ended(lost)
    assert ["m"] == list(canary.asking)
    await until(lambda: not canary.asking)

    assert (0, 1) == (small.await_count, models.fleet.refresh.await_count)
