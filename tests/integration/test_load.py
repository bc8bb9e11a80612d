"""Limits of running requests and of time, seen from a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clock import Clock
from tests.conformance.calls import PATHS, ask, end_of, id_of, in_session_loop, request, steered
from tests.proxy_fixture import TRANSPORTS, Answer, Proxy, changed, proxy_settings, read, serving
from tests.triton_fixture import TestTriton
from triton_openai.app import SERVICE

pytestmark = in_session_loop


async def test_what_is_too_much_is_refused_with_503(triton: TestTriton) -> None:
    """One runs, one waits for it, and the third is told to come again."""
    limits = {"max_running_requests": 1, "max_queued_requests": 1}
    settings = changed(proxy_settings(triton, "http"), server=limits)
    async with serving(settings) as proxy:
        await proxy.ready()
        body = request("chat", "vllm_model", steered(text="a", repeat=2000, delay_ms=20), stream=True, max_tokens=2000)
        async with proxy.client.post("/v1/chat/completions", json=body) as running:
            await running.content.readany()
            waiting = asyncio.create_task(ask(proxy, "chat", "vllm_model", steered(text="b")))
            admission = proxy.client.app[SERVICE].admission
            while not admission.queue and not waiting.done():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
            refused = await ask(proxy, "chat", "ensemble", "x")
            assert (503, "overloaded", "30") == (
                refused.status,
                refused.error["code"],
                refused.headers["Retry-After"],
            )
            assert 200 == (await proxy.get("/v1/models")).status
            running.close()
        # The client that left made room.
        assert "b" == (await waiting).json["choices"][0]["message"]["content"]


async def test_a_client_does_not_wait_for_longer_than_it_wants(triton: TestTriton) -> None:
    """
    A client's time runs from when it came: the queue keeps it no longer than that, and what is left holds after it.
    """
    settings = changed(proxy_settings(triton, "http"), server={"max_running_requests": 1, "queue_timeout": 600})
    endless = steered(text="a", repeat=2000, delay_ms=20)
    async with serving(settings) as proxy:
        await proxy.ready()
        body = request("chat", "vllm_model", endless, stream=True, max_tokens=2000)
        async with proxy.client.post("/v1/chat/completions", json=body) as running:
            await running.content.readany()
            for name in ("x-request-timeout", "x-first-token-timeout"):
                refused = await proxy.post("/v1/chat/completions", body, **{name: "0.3"})
                assert (503, "overloaded", "1") == (
                    refused.status,
                    refused.error["code"],
                    refused.headers["Retry-After"],
                )
            wrong = await proxy.post("/v1/chat/completions", body, **{"x-request-timeout": "soon"})
            assert (400, "x-request-timeout") == (wrong.status, wrong.error["param"])


async def over_in_time(proxy: Proxy, clock: Clock, path: str, body: dict[str, Any]) -> Answer:
    """Return the stream of a client whose time is over once the stream has begun."""
    async with proxy.client.post(path, json=body, headers={"x-request-timeout": "60"}) as response:
        begun = await response.content.readany()
        clock.advance(61)
        rest, broken = await read(response)
    assert broken
    return Answer(response.status, response.headers.copy(), begun + rest)


@pytest.mark.asyncio(loop_scope="function")
@pytest.mark.parametrize("endpoint", PATHS)
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_client_sets_its_own_total(triton: TestTriton, transport: str, endpoint: str, clock: Clock) -> None:
    """A client whose own time is over is told so, and the work ends."""
    clock.run()
    path, prompt = PATHS[endpoint], steered(text="a", repeat=2000, delay_ms=20)
    body = request(endpoint, "vllm_model", prompt, max_tokens=2000)
    async with serving(proxy_settings(triton, transport), transport=transport) as proxy:
        await proxy.ready()
        whole = await proxy.post(path, body, **{"x-request-timeout": "0.3"})
        stream = await over_in_time(proxy, clock, path, {**body, "stream": True})

        assert (504, "upstream_timeout") == (whole.status, whole.error["code"])
        assert 200 == stream.status
        assert '"upstream_timeout"' in stream.events[-1]
        assert "cancelled" == (await end_of(triton, "vllm_model", id_of(stream)))[0]


@pytest.mark.asyncio(loop_scope="function")
async def test_the_total_holds_for_several_answers(triton: TestTriton, clock: Clock) -> None:
    """All of them end together."""
    clock.run()
    prompt = steered(text="a", repeat=2000, delay_ms=20)
    body = request("completions", "vllm_model", prompt, stream=True, max_tokens=2000, n=3)
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        answer = await over_in_time(proxy, clock, "/v1/completions", body)
    assert '"upstream_timeout"' in answer.events[-1]


async def test_a_client_sets_its_own_patience(proxies: dict[str, Proxy]) -> None:
    """A client sets how long it waits for the first token, and between two."""
    slow = steered(text="a b c", first_delay_ms=60_000)
    first = await proxies["http"].post(
        "/v1/chat/completions", request("chat", "vllm_model", slow), **{"x-first-token-timeout": "0.2"}
    )
    assert (504, "upstream_silent") == (first.status, first.error["code"])
    stuck = steered(text="a b c", hang_at=1)
    idle = await proxies["http"].post(
        "/v1/chat/completions", request("chat", "vllm_model", stuck), **{"x-idle-timeout": "0.2"}
    )
    assert (504, "upstream_silent") == (idle.status, idle.error["code"])


@pytest.mark.parametrize("name", ["x-request-timeout", "x-first-token-timeout", "x-idle-timeout"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", "", "100000"])
async def test_headers_that_are_no_limits(proxies: dict[str, Proxy], name: str, value: str) -> None:
    """What is no time, or more than the operator allows, is refused and not bent."""
    answer = await proxies["http"].post("/v1/chat/completions", request("chat", "ensemble", "x"), **{name: value})
    assert (400, name) == (answer.status, answer.error["param"])


async def test_embeddings_have_a_total_too(proxies: dict[str, Proxy]) -> None:
    """The header is the same one."""
    body = {"model": "text_embedding", "input": "x"}
    assert 200 == (await proxies["http"].post("/v1/embeddings", body, **{"x-request-timeout": "300"})).status
    assert 400 == (await proxies["http"].post("/v1/embeddings", body, **{"x-request-timeout": "no"})).status
