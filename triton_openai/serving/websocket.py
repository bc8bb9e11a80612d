"""
WebSockets: the upgrade of a request, and the frames of its connection.

What the frames mean is that of a :class:`Session`, which has no HTTP. While a session is late, no further frames are
read, and the connection stays. Frames are not compressed: an event for a token is short, and compression would hold it
back.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable
from contextlib import suppress
from itertools import count
from typing import Literal, TypeAlias

import structlog
from aiohttp import WSCloseCode, WSMsgType, web

from triton_openai.access.keys import KEY
from triton_openai.draining import Draining
from triton_openai.errors import InvalidRequest, ServiceError
from triton_openai.operations import Opening, OpenSession, Session
from triton_openai.telemetry.request_record import RECORD, RequestRecord

_log = structlog.get_logger(__name__)

_Socket: TypeAlias = "web.WebSocketResponse[Literal[False]]"
# Seconds after which the connection is examined. Every second time a ping is sent. A client from which nothing came
# three times in a row has left, for a ping was sent at the first or the second time.
_EXAMINE_SECONDS = 15.0
_EXAMINATIONS_A_PING = 2
_MAX_QUIET = 3
#: The longest time of one connection, in seconds, as OpenAI has it.
MAX_SECONDS = 3600.0
# aiohttp warns about subprotocols that are not served, and one of them may be the client's key.
logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)

# What is chosen of the subprotocols that a client offers. A browser closes a connection without a choice. OpenAI's
# clients in browsers offer this one, and their key as another.
_PROTOCOLS = ("realtime",)
# The longest reason of a close frame, in bytes (RFC 6455, 5.5: 125 with the code).
_MAX_REASON = 123
# Bytes that the connection has not taken, above which whoever sends waits for the client to read.
_HIGH_WATER = 64 * 1024
# Longest time that a client may take to read, or to answer, the end of a connection.
_CLOSE_SECONDS = 2.0


def is_upgrade(request: web.Request) -> bool:
    """Return whether *request* asks for a WebSocket."""
    return request.headers.get("Upgrade", "").lower() == "websocket"


async def serve_websocket(request: web.Request, open_session: OpenSession, *, draining: Draining) -> web.StreamResponse:
    """
    Return the response to *request* once its WebSocket has ended, whose frames the session gets.

    Raises what refuses the session, before the upgrade.
    """
    client: _Client | None = None

    def send(frame: bytes) -> Awaitable[None]:
        assert client is not None, "the connection is open"
        return client.send(frame)

    opening = Opening(request.headers, request.query, request[RECORD], request[KEY])
    session = open_session(opening, send)
    try:
        # Frames are not decoded here, where a large one would hold the event loop.
        socket: _Socket = web.WebSocketResponse(
            timeout=_CLOSE_SECONDS,
            autoping=False,
            max_msg_size=session.max_frame_size,
            protocols=_PROTOCOLS,
            compress=False,
            decode_text=False,
            # A write never waits for the client to read: _Client does.
            writer_limit=sys.maxsize,
        )
        # aiohttp raises what the middleware answers, if the request is no WebSocket's.
        await socket.prepare(request)
        client = _Client(socket, request)
        await _serve(client, session, draining, opening.record)
    finally:
        # Nothing is awaited: a client that has ended its connection in order has not left early.
        session.close()
        if client is not None:
            client.stop_waiting()
    return socket


async def _serve(client: _Client, session: Session, draining: Draining, record: RequestRecord) -> None:
    """Give *session* the frames of *client* until one of them ends. *record* is that of the request."""
    stopping = asyncio.create_task(_stop(session, client.socket, draining))
    watching = asyncio.create_task(_end_when_gone(client, session))
    try:
        async with asyncio.timeout(MAX_SECONDS):
            await session.begin()
            await _read(client, session)
    except ConnectionError:
        # The client has left, and does not read an answer.
        return
    except TimeoutError:
        message = f"A connection ends after {MAX_SECONDS:g} seconds."
        await _end(client, session, InvalidRequest(message, code="websocket_connection_limit_reached"), WSCloseCode.OK)
    except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
        _log.exception("session failed", request_id=record.request_id, path=record.path)
        record.error = ServiceError()
        await _end(client, session, record.error, WSCloseCode.INTERNAL_ERROR)
    except asyncio.CancelledError:
        reason = draining.reason()
        if reason is None:
            raise
        # The time for running requests is over, or the key was removed.
        code = WSCloseCode.SERVICE_RESTART
        if reason.status < 500:
            code = WSCloseCode.POLICY_VIOLATION
        await _end(client, session, reason, code)
    finally:
        stopping.cancel()
        watching.cancel()


class _Client:
    """The client of *request* behind *socket*: what is sent to it, and whether it is still there."""

    def __init__(self, socket: _Socket, request: web.Request) -> None:
        self.socket = socket
        #: Whether the session has a frame and takes no other one. What the client sends meanwhile is not read.
        self.waits = False
        #: Whether anything has come since this was reset.
        self.active = False
        self._request = request
        self._draining: asyncio.Task[None] | None = None

    async def send(self, frame: bytes) -> None:
        """Send *frame*, and wait while the client is slow. Raises ``ConnectionError`` if it has left."""
        await self.socket.send_frame(frame, WSMsgType.TEXT)
        await self._drain()

    async def pong(self, data: bytes) -> None:
        """Answer a ping with its *data*. Waits, and raises, as :meth:`send`."""
        await self.socket.pong(data)
        await self._drain()

    async def _drain(self) -> None:
        """
        Wait until the client has read, if much is unread.

        In aiohttp, all tasks that wait for one connection wait for the same future: the cancellation of one of them
        would cancel the others, too. So one task of the connection waits for it, and the others for that task.
        """
        if self._unread() <= _HIGH_WATER:
            return
        if self._draining is None or self._draining.done():
            self._draining = asyncio.create_task(self._request.writer.drain())
        await asyncio.shield(self._draining)

    def _unread(self) -> int:
        """Return how many bytes the connection has not taken yet."""
        transport = self._request.transport
        if transport is None:
            return 0
        return transport.get_write_buffer_size()

    def stop_waiting(self) -> None:
        """End what waits for the client to read."""
        if self._draining is not None:
            self._draining.cancel()

    def abort(self) -> None:
        """Close the connection without what the client has not read."""
        transport = self._request.transport
        if transport is not None:
            transport.abort()

    async def gone(self) -> None:
        """Send pings, and return when the client has sent nothing for some time in which it was read."""
        quiet = 0
        for number in count(1):
            await asyncio.sleep(_EXAMINE_SECONDS)
            if self.active or self.waits:
                quiet = 0
            else:
                quiet += 1
            self.active = False
            if quiet == _MAX_QUIET:
                return
            if number % _EXAMINATIONS_A_PING == 0:
                with suppress(ConnectionError):
                    await self.socket.ping()


async def _read(client: _Client, session: Session) -> None:
    """Give *session* the frames of *client* until it leaves."""
    async for message in client.socket:
        client.active = True
        if message.type is WSMsgType.PING:
            await client.pong(message.data)
        elif message.type is WSMsgType.TEXT:
            client.waits = True
            await session.receive(message.data)
            client.waits = False
            # Pings that came meanwhile are read next.
            client.active = True
        elif message.type is WSMsgType.BINARY:
            await client.socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"Frames have to be text.")
        # Many frames that have come together, pings and their answers too, leave others their turns.
        await asyncio.sleep(0)


async def _end_when_gone(client: _Client, session: Session) -> None:
    """End *session* when *client* is gone."""
    await client.gone()
    seconds = _MAX_QUIET * _EXAMINE_SECONDS
    message = f"The client has sent nothing for {seconds:g} seconds, not even an answer to a ping."
    error = InvalidRequest(message, code="websocket_ping_timeout")
    await _end(client, session, error, WSCloseCode.POLICY_VIOLATION)


async def _stop(session: Session, socket: _Socket, draining: Draining) -> None:
    """Close *socket* when the service stops and *session* has nothing to do."""
    await draining.started.wait()
    await session.finish()
    await socket.close(code=WSCloseCode.SERVICE_RESTART, message=b"The service is stopping.")


async def _end(client: _Client, session: Session, error: ServiceError, code: WSCloseCode) -> None:
    """End *session* by *error*, and close the connection. A client that reads nothing does not delay that."""
    reason = error.message.encode()[:_MAX_REASON]
    try:
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await session.end(error)
        with suppress(TimeoutError):
            # It also waits for the client to close the connection.
            async with asyncio.timeout(2 * _CLOSE_SECONDS):
                await client.socket.close(code=code, message=reason)
    finally:
        client.abort()
