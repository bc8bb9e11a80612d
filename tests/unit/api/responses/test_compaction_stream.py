"""Streams of responses whose conversation is compacted: their first events do not wait for the summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.clock import Clock
from tests.conformance.fake_triton import FakeTriton
from tests.proxy_fixture import Proxy
from tests.unit.api.responses.test_background import Stream, held, service

PATH = "/v1/responses"
REQUEST = {
    "model": "m",
    "input": [{"role": "user", "content": "word " * 50}, {"role": "user", "content": "Go on."}],
    "context_management": [{"type": "compaction", "compact_threshold": 20}],
}
OPENING = ["created", "in_progress"]
COMPACTION = ["response.output_item.added", "response.compaction.compacting", "response.output_item.done"]
TEXT = "one two three"


class Frames:
    """The events of a response over a WebSocket, as they come."""

    def __init__(self, proxy: Proxy, fields: dict[str, Any]) -> None:
        self._call = proxy.client.ws_connect(PATH)
        self._fields = fields

    async def __aenter__(self) -> Frames:
        self._socket = await self._call.__aenter__()
        await self._socket.send_str(json.dumps({"type": "response.create", **REQUEST, "store": False, **self._fields}))
        return self

    async def __aexit__(self, *given: Any) -> None:
        await self._call.__aexit__(*given)

    async def event(self) -> dict[str, Any]:
        """Return the next event."""
        return dict(json.loads(await asyncio.wait_for(self._socket.receive_str(), 120)))

    async def until(self, kind: str) -> dict[str, Any]:
        """Return the next event of *kind*."""
        event = await self.event()
        while event["type"] != f"response.{kind}":
            event = await self.event()
        return event

    async def rest(self) -> list[dict[str, Any]]:
        """Return the events up to the end."""
        events = [await self.event()]
        while events[-1]["type"] not in ("response.completed", "response.failed"):
            events.append(await self.event())
        return events


@asynccontextmanager
async def asked(proxy: Proxy, how: str, **fields: Any) -> AsyncIterator[Stream | Frames]:
    """Yield the stream of a response."""
    stream: Stream | Frames
    if how == "websocket":
        stream = Frames(proxy, fields)
    else:
        stream = Stream(proxy, "POST", PATH, {**REQUEST, "stream": True, "background": how == "background", **fields})
    async with stream:
        yield stream


@pytest.mark.parametrize("how", ["http", "websocket", "background"])
async def test_events_before_the_summary(how: str, clock: Clock) -> None:
    """The response opens at once, shows that it lives while the model writes the summary, and then goes on."""
    async with held() as triton, service(triton) as proxy, asked(proxy, how) as stream:
        opening = list(OPENING)
        if how == "background":
            opening.insert(1, "queued")
        numbers = [(await stream.until(kind))["sequence_number"] for kind in opening]
        while not triton.asked:  # noqa: ASYNC110 - the model is asked soon
            await asyncio.sleep(0)
        assert 1 == len(triton.asked)
        if how != "background":
            await clock.elapse(16)
            assert len(numbers) == (await stream.until("in_progress"))["sequence_number"]
            numbers.append(len(numbers))
        triton.may_go_on.set()
        rest = await stream.rest()

    numbers += [event["sequence_number"] for event in rest]
    compaction, message = rest[-1]["response"]["output"]
    assert list(range(len(numbers))) == numbers
    assert COMPACTION == [event["type"] for event in rest[:3]]
    assert compaction == rest[0]["item"] == rest[2]["item"]
    assert TEXT == message["content"][0]["text"]
    assert 2 == len(triton.asked)


@pytest.mark.parametrize("how", ["http", "websocket", "background"])
async def test_a_summary_that_fails(how: str) -> None:
    """The response that has begun fails with an event that says why."""
    async with held() as triton, service(triton) as proxy:
        triton.failing = 1
        triton.failure = "out of memory"
        async with asked(proxy, how) as stream:
            await stream.until("in_progress")
            *_, error, failed = await stream.rest()

    assert ("error", "response.failed") == (error["type"], failed["type"])
    assert "failed" == failed["response"]["status"]
    assert error["message"] == failed["response"]["error"]["message"]


@pytest.mark.parametrize("how", ["http", "websocket", "background"])
async def test_no_summary(how: str) -> None:
    """The answer goes on from the whole conversation, and no item says that there is a summary."""
    async with held() as triton, service(triton) as proxy:
        triton.responses = [{"text_output": ""}]
        async with asked(proxy, how) as stream:
            triton.may_go_on.set()
            *_, completed = await stream.rest()

    assert "response.completed" == completed["type"]
    assert ["message"] == [item["type"] for item in completed["response"]["output"]]


async def wrong(triton: FakeTriton, proxy: Proxy, how: str) -> dict[str, Any]:
    """Return the error of a request with a field that is wrong."""
    if how == "websocket":
        async with Frames(proxy, {"temperature": 7}) as frames:
            event = await frames.event()
            assert "error" == event["type"]
            return dict(event["error"])
    body = {**REQUEST, "stream": True, "background": how == "background", "temperature": 7}
    answer = await proxy.post(PATH, body)
    assert 400 == answer.status
    return dict(answer.json["error"])


@pytest.mark.parametrize("how", ["http", "websocket", "background"])
async def test_a_request_that_is_wrong(how: str) -> None:
    """It is refused before the stream begins, and no summary is written for it."""
    async with held() as triton, service(triton) as proxy:
        error = await wrong(triton, proxy, how)

    assert "temperature" == error["param"]
    assert not triton.asked
