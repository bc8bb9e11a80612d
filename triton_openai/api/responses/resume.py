"""Reads the stream of a response that is or was made in the background, from any place, in any process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

import structlog

from triton_openai.api.responses.background import EVENTS
from triton_openai.api.responses.events import response_event, terminal_events
from triton_openai.api.responses.state import Record, ResponseState
from triton_openai.api.sse import EventSource, event_count, without_events
from triton_openai.errors import ObjectNotFound, ServiceError, StoreUnavailable
from triton_openai.storage.store import Row
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)
# Bytes and rows that are read at once.
_PAGE_SIZE = 256 * 1024
_PAGE_ROWS = 100
# How long a reader waits before it asks the store again, more each time that there is nothing new.
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 2.0


class ResumedEvents(EventSource):
    """
    The events of *owner*'s response of *record* that follow number *after*, and those to come, up to its end.

    There is always its end. What another process makes is read from the store as it comes.
    """

    def __init__(self, state: ResponseState, record: Record, owner: str, after: int) -> None:
        self._state, self._record, self._owner = state, record, owner
        live = state.live.get(record.response.id)
        self._log = None if live is None else live.log
        self._place = max(0, after + 1)
        # The last row that was read, and the number of the event behind it.
        self._row: str | None = None
        self._behind = 0
        self._pause = _FIRST_WAIT
        self._stopping: ServiceError | None = None
        self._over = False

    def stop(self, reason: ServiceError) -> None:
        self._stopping = reason

    async def next(self, seconds: float) -> bytes | None:
        if self._over:
            return None
        found = await self._stored(seconds) if self._log is None else await self._made(seconds)
        if not self._over:
            self._place += event_count(found)
        return found

    async def _made(self, seconds: float) -> bytes:
        """Return further events of a response that this process makes."""
        log = self._log
        assert log is not None
        if self._place >= log.count and log.last is None:
            await log.wait(seconds)
        found = log.after(self._place)
        if found is None:
            # The reader is far behind.
            self._row, self._behind = log.row_before(self._place)
            return await self._stored(seconds)
        if not found and log.last is not None:
            self._over = True
            return log.last
        return found

    async def _stored(self, seconds: float) -> bytes:
        """Return further events from the store, or the last ones; nothing if there are none for *seconds*."""
        until = monotonic() + seconds
        while self._stopping is None:
            try:
                while rows := await self._rows():
                    found = b"".join([self._read(row) for row in rows])
                    if found:
                        self._pause = _FIRST_WAIT
                        return found
                if not self._record.running:
                    return self._end()
                self._record = await self._state.record(self._record.response.id, self._owner)
                if not self._record.running:
                    # Events may have come before the end.
                    continue
            except ObjectNotFound:
                if self._record.running:
                    self._record.response.status = "cancelled"
                return self._end()
            except StoreUnavailable as error:
                if self._state.store().available:
                    warn(_log, "events of a response cannot be read yet", error, response=self._record.response.id)
            left = until - monotonic()
            if left <= self._pause:
                await asyncio.sleep(max(0.0, left))
                return b""
            await asyncio.sleep(self._pause)
            self._pause = min(1.5 * self._pause, _LONGEST_WAIT)
        # The response goes on in another process. The number is that of the last event, after which clients resume.
        self._over = True
        code, message = self._stopping.code, self._stopping.message
        return response_event("error", max(0, self._place - 1), code=code, message=message, param=None)

    async def _rows(self) -> Sequence[Row]:
        page = await self._state.store().page(
            self._record.response.id, EVENTS, after=self._row, limit=_PAGE_ROWS, most_size=_PAGE_SIZE
        )
        return () if page is None else page.rows

    def _read(self, row: Row) -> bytes:
        """Return those of the next row's events that are asked for."""
        events = without_events(row.data, self._place - self._behind)
        self._row = row.id
        self._behind += event_count(row.data)
        return events

    def _end(self) -> bytes:
        self._over = True
        return terminal_events(self._record.response, self._behind)
