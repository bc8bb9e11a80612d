"""
Streams answers as server-sent events: the only place that writes them.

Events are ``data: <json>`` and an empty line; a line that starts with a colon is a comment, which clients skip; the
stream of a completion ends with ``data: [DONE]``.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic

import msgspec
import structlog
from aiohttp import HttpVersion11, web

from triton_openai.answer.fan_out import Answers, too_long
from triton_openai.answer.run import Run
from triton_openai.api.parameters import StreamOptions
from triton_openai.api.service import now
from triton_openai.api.usage import UsageObject, usage_of, usage_so_far
from triton_openai.errors import ServiceError
from triton_openai.generation import Delta
from triton_openai.models.draining import DRAINING
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.observation import OBSERVATION, Observation

_log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode
_FIELD = b"data: "
_END = b"\n\n"
_DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": keep-alive\n\n"
# That of asyncio's transports, above which aiohttp's writer waits.
_HIGH_WATER = 64 * 1024
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and what copies it would collect events otherwise.
    "X-Accel-Buffering": "no",
}


class Chunks(ABC):
    """
    Renders the events of one stream, with a choice for each of *runs*. Each method returns whole events, or nothing.

    The parts that all chunks have in common are encoded once. *n* is how many choices each prompt has. The fingerprint
    stands in the chunk with the usage where there is one, else in the last chunk of each choice, as in vLLM's server.
    """

    def __init__(
        self,
        kind: str,
        completion_id: str,
        model: str,
        runs: Sequence[Run],
        *,
        n: int,
        options: StreamOptions,
        fingerprint: str,
    ) -> None:
        head = {"id": completion_id, "object": kind, "created": now(), "model": model}
        self._head = _FIELD + _encode(head)[:-1] + b',"choices":['
        self._runs = runs
        self._n = n
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._ids = any(run.generation.token_ids for run in runs)
        self._fingerprint = b',"system_fingerprint":' + _encode(fingerprint)
        #: What follows the choice in most chunks.
        self._tail = b'],"usage":null}' + _END if self._include_usage else b"]}" + _END

    @abstractmethod
    def first(self, choice: int) -> bytes:
        """Return the events that open a choice."""

    @abstractmethod
    def piece(self, choice: int, delta: Delta) -> bytes:
        """Return the events for *delta*."""

    @abstractmethod
    def last(self, choice: int) -> bytes:
        """Return the events that end a choice."""

    def opening(self) -> bytes:
        """Return the events that open all choices, in order: the official client takes the first chunk for choice 0."""
        return b"".join([self.first(choice) for choice in range(len(self._runs))])

    def closing(self) -> bytes:
        """Return the chunk with the usage of all choices, where it is wanted and known, and the end."""
        usage = self._usage(self._runs) if self._include_usage else None
        if usage is None:
            return _DONE
        return self._head + b"]" + self._fingerprint + b',"usage":' + _encode(usage) + b"}" + _END + _DONE

    def _usage(self, runs: Sequence[Run]) -> UsageObject | None:
        return usage_of(runs, n=self._n)

    def _counted(self, choice: int) -> bytes:
        """Return what follows the choice in a chunk that counts the tokens so far."""
        usage = usage_so_far([self._runs[choice]]) if self._continuous else None
        return self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}" + _END

    def _ended(self, choice: int) -> bytes:
        """Return what follows the choice in its last chunk."""
        tail = self._counted(choice)
        return tail if self._include_usage else tail[:1] + self._fingerprint + tail[1:]


class EventStream:
    """
    The response of one stream.

    :meth:`push` renders and writes what the runs bring in the turn of the event loop in which it comes; it does not
    wake the task, which waits in :meth:`relay` for what blocks or ends. The status line is written with the first
    answer, or after *heartbeat* seconds, so that until then an error can still be a JSON answer with its own status.
    While nothing else is sent, a comment goes out every *heartbeat* seconds. A client that does not read holds back the
    runs.
    """

    def __init__(self, request: web.Request, runs: Sequence[Run], chunks: Chunks, *, heartbeat: float) -> None:
        self.response = web.StreamResponse(headers=_HEADERS)
        #: Whether the client has been told how its answer ended.
        self.told = False
        self._request = request
        self._chunks = chunks
        self._piece = chunks.piece
        self._answers = Answers(runs, self.push)
        # aiohttp's writer awaits for each write. Events go to its transport instead, in chunks as it writes them, which
        # is sound once the headers are sent: it keeps nothing back.
        self._transport: asyncio.WriteTransport | None = None
        self._chunked = request.version >= HttpVersion11
        # Events that came before the status line was written, and whether they leave at once since
        self._pending: list[bytes] = []
        self._flowing = False
        self._held_back = False
        self._heartbeat = heartbeat
        self._last = monotonic()
        self._timer = asyncio.get_running_loop().call_later(heartbeat, self._check)

    def push(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Send what run number *choice* brings; what arrived together leaves together."""
        piece = self._piece
        events = piece(choice, deltas[0]) if len(deltas) == 1 else b"".join([piece(choice, each) for each in deltas])
        if self._flowing and events:
            self._write(events)
        elif events:
            self._pending.append(events)
            self._answers.wake()

    async def relay(self) -> None:
        """
        Send the requests, and then everything up to the end.

        Raises what a run failed of, and ``ConnectionResetError`` when the client has left.
        """
        answers, chunks = self._answers, self._chunks
        await answers.start()
        while answers.left:
            ended = await answers.ended()
            events = b"" if self._flowing else await self._begin(answered=bool(ended))
            events += b"".join([chunks.last(choice) for choice in ended])
            if not answers.left:
                await self._finish(events + chunks.closing())
                return
            if events:
                self._write(events)
            if self._transport is not None and self._transport.is_closing():
                raise ConnectionResetError("The client has left.")
            if self._held_back:
                await self._request.writer.drain()
                self._held_back = False
                answers.resume()

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event. Raises ``ConnectionResetError`` when the client has left."""
        events = b"" if self._flowing or not self._pending else await self._begin(answered=True)
        await self._finish(events + _FIELD + error.envelope() + _END)

    def close(self) -> None:
        """Stop what still runs, and the heartbeat."""
        self._timer.cancel()
        self._answers.close()

    @property
    def begun(self) -> bool:
        """Whether the answer has begun: an error can only be an event of it."""
        return self.response.prepared or bool(self._pending)

    async def _begin(self, *, answered: bool) -> bytes:
        """Write the status line, and return what to begin with: a comment, where nothing came or was *answered*."""
        if not self.response.prepared:
            if self._chunked:
                # HTTP/1.0, which older proxies speak to their upstreams, ends the body with the connection.
                self.response.enable_chunked_encoding()
            await self.response.prepare(self._request)
        self._transport = self._request.transport
        if not answered and not self._pending:
            return _HEARTBEAT
        self._flowing = True
        pending, self._pending = self._pending, []
        return self._chunks.opening() + b"".join(pending)

    def _write(self, events: bytes) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            # The task has to learn of it.
            self._answers.wake()
            return
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._last = monotonic()
        if transport.get_write_buffer_size() > _HIGH_WATER and not self._held_back:
            self._held_back = True
            self._answers.pause()
            self._answers.wake()

    async def _finish(self, events: bytes) -> None:
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("The client has left.")
        self._timer.cancel()
        self.told = True
        await self.response.write_eof(events)

    def _check(self) -> None:
        # A time stamp and one timer per stream, instead of a timer set anew for every token.
        left = self._last + self._heartbeat - monotonic()
        if left <= 0:
            left = self._heartbeat
            if self._transport is None:
                self._answers.wake()
            elif not self._held_back:
                # A client that does not read gets no comments piled up for it.
                self._write(_HEARTBEAT)
        self._timer = asyncio.get_running_loop().call_later(left, self._check)


async def stream(
    request: web.Request, runs: Sequence[Run], chunks: Chunks, *, heartbeat: float, timeout: float | None
) -> web.StreamResponse:
    """
    Stream *runs* to the client, for *timeout* seconds at most.

    Raises :class:`ServiceError` for what goes wrong before anything was sent; after that, errors are events.
    """
    events = EventStream(request, runs, chunks, heartbeat=heartbeat)
    observation = request[OBSERVATION]
    try:
        try:
            async with asyncio.timeout(timeout):
                await events.relay()
        except TimeoutError as error:
            raise too_long(timeout) from error
        finally:
            events.close()
    except ConnectionError:
        # The client has left: there is nobody to tell. Who has read how it ended has not.
        observation.client_left = not events.told
    except asyncio.CancelledError:
        reason = request.app[DRAINING].reason()
        if events.told:
            return events.response
        if reason is None or not events.begun:
            raise
        await _fail(events, observation, reason)
    except ServiceError as error:
        if not events.begun:
            raise
        fields = {"request_id": observation.request_id, "model": runs[0].model.name}
        warn(_log, "stream failed", error, **fields, code=error.code)
        await _fail(events, observation, error)
    except Exception:
        if not events.begun:
            raise
        # A mistake of ours, or of a third party's parser: the answer has begun, so it has to be told in it.
        _log.exception("stream failed", request_id=observation.request_id, model=runs[0].model.name)
        await _fail(events, observation, ServiceError("The service failed to answer the request."))
    return events.response


async def _fail(events: EventStream, observation: Observation, error: ServiceError) -> None:
    observation.error = error
    try:
        await events.fail(error)
    except (asyncio.CancelledError, ConnectionError):
        # Clients go as soon as they have read how it ended, and some before the body has: that is no leaving.
        if not events.told:
            raise
