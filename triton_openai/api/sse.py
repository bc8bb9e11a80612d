"""
Streams answers as server-sent events: the only place that writes them.

Events are ``data: <json>`` and an empty line; a line that starts with a colon is a comment, which clients skip; the
stream of a completion ends with ``data: [DONE]``. Lines end with line feeds alone, and clients that read text line by
line find no other character that could end one. A stream that fails ends with an event that is named ``error``, and
without the last chunk of its body, so that no client takes it for whole.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Sequence
from contextlib import aclosing, closing
from time import monotonic
from typing import Any

import msgspec
import structlog
from aiohttp import HttpVersion11, web

from triton_openai.answer.fan_out import RunGroup, timeout_error
from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run import Run
from triton_openai.api.bodies import encode
from triton_openai.api.service import RequestContext, now, service_of
from triton_openai.api.usage import UsageObject, usage_object, usage_of
from triton_openai.draining import DRAINING
from triton_openai.errors import ServiceError
from triton_openai.generation import Delta
from triton_openai.json_lines import escape_line_breaks
from triton_openai.serving.connections import WholeResponse
from triton_openai.tasks import cancel
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.request_record import RequestRecord

_log = structlog.get_logger(__name__)
_FIELD = b"data: "
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": keep-alive\n\n"
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


def data_event(data: bytes) -> bytes:
    """Return an event without a name, with the JSON *data*."""
    return _FIELD + data + _END


def event(name: str, data: bytes) -> bytes:
    """Return an event with a *name*, and the JSON *data*."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class Renderer(ABC):
    """Renders the events of one stream, with a choice for each run. Each method returns whole events, or nothing."""

    #: Whether all clients know the last events of a stream that failed; else its body is broken off after them.
    ends_failed = True

    @abstractmethod
    def opening(self) -> bytes:
        """Return the events that open all choices, in order."""

    def openings(self) -> Iterable[bytes]:
        """Return the same in pieces, as they may be tens of megabytes."""
        return (self.opening(),)

    @abstractmethod
    def piece(self, choice: int, delta: Delta) -> bytes:
        """Return the events for *delta*."""

    @abstractmethod
    def last(self, choice: int) -> bytes:
        """Return the events that end a choice."""

    @abstractmethod
    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the events that end the stream, by *error* if there is one, once what has to be done before is."""

    def keep_alive(self) -> bytes:
        """Return what is sent while there is nothing to send, also before the first text."""
        return _HEARTBEAT


class Chunks(Renderer):
    """
    Renders OpenAI's chunks, with a choice for each of *runs*.

    The parts that all chunks share are encoded once. *kind* is the name of the chunks' type. The fingerprint is in the
    chunk with the usage if there is one, else in the last chunk of each choice, as in vLLM's server.
    """

    ends_failed = False

    def __init__(self, kind: str, context: RequestContext[Any], spec: GenerationSpec, runs: Sequence[Run]) -> None:
        head = {"id": spec.template.id, "object": kind, "created": now(), "model": context.body.model}
        self._head = _FIELD + encode(head)[:-1] + b',"choices":['
        self._runs = runs
        self._n = spec.n
        options, always = context.body.stream_options, context.service.settings.api.always_include_usage
        self._include_usage = always or (options is not None and bool(options.include_usage))
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        # Of each choice the tokens whose text has been sent, or is about to be.
        self._shown = [0] * len(runs)
        self._ids = spec.template.token_ids
        self._fingerprint = b',"system_fingerprint":' + encode(context.model.fingerprint)
        #: What follows the choice in most chunks.
        self._tail = b'],"usage":null}' + _END if self._include_usage else b"]}" + _END

    @abstractmethod
    def first(self, choice: int) -> bytes:
        """Return the events that open a choice."""

    def opening(self) -> bytes:
        """Return the events that open all choices, in order: the official client takes the first chunk for choice 0."""
        return b"".join(self.openings())

    def openings(self) -> Iterable[bytes]:
        return map(self.first, range(len(self._runs)))

    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the chunk with the usage of all choices, where it is wanted and known, and the end; or the *error*."""
        if error is not None:
            # Some clients read only the name of the event, some only its data.
            return event("error", error.envelope())
        usage = self._usage() if self._include_usage else None
        if usage is None:
            return _DONE
        return self._head + b"]" + self._fingerprint + b',"usage":' + encode(usage) + b"}" + _END + _DONE

    def _usage(self) -> UsageObject | None:
        return usage_of(self._runs, n=self._n)

    def _counted(self, choice: int) -> bytes:
        """Return what follows the choice in a chunk that counts the tokens so far."""
        if not self._continuous:
            return self._tail
        progress = self._runs[choice].progress
        counted = progress.usage_so_far
        if counted is None:
            return self._tail
        if progress.usage is None:
            # The backend may be ahead of the text.
            counted = msgspec.structs.replace(counted, completion_tokens=self._shown[choice])
        return b'],"usage":' + encode(usage_object(counted)) + b"}" + _END

    def _ended(self, choice: int) -> bytes:
        """Return what follows the choice in its last chunk."""
        tail = self._counted(choice)
        return tail if self._include_usage else tail[:1] + self._fingerprint + tail[1:]


class _Response(web.StreamResponse):
    """The response of a stream. The body of a *broken* one ends with the connection, without its last chunk."""

    broken = False

    async def write_eof(self, data: bytes = b"") -> None:
        """End the body. The client of a broken one has a while to read it, and usually leaves when it has."""
        if self.broken:
            await asyncio.sleep(CLOSE_SECONDS)
        else:
            await super().write_eof(data)


class EventStream:
    """
    The response of one stream.

    :meth:`push` renders and writes deltas in the same turn of the event loop in which they arrive. It does not wake the
    task, which waits in :meth:`run` until a run ends or the client reads too slowly. The status line is written with
    the first text, or after *heartbeat* seconds; until then an error becomes a JSON answer with its own status. While
    nothing else is sent, what keeps the connection alive goes out every *heartbeat* seconds. A slow client pauses runs.
    Of several prompts, no answer begins before the model has accepted those that it has, for as long.
    """

    def __init__(self, request: web.Request, runs: Sequence[Run], renderer: Renderer, *, heartbeat: float) -> None:
        # Sent at the end, in one write, unless the answer begins before.
        self._whole = WholeResponse(headers=_HEADERS)
        self.response: web.StreamResponse = self._whole
        #: Whether the last event, the end or an error, was written.
        self.complete = False
        self._request = request
        self._renderer = renderer
        self._piece = renderer.piece
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
        events = piece(choice, deltas[0]) if len(deltas) == 1 else b"".join([piece(choice, each) for each in deltas])
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
        with closing(self._group) as group:
            await group.start()
            unanswered = [run for run in group.runs if run.progress.sent is not None] if self._waits else []
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
                events = b"" if self._flowing else await self._first_events(answered=bool(ended))
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

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event. Raises ``ConnectionResetError`` if the client has disconnected."""
        events = b"" if self._flowing or not self._pending else await self._first_events(answered=True)
        events += await self._renderer.ended(error)
        # The end of the connection is that of the body over HTTP/1.0.
        await self._finish(events, broken=self._chunked and not self._renderer.ends_failed)

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
                rest, size = [], 0
                await self._drained()
                # Also a client that reads fast leaves others their turns.
                await asyncio.sleep(0)
        self._flowing = True
        pending, self._pending = self._pending, []
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
            events = b"".join((_SIZES[size] if size < 1024 else b"%x\r\n" % size, events, b"\r\n"))
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


def stream(context: RequestContext[Any], runs: Sequence[Run], renderer: Renderer) -> Awaitable[web.StreamResponse]:
    """
    Stream *runs* to the client, within the time limits of *context*.

    Raises :class:`ServiceError` for what goes wrong before anything was sent; after that, errors are events.
    """
    heartbeat = context.service.settings.server.heartbeat_interval
    return _sent(context, EventStream(context.request, runs, renderer, heartbeat=heartbeat), runs)


def stream_parts(
    context: RequestContext[Any], parts: AsyncGenerator[bytes, None], *, content_type: str | None = None
) -> Awaitable[web.StreamResponse]:
    """
    Send *parts* as they come, within the time limits of *context*: of a file of *content_type*, or else events.

    While there is no event, the client gets signs of life. A client that reads slowly is waited for. Raises
    :class:`ServiceError` for what goes wrong before anything was sent; after that, the body breaks off, behind an event
    with the error if it has events.
    """
    heartbeat = context.service.settings.server.heartbeat_interval
    return _sent(context, _PartStream(context.request, parts, content_type, heartbeat))


async def _sent(
    context: RequestContext[Any], sender: EventStream | _PartStream, runs: Sequence[Run] = ()
) -> web.StreamResponse:
    """Have *sender* send its answer, of *runs* if there are any, and return it."""
    record, timeout = context.record, context.limits.total
    try:
        async with asyncio.timeout(timeout):
            await sender.run()
    except ConnectionError:
        # A client that disconnects after the last event has read its answer.
        record.client_left = not sender.complete
    except asyncio.CancelledError:
        reason = context.request.app[DRAINING].reason()
        if sender.complete:
            return sender.response
        if reason is None or not sender.begun:
            raise
        await _fail(sender, record, reason)
    except Exception as error:
        if isinstance(error, TimeoutError):
            error = timeout_error(timeout, runs)
        if not sender.begun:
            raise error from None
        await _fail(sender, record, _reported(context, error))
    return sender.response


def _reported(context: RequestContext[Any], error: Exception) -> ServiceError:
    """Log *error*, which ended a stream that has begun, and return what the client is told."""
    fields = {"request_id": context.record.request_id, "model": context.model.name}
    if isinstance(error, ServiceError):
        warn(_log, "stream failed", error, **fields, code=error.code)
        return error
    # A bug, or an error of a third party's parser. The answer has begun, so the error is an event in it.
    _log.exception("stream failed", **fields)
    return ServiceError()


async def _fail(sender: EventStream | _PartStream, record: RequestRecord, error: ServiceError) -> None:
    record.error = error
    try:
        await sender.fail(error)
    except (asyncio.CancelledError, ConnectionError):
        # Some clients disconnect as soon as they have read the last event.
        if not sender.complete:
            raise


class _PartStream:
    """The response of *parts* as they come: of a file of *content_type*, or else events."""

    def __init__(
        self, request: web.Request, parts: AsyncGenerator[bytes, None], content_type: str | None, heartbeat: float
    ) -> None:
        self.response = _Response(headers=_HEADERS if content_type is None else {"Content-Type": content_type})
        self.complete = False
        self._request, self._parts, self._content_type = request, parts, content_type
        self._chunked, self._heartbeat = request.version >= HttpVersion11, heartbeat

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def run(self) -> None:
        """Send the parts; the server ends the body."""
        response = self.response
        sent = self._parts if self._content_type is not None else _with_heartbeats(self._parts, self._heartbeat)
        # What waits for the parts is closed before they are.
        async with aclosing(self._parts), aclosing(sent):
            async for part in sent:
                if not part:
                    continue
                if not response.prepared:
                    (response.enable_chunked_encoding if self._chunked else response.force_close)()
                    await response.prepare(self._request)
                await response.write(part if self._content_type is not None else escape_line_breaks(part))
        self.complete = True

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event, if there are events, and break the body off."""
        self.complete = True
        self.response.broken = self._chunked
        self.response.force_close()
        if self._content_type is None:
            await self.response.write(escape_line_breaks(event("error", error.envelope())))


async def _with_heartbeats(parts: AsyncGenerator[bytes, None], interval: float) -> AsyncGenerator[bytes, None]:
    """Yield *parts*, and a sign of life whenever none came for *interval* seconds."""
    while True:
        coming = asyncio.ensure_future(anext(parts, None))
        try:
            while not (await asyncio.wait([coming], timeout=interval))[0]:
                yield _HEARTBEAT
        finally:
            await cancel(coming)
        part = coming.result()
        if part is None:
            return
        yield part


def event_count(events: bytes) -> int:
    """Return how many whole *events* there are."""
    return events.count(_END)


def event_data(events: bytes) -> Iterator[bytes]:
    """Yield the JSON of each of whole *events*, which have names."""
    for each in events.split(_END)[:-1]:
        yield each.partition(b"\n" + _FIELD)[2]


def without_events(events: bytes, number: int) -> bytes:
    """Return whole *events* without the first *number* of them."""
    return b"" if event_count(events) < number else events.split(_END, max(number, 0))[-1]


class EventSource(ABC):
    """Where events come from that are sent later, and more than once."""

    @abstractmethod
    async def next(self, seconds: float) -> bytes | None:
        """Return further events, nothing if there are none for *seconds*, ``None`` at the end."""

    @abstractmethod
    def stop(self, reason: ServiceError) -> None:
        """Let the end come soon, because this process stops."""


async def send_events(request: web.Request, source: EventSource) -> web.StreamResponse:
    """Stream what comes from *source* to the client, which learns at once that it will."""
    heartbeat = service_of(request).settings.server.heartbeat_interval
    response = web.StreamResponse(headers=_HEADERS)
    await response.prepare(request)
    while True:
        try:
            found = await source.next(heartbeat)
            if found is None:
                break
            # An event would have a number of its own.
            await response.write(escape_line_breaks(found) or _HEARTBEAT)
        except asyncio.CancelledError:
            reason = request.app[DRAINING].reason()
            if reason is None:
                raise
            source.stop(reason)
    await response.write_eof()
    return response
