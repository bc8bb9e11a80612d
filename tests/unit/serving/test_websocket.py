"""The frames of a WebSocket, with a session that does what a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, web
from aiohttp.test_utils import TestClient, TestServer

from tests.cases import every_case
from tests.clock import Clock, turns
from triton_openai.access.keys import KEY, NO_KEY
from triton_openai.draining import Draining
from triton_openai.errors import ServiceError
from triton_openai.operations import Opening, OpenSession, Send
from triton_openai.serving.websocket import MAX_SECONDS, serve_websocket
from triton_openai.telemetry.request_record import RECORD, RequestRecord

Client: TypeAlias = "TestClient[web.Request, web.Application]"


class Echo:
    """Sends each frame back when *free* is set."""

    max_frame_size = 1024

    def __init__(self, send: Send, free: asyncio.Event) -> None:
        self._send = send
        self._free = free

    async def begin(self) -> None:
        """Send nothing."""

    async def receive(self, frame: bytes) -> None:
        """Wait, and send *frame* back."""
        await self._free.wait()
        await self._send(frame)

    async def finish(self) -> None:
        """There is nothing left to do."""

    async def end(self, error: ServiceError) -> None:
        """Send *error*."""
        await self._send(json.dumps({"code": error.code}).encode())

    def close(self) -> None:
        """There is nothing to give back."""


@pytest.fixture
def free() -> asyncio.Event:
    """What sessions wait for."""
    event = asyncio.Event()
    event.set()
    return event


@pytest.fixture
async def client(free: asyncio.Event) -> AsyncIterator[Client]:
    """A client of a service whose sessions echo."""

    def opened(_: Opening, send: Send) -> Echo:
        return Echo(send, free)

    async with served(opened, Draining()) as client:
        yield client


@asynccontextmanager
async def served(open_session: OpenSession, draining: Draining) -> AsyncIterator[Client]:
    """A client of a service with such sessions."""

    async def serve(request: web.Request) -> web.StreamResponse:
        record = RequestRecord(request_id="1", method="GET", path="/")
        request[RECORD] = record
        request[KEY] = NO_KEY
        task = draining.enter(record)
        try:
            return await serve_websocket(request, open_session, draining=draining)
        finally:
            draining.leave(task)

    app = web.Application()
    app.router.add_get("/", serve)
    async with TestClient(TestServer(app)) as client:
        yield client


def transport_of(socket: ClientWebSocketResponse) -> asyncio.Transport:
    """Return the transport of a client, which can stop to read."""
    assert socket._conn is not None
    transport = socket._conn.transport
    assert isinstance(transport, asyncio.Transport)
    return transport


async def frames(socket: ClientWebSocketResponse) -> list[tuple[WSMsgType, object]]:
    """Return what *socket* gets up to its end."""
    got: list[tuple[WSMsgType, object]] = []
    while True:
        message = await socket.receive(10)
        got.append((message.type, message.data))
        if message.type in (WSMsgType.CLOSE, WSMsgType.CLOSED, WSMsgType.ERROR):
            return got


async def test_a_client_that_is_gone(client: Client, clock: Clock) -> None:
    """A client that sends nothing, not even an answer to a ping, gets an error and a code that say so."""
    async with client.ws_connect("/", autoping=False) as socket:
        await clock.elapse(60, steps=60)
        got = await frames(socket)
    assert [WSMsgType.PING, WSMsgType.TEXT, WSMsgType.CLOSE] == [kind for kind, _ in got]
    assert ('{"code": "websocket_ping_timeout"}', 1008) == (got[1][1], got[2][1])


async def test_a_session_that_is_late(client: Client, clock: Clock, free: asyncio.Event) -> None:
    """Where the session takes no frames, the answers of its client are not read, and the connection stays."""
    free.clear()
    async with client.ws_connect("/", autoping=False) as socket:
        for number in range(3):
            await socket.send_str(str(number))
        await clock.elapse(600, steps=600)
        free.set()
        got: list[str] = []
        while len(got) < 3:
            message = await socket.receive(10)
            if message.type is WSMsgType.TEXT:
                got.append(message.data)
            else:
                assert WSMsgType.PING == message.type
        assert ["0", "1", "2"] == got


@every_case("kind", [WSMsgType.PING, WSMsgType.PONG, WSMsgType.TEXT])
async def test_many_frames_at_once(client: Client, kind: WSMsgType) -> None:
    """Whatever the frames are that come together, each has a turn of the event loop to itself."""
    count = 200
    async with client.ws_connect("/", autoping=False) as socket:
        # An unmasked frame would be refused: the mask is four zeros.
        transport_of(socket).write(count * bytes((0x80 | kind, 0x80, 0, 0, 0, 0)))
        await socket.send_str("last")
        turns_of_others = 0
        answer = asyncio.create_task(last_answer(socket))
        while not answer.done():
            await asyncio.sleep(0)
            turns_of_others += 1
        assert "last" == await answer
    assert turns_of_others > count


async def last_answer(socket: ClientWebSocketResponse) -> str:
    """Read all that comes before the first text that is not empty, and return that."""
    while not (message := await socket.receive(10)).data or message.type is not WSMsgType.TEXT:
        pass
    return str(message.data)


async def test_a_client_that_only_listens(client: Client, clock: Clock) -> None:
    """A client that answers pings stays, and its own pings are answered."""
    async with client.ws_connect("/") as socket:
        listening = asyncio.create_task(socket.receive(1000))
        await clock.elapse(600, steps=600)
        assert not listening.done()
        await socket.send_str("still here")
        assert "still here" == (await listening).data
    async with client.ws_connect("/", autoping=False) as socket:
        await socket.ping(b"one")
        message = await socket.receive(10)
        assert (WSMsgType.PONG, b"one") == (message.type, bytes(message.data))


class Flood:
    """Sends frames for as long as its client reads them, for each that it gets; *late*: it takes one only."""

    max_frame_size = 1024

    def __init__(self, send: Send, *, late: bool) -> None:
        self._send = send
        self._late = late
        self.sending: list[asyncio.Task[None]] = []
        self.closed = False

    async def begin(self) -> None:
        """Send nothing."""

    async def receive(self, frame: bytes) -> None:
        """Begin to send."""
        self.sending.append(asyncio.create_task(self._flood(frame)))
        if self._late:
            await self.sending[0]

    async def _flood(self, frame: bytes) -> None:
        while True:
            await self._send(1000 * frame)

    async def finish(self) -> None:
        """Wait until all is sent."""
        await asyncio.wait(self.sending)

    async def end(self, error: ServiceError) -> None:
        """Send *error*."""
        await self._send(error.message.encode())

    def close(self) -> None:
        self.closed = True
        for task in self.sending:
            task.cancel()


@every_case("late, drained, seconds", [(False, False, 60), (True, False, MAX_SECONDS), (True, True, 0)])
async def test_a_client_that_does_not_read(clock: Clock, late: bool, drained: bool, seconds: float) -> None:
    """Whatever ends the connection of a client that does not read, the end does not wait for the client."""
    sessions: list[Flood] = []
    draining = Draining()
    ending: list[asyncio.Task[None]] = []

    def opened(_: Opening, send: Send) -> Flood:
        sessions.append(Flood(send, late=late))
        return sessions[-1]

    async with served(opened, draining) as client, client.ws_connect("/") as socket:
        transport = transport_of(socket)
        await socket.send_str(1000 * "x")
        transport.pause_reading()
        await turns(50)
        if drained:
            ending.append(asyncio.create_task(draining.drain(0)))
        try:
            await clock.elapse(seconds, steps=60)
            # The time in which the client could read the end.
            await clock.elapse(10, steps=60)
            assert (True, []) == (sessions[0].closed, list(draining._tasks))
        finally:
            transport.abort()
            await asyncio.gather(*ending)


async def test_a_sender_that_is_cancelled() -> None:
    """What is cancelled while it waits for a slow client, such as one of several answers, cancels no other sender."""
    sessions: list[Flood] = []

    def opened(_: Opening, send: Send) -> Flood:
        sessions.append(Flood(send, late=False))
        return sessions[-1]

    async with served(opened, Draining()) as client, client.ws_connect("/") as socket:
        transport = transport_of(socket)
        for letter in "abc":
            await socket.send_str(1000 * letter)
        await turns(50)
        transport.pause_reading()
        await turns(50)
        one, *others = sessions[0].sending
        one.cancel()
        await turns(50)
        assert [True, False, False] == [task.done() for task in (one, *others)]
        transport.resume_reading()
        for letter in "bc":
            while letter not in (await socket.receive_str(timeout=120))[:1]:
                pass
        transport.abort()
