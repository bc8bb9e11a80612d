"""
Responses over a WebSocket: each frame of the client asks for a response, whose events go out as frames.

A frame is the body of ``POST /v1/responses`` with ``"type": "response.create"``, and is a request of its own, with its
own admission, limits, log line and span. ``stream_id`` names a lane. The requests of a lane run in order, those of
different lanes in parallel. ``generate: false`` prepares a response without asking the model. The last response of
each lane stays in memory, and the next can go on from it, also with ``store: false``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import closing
from time import monotonic
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.access.authorizer import AuthorizedCall
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import RunGroup
from triton_openai.api.bodies import decode_json, encode
from triton_openai.api.responses.create import create, prewarm
from triton_openai.api.responses.objects import ResponsesRequest
from triton_openai.api.responses.stored import RecentResponses
from triton_openai.api.service import Service
from triton_openai.draining import Draining
from triton_openai.generation import Delta
from triton_openai.operations import Call, NoStream, Opening, PrepareRuns, Renderer, Send, Streamed
from triton_openai.serving.execution import send_stream
from triton_openai.serving.session import CallSession
from triton_openai.tasks import wait_with_signs
from triton_openai.telemetry.request_record import RequestRecord

# Bytes of events that wait for a slow client, above which its runs pause.
_HIGH_WATER = 64 * 1024
# Requests of one lane that wait for those before them.
_MAX_WAITING = 16
# aiohttp joins and unmasks a frame in one step: 1.5 ms for each MiB, in which the event loop does nothing else.
_MAX_FRAME_SIZE = 24 * 1024 * 1024


class CreateEvent(ResponsesRequest, kw_only=True):
    """A frame of the client: the body of a request, with what only frames have."""

    type: Literal["response.create"]
    stream_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}$")] | None = None
    #: Whether the model is asked, or the response is only prepared.
    generate: bool | None = None


class _Head(msgspec.Struct):
    """What the answer to a frame has that cannot be read as a request."""

    stream_id: str | None = None


# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_HEAD = msgspec.json.Decoder(_Head)


class _Frame(msgspec.Struct):
    """A frame of the client: a request, or the error that it could not be read for."""

    record: RequestRecord
    stream_id: str | None
    size: int
    request: CreateEvent | None = None
    error: errors.ServiceError | None = None


class _Lane:
    """The requests of one lane: the one that runs, and those that wait for it."""

    def __init__(self) -> None:
        self.running = False
        self.waiting: deque[_Frame] = deque()


class ResponsesSession(CallSession):
    """The responses of one connection."""

    def __init__(self, service: Service, opening: Opening, send: Send) -> None:
        super().__init__(service.executor, service.authorizer, opening, send)
        self.max_frame_size = min(service.settings.server.max_body_size, _MAX_FRAME_SIZE)
        self._service = service
        operation = next(row for row in service.operations if row.name == "create_response")
        self._operation = msgspec.structs.replace(operation, request=CreateEvent)
        self._recent = RecentResponses(lambda: service.settings.responses.max_lanes)
        # By stream_id: those that run.
        self._lanes: dict[str | None, _Lane] = {}

    async def begin(self) -> None:
        """Do nothing: the client asks first."""

    async def receive(self, frame: bytes) -> None:
        read = await self._read(frame)
        try:
            self._check_room(read)
        except errors.ServiceError as error:
            await self._refuse(read, error)
            return
        lane = self._lanes.setdefault(read.stream_id, _Lane())
        lane.waiting.append(read)
        if not lane.running:
            self._begin_next(read.stream_id, lane)

    async def _read(self, body: bytes) -> _Frame:
        """Return what is in a frame. One whose lane cannot be read has the lane without a name."""
        record = self.new_record()
        read = _Frame(record, None, len(body))
        try:
            read.request = await decode_json(body, self._operation, record, self._service.settings)
            read.stream_id = read.request.stream_id
        except errors.ServiceError as error:
            read.error = error
            read.stream_id = await _stream_id(body)
        return read

    def _check_room(self, read: _Frame) -> None:
        """Raise :class:`ServiceError` unless there is room for another request."""
        settings = self._service.settings
        max_lanes = settings.responses.max_lanes
        max_size = settings.server.max_body_size
        lane = self._lanes.get(read.stream_id)
        self.check_stopping()
        if lane is None and len(self._lanes) >= max_lanes:
            message = f"At most {max_lanes} streams of a connection run at once (responses.max_lanes)."
            raise errors.Overloaded(message, code="websocket_stream_limit_reached")
        if lane is None:
            return
        if len(lane.waiting) >= _MAX_WAITING:
            message = f"At most {_MAX_WAITING} requests of one stream can wait."
            raise errors.Overloaded(message, code="websocket_queue_limit_reached")
        waiting = sum(frame.size for each in self._lanes.values() for frame in each.waiting)
        if waiting + read.size > max_size:
            message = f"The requests of a connection that wait have more than {max_size} bytes (server.max_body_size)."
            raise errors.Overloaded(message, code="websocket_queue_limit_reached")

    def _begin_next(self, stream_id: str | None, lane: _Lane) -> None:
        """Begin the next request of *lane*, or forget the lane."""
        lane.running = bool(lane.waiting) and not self.ended
        if not lane.running:
            del self._lanes[stream_id]
            return
        self.start(self._answer(lane.waiting.popleft()), then=lambda _: self._begin_next(stream_id, lane))

    async def _answer(self, frame: _Frame) -> None:
        """Answer the request in *frame*."""
        record = frame.record
        record.began = time.monotonic()

        async def work(authorized: AuthorizedCall) -> None:
            await self._respond(frame, authorized)

        async def failed(error: errors.ServiceError) -> None:
            self._recent.drop(frame.stream_id)
            await self._refuse(frame, error)

        await self.run_call(record, self._operation.group, work, failed)
        # Nobody reads a further answer.
        self.ended = self.ended or record.client_left

    async def _respond(self, frame: _Frame, authorized: AuthorizedCall) -> None:
        """Send the response to *frame*. Raises :class:`ServiceError`."""
        if frame.error is not None:
            raise frame.error
        request = frame.request
        assert request is not None, "a frame has a request or an error"
        if request.background:
            raise errors.UnsupportedParameter(
                "Responses over a WebSocket are not made in the background: use POST.", param="background"
            )
        request.stream = True
        service = self._service
        heartbeat = service.settings.server.heartbeat_interval
        sender = self._sender(frame.stream_id)
        output = _FrameOutput(sender, frame.record, service.executor.draining, heartbeat)
        call: Call[Any] = Call(
            self._operation,
            request,
            authorized.key,
            frame.record,
            output,
            headers=self.opening.headers,
            reservation=authorized.reservation,
        )
        recent = self._recent.lane(frame.stream_id)
        if request.generate is False:
            await output.send(await prewarm(service, call, recent))
        else:
            await create(service, call, recent)

    def error_frame(self, error: errors.ServiceError, headers: Mapping[str, str]) -> bytes:
        # The fields of OpenAI's event, and the headers as Codex CLI reads them.
        return encode({"type": "error", "status": error.status, "error": error.body(), "headers": headers})

    async def _refuse(self, frame: _Frame, error: errors.ServiceError) -> None:
        """Send *error* as the answer to the request in *frame*."""
        await self._sender(frame.stream_id)(self.error_frame(error, frame.record.answer_headers(error)))

    def _sender(self, stream_id: str | None) -> Send:
        """Return what sends an event with its *stream_id*."""
        if stream_id is None:
            return self.send
        tail = b',"stream_id":' + encode(stream_id) + b"}"

        async def send(frame: bytes) -> None:
            await self.send(frame[:-1] + tail)

        return send


async def _stream_id(body: bytes) -> str | None:
    """Return the lane of a frame that is no request, if it can be read."""
    try:
        head: _Head = await offload.run(_HEAD.decode, body, cost=offload.json_cost(len(body)))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if head.stream_id is None or len(head.stream_id) > 256:
        return None
    return head.stream_id


class _FrameOutput(NoStream):
    """Sends the events of one call as frames."""

    def __init__(self, send: Send, record: RequestRecord, draining: Draining, heartbeat: float) -> None:
        self._send = send
        self._record = record
        self._draining = draining
        self._heartbeat = heartbeat

    async def send(self, events: bytes) -> None:
        """Send whole *events*, which are lines of JSON."""
        for event in events.splitlines():
            await self._send(event)

    def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        stream = _FrameStream(runs, renderer, self.send, self._heartbeat)
        return send_stream(stream, self._record, self._draining, timeout=timeout, runs=runs)

    def stream_later(self, prepare: PrepareRuns, renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        stream = _FrameStream((), renderer, self.send, self._heartbeat, prepare)
        return send_stream(stream, self._record, self._draining, timeout=timeout)


class _FrameStream:
    """
    The frames of one stream.

    While a slow client takes what was sent, events wait, and the runs pause when they have become many.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        renderer: Renderer,
        send: Send,
        heartbeat: float,
        prepare: PrepareRuns | None = None,
    ) -> None:
        """With *prepare*, which makes the runs, the opening is sent at once."""
        self.begun = False
        self.complete = False
        self._renderer = renderer
        self._send = send
        self._heartbeat = heartbeat
        self._prepare = prepare
        self._group = RunGroup(runs, self._push, check=self._check)
        self._waiting: list[bytes] = []
        self._waiting_size = 0
        self._paused = False
        self._silent = False
        self._last = monotonic()

    def _push(self, choice: int, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            events = self._renderer.piece(choice, delta)
            self._waiting.append(events)
            self._waiting_size += len(events)
        if self._waiting_size > _HIGH_WATER and not self._paused:
            self._paused = True
            self._group.pause()
        self._group.wake()

    def _check(self, now: float) -> float:
        """Note a silence that is too long. Return the seconds until the next check."""
        left = self._last + self._heartbeat - now
        if left > 0:
            return left
        self._silent = True
        self._group.wake()
        return self._heartbeat

    async def run(self) -> None:
        """Send the requests to Triton, and the events to the client up to the end. Raises the error of a run."""
        if self._prepare is not None:
            await self._open_early(self._prepare)
        with closing(self._group) as group:
            await group.start()
            while group.unfinished:
                ended = await group.wait()
                events = self._take()
                for choice in ended:
                    events += self._renderer.last(choice)
                if not events and self._silent:
                    events = self._renderer.keep_alive()
                if not group.unfinished:
                    events += await self._renderer.ended(None)
                if events:
                    await self._write(events)
        self.complete = True

    async def _open_early(self, prepare: PrepareRuns) -> None:
        """Send the opening, keep the connection open until *prepare* has made the runs, and send what it has done."""
        await self._write(b"")

        async def keep_alive() -> None:
            await self._write(self._renderer.keep_alive())

        runs = await wait_with_signs(prepare(), self._heartbeat, keep_alive)
        self._group.close()
        self._group = RunGroup(runs, self._push, check=self._check)
        if events := self._renderer.opening():
            await self._write(events)

    async def fail(self, error: errors.ServiceError) -> None:
        """Send *error* as the last event."""
        await self._write(self._take() + await self._renderer.ended(error))
        self.complete = True

    def _take(self) -> bytes:
        """Return the events that wait."""
        events = b"".join(self._waiting)
        self._waiting = []
        self._waiting_size = 0
        return events

    async def _write(self, events: bytes) -> None:
        if not self.begun:
            self.begun = True
            # The events that wait were rendered before, with numbers after these.
            events = self._renderer.opening() + events
        self._last = monotonic()
        self._silent = False
        await self._send(events)
        if self._paused and self._waiting_size <= _HIGH_WATER:
            self._paused = False
            self._group.resume()
