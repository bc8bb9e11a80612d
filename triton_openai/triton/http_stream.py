"""
Streams of HTTP's generate extension over pooled connections, on asyncio's protocols and llhttp (through httptools).

This is the hot path of the product: once per token a packet is parsed here. A raw protocol takes about two thirds of
the CPU time that aiohttp's client takes for the same stream (`make bench` measures it), so streams do not go through
aiohttp; all other calls do.

Source of the facts: Triton's ``extension_generate.md`` and http_server.cc: each response is one ``data: {json}``
event ended by an empty line, the end of the body is the end of the answers, and a failure is a JSON object with the
key ``error``, as an event or as a plain body, under a status that cannot be relied on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import httptools
import msgspec

from triton_openai.config.tls import PERHAPS_REFUSED, words
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.triton.connection import notice
from triton_openai.triton.status import Failure, classify, cut_off, unreachable
from triton_openai.triton.tensors import InferResponse, JsonResponse

_decode = msgspec.json.Decoder(dict[str, Any]).decode

# Above this many unread bytes the socket is not read any more, so a slow client holds back Triton and not our memory.
HIGH_WATER = 256 * 1024
# Idle connections are closed well before a server or a balancer between us would do it.
IDLE_SECONDS = 30.0
MAX_IDLE = 512
# A connection that the server had closed before it saw the request is lost within a round trip of sending it. Later on,
# the request may have been worked on, and may be what ended the server: it is not sent again.
STALE_SECONDS = 1.0
EVENT_END = b"\n\n"


def decode_values(data: bytes) -> dict[str, Any]:
    """
    Return the JSON object of an event.

    Triton copies BYTES outputs into the JSON unchecked (invalid UTF-8 is possible) and writes ``NaN`` for a float
    that is none; strict parsers refuse both, so what the fast decoder refuses is read again leniently. Raises
    :class:`UpstreamError`.
    """
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        values = json.loads(data.decode("utf-8", "replace"))
    except ValueError as error:
        raise _unreadable(data) from error
    if not isinstance(values, dict):
        raise _unreadable(data)
    return values


def _unreadable(data: bytes) -> UpstreamError:
    # Not what it is: it may well be a part of an answer, and those are not logged.
    return UpstreamError(
        "Triton sent an answer that cannot be read.", detail=f"An event of {len(data)} bytes is no JSON object."
    )


class StaleConnectionError(Exception):
    """
    A kept-alive connection was closed by the other side before it answered anything: the request may be sent again.
    """


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection that carries one request at a time."""

    def __init__(self, release: Callable[[Connection], None]) -> None:
        # Per connection
        # Asking for the running loop costs a system call before Python 3.12: too much for once per token.
        self._loop = asyncio.get_running_loop()
        self._release = release
        self._transport: asyncio.Transport | None = None
        # From the first request until the connection is lost: it holds this object's methods, a cycle.
        self._parser: httptools.HttpResponseParser | None = None
        self.used = False
        self._encrypted = False
        self._refused: ssl.SSLError | None = None
        # Per request
        self._sent_at = 0.0
        self._lost_at = 0.0
        self._body: list[bytes] = []
        self._size = 0
        self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._readable = False
        self._last = b""
        self.status = 0
        self.events = False
        self.complete = False
        self.reusable = False
        self.lost = False
        self.abandoned = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not asserted: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._encrypted = transport.get_extra_info("sslcontext") is not None

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then wake the reader if a whole event, or the end, is there."""
        try:
            if self._parser is None:
                raise httptools.HttpParserError("Nothing was asked yet: whoever speaks first does not speak HTTP.")
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.lost = True
            self._readable = True
            self.close()
        if self._readable:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Remember that no more will come."""
        self.lost = True
        if isinstance(error, ssl.SSLError):
            self._refused = error
        self._lost_at = self._loop.time()
        self._parser = None
        self._wake()

    # What llhttp calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """Look at the one header that matters."""
        if name.lower() == b"content-type":
            self.events = value.lower().startswith(b"text/event-stream")

    def on_headers_complete(self) -> None:
        """Keep the status."""
        assert self._parser is not None
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Collect; an event is whole when an empty line is in it (which may be cut between two pieces)."""
        self._body.append(body)
        self._size += len(body)
        if EVENT_END in body or (body[:1] == b"\n" and self._last == b"\n"):
            self._readable = True
        self._last = body[-1:]
        if self._size > HIGH_WATER and not self._paused and self._readable and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The answer is complete, and whether the connection can serve again: the parser forgets that afterwards."""
        assert self._parser is not None
        self.complete = True
        self.reusable = self._parser.should_keep_alive()
        self._readable = True

    # What the pool and the stream call.

    @property
    def usable(self) -> bool:
        """Whether another request can be sent on it."""
        return not self.lost and self._transport is not None and not self._transport.is_closing()

    @property
    def answered(self) -> bool:
        """Whether any part of an answer has come."""
        return self.status != 0

    def send(self, request: bytes) -> None:
        """Send a whole request and get ready for its answer."""
        assert self._transport is not None
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self._body = []
        self._size = 0
        self._readable = False
        self._last = b""
        self.status = 0
        self.events = False
        self.complete = False
        self._sent_at = self._loop.time()
        self._transport.write(request)

    async def take(self) -> bytes:
        """
        Return what has come since the last call, at least one whole event; ``b""`` when the answer is complete.

        Raises :class:`StaleConnectionError`, or :class:`UpstreamError` when the connection broke.
        """
        while not self._readable:
            if self.lost:
                if self.used and not self.answered and self._lost_at - self._sent_at < STALE_SECONDS:
                    raise StaleConnectionError
                if self._encrypted and not self.used and not self.answered:
                    raise unreachable(PERHAPS_REFUSED if self._refused is None else words(self._refused))
                raise cut_off()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        body = self._body
        if self.lost and not body and not self.complete:
            raise cut_off()
        data = body[0] if len(body) == 1 else b"".join(body)
        self._body = []
        self._size = 0
        # At the end of the answer (or of the connection) every call may return.
        self._readable = self.complete or self.lost
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def finish(self) -> None:
        """Give the connection back if its answer was read to the end and the server keeps it open; else close it."""
        if self.complete and self.reusable and self.usable and not self.abandoned:
            self.used = True
            self._release(self)
        else:
            self.close()

    def close(self) -> None:
        """Close it; Triton takes this as the cancellation of a request in flight."""
        self.abandoned = True
        if self._transport is not None:
            self._transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ConnectionPool:
    """
    Keep-alive connections to one address. Not bounded: admission is decided elsewhere, a stream must never wait here.

    *doubted* is called when there is reason to think that the way to that address is cut; see :meth:`distrust`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        ssl_context: ssl.SSLContext | None,
        connect_timeout: float,
        server_name: str | None = None,
        doubted: Callable[[], None] | None = None,
    ) -> None:
        self._doubted = doubted
        self._host = host
        self._port = port
        self._ssl = ssl_context
        self._server_name = server_name
        self._connect_timeout = connect_timeout
        self._idle: deque[tuple[float, Connection]] = deque()
        self._closed = False

    async def acquire(self, *, fresh: bool = False) -> Connection:
        """Return an idle connection, or a new one. Raises :class:`UpstreamUnavailable`."""
        now = asyncio.get_running_loop().time()
        while self._idle and not fresh:
            since, connection = self._idle.pop()
            if connection.usable and now - since < IDLE_SECONDS:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                transport, connection = await loop.create_connection(
                    lambda: Connection(self._keep),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                    server_hostname=self._server_name,
                )
        except (TimeoutError, OSError) as error:
            raise unreachable(words(error)) from error
        notice(transport)
        if not connection.usable:
            # Lost again before there was time to use it, as happens while a server ends.
            raise unreachable("the connection was closed at once")
        return connection

    def _keep(self, connection: Connection) -> None:
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        now = asyncio.get_running_loop().time()
        # The oldest wait at the left end: what has been idle too long is closed in passing.
        while self._idle and now - self._idle[0][0] >= IDLE_SECONDS:
            self._idle.popleft()[1].close()
        self._idle.append((now, connection))

    def distrust(self) -> None:
        """Close every idle connection: one was silent, and the way that they all take may be cut."""
        self._close_idle()
        if self._doubted is not None:
            self._doubted()

    def close(self) -> None:
        """Close every idle connection; those in use close when they are given back."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()


class HttpStream:
    """
    The answers of one ``generate_stream`` call. See :class:`triton_openai.triton.client.ResponseStream`.

    An event with none of the *outputs* that were asked for is no answer; where these are empty, every event is one.
    """

    def __init__(
        self,
        pool: ConnectionPool,
        connection: Connection,
        request: bytes,
        model: str,
        outputs: frozenset[str] = frozenset(),
    ) -> None:
        self._pool = pool
        self._connection = connection
        self._request = request
        self._model = model
        self._outputs = outputs
        self._tail = b""
        self._error: ServiceError | None = None
        self._ended = False

    async def read(self) -> Sequence[InferResponse]:
        """Return the responses that arrived together; empty at the end."""
        while not self._ended:
            self._raise_pending()
            try:
                data = await self._connection.take()
            except StaleConnectionError:
                await self._send_again()
                continue
            except ServiceError:
                # abort() closes the connection: its reason is the one to tell.
                self._raise_pending()
                self.close()
                raise
            connection = self._connection
            if not connection.events and (data or connection.status >= 400):
                await self._fail(data)
            if not data and connection.complete:
                if self._tail.strip():
                    self.close()
                    raise cut_off()
                self._ended = True
                connection.finish()
                break
            responses = self._parse(data)
            if responses:
                return responses
        return ()

    def _raise_pending(self) -> None:
        if self._error is not None:
            self.close()
            raise self._error

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error* and cancel the work."""
        if not self._ended:
            self._error = error
            self._connection.close()
            if error.code == "upstream_silent":
                self._pool.distrust()

    def close(self) -> None:
        """Cancel the work unless it has ended."""
        if not self._ended:
            self._ended = True
            self._connection.close()

    def _parse(self, data: bytes) -> list[InferResponse]:
        if self._tail:
            data = self._tail + data
        *events, self._tail = data.split(EVENT_END)
        responses: list[InferResponse] = []
        for event in events:
            # Triton writes "data: "; the space is optional in the event stream format.
            start = event.find(b"{")
            if start < 0:
                continue
            values = decode_values(event[start:] if start else event)
            failure = values.get("error")
            if failure is not None and "model_name" not in values:
                self._error = classify(Failure(str(failure), self._model))
                break
            if not self._outputs or not self._outputs.isdisjoint(values):
                responses.append(JsonResponse(values))
        return responses

    async def _fail(self, data: bytes) -> None:
        body = [data]
        size = len(data)
        while not self._connection.complete and size < HIGH_WATER:
            more = await self._connection.take()
            body.append(more)
            size += len(more)
        status = str(self._connection.status)
        self.close()
        text = error_text(b"".join(body))
        raise classify(Failure(text, self._model, status))

    async def _send_again(self) -> None:
        self._connection = await self._pool.acquire(fresh=True)
        self._connection.send(self._request)


def error_text(body: bytes) -> str:
    """Return the text of Triton's ``{"error": "…"}`` body, or the start of the body where it is something else."""
    try:
        values = decode_values(body)
    except UpstreamError:
        return body[:500].decode("utf-8", "replace")
    error = values.get("error")
    return error if isinstance(error, str) else json.dumps(error)
