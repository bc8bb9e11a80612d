"""The load that engines report by request: in metrics, and in what answers report to gateways."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.scrape import Scrape
from triton_openai.config.tree import EndpointSettings, MetricsSettings, Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.generation import EngineLoad
from triton_openai.models import engine_loads
from triton_openai.telemetry import exposition
from triton_openai.telemetry.exposition import Exposition
from triton_openai.telemetry.gauges import ServedName, State
from triton_openai.telemetry.instruments import QUEUED, RUNNING
from triton_openai.telemetry.metrics import Metrics

COMPANION = config_of(
    "c",
    inputs=("request BYTES 1", "carrier? BYTES 1", "media? BYTES -1"),
    outputs=("response BYTES 1",),
    backend="python",
    parameters={"triton_openai_contract": {"string_value": "1"}},
)
LOAD = {"running": 3, "waiting": 2, "cache_usage": 0.5, "cache_blocks": 100, "block_size": 16}
NOWHERE = "http://127.0.0.1:1/metrics"
CACHE = "triton_openai_engine_cache_usage"
REQUESTS = "triton_openai_engine_requests"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scrape wait for the engines, however busy the machine is."""
    monkeypatch.setattr(exposition, "_ENGINE_TIMEOUT", 120.0)


def answering(body: Any) -> list[dict[str, Any]]:
    """Return the responses of a companion model whose engine says *body*."""
    return [{"response": json.dumps(body)}]


async def scraped(*answers: Any, hangs: bool = False) -> Scrape:
    """Return the metrics of a service whose Tritons have a companion model that says *answers*, one each."""
    tritons = [FakeTriton(COMPANION, config_of("m")) for _ in answers]
    for triton, answer in zip(tritons, answers, strict=True):
        triton.responses = answering(answer) * (1 + hangs)
        if hangs:
            triton.may_go_on.clear()
        await triton.__aenter__()
    endpoints = tuple([EndpointSettings(url=(triton.url,)) for triton in tritons])
    settings = Settings(
        triton=TritonSettings(endpoints=endpoints), metrics=MetricsSettings(vllm_names=True, triton_url=NOWHERE)
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        answer = await proxy.get("/metrics")
    for triton in tritons:
        triton.may_go_on.set()
        await triton.__aexit__()
    return Scrape(answer.body.decode())


async def test_the_load_of_an_engine() -> None:
    """It stands in the metrics, and under vLLM's names too, where a gateway reads it."""
    metrics = await scraped(LOAD)

    assert (3, 2) == tuple(metrics.sum(REQUESTS, model="c", state=state) for state in ("running", "waiting"))
    assert 0.5 == metrics.sum(CACHE, model="c") == metrics.sum("vllm:kv_cache_usage_perc", model_name="c")
    assert 1 == metrics.sum("vllm:cache_config_info", model_name="c", block_size="16", num_gpu_blocks="100")
    assert not [line for line in metrics.text.splitlines() if 'model="m"' in line and "engine" in line]


async def test_the_load_of_several_engines() -> None:
    """Requests are summed, and the cache is that of the fullest."""
    metrics = await scraped(LOAD, {**LOAD, "running": 10, "cache_usage": 0.75})

    assert (13, 4) == tuple(metrics.sum(REQUESTS, model="c", state=state) for state in ("running", "waiting"))
    assert 0.75 == metrics.sum(CACHE, model="c")


@pytest.mark.parametrize(
    "answer",
    [{"running": None, "waiting": None}, {"e": {"kind": "dead", "message": "It has died."}}, ["x"], {"running": "x"}],
)
async def test_an_engine_that_reports_nothing(answer: Any) -> None:
    """An older model, an engine that has died, and one that makes no sense have no series."""
    assert not [name for name in (await scraped(answer)).names() if "engine" in name]


async def test_a_model_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scrape does not wait for it: Triton says nothing of a process that was killed."""
    monkeypatch.setattr(exposition, "_ENGINE_TIMEOUT", 0.01)
    metrics = await scraped(LOAD, hangs=True)

    assert 1 == metrics.sum("triton_openai_triton_up")
    assert not [name for name in metrics.names() if "engine" in name]


async def test_requests_that_wait_in_the_engine() -> None:
    """Under vLLM's names they wait, as in its own server, and do not run; so too in what answers report."""
    counted = Metrics(Worker())
    counted.child(RUNNING, "c", "companion").inc(5)
    counted.child(QUEUED, "c", "companion").inc(4)
    served = ServedName(
        name="c", triton_model="c", adapter="companion", can_chat=True, engines=("c",), lora=False, max_loras=None
    )
    state = State(workers=1, triton_up=True, triton_models={}, served=[served])

    async def engines(timeout: float) -> Mapping[str, EngineLoad]:
        return {"c": EngineLoad(running=3, waiting=2, cache_usage=0.25)}

    shown = Exposition(counted, lambda: state, MetricsSettings(vllm_names=True), NOWHERE, engines=engines)
    body, _ = await shown.render()
    metrics = Scrape(body.decode())
    assert (3, 6) == tuple(
        metrics.sum(f"vllm:num_requests_{state}", model_name="c") for state in ("running", "waiting")
    )
    assert {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 6.0} == await shown.load("c")


async def test_a_scrape_whose_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has asked the engines is given up: they may never answer."""
    asked = asyncio.Event()
    ended: list[str] = []

    async def hang(*_: Any) -> Any:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("given up")

    monkeypatch.setattr(engine_loads, "all_responses", hang)
    async with FakeTriton(COMPANION) as triton:
        settings = Settings(triton=TritonSettings(url=(triton.url,)))
        async with serving(settings) as proxy:
            await proxy.ready()
            scrape = asyncio.create_task(engine_loads.engine_loads(proxy.models, 60.0))
            await asked.wait()
            scrape.cancel()
            await asyncio.gather(scrape, return_exceptions=True)
            await asyncio.sleep(0)
            assert ["given up"] == ended
