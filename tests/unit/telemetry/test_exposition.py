"""Triton's own metrics: read, checked, merged, and done without."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from tests.scrape import Scrape, scrape
from triton_openai.config.tree import MetricsSettings, Settings, TritonSettings
from triton_openai.config.worker import Worker
from triton_openai.telemetry import exposition, triton_metrics
from triton_openai.telemetry.exposition import Exposition
from triton_openai.telemetry.gauges import ServedName, State
from triton_openai.telemetry.instruments import QUEUED, RUNNING
from triton_openai.telemetry.metrics import Metrics
from triton_openai.telemetry.triton_metrics import cache_blocks, parse

TEXT = """\
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="m",version="1"} 3
# HELP nv_trt_llm_kv_cache_block_metrics TRT LLM KV cache block metrics
# TYPE nv_trt_llm_kv_cache_block_metrics gauge
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 30
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m",version="1"} 120
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m",version="1"} 64
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{model="m",version="1"} 99
# HELP nv_latency_ms A histogram
# TYPE nv_latency_ms histogram
nv_latency_ms_count{model="m"} 1
nv_latency_ms_sum{model="m"} 2.5e+01
nv_latency_ms_bucket{model="m",le="+Inf"} 1
# HELP nv_inference_request_success Number of successful inference requests, all batch sizes
# TYPE nv_inference_request_success counter
# a remark
nv_cpu_utilization 0.25 1700000000000
"""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a scrape wait for Triton's metrics, however busy the machine is."""
    monkeypatch.setattr(triton_metrics, "_TIMEOUT", 120.0)


@asynccontextmanager
async def port_with(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yield the address of metrics that are what *answer* says."""
    app = web.Application()
    app.router.add_get("/metrics", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/metrics"))


async def merged(url: str, *, relay: bool = True, vllm: bool = False) -> Scrape:
    """Return what a service says that passes on the metrics at *url*."""
    settings = MetricsSettings(relay_triton=relay, vllm_names=vllm, triton_url=url)
    async with (
        FakeTriton(config_of("m")) as triton,
        serving(Settings(metrics=settings, triton=TritonSettings(url=(triton.url,)))) as proxy,
    ):
        await proxy.ready()
        await scrape(proxy)
        return await scrape(proxy)


async def say(text: str, status: int = 200) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Return a handler that answers *text*."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, status=status)

    return answer


async def hang(request: web.Request) -> web.StreamResponse:
    """Answer nothing."""
    await asyncio.Event().wait()
    raise AssertionError


def test_parsing() -> None:
    """Lines are put together by their metric, and stay as they are."""
    families = parse(TEXT)

    assert {
        "nv_inference_request_success", "nv_trt_llm_kv_cache_block_metrics", "vllm:prompt_tokens_total",
        "nv_latency_ms", "nv_cpu_utilization",
    } == families.keys()  # fmt: skip
    assert 5 == len(families["nv_latency_ms"])
    assert {"m": {"used": 30, "max": 120, "tokens_per": 64}} == cache_blocks(families)
    assert {} == cache_blocks(parse("a 1\n")) == cache_blocks(parse(""))


@every_case(
    "text",
    ["<html>", "nv_x{", 'nv_x{a="1} 2', "nv_x", "nv_x one", "nv_x 1 2 3", 'nv_x{a="1"b="2"} 1', "nv x 1", "é 1"],
)
def test_what_is_no_exposition(text: str) -> None:
    """What is no exposition is noticed, and none of it is passed on."""
    with pytest.raises(ValueError, match=r"."):
        parse(TEXT + text + "\n")


@given(st.text(alphabet='ab{}="\\,# \n1.e+-_:', max_size=60))
def test_parsing_anything(text: str) -> None:
    """Whatever comes is taken or refused; what is taken is read by others too."""
    try:
        families = parse(text)
    except ValueError:
        return
    for family in families.values():
        assert all(line in text for line in family)


async def test_merging() -> None:
    """One valid exposition, in which nothing stands twice; where names meet, ours stay."""
    async with port_with(await say(TEXT)) as url:
        plain = await merged(url)
        both = await merged(url, vllm=True)
        only_ours = await merged(url, relay=False, vllm=True)

    assert 3 == plain.sum("nv_inference_request_success", model="m") == both.sum("nv_inference_request_success")
    assert 1 == plain.sum("triton_openai_triton_metrics_up") == both.sum("triton_openai_triton_metrics_up")
    assert 99 == plain.sum("vllm:prompt_tokens_total", model="m")
    assert "99" not in [line.split()[-1] for line in both.text.splitlines() if "prompt_tokens" in line]
    assert 0.25 == both.sum("vllm:kv_cache_usage_perc", model_name="m") == only_ours.sum("vllm:kv_cache_usage_perc")
    assert 1 == only_ours.sum("vllm:cache_config_info", model_name="m", block_size="64", num_gpu_blocks="120")
    assert not [name for name in only_ours.names() if name.startswith("nv_") or "lora" in name]


async def test_lora_adapters_with_requests() -> None:
    """One series for each Triton model: the adapters that run, and those that wait."""
    metrics = Metrics(Worker())
    names = (("base", False), ("french", True), ("german", True), ("greek", True))
    served = [
        ServedName(name=name, triton_model="m", adapter="a", can_chat=True, engines=("m",), lora=lora, max_loras=2)
        for name, lora in names
    ]
    served.append(
        ServedName(name="x", triton_model="n", adapter="a", can_chat=True, engines=("n",), lora=True, max_loras=None)
    )
    state = State(workers=1, triton_up=True, triton_models={}, served=served)
    for instrument, running in ((RUNNING, ("base", "french", "greek")), (QUEUED, ("german", "french", "base"))):
        for name in running:
            metrics.child(instrument, name, "a").inc(1)
    settings = MetricsSettings(vllm_names=True)
    body, _ = await Exposition(metrics, lambda: state, settings, "http://127.0.0.1:1/metrics").render()
    found = Scrape(body.decode())

    names_of = {"running_lora_adapters": "french,greek", "waiting_lora_adapters": "french,german"}
    value = found.sum("vllm:lora_requests_info", model_name="m", max_lora="2", **names_of)
    # The time of the scrape.
    assert time.time() - 60 < value <= time.time()
    idle = {"max_lora": "", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert 0 < found.sum("vllm:lora_requests_info", model_name="n", **idle)
    assert 2 == len([line for line in found.text.splitlines() if line.startswith("vllm:lora_requests_info")])


_FORMAT, _LOAD = "endpoint-load-metrics-format", "endpoint-load-metrics"
_ALL = {"named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 0.0}}


async def loads(url: str, *, vllm: bool = True) -> list[str | None]:
    """Return what answers report: as text, in a stream as JSON, in an unknown form, unasked, and of no model."""
    metrics = MetricsSettings(vllm_names=vllm, triton_url=url)
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "one"}]
        async with serving(Settings(metrics=metrics, triton=TritonSettings(url=(triton.url,)))) as proxy:
            await proxy.ready()
            answers = [
                await proxy.post("/v1/completions", body, **{_FORMAT: "text"}),
                await proxy.post("/v1/completions", {**body, "stream": True}, **{_FORMAT: "JSON"}),
                await proxy.post("/v1/completions", body, **{_FORMAT: "BIN"}),
                await proxy.post("/v1/completions", body),
                await proxy.post("/v1/completions", {**body, "model": "nobody"}, **{_FORMAT: "TEXT"}),
            ]
    return [answer.headers.get(_LOAD) for answer in answers]


async def test_load_in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that asks gets a model's load with the answer; without Triton's metrics, what is known here."""
    # However busy the machine is.
    monkeypatch.setattr(exposition, "_LOAD_TIMEOUT", 120.0)
    async with port_with(await say(TEXT)) as url:
        text, json_report, *rest = await loads(url)
        assert [None] * 5 == await loads(url, vllm=False)
    assert "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_waiting=0.0" == text
    assert json_report is not None
    assert json_report.startswith("JSON ")
    assert _ALL == json.loads(json_report.removeprefix("JSON "))
    assert [None] * 3 == rest

    monkeypatch.setattr(exposition, "_LOAD_TIMEOUT", 0.01)
    async with port_with(hang) as url:
        text, *_ = await loads(url)
    assert "TEXT named_metrics.num_requests_waiting=0.0" == text


@every_case("text, status", [("<html>no</html>", 200), (TEXT, 500), (TEXT, 302), (TEXT + "half{", 200)])
async def test_answers_that_are_none(text: str, status: int) -> None:
    """Ours come all the same, and say that Triton's did not."""
    async with port_with(await say(text, status)) as url:
        found = await merged(url)

    assert 0 == found.sum("triton_openai_triton_metrics_up")
    assert 1 == found.sum("triton_openai_models_served")
    assert not [name for name in found.names() if name.startswith("nv_")]


async def test_a_port_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is silent is not waited for longer than Prometheus waits."""
    monkeypatch.setattr(triton_metrics, "_TIMEOUT", 0.05)
    async with port_with(hang) as url:
        found = await merged(url)

    assert (0, 1) == (found.sum("triton_openai_triton_metrics_up"), found.sum("triton_openai_models_served"))


async def test_a_port_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is read than fits."""
    monkeypatch.setattr(triton_metrics, "_MAX_BYTES", 1000)
    async with port_with(await say(TEXT * 10)) as url:
        assert 0 == (await merged(url)).sum("triton_openai_triton_metrics_up")


async def test_nobody_there() -> None:
    """A port that is closed is as good as none."""
    found = await merged("http://127.0.0.1:1/metrics")

    assert (0, 1) == (found.sum("triton_openai_triton_metrics_up"), found.sum("triton_openai_models_served"))


@every_case(
    "settings, url",
    [
        (Settings(triton=TritonSettings(url=("http://triton:8000",))), "http://triton:8002/metrics"),
        (
            Settings(triton=TritonSettings(url=("grpcs://[::1]:8001", "https://[::1]:8000"))),
            "http://[::1]:8002/metrics",
        ),
        (Settings(metrics=MetricsSettings(triton_url="http://elsewhere/m")), "http://elsewhere/m"),
        (Settings().with_triton("http://127.0.0.1:1", metrics_url="http://127.0.0.1:3/m"), "http://127.0.0.1:3/m"),
    ],
)
def test_where_it_is_looked_for(settings: Settings, url: str) -> None:
    """
    Triton's metrics are looked for where the operator says, else where a Triton was started here, else at its
    default.
    """
    assert url == settings.triton_metrics_url
