"""Responses that are made in the background: making one, and reading its stream from any event on, in any process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
import structlog

from triton_openai import errors
from triton_openai.access.rate_limits import Reservation
from triton_openai.answer.run_group import collect
from triton_openai.api.conversation import Conversation, PreparedChat
from triton_openai.api.responses.context_window import answer_within_context, prepare_fitting
from triton_openai.api.responses.event_log import EVENTS, LEASE_SECONDS, EventLog
from triton_openai.api.responses.item_renderer import response_event
from triton_openai.api.responses.objects import ResponsesRequest
from triton_openai.api.responses.request_reader import ParsedRequest
from triton_openai.api.responses.response_events import ResponseEvents, terminal_events
from triton_openai.api.responses.stored import StoredResponse
from triton_openai.api.service import RequestContext
from triton_openai.api.sse import event_count, without_events
from triton_openai.generation import Delta
from triton_openai.operations import Output, Streamed
from triton_openai.shares import may_take
from triton_openai.storage.store import Row
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.request_record import RequestRecord

_log = structlog.get_logger(__name__)
# How a response ends whose maker has stored all events.
_ENDED_BY_MAKER = ("completed", "incomplete")
# Bytes and rows that are read at once.
_PAGE_SIZE = 256 * 1024
_PAGE_ROWS = 100
# How long a reader waits before it asks the store again, more each time that there is nothing new.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 2.0


def admit(context: RequestContext[ResponsesRequest], made: StoredResponse) -> RequestRecord:
    """
    Admit a response that is to be made in the background; return its record, beside that of the request for it.

    Raises :class:`InvalidValue` for one that is not stored, and :class:`ServiceOverloaded` for too many.
    """
    if not made.response.store:
        raise errors.InvalidValue("'background' needs the response to be stored.", "background")
    max_running = context.service.worker.share(context.service.settings.responses.max_background)
    state = made.state
    free = max_running - len(state.live) - state.beginning.total()
    own = sum(log.owner == made.owner for log in state.live.values()) + state.beginning[made.owner]
    if not may_take(1, own=own, free=free):
        if free <= 0:
            whose = "Too many responses"
        else:
            whose = "Too many responses of this key"
        raise errors.ServiceOverloaded(f"{whose} are being made in the background already.", retry_after=10)
    # Raises where no request is taken now. A model that is busy only makes the response wait.
    context.service.admission.has_room(context.model.triton_model)
    return msgspec.structs.replace(
        context.record,
        **{"request": None, "memory": None, "stages": [], "unknown_fields": ()},
        **{"began": time.monotonic(), "stream": True, "status": 200},
    )


async def start(
    context: RequestContext[Conversation],
    made: StoredResponse,
    prepared: PreparedChat | None,
    events: ResponseEvents,
    request: ParsedRequest,
    resources: AsyncExitStack,
) -> None:
    """
    Make a response of what is *prepared*, whether the client stays or not; then *resources* are closed.

    ``None`` is prepared for a conversation that is compacted before.

    *request* serves another attempt: of the text-level model, or with a shorter prompt. The request's key is charged
    when the response has ended. Raises :class:`StoreUnavailable`.
    """
    made.response.status = "queued"
    await made.save(made.input, lease=LEASE_SECONDS)
    reservation = context.call.reservation
    if reservation is not None:
        reservation = reservation.take()
    log = made.log = EventLog(made.state.store(), made.response, made.owner)
    log.add(events.queued())
    log.task = asyncio.create_task(
        _make(context, made, log, prepared, events, request, resources.pop_all(), reservation)
    )
    made.state.live[made.response.id] = log


async def _make(
    context: RequestContext[Conversation],
    made: StoredResponse,
    log: EventLog,
    first: PreparedChat | None,
    events: ResponseEvents,
    request: ParsedRequest,
    resources: AsyncExitStack,
    reservation: Reservation | None,
) -> None:
    record = context.record
    executor = context.service.executor
    pending = [first]

    async def answer(context: RequestContext[Conversation]) -> None:
        prepared = None
        if pending:
            prepared = pending.pop()
            log.add(events.opening())
            if not await made.mark_in_progress():
                raise asyncio.CancelledError
        if prepared is None:
            # The conversation is compacted before. Or it is another attempt: the model's engine does not take the
            # request, or no Triton has this variant of the model.
            prepared = await prepare_fitting(context, request, made.response.id)
            events.go_on(prepared.runs[0], prepared.parsers[0], request.compaction)
            log.add(events.opening())

        def push(choice: int, deltas: Sequence[Delta]) -> None:
            log.check_room()
            log.add(b"".join([events.piece(choice, delta) for delta in deltas]))

        async def generate(prepared: PreparedChat) -> None:
            (events.run,) = prepared.runs
            (events.parser,) = prepared.parsers
            await collect(prepared.runs, timeout=context.limits.total, push=push)

        await answer_within_context(context, request, made.response.id, generate, prepared=prepared)
        log.add(events.last(0))

    async def work() -> None:
        executor.observer.identified(record)
        log.start()
        try:
            async with resources:
                await context.admitted(answer, param="input")
                log.add(events.concluded(None))
                await made.finalize()
        except asyncio.CancelledError:
            if executor.draining.reason() is not None:
                raise
            # Another request has cancelled it.
            log.add(events.cancelled())
            await made.finalize()

    async def failed(error: errors.ServiceError) -> None:
        log.add(events.concluded(error))
        await made.finalize()

    try:
        await executor.run(record, work, failed=failed, reservation=lambda: reservation)
    finally:
        await log.close()
        log.end(terminal_events(made.response, log.count, None if record.error is None else record.error.param))
        made.state.live.pop(log.response.id, None)


class ResumedEvents:
    """
    The events of a response that follow number *after*, and those to come, up to its end.

    What another process makes is read from the store as it comes. The end is left out only for a client that has seen
    it. That is not certain of a response that another process ended: its maker may have sent more than it has stored.
    """

    def __init__(self, found: StoredResponse, after: int) -> None:
        self._found = found
        self._log = found.log
        self._place = max(0, after + 1)
        # The last row that was read, and the number of the event behind it.
        self._row: str | None = None
        self._behind = 0
        self._pause = _FIRST_WAIT
        self._stopping: errors.ServiceError | None = None
        self._over = False

    async def send(self, output: Output) -> Streamed:
        """Stream the events to *output*."""
        return await output.send_events(self.next, self.stop)

    def stop(self, reason: errors.ServiceError) -> None:
        """Make the end come soon, because this process stops for this *reason*."""
        self._stopping = reason

    async def next(self, seconds: float) -> bytes | None:
        """Return further events, nothing if there are none for *seconds*, ``None`` at the end."""
        if self._over:
            return None
        if self._log is None:
            events = await self._stored(seconds)
        else:
            events = await self._made(self._log, seconds)
        if not self._over:
            self._place += event_count(events)
        return events

    async def _made(self, log: EventLog, seconds: float) -> bytes:
        """Return further events of a response that this process makes."""
        if isinstance(self._stopping, errors.InvalidApiKey):
            # Whoever reads may not, while the response goes on. Otherwise its own end comes soon.
            return self._stopped(self._stopping)
        if self._place >= log.count and log.last is None:
            await log.wait(seconds)
        events = log.after(self._place)
        if events is None:
            # The reader is far behind. The store is read on from where it was before.
            return await self._stored(seconds)
        if not events and log.last is not None:
            self._over = True
            return without_events(log.last, self._place - log.count)
        return events

    async def _stored(self, seconds: float) -> bytes:
        """Return further events from the store, or the last ones; nothing if there are none for *seconds*."""
        state = self._found.state
        until = time.monotonic() + seconds
        while self._stopping is None:
            response = self._found.response
            try:
                while rows := await self._rows():
                    if events := b"".join([self._read(row) for row in rows]):
                        self._pause = _FIRST_WAIT
                        return events
                if not self._found.running:
                    return self._end()
                self._found = await state.find(response.id, self._found.owner)
                if not self._found.running:
                    # Events may have come before the end.
                    continue
            except errors.ObjectNotFound:
                if self._found.running:
                    response.status = "cancelled"
                return self._end()
            except errors.StoreUnavailable as error:
                if state.available:
                    warn(_log, "events of a response cannot be read yet", error, response=response.id)
            left = until - time.monotonic()
            if left <= self._pause:
                await asyncio.sleep(max(0.0, left))
                return b""
            await asyncio.sleep(self._pause)
            self._pause = min(1.5 * self._pause, _LONGEST_WAIT)
        return self._stopped(self._stopping)

    def _stopped(self, reason: errors.ServiceError) -> bytes:
        """End with *reason*: the response goes on. The number is that of the last event, after which clients resume."""
        self._over = True
        number = max(0, self._place - 1)
        return response_event("error", number, code=reason.code, message=reason.message, param=None)

    async def _rows(self) -> Sequence[Row]:
        page = await self._found.state.store().page(
            self._found.response.id, EVENTS, after=self._row, limit=_PAGE_ROWS, max_size=_PAGE_SIZE
        )
        if page is None:
            return ()
        return page.rows

    def _read(self, row: Row) -> bytes:
        """Return those of the next row's events that are asked for."""
        events = without_events(row.data, self._place - self._behind)
        self._row = row.id
        self._behind += event_count(row.data)
        return events

    def _end(self) -> bytes:
        self._over = True
        response = self._found.response
        events = terminal_events(response, self._behind)
        if response.status in _ENDED_BY_MAKER:
            return without_events(events, self._place - self._behind)
        return events
