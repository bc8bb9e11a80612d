"""Responses over a WebSocket, in front of a real Triton."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any

import aiohttp
import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType

from tests.clients.service import steered
from tests.proxy_fixture import Proxy, changed, proxy_settings, serving
from tests.triton_fixture import TestTriton
from triton_openai.app import SERVICE
from triton_openai.draining import DRAINING

pytestmark = pytest.mark.asyncio(loop_scope="session")
_PATH = "/v1/responses"


class Socket:
    """A client's end of the connection."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self.raw = socket

    async def ask(self, text: str = "one two three", delay: int = 0, **fields: Any) -> None:
        """Ask for a response, whose tokens come after *delay* ms each."""
        prompt = steered(text=text, delay_ms=delay)
        body = {"type": "response.create", "model": "vllm_model", "input": prompt, **fields}
        await self.raw.send_str(json.dumps(body))

    async def event(self) -> dict[str, Any]:
        """Return the next event."""
        return dict(json.loads(await asyncio.wait_for(self.raw.receive_str(), 120)))

    async def events(self) -> list[dict[str, Any]]:
        """Return the events up to the last one of a response, or to an error."""
        events = [await self.event()]
        while events[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed"):
            if events[-1]["type"] == "error" and "sequence_number" not in events[-1]:
                break
            events.append(await self.event())
        return events

    async def error(self) -> dict[str, Any]:
        """Return the error that comes next."""
        event = await self.event()
        assert "error" == event["type"], event
        assert {"message", "type", "param", "code"} == event["error"].keys()
        return {"status": event["status"], **event["error"], "stream_id": event.get("stream_id")}


@asynccontextmanager
async def connected(proxy: Proxy, **headers: str) -> AsyncIterator[Socket]:
    """Yield an open connection."""
    async with proxy.client.ws_connect(_PATH, headers=headers) as socket:
        yield Socket(socket)


def text_of(event: dict[str, Any]) -> str:
    """Return the text of the response in *event*."""
    return "".join(
        part["text"] for item in event["response"]["output"] if item["type"] == "message" for part in item["content"]
    )


async def test_a_response(proxies: dict[str, Proxy]) -> None:
    """The events are those of the stream of a request, numbered from 0, without an end mark."""
    async with connected(proxies["http"], **{"OpenAI-Beta": "responses_websockets=2026-02-06"}) as socket:
        await socket.ask()
        events = await socket.events()

    answer = await proxies["http"].post(
        _PATH, {"model": "vllm_model", "input": steered(text="one two three"), "stream": True}
    )
    expected = [json.loads(line[6:])["type"] for line in answer.body.decode().split("\n") if line.startswith("data: ")]
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    assert [kind for kind in expected if "delta" not in kind] == [
        event["type"] for event in events if "delta" not in event["type"]
    ]
    assert "one two three" == text_of(events[-1])
    assert all("stream_id" not in event for event in events)


async def test_going_on_without_a_store(triton: TestTriton) -> None:
    """The next response goes on from the last one of the connection, which is kept nowhere else."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none"})
    async with serving(settings) as proxy, connected(proxy) as socket:
        await proxy.ready()
        await socket.ask(store=False)
        first = (await socket.events())[-1]["response"]["id"]
        await socket.ask("four", store=False, previous_response_id=first)
        second = (await socket.events())[-1]["response"]
        assert first == second["previous_response_id"]
        # The prompt has the first turn, too.
        await socket.ask("four", store=False)
        alone = (await socket.events())[-1]["response"]
        assert second["usage"]["input_tokens"] > alone["usage"]["input_tokens"]

        # Only the last one of a lane is kept.
        await socket.ask(previous_response_id=first)
        error = await socket.error()
        assert (400, "previous_response_id") == (error["status"], error["param"])
        async with connected(proxy) as other:
            await other.ask(previous_response_id=alone["id"])
            assert "previous_response_id" == (await other.error())["param"]


async def test_an_error_forgets_the_last_response(proxies: dict[str, Proxy]) -> None:
    """After an error in a lane nothing goes on from what was before it, and the connection stays open."""
    async with connected(proxies["grpc"]) as socket:
        await socket.ask(store=False)
        last = (await socket.events())[-1]["response"]["id"]
        await socket.ask(temperature=7)
        error = await socket.error()
        assert (400, "temperature", None) == (error["status"], error["param"], error["stream_id"])
        await socket.ask(store=False, previous_response_id=last)
        assert "previous_response_not_found" == (await socket.error())["code"]
        await socket.ask()
        assert "response.completed" == (await socket.events())[-1]["type"]


async def test_a_stored_response(proxies: dict[str, Proxy]) -> None:
    """A response that is stored can be fetched, and gone on from over HTTP."""
    proxy = proxies["http"]
    async with connected(proxy) as socket:
        await socket.ask(store=True)
        made = (await socket.events())[-1]["response"]
    assert 200 == (await proxy.get(f"{_PATH}/{made['id']}")).status
    body = {"model": "vllm_model", "input": steered(text="more"), "previous_response_id": made["id"]}
    assert 200 == (await proxy.post(_PATH, body)).status


async def test_preparation(proxies: dict[str, Proxy]) -> None:
    """A response that is only prepared has no output, and the next one goes on from its input."""
    async with connected(proxies["http"]) as socket:
        await socket.ask("many words to begin with", generate=False, store=False)
        created, completed = await socket.events()
        assert ("response.created", "response.completed") == (created["type"], completed["type"])
        assert [] == completed["response"]["output"]
        await socket.ask("x", store=False, previous_response_id=completed["response"]["id"])
        answer = (await socket.events())[-1]["response"]
        await socket.ask("x", store=False)
        alone = (await socket.events())[-1]["response"]
        assert answer["usage"]["input_tokens"] > alone["usage"]["input_tokens"]
        await socket.ask(generate=False, temperature=9)
        assert "temperature" == (await socket.error())["param"]


async def test_lanes(triton: TestTriton) -> None:
    """Requests of one lane run in order, lanes in parallel, and there is a bound on both."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none", "max_lanes": 2})
    async with serving(settings) as proxy, connected(proxy) as socket:
        await proxy.ready()
        for number in range(3):
            await socket.ask(f"a {number}", stream_id="a")
        await socket.ask("b", stream_id="b")
        await socket.ask("c", stream_id="c")
        ended: dict[str, list[str]] = {"a": [], "b": []}
        errors = []
        while sum(map(len, ended.values())) < 4:
            event = await socket.event()
            if event["type"] == "error":
                errors.append((event["stream_id"], event["error"]["code"]))
            elif event["type"] == "response.completed":
                ended[event["stream_id"]].append(text_of(event))
        assert {"a": ["a 0", "a 1", "a 2"], "b": ["b"]} == ended
        assert [("c", "websocket_stream_limit_reached")] == errors
        for _ in range(18):
            # None ends before all have been sent.
            await socket.ask("slow " * 20, delay=2000, stream_id="a")
        codes: list[str] = []
        while not codes or codes[-1] != "websocket_queue_limit_reached":
            event = await socket.event()
            if event["type"] == "error":
                codes.append(event["error"]["code"])


@pytest.mark.parametrize(
    "frame, param",
    [
        ("", None),
        ("{", None),
        ("[]", None),
        ("null", None),
        ('"\\ud800"', None),
        ('{"type": "response.cancel"}', "type"),
        ('{"model": "vllm_model", "input": "x"}', "type"),
        ('{"type": "response.create", "model": "vllm_model", "input": "x", "background": true}', "background"),
        ('{"type": "response.create", "model": "vllm_model", "input": "x", "stream_id": "a b"}', "stream_id"),
        ('{"type": "response.create", "model": "vllm_model", "input": "x", "stream_id": 1}', "stream_id"),
        ('{"type": "response.create", "model": "vllm_model"}', "input"),
        ('{"type": "response.create", "input": "x", "model": "nobody"}', "model"),
        ("[" * 100_000, None),
    ],
)
async def test_what_is_refused(proxies: dict[str, Proxy], frame: str, param: str | None) -> None:
    """A wrong frame is answered by an error, and the connection goes on."""
    async with connected(proxies["http"]) as socket:
        await socket.raw.send_str(frame)
        error = await socket.error()
        assert error["status"] in (400, 404, 413)
        if param is not None:
            assert param == error["param"]
        await socket.ask()
        assert "response.completed" == (await socket.events())[-1]["type"]


async def test_frames_that_end_the_connection(triton: TestTriton) -> None:
    """Binary frames, and those above the limit of a body."""
    settings = changed(proxy_settings(triton, "http"), server={"max_body_size": 65_536})
    async with serving(settings) as proxy:
        await proxy.ready()
        for kind, data, code in (
            (WSMsgType.BINARY, b"{}", 1003),
            (WSMsgType.TEXT, b"x" * 70_000, 1009),
        ):
            async with connected(proxy) as socket:
                await socket.raw.send_frame(data, kind)
                message = await asyncio.wait_for(socket.raw.receive(), 120)
                assert WSMsgType.CLOSE == message.type
                assert code == message.data


async def test_a_frame_that_would_hold_the_event_loop(proxies: dict[str, Proxy]) -> None:
    """A frame that takes longer to join and to unmask than a turn may last ends the connection."""
    async with connected(proxies["http"]) as socket:
        with contextlib.suppress(ConnectionError):
            await socket.raw.send_frame(b" " * (24 * 1024 * 1024 + 1), WSMsgType.TEXT)
        message = await asyncio.wait_for(socket.raw.receive(), 120)
        assert (WSMsgType.CLOSE, 1009) == (message.type, message.data)


async def test_no_upgrade(proxies: dict[str, Proxy]) -> None:
    """A plain GET is refused as before, and an upgrade that is none by the middleware."""
    client = proxies["http"].client
    async with client.get(_PATH) as response:
        assert 405 == response.status
    async with client.get(_PATH, headers={"Upgrade": "websocket"}) as response:
        assert 400 == response.status
        assert "error" in await response.json()


async def test_keys_and_limits(triton: TestTriton, tmp_path: Path) -> None:
    """A bad key is a 401 before the upgrade, a foreign page a 403; the limits of a key hold for each request."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: few, key: one-key, requests_per_minute: 2}]")
    settings = changed(proxy_settings(triton, "http"), access={"api_keys_file": file}, responses={"store": "none"})
    async with serving(settings) as proxy:
        await proxy.ready()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await proxy.client.ws_connect(_PATH, headers={"Authorization": "Bearer wrong"})
        assert 401 == refused.value.status
        async with connected(proxy, Authorization="Bearer one-key") as socket:
            codes = []
            for _ in range(3):
                await socket.ask()
                codes.append((await socket.events())[-1].get("status", 200))
            assert [200, 200, 429] == codes
    async with serving(proxy_settings(triton, "http")) as proxy:
        await proxy.ready()
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await proxy.client.ws_connect(_PATH, headers={"Origin": "https://evil.example"})
        assert 403 == refused.value.status


async def test_the_key_of_a_page(triton: TestTriton, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A page gives its key as a subprotocol, gets an answer to the others, and no log has it."""
    file = tmp_path / "keys.yaml"
    file.write_text("keys: [{name: few, key: one-key}]")
    settings = changed(proxy_settings(triton, "http"), access={"api_keys_file": file}, responses={"store": "none"})
    caplog.set_level("DEBUG")
    async with serving(settings) as proxy:
        await proxy.ready()
        for protocols, chosen in (
            (("realtime", "openai-insecure-api-key.one-key"), "realtime"),
            (("openai-insecure-api-key.one-key",), None),
        ):
            async with proxy.client.ws_connect(_PATH, protocols=protocols) as raw:
                assert chosen == raw.protocol
                socket = Socket(raw)
                await socket.ask()
                assert "response.completed" == (await socket.events())[-1]["type"]
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await proxy.client.ws_connect(_PATH, protocols=("realtime", "openai-insecure-api-key.wrong"))
        assert 401 == refused.value.status
    assert "one-key" not in caplog.text


async def test_the_size_of_what_waits(triton: TestTriton) -> None:
    """Requests that wait have no more bytes than one request may have."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none"}, server={"max_body_size": 65_536})
    async with serving(settings) as proxy, connected(proxy) as socket:
        await proxy.ready()
        # It does not end before the others have been sent.
        await socket.ask("slow " * 20, delay=2000, stream_id="a")
        for _ in range(2):
            await socket.ask("b", metadata={"filler": "x" * 512}, instructions="y" * 40_000, stream_id="a")
        event = await socket.event()
        while event["type"] != "error":
            event = await socket.event()
        assert "websocket_queue_limit_reached" == event["error"]["code"]
        assert "server.max_body_size" in event["error"]["message"]


async def test_a_client_that_leaves(proxies: dict[str, Proxy], triton: TestTriton) -> None:
    """The end of a connection cancels its requests."""
    proxy = proxies["http"]
    service = proxy.client.app[SERVICE]
    async with connected(proxy) as socket:
        await socket.ask("word " * 500, delay=10)
        await socket.event()
    draining = service.executor.draining
    async with asyncio.timeout(120):
        while draining._tasks:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)


async def test_a_client_that_reads_nothing(triton: TestTriton) -> None:
    """Its runs pause, and go on when it reads: nothing is lost, and little is kept in memory."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none"})
    async with serving(settings) as proxy, connected(proxy) as socket:
        await proxy.ready()
        transport = socket.raw.get_extra_info("socket")
        transport.setsockopt(SOL_SOCKET, SO_RCVBUF, 16384)
        # Each event has twenty alternatives of its token.
        text = "word " * 150
        await socket.ask(text, top_logprobs=20, include=["message.output_text.logprobs"])
        await socket.ask("after", stream_id="b")
        texts: list[str] = []
        while len(texts) < 2:
            event = await socket.event()
            if event["type"] == "response.completed":
                texts.append(text_of(event))
        assert {text.rstrip(), "after"} == {found.rstrip() for found in texts}


async def test_the_end_of_the_service(triton: TestTriton) -> None:
    """An idle connection ends at once, a running response may end, and nothing new begins."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none"})
    async with serving(settings) as proxy, connected(proxy) as idle, connected(proxy) as busy:
        await proxy.ready()
        # It has to run until the next request has been refused, also on a busy machine.
        await busy.ask("word " * 30, delay=100)
        await busy.event()
        draining = proxy.client.app[DRAINING]
        end = asyncio.create_task(draining.drain(120))
        message = await asyncio.wait_for(idle.raw.receive(), 120)
        assert (WSMsgType.CLOSE, 1012) == (message.type, message.data)
        await busy.ask(stream_id="late")
        events = await busy.events()
        assert "service_stopping" == next(event for event in events if event["type"] == "error")["error"]["code"]
        if events[-1]["type"] != "response.completed":
            events = await busy.events()
        assert "response.completed" == events[-1]["type"]
        message = await asyncio.wait_for(busy.raw.receive(), 120)
        assert 1012 == message.data
        await end


async def test_a_running_response_at_the_end_of_the_grace(triton: TestTriton) -> None:
    """What runs longer than the grace ends with an error, and the connection after it."""
    settings = changed(proxy_settings(triton, "http"), responses={"store": "none"})
    async with serving(settings) as proxy, connected(proxy) as busy:
        await proxy.ready()
        await busy.ask("word " * 2000, delay=10)
        await busy.event()
        draining = proxy.client.app[DRAINING]
        await draining.drain(0)
        last: dict[str, Any] = {}
        while (message := await asyncio.wait_for(busy.raw.receive(), 120)).type is WSMsgType.TEXT:
            last = json.loads(message.data)
        assert (WSMsgType.CLOSE, 1012) == (message.type, message.data)
        assert last["type"] in ("response.failed", "error"), last
