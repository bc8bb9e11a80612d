"""Responses that are made in the background, and how their streams end, in front of a Triton that can be held up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Answer, Proxy, serving
from triton_openai.config.tree import ModelDefaults, ResponsesSettings, ServerSettings, Settings, TritonSettings
from triton_openai.models.draining import DRAINING

# Of a model that does not repeat the prompt.
INPUTS = tuple(f"{name}? {kind} 1" for name, kind in (
    ("text_input", "BYTES"), ("sampling_parameters", "BYTES"), ("stream", "BOOL"), ("exclude_input_in_output", "BOOL"),
))  # fmt: skip
REQUEST = {"model": "m", "input": "Hi", "background": True}


@asynccontextmanager
async def held() -> AsyncIterator[FakeTriton]:
    """Run a Triton whose model says three words, the last two once it may."""
    async with FakeTriton(config_of("m", INPUTS)) as triton:
        triton.responses = [{"text_output": text} for text in ("one", " two", " three", "")]
        triton.may_go_on.clear()
        yield triton
        triton.may_go_on.set()


@asynccontextmanager
async def service(triton: FakeTriton, store: str = "memory", **server: Any) -> AsyncIterator[Proxy]:
    """Run a service in front of *triton*."""
    most = server.pop("max_background", 1000)
    settings = Settings(
        triton=TritonSettings(url=(triton.url,)),
        defaults=ModelDefaults(chat_template="chatml"),
        responses=ResponsesSettings(store=store, max_background=most),
        server=ServerSettings(**server),
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        yield proxy


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, comments left out."""
    blocks = body.decode().split("\n\n")
    assert "" == blocks.pop()
    return [json.loads(block.partition("data: ")[2]) for block in blocks if not block.startswith(":")]


class Stream:
    """A stream that is read as it comes."""

    def __init__(self, proxy: Proxy, method: str, path: str, body: Any = None) -> None:
        self._call = proxy.client.request(method, path, json=body)

    async def __aenter__(self) -> Stream:
        self.response = await self._call.__aenter__()
        assert 200 == self.response.status
        return self

    async def __aexit__(self, *given: Any) -> None:
        await self._call.__aexit__(*given)

    async def until(self, kind: str) -> dict[str, Any]:
        """Return the next event of *kind*."""
        while True:
            block = await asyncio.wait_for(self.response.content.readuntil(b"\n\n"), 30)
            for event in events_of(block):
                if event["type"] == f"response.{kind}":
                    return event

    async def rest(self) -> list[dict[str, Any]]:
        """Return the events up to the end."""
        return events_of(await asyncio.wait_for(self.response.read(), 30))


async def resumed(proxy: Proxy, made: str, after: int | None = None) -> list[dict[str, Any]]:
    """Return all events of a response, or those after one."""
    query = "" if after is None else f"&starting_after={after}"
    answer = await asyncio.wait_for(proxy.get(f"/v1/responses/{made}?stream=true{query}"), 30)
    assert 200 == answer.status
    return events_of(answer.body)


async def assert_ended(proxy: Proxy, made: str, status: str, *texts: str) -> dict[str, Any]:
    """Assert that a response ended with *status* and output of *texts*, and each of its streams with the event."""
    found = (await proxy.get(f"/v1/responses/{made}")).json
    assert (status, list(texts)) == (found["status"], [item["content"][0]["text"] for item in found["output"]])
    events = await resumed(proxy, made)
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    last = events[-1]
    assert (f"response.{status}", found) == (last["type"], last["response"])
    for after in (0, len(events) - 2, len(events) - 1, len(events) + 7):
        assert last == (await resumed(proxy, made, after))[-1]
    return dict(found)


async def test_a_stream_and_its_resumption() -> None:
    """A stream tells that the response waits before it begins; others read the same from any place, also meanwhile."""
    async with (
        held() as triton,
        service(triton) as proxy,
        Stream(proxy, "POST", "/v1/responses", {**REQUEST, "stream": True}) as stream,
    ):
        made = (await stream.until("created"))["response"]
        assert "queued" == made["status"]
        await stream.until("queued")
        await stream.until("in_progress")
        assert "one" == (await stream.until("output_text.delta"))["delta"]
        async with Stream(proxy, "GET", f"/v1/responses/{made['id']}?stream=true&starting_after=3") as other:
            await other.until("output_text.delta")
            triton.may_go_on.set()
            assert await stream.rest() == await other.rest()
        await assert_ended(proxy, made["id"], "completed", "one two three")


@pytest.mark.parametrize("how", ["cancel", "delete", "stop"])
async def test_the_end_of_what_is_in_progress(how: str) -> None:
    """Whoever reads a response that is cancelled, deleted or stopped learns it, and what there is of it stays."""
    async with (
        held() as triton,
        service(triton) as proxy,
        Stream(proxy, "POST", "/v1/responses", {**REQUEST, "stream": True}) as stream,
    ):
        made = (await stream.until("created"))["response"]["id"]
        await stream.until("output_text.delta")
        if how == "cancel":
            answer = await proxy.post(f"/v1/responses/{made}/cancel", {})
            assert ("cancelled", "one") == (answer.json["status"], answer.json["output"][0]["content"][0]["text"])
        elif how == "delete":
            assert (await proxy.client.delete(f"/v1/responses/{made}")).status == 200
        else:
            await proxy.client.app[DRAINING].drain(0.0)
        last = (await stream.rest())[-1]
        status = "failed" if how == "stop" else "cancelled"
        assert (f"response.{status}", "one") == (last["type"], last["response"]["output"][0]["content"][0]["text"])
        if how == "delete":
            assert 404 == (await proxy.get(f"/v1/responses/{made}?stream=true")).status
            return
        found = await assert_ended(proxy, made, status, "one")
        code = None if found["error"] is None else found["error"]["code"]
        assert code == ("server_error" if how == "stop" else None)


async def test_the_end_of_what_waits() -> None:
    """A response that is cancelled before its turn never begins, and its stream says so."""
    async with (
        held() as triton,
        service(triton, max_running_requests=1) as proxy,
        Stream(proxy, "POST", "/v1/responses", {**REQUEST, "stream": True}) as first,
    ):
        await first.until("output_text.delta")
        made = (await proxy.post("/v1/responses", REQUEST)).json["id"]
        assert "queued" == (await proxy.get(f"/v1/responses/{made}")).json["status"]
        async with Stream(proxy, "GET", f"/v1/responses/{made}?stream=true") as stream:
            await stream.until("queued")
            # Twice at once, as an impatient client does it.
            answers = await asyncio.gather(*[proxy.post(f"/v1/responses/{made}/cancel", {}) for _ in range(2)])
            assert ["cancelled"] * 2 == [answer.json["status"] for answer in answers]
            assert ["response.cancelled"] == [event["type"] for event in await stream.rest()]
        await assert_ended(proxy, made, "cancelled")
        assert 1 == len(triton.asked)
        triton.may_go_on.set()
        await first.until("completed")


async def test_how_many_there_may_be() -> None:
    """What waits or runs in the background is bounded: more is refused at once, and leaves nothing behind."""
    limits: tuple[dict[str, Any], ...] = ({"max_background": 1}, {"max_running_requests": 1, "max_queued_requests": 0})
    for limit in limits:
        async with held() as triton, service(triton, **limit) as proxy:
            first = (await proxy.post("/v1/responses", REQUEST)).json["id"]
            async with Stream(proxy, "GET", f"/v1/responses/{first}?stream=true") as stream:
                await stream.until("output_text.delta")
                refused: Answer = await proxy.post("/v1/responses", REQUEST)
                assert (503, "Retry-After" in refused.headers) == (refused.status, True), limit
                triton.may_go_on.set()
                await stream.until("completed")
            assert "queued" == (await proxy.post("/v1/responses", REQUEST)).json["status"]


async def test_a_conversation_is_held_from_the_start() -> None:
    """A response in the background has its conversation before it is announced; a second one is refused at once."""
    async with held() as triton, service(triton) as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        first = await proxy.post("/v1/responses", {**REQUEST, "conversation": conversation})
        second = await proxy.post("/v1/responses", {**REQUEST, "conversation": conversation})
        assert (200, 409) == (first.status, second.status)
        async with Stream(proxy, "GET", f"/v1/responses/{first.json['id']}?stream=true") as stream:
            triton.may_go_on.set()
            await stream.until("completed")
        items = (await proxy.get(f"/v1/conversations/{conversation}/items")).json["data"]
        assert ["assistant", "user"] == [item["role"] for item in items]
