"""The numbers add up after mixed traffic on a real Triton."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.clients.service import serving as service_process
from tests.conformance.calls import ask, request, steered
from tests.proxy_fixture import Answer, Proxy, changed, proxy_settings, serving
from tests.scrape import Scrape, scrape
from tests.triton_fixture import TestTriton

ROOT = Path(__file__).resolve().parents[2]
USAGE = {"include_usage": True}


def counts(answer: Answer) -> tuple[int, int]:
    """Return the prompt's and the answer's tokens that a client was told of."""
    usage = answer.chunks[-1]["usage"] if answer.body.startswith(b"data:") else answer.json["usage"]
    return usage["prompt_tokens"], usage.get("completion_tokens", 0)


async def leave(proxy: Proxy) -> None:
    """Begin a stream, and go away in the middle of it."""
    body = request("chat", "vllm_model", steered(text="a ", repeat=2000, delay_ms=20), stream=True, max_tokens=2000)
    async with proxy.client.post("/v1/chat/completions", json=body) as response:
        await response.content.readany()
        assert 1 == (await scrape(proxy)).sum("triton_openai_requests_running", model="vllm_model")
        response.close()


async def settled(proxy: Proxy, name: str = "triton_openai_requests_running") -> Scrape:
    """Return the metrics once nothing runs any more."""
    while (found := await scrape(proxy)).sum(name):  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)
    return found


@pytest.fixture
async def fresh(triton: TestTriton) -> AsyncIterator[Proxy]:
    """A service that has answered nothing yet, with everything that it can show."""
    settings = changed(
        proxy_settings(triton, "http"),
        metrics={"relay_triton": True, "vllm_names": True, "triton_url": triton.metrics_url},
    )
    async with serving(settings, transport="http") as proxy:
        await proxy.ready()
        yield proxy


async def test_mixed_traffic(fresh: Proxy) -> None:
    """Each request is counted once, by how it ended, and tokens are those that clients were told of."""
    answered = [
        await ask(fresh, "chat", "ensemble", steered(text="one two three")),
        await ask(
            fresh,
            "completions",
            "ensemble",
            # So many that some come by themselves, however busy the machine is.
            steered(text="one two three ", repeat=12, delay_ms=30),
            stream=True,
            max_tokens=100,
            stream_options=USAGE,
        ),
        await ask(fresh, "chat", "ensemble", steered(text="one two"), n=2),
        await ask(fresh, "chat", "ensemble", steered(text="one two", repeat=20), max_tokens=5),
    ]
    assert {200} == {answer.status for answer in answered}
    embedded = await fresh.post("/v1/embeddings", {"model": "text_embedding", "input": ["one", "two"]})
    refused = await ask(fresh, "chat", "ensemble", "x", web_search_options={})
    nobody = await ask(fresh, "chat", "no-such-model", "x")
    failed = await ask(fresh, "chat", "vllm_model", steered(text="a b c", fail_at=2, delay_ms=20), stream=True)
    assert (200, 400, 404, 200) == tuple(answer.status for answer in (embedded, refused, nobody, failed))
    await leave(fresh)
    found = await asyncio.wait_for(settled(fresh), 120)

    def requests(**labels: str) -> float:
        return found.sum("triton_openai_requests_total", **labels)

    inference = requests() - requests(operation="other")
    assert 8 == inference == found.sum("gen_ai_server_request_duration_seconds_count")
    assert (5, 1, 1, 1) == tuple(
        requests(outcome=outcome) - requests(outcome=outcome, operation="other")
        for outcome in ("answered", "invalid", "failed", "cancelled")
    )
    assert 1 == requests(operation="other", outcome="invalid", status="404", model="")
    assert 1 == requests(model="vllm_model", status="200", outcome="failed")
    assert 1 == requests(model="vllm_model", status="499", outcome="cancelled")
    assert found.sum("triton_openai_errors_total") == requests(outcome="invalid") + requests(outcome="failed")
    assert 1 == found.sum("triton_openai_errors_total", model="ensemble", code="unsupported_parameter")

    told = [counts(answer) for answer in answered]
    tokens = {
        kind: found.sum("triton_openai_tokens_total", model="ensemble", type=kind) for kind in ("input", "output")
    }
    assert {"input": sum(one for one, _ in told), "output": sum(other for _, other in told)} == tokens
    assert counts(embedded)[0] == found.sum("triton_openai_tokens_total", model="text_embedding")
    finished = {
        reason: found.sum("triton_openai_answers_finished_total", model="ensemble", reason=reason)
        for reason in ("stop", "length")
    }
    assert {"stop": 4, "length": 1} == finished
    # An answer that comes at once has no first token, and no time between tokens.
    assert 1 == found.sum("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="ensemble")
    assert 1 == found.sum("gen_ai_server_time_per_output_token_seconds_count", gen_ai_request_model="ensemble")
    between = found.sum("triton_openai_time_between_tokens_seconds_count", model="ensemble")
    # Of what comes together nobody knows.
    assert 0 < between <= tokens["output"] - 5
    assert between == found.sum("vllm:inter_token_latency_seconds_count", model_name="ensemble")
    assert 0 < found.sum("triton_openai_tokens_total", model="vllm_model", type="output")
    # The other names say the same.
    assert tokens["output"] == found.sum("vllm:generation_tokens_total", model_name="ensemble")
    assert 4 == found.sum("vllm:request_success_total", model_name="ensemble", finished_reason="stop")
    assert 4 == found.sum("vllm:e2e_request_latency_seconds_count", model_name="ensemble")
    assert 0 == found.sum("vllm:num_requests_running")
    # Triton's own are there as well.
    assert 0 < found.sum("nv_inference_request_success", model="preprocessing")
    assert 1 == found.sum("triton_openai_triton_metrics_up")


async def test_queued_and_refused(triton: TestTriton) -> None:
    """With room for one, the second waits, the third is refused, and all three are seen."""
    settings = changed(proxy_settings(triton, "http"), server={"max_running_requests": 1, "max_queued_requests": 1})
    async with serving(settings, transport="http") as proxy:
        await proxy.ready()
        slow = steered(text="a ", repeat=2000, delay_ms=20)
        body = request("chat", "vllm_model", slow, stream=True, max_tokens=2000)
        async with proxy.client.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
            second = asyncio.create_task(ask(proxy, "chat", "ensemble", steered(text="one")))
            while not (found := await scrape(proxy)).sum("triton_openai_requests_queued", model="ensemble"):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
            third = await ask(proxy, "chat", "ensemble", steered(text="two"))
            assert (1, 1) == tuple(found.sum(f"triton_openai_requests_{what}") for what in ("running", "queued"))
            response.close()
        assert (200, 503) == ((await second).status, third.status)
        # The loop is measured ten times a second, and all this may have been quicker.
        while not (found := await settled(proxy)).sum("triton_openai_event_loop_lag_seconds_count"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    assert 0 == found.sum("triton_openai_requests_queued")
    assert 1 == found.sum("triton_openai_requests_total", model="ensemble", status="503", outcome="refused")
    assert 1 == found.sum("triton_openai_errors_total", model="ensemble", code="overloaded")
    assert 0 < found.sum("triton_openai_queue_seconds_sum", model="ensemble")


@pytest.mark.parametrize(
    "orders, last, outcome",
    [({}, b"data: [DONE]", "answered"), ({"fail_at": 2}, b'data: {"error"', "failed")],
)
async def test_a_client_that_goes_with_the_last_event(
    fresh: Proxy, monkeypatch: pytest.MonkeyPatch, orders: dict[str, Any], last: bytes, outcome: str
) -> None:
    """Whoever has read how an answer ended has not left it: a failure stays one, which alerts count."""
    write_eof = web.StreamResponse.write_eof

    async def slowly(response: web.StreamResponse, data: bytes = b"") -> None:
        await write_eof(response, data)
        if data and response.content_type == "text/event-stream":
            # Until the client's going ends it.
            await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse, "write_eof", slowly)
    body = request("chat", "vllm_model", steered(text="one two three", **orders), stream=True, n=2)
    url = fresh.client.make_url("/v1/chat/completions")
    # Its connection ends with the session.
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        async for line in response.content:
            if line.startswith(last):
                break

    found = await settled(fresh)
    assert 1 == found.sum("triton_openai_requests_total", model="vllm_model", status="200", outcome=outcome)


async def test_an_answer_in_one_piece(fresh: Proxy) -> None:
    """An answer in one piece does not show when its first token came, nor a time between tokens."""
    await ask(fresh, "chat", "ensemble_nonstreaming", steered(text="one two three four"))
    found = await scrape(fresh)
    model = {"gen_ai_request_model": "ensemble_nonstreaming"}

    assert 0 == found.sum("gen_ai_server_time_to_first_token_seconds_count", **model)
    assert 0 == found.sum("gen_ai_server_time_per_output_token_seconds_count", **model)
    assert 0 == found.sum("triton_openai_time_between_tokens_seconds_count", model="ensemble_nonstreaming")
    assert 4 <= found.sum("triton_openai_tokens_total", model="ensemble_nonstreaming", type="output")


def test_a_launched_triton(triton: TestTriton, tmp_path: Path) -> None:
    """The metrics of a Triton that is started here are found without a setting."""
    repository = tmp_path / "models"
    repository.mkdir()
    with service_process(tmp_path, "--model-repository", str(repository), "--relay-triton-metrics") as service:
        found = Scrape(service.send("GET", "/metrics").body.decode())
    assert 1 == found.sum("triton_openai_triton_metrics_up") == found.sum("triton_openai_triton_up")
    assert "nv_cpu_memory_total_bytes" in found.names()
