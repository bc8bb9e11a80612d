"""
Responses over a WebSocket: each frame of the client asks for a response, whose events go out as frames.

A frame is the body of ``POST /v1/responses`` with ``"type": "response.create"``, and is a request of its own, with its
own admission, limits, log line and span. ``stream_id`` names a lane. The requests of a lane run in order, those of
different lanes in parallel. ``generate: false`` prepares a response without asking the model. The last response of
each lane stays in memory, and the next can go on from it, also with ``store: false``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from time import monotonic
from typing import Annotated, Literal

import msgspec
import structlog
from msgspec import Meta
from multidict import CIMultiDictProxy

from triton_openai import errors, offload
from triton_openai.access.keys import NO_KEY
from triton_openai.access.rate_limits import Reservation
from triton_openai.answer.fan_out import RunGroup, timeout_error
from triton_openai.answer.run import Run
from triton_openai.api.bodies import decode_json, encode
from triton_openai.api.responses.create import prepare, respond
from triton_openai.api.responses.objects import ResponsesRequest
from triton_openai.api.responses.stored import RecentResponses
from triton_openai.api.service import Service
from triton_openai.api.sse import event_data
from triton_openai.draining import Draining
from triton_openai.generation import Delta
from triton_openai.operations import STREAMED, Call, NoStream, Renderer, Send, Streamed
from triton_openai.serving.execution import stream_error
from triton_openai.tasks import cancel
from triton_openai.telemetry.request_record import RequestRecord, request_id

_log = structlog.get_logger(__name__)
# Bytes of events that wait for a slow client, above which its runs pause.
_HIGH_WATER = 64 * 1024
# Requests of one lane that wait for those before them.
_MAX_WAITING = 16


class CreateEvent(ResponsesRequest, kw_only=True):
    """A frame of the client: the body of a request, with what only frames have."""

    type: Literal["response.create"]
    stream_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,256}$")] | None = None
    #: Whether the model is asked, or the response is only prepared.
    generate: bool | None = None


class _Head(msgspec.Struct):
    """What decides where a frame goes, before the whole of it is read."""

    stream_id: str | None = None


# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_HEAD = msgspec.json.Decoder(_Head)


class _Lane:
    """The requests of one lane: the one that runs, and those that wait for it."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.waiting: deque[bytes] = deque()


class ResponsesSession:
    """
    The responses of one connection, which was opened with *headers*; *opened* is the record of that request.

    *send* sends a frame.
    """

    def __init__(self, service: Service, headers: CIMultiDictProxy[str], opened: RequestRecord, send: Send) -> None:
        self._service = service
        self._headers = headers
        self._opened = opened
        self._send = send
        operation = next(row for row in service.operations if row.name == "create_response")
        self._operation = msgspec.structs.replace(operation, request=CreateEvent)
        self._recent = RecentResponses(service.settings.responses.max_lanes)
        # By stream_id: those that run.
        self._lanes: dict[str | None, _Lane] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    async def receive(self, frame: str) -> None:
        body = frame.encode(errors="surrogatepass")
        stream_id = await self._stream_id(body)
        lane = self._lanes.get(stream_id)
        max_lanes = self._service.settings.responses.max_lanes
        if self._service.executor.draining.begun:
            stopping = errors.UpstreamUnavailable("The service is stopping.", code="service_stopping")
            await self._refuse(stream_id, stopping)
        elif lane is None and len(self._lanes) >= max_lanes:
            message = f"At most {max_lanes} streams of a connection run at once (responses.max_lanes)."
            await self._refuse(stream_id, errors.Overloaded(message, code="websocket_stream_limit_reached"))
        elif lane is not None and len(lane.waiting) >= _MAX_WAITING:
            message = f"At most {_MAX_WAITING} requests of one stream can wait."
            await self._refuse(stream_id, errors.Overloaded(message, code="websocket_queue_limit_reached"))
        else:
            if lane is None:
                lane = self._lanes[stream_id] = _Lane()
                self._idle.clear()
            lane.waiting.append(body)
            if lane.task is None:
                self._begin_next(stream_id, lane)

    async def _stream_id(self, body: bytes) -> str | None:
        """Return the lane of a frame. One that cannot be read has the lane without a name, where it is refused."""
        try:
            head: _Head = await offload.run(_HEAD.decode, body, cost=offload.json_cost(len(body)))
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None
        if head.stream_id is None or len(head.stream_id) > 256:
            return None
        return head.stream_id

    def _begin_next(self, stream_id: str | None, lane: _Lane) -> None:
        """Begin the next request of *lane*, or forget the lane."""
        if not lane.waiting:
            del self._lanes[stream_id]
            if not self._lanes:
                self._idle.set()
            return
        lane.task = asyncio.create_task(self._answer(stream_id, lane.waiting.popleft()))

        def ended(task: asyncio.Task[None]) -> None:
            lane.task = None
            if task.cancelled() or task.exception() is not None:
                # The client has left.
                lane.waiting.clear()
            self._begin_next(stream_id, lane)

        lane.task.add_done_callback(ended)

    async def _answer(self, stream_id: str | None, body: bytes) -> None:
        """Answer the request in *body*."""
        service = self._service
        record = RequestRecord(
            request_id=request_id({}), method="POST", path=self._opened.path, client=self._opened.client
        )
        reservation: Reservation | None = None

        async def work() -> None:
            nonlocal reservation
            service.executor.draining.check()
            key = service.authorizer.authenticate(self._headers, self._operation.group)
            service.authorizer.share(key)
            if key is not None:
                record.key = key.name
                record.key_digest = key.digest
                if key.limit.any:
                    reservation = await service.authorizer.admit(key)
                    if reservation.refusal is not None:
                        raise reservation.refusal
            request = await decode_json(body, self._operation, record, service.settings)
            if request.background:
                raise errors.UnsupportedParameter(
                    "Responses over a WebSocket are not made in the background: use POST.", param="background"
                )
            request.stream = True
            output = _FrameOutput(
                self._sender(stream_id), record, service.executor.draining, service.settings.server.heartbeat_interval
            )
            call = Call(
                self._operation,
                request,
                key or NO_KEY,
                record,
                output,
                headers=self._headers,
                reservation=reservation,
            )
            recent = self._recent.lane(stream_id)
            if request.generate is False:
                events = await prepare(service, call, recent)
                await output.send(events)
            else:
                await respond(service, call, recent)
            record.status = 200

        async def failed(error: errors.ServiceError) -> None:
            record.status = error.status
            self._recent.drop(stream_id)
            await self._refuse(stream_id, error)

        await service.executor.run(record, work, failed=failed, reservation=lambda: reservation)

    async def _refuse(self, stream_id: str | None, error: errors.ServiceError) -> None:
        """Send *error* as the answer to a request."""
        frame = b'{"type":"error","status":%d,' % error.status + error.envelope()[1:]
        await self._sender(stream_id)(frame)

    def _sender(self, stream_id: str | None) -> Send:
        """Return what sends an event with its *stream_id*."""
        if stream_id is None:
            return self._send
        tail = b',"stream_id":' + encode(stream_id) + b"}"

        async def send(frame: bytes) -> None:
            await self._send(frame[:-1] + tail)

        return send

    async def idle(self) -> None:
        await self._idle.wait()

    async def end(self, code: str, message: str) -> None:
        await cancel(*self._drop_waiting())
        await self._refuse(None, errors.InvalidRequest(message, code=code))

    def close(self) -> None:
        for task in self._drop_waiting():
            task.cancel()

    def _drop_waiting(self) -> Sequence[asyncio.Task[None]]:
        """Forget the requests that wait, and return the tasks of those that run."""
        running = []
        for lane in self._lanes.values():
            lane.waiting.clear()
            if lane.task is not None:
                running.append(lane.task)
        return running


class _FrameOutput(NoStream):
    """Sends the events of one call as frames."""

    def __init__(self, send: Send, record: RequestRecord, draining: Draining, heartbeat: float) -> None:
        self._send = send
        self._record = record
        self._draining = draining
        self._heartbeat = heartbeat

    async def send(self, events: bytes) -> None:
        """Send whole *events*."""
        for data in event_data(events):
            if data:
                await self._send(data)

    async def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Streamed:
        stream = _FrameStream(runs, renderer, self.send, self._heartbeat)
        try:
            async with asyncio.timeout(timeout):
                await stream.run()
        except ConnectionError:
            raise
        except asyncio.CancelledError:
            reason = self._draining.reason()
            if reason is None or not stream.begun:
                raise
            self._record.error = reason
            await stream.fail(reason)
        except Exception as error:  # noqa: BLE001 - what has begun ends with an event; the rest is raised
            failure = error
            if isinstance(error, TimeoutError):
                failure = timeout_error(timeout, runs)
            if not stream.begun:
                raise failure from None
            self._record.error = stream_error(self._record, failure)
            await stream.fail(self._record.error)
        return STREAMED


class _FrameStream:
    """
    The frames of one stream.

    While a slow client takes what was sent, events wait, and the runs pause when they have become many.
    """

    def __init__(self, runs: Sequence[Run], renderer: Renderer, send: Send, heartbeat: float) -> None:
        #: Whether an event was sent, so that an error can only be an event.
        self.begun = False
        self._renderer = renderer
        self._send = send
        self._heartbeat = heartbeat
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

    async def fail(self, error: errors.ServiceError) -> None:
        """Send *error* as the last event."""
        await self._write(self._take() + await self._renderer.ended(error))

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
