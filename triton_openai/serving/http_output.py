"""
The streams of calls over HTTP, as chunked bodies: events of runs, parts as they come, and events from a store.

A stream that fails ends without the last chunk of its body, unless its last event is enough, so that no client takes it
for whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, closing
from time import monotonic
from typing import NamedTuple, Protocol

from aiohttp import HttpVersion11, web

from triton_openai.answer.run import Run
from triton_openai.answer.run_group import RunGroup
from triton_openai.draining import Draining
from triton_openai.errors import ServiceError
from triton_openai.generation import Delta
from triton_openai.json_bytes import escape_line_breaks
from triton_openai.operations import STREAMED, PrepareRuns, Renderer, Streamed
from triton_openai.serving.connections import WholeResponse
from triton_openai.serving.execution import send_stream
from triton_openai.tasks import cancel, wait_with_signs
from triton_openai.telemetry.request_record import RequestRecord

# What precedes a chunk of HTTP, by its size. To format it takes more code, and so more of the processor's cache.
_SIZES = [b"%x\r\n" % size for size in range(1024)]
# asyncio's default, above which aiohttp's writer waits.
_HIGH_WATER = 64 * 1024
#: How long before a broken end the last event comes: at such an end, browsers drop what the page has not read.
CLOSE_SECONDS = 1.0
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Without it, nginx and similar proxies buffer events.
    "X-Accel-Buffering": "no",
}


class _Response(web.StreamResponse):
    """The response of a stream. The body of a *broken* one ends with the connection, without its last chunk."""

    broken = False
    # Whether the end of the body was written. It is not written again where the wait for the client was cancelled.
    _ended = False

    async def write_eof(self, data: bytes = b"") -> None:
        """End the body. The client of a broken one has a while to read it, and usually leaves when it has."""
        if self.broken:
            await asyncio.sleep(CLOSE_SECONDS)
        elif not self._ended:
            self._ended = True
            try:
                await super().write_eof(data)
            except asyncio.CancelledError:
                # In aiohttp, nothing can wait for this client any more, so no other answer follows.
                self.force_close()
                raise


class EventStream:
    """
    The response of one stream.

    :meth:`push` renders and writes deltas in the same turn of the event loop in which they arrive. It does not wake the
    task, which waits in :meth:`run` until a run ends or the client reads too slowly. The status line is written with
    the first text, or after *heartbeat* seconds; until then an error becomes a JSON answer with its own status. While
    nothing else is sent, what keeps the connection alive goes out every *heartbeat* seconds. A slow client pauses runs.
    Of several prompts, no answer begins before the model has accepted those that it has, for as long.

    With *prepare*, which makes the runs, the status line and the opening are written at once.
    """

    def __init__(
        self,
        request: web.Request,
        runs: Sequence[Run],
        renderer: Renderer,
        *,
        heartbeat: float,
        prepare: PrepareRuns | None = None,
    ) -> None:
        # Sent at the end, in one write, unless the answer begins before.
        self._whole = WholeResponse(headers=_HEADERS)
        self.response: web.StreamResponse = self._whole
        #: Whether the last event, the end or an error, was written.
        self.complete = False
        self._request = request
        self._renderer = renderer
        self._piece = renderer.piece
        self._prepare = prepare
        self._group = RunGroup(runs, self.push, check=self._check)
        # aiohttp's writer awaits each write. Events go to its transport directly, as chunks of HTTP. That is
        # safe once the headers are sent: the writer buffers nothing.
        self._transport: asyncio.WriteTransport | None = None
        # HTTP/1.0, which older proxies speak to their upstreams, ends the body with the connection.
        self._chunked = request.version >= HttpVersion11
        # Events from before the status line, and whether new ones are written at once
        self._pending: list[bytes] = []
        self._waits = len(runs) > 1 and any(run.generation.prompt != runs[0].generation.prompt for run in runs)
        self._flowing = False
        self._paused = False
        self._heartbeat = heartbeat
        self._last = monotonic()

    def push(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Send the *deltas* of run number *choice* in one write."""
        piece = self._piece
        if len(deltas) == 1:
            events = piece(choice, deltas[0])
        else:
            events = b"".join([piece(choice, each) for each in deltas])
        if self._flowing and events:
            self._write(events)
        elif events:
            self._pending.append(events)
            self._group.wake()

    async def run(self) -> None:
        """
        Send the requests to Triton, and the events to the client up to the end.

        Raises the error of a run, and ``ConnectionResetError`` if the client has disconnected.
        """
        renderer = self._renderer
        if self._prepare is not None:
            await self._open_early(self._prepare)
        with closing(self._group) as group:
            await group.start()
            if self._waits:
                unanswered = [run for run in group.runs if run.progress.sent is not None]
            else:
                unanswered = []
            ended: list[int] = []
            while group.unfinished:
                ended += await group.wait()
                if self._waits:
                    unanswered = [run for run in unanswered if not (run.progress.steps or run.over)]
                    self._waits = bool(unanswered) and monotonic() < self._last + self._heartbeat
                if self._waits:
                    continue
                if group.unfinished and not self._flowing:
                    await self._send_head()
                if self._flowing:
                    events = b""
                else:
                    events = await self._first_events(answered=bool(ended))
                events += b"".join([renderer.last(choice) for choice in ended])
                if not group.unfinished:
                    await self._finish(events + await renderer.ended(None))
                    return
                ended = []
                if events:
                    self._write(events)
                if self._transport is not None and self._transport.is_closing():
                    raise ConnectionResetError("The client has left.")
                await self._drained()

    async def _open_early(self, prepare: PrepareRuns) -> None:
        """Send the opening, keep the connection open until *prepare* has made the runs, and send what it has done."""
        renderer = self._renderer
        await self._send_head()
        self._flowing = True
        self._write(b"".join(renderer.openings()))

        async def keep_alive() -> None:
            transport = self._transport
            if transport is None or transport.is_closing():
                raise ConnectionResetError("The client has left.")
            if not self._paused:
                # Nothing piles up for a client that does not read.
                self._write(renderer.keep_alive())

        runs = await wait_with_signs(prepare(), self._heartbeat, keep_alive)
        await self._drained()
        self._group.close()
        self._group = RunGroup(runs, self.push, check=self._check)
        if events := b"".join(renderer.openings()):
            self._write(events)

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event. Raises ``ConnectionResetError`` if the client has disconnected."""
        if self._flowing or not self._pending:
            events = b""
        else:
            events = await self._first_events(answered=True)
        events += await self._renderer.ended(error)
        # The end of the connection is that of the body over HTTP/1.0.
        await self._finish(events, broken=self._chunked and not self._renderer.has_error_event)

    @property
    def begun(self) -> bool:
        """Whether the answer has begun, so that an error can only be an event."""
        return self.response.prepared or (bool(self._pending) and not self._waits)

    async def _send_head(self) -> None:
        """Write the status line."""
        if not self.response.prepared:
            self.response = _Response(headers=_HEADERS)
            if self._chunked:
                self.response.enable_chunked_encoding()
            else:
                self.response.force_close()
            await self.response.prepare(self._request)
        self._transport = self._request.transport

    async def _first_events(self, *, answered: bool) -> bytes:
        """Return the first events, or their end; a sign of life if there are none and no run is *answered*."""
        if not answered and not self._pending:
            return self._renderer.keep_alive()
        rest: list[bytes] = []
        size = 0
        for events in self._renderer.openings():
            rest.append(events)
            size += len(events)
            if size > _HIGH_WATER:
                await self._send_head()
                self._write(b"".join(rest))
                rest = []
                size = 0
                await self._drained()
                # Also a client that reads fast leaves others their turns.
                await asyncio.sleep(0)
        self._flowing = True
        pending = self._pending
        self._pending = []
        return b"".join((*rest, *pending))

    async def _drained(self) -> None:
        """Wait until a slow client has read, if runs are paused for it."""
        if self._paused:
            await self._request.writer.drain()
            self._paused = False
            self._group.resume()

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            # The task sees that the client has disconnected.
            self._group.wake()
            return
        if not events.isascii():
            events = escape_line_breaks(events)
        if self._chunked:
            size = len(events)
            if size < 1024:
                head = _SIZES[size]
            else:
                head = b"%x\r\n" % size
            events = b"".join((head, events, b"\r\n"))
        transport.write(events)
        self._last = monotonic()
        if transport.get_write_buffer_size() > _HIGH_WATER and not self._paused:
            self._paused = True
            self._group.pause()
            self._group.wake()

    async def _finish(self, events: bytes, *, broken: bool = False) -> None:
        """Send the last *events*; a *broken* body ends behind them with the connection."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client has left.")
        self.complete = True
        events = escape_line_breaks(events)
        if broken:
            await self._send_head()
            self._write(events)
            assert isinstance(self.response, _Response)
            self.response.broken = True
            self.response.force_close()
            await self._request.writer.drain()
            return
        if self.response.prepared:
            await self.response.write_eof(events)
        else:
            # The server sends it, when the handler has returned.
            self._whole.body = events
            if self._chunked:
                self._whole.enable_chunked_encoding()

    def _check(self, now: float) -> float:
        """Send a sign of life if there was none for too long. Return the seconds until the next check."""
        left = self._last + self._heartbeat - now
        if left > 0:
            return left
        if self._transport is None:
            self._group.wake()
        elif not (self._paused or self._pending or self.complete):
            # Nothing piles up for a client that does not read.
            self._write(self._renderer.keep_alive())
        return self._heartbeat


class HasResponse(Protocol):
    """A stream that was sent as a response."""

    @property
    def response(self) -> web.StreamResponse:
        """The response, once the stream has ended."""


class _EventsFromStore(NamedTuple):
    """A stream of events that were made before, or elsewhere."""

    response: web.StreamResponse


class HttpOutput:
    """
    Sends the streams of one call as the response to *request*.

    *heartbeat* is the longest silence in seconds; *comment* keeps a connection open, and *error_event* renders the last
    event of parts that failed.
    """

    def __init__(
        self,
        request: web.Request,
        record: RequestRecord,
        draining: Draining,
        *,
        heartbeat: float,
        comment: bytes,
        error_event: Callable[[ServiceError], bytes],
    ) -> None:
        #: The stream that was sent.
        self.sent: HasResponse | None = None
        self._request = request
        self._record = record
        self._draining = draining
        self._heartbeat = heartbeat
        self._comment = comment
        self._error_event = error_event

    def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        stream = EventStream(self._request, runs, renderer, heartbeat=self._heartbeat)
        self.sent = stream
        return send_stream(stream, self._record, self._draining, timeout=timeout, runs=runs)

    def stream_later(self, prepare: PrepareRuns, renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        stream = EventStream(self._request, (), renderer, heartbeat=self._heartbeat, prepare=prepare)
        self.sent = stream
        return send_stream(stream, self._record, self._draining, timeout=timeout)

    def send_parts(
        self, parts: AsyncGenerator[bytes, None], *, timeout: float | None, media_type: str | None = None
    ) -> Awaitable[Streamed]:
        error_event = None
        if media_type is None:
            parts = _with_comments(parts, self._heartbeat, self._comment)
            error_event = self._error_event
        stream = _PartStream(self._request, parts, media_type, error_event)
        self.sent = stream
        return send_stream(stream, self._record, self._draining, timeout=timeout)

    async def send_events(
        self, following: Callable[[float], Awaitable[bytes | None]], stop: Callable[[ServiceError], None]
    ) -> Streamed:
        response = web.StreamResponse(headers=_HEADERS)
        self.sent = _EventsFromStore(response)
        await response.prepare(self._request)
        while True:
            try:
                events = await following(self._heartbeat)
                if events is None:
                    break
                # An event would have a number of its own.
                await response.write(escape_line_breaks(events) or self._comment)
            except asyncio.CancelledError:
                reason = self._draining.reason()
                if reason is None:
                    raise
                stop(reason)
        # The server ends the body. Here, the wait for a slow client would fail once it was cancelled above.
        return STREAMED


class _PartStream:
    """The response of *parts* as they come: of a file of *media_type*, or else events."""

    def __init__(
        self,
        request: web.Request,
        parts: AsyncGenerator[bytes, None],
        media_type: str | None,
        error_event: Callable[[ServiceError], bytes] | None,
    ) -> None:
        headers: Mapping[str, str] = _HEADERS
        if media_type is not None:
            headers = {"Content-Type": media_type}
        self.response = _Response(headers=headers)
        self.complete = False
        self._request = request
        self._parts = parts
        self._error_event = error_event
        self._chunked = request.version >= HttpVersion11

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def run(self) -> None:
        """Send the parts; the server ends the body."""
        async with aclosing(self._parts) as parts:
            async for part in parts:
                if part:
                    await self._write(part)
        self.complete = True

    async def _write(self, part: bytes) -> None:
        response = self.response
        if not response.prepared:
            if self._chunked:
                response.enable_chunked_encoding()
            else:
                response.force_close()
            await response.prepare(self._request)
        if self._error_event is not None:
            part = escape_line_breaks(part)
        await response.write(part)

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event, if there are events, and break the body off."""
        self.complete = True
        self.response.broken = self._chunked
        self.response.force_close()
        if self._error_event is not None:
            await self.response.write(escape_line_breaks(self._error_event(error)))


async def _with_comments(
    parts: AsyncGenerator[bytes, None], interval: float, comment: bytes
) -> AsyncGenerator[bytes, None]:
    """Yield *parts*, and *comment* whenever none came for *interval* seconds. Closes *parts* at its end."""
    async with aclosing(parts):
        while True:
            coming = asyncio.ensure_future(anext(parts, None))
            try:
                while not (await asyncio.wait([coming], timeout=interval))[0]:
                    yield comment
            finally:
                # What waits for the parts ends before they are closed.
                await cancel(coming)
            part = coming.result()
            if part is None:
                return
            yield part
