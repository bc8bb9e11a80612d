"""The events of responses that are made in the background: stored as they come, and read by any process."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import structlog

from triton_openai.api.responses.objects import ResponseObject, ResponseStatus
from triton_openai.api.sse import event_count, without_events
from triton_openai.errors import StoreUnavailable
from triton_openai.storage.store import Row, Store
from triton_openai.tasks import wait_any
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)

#: A process that makes a response, or holds a conversation, renews its lease within this time; and how often it does.
LEASE_SECONDS = 15.0
RENEW_SECONDS = LEASE_SECONDS / 3
#: The list of a response's events, without the last ones: they follow from the response.
EVENTS = "events"
_BATCH_SECONDS = 0.25
# Bytes of stored events that stay here for readers, and of events that may wait to be stored.
_MAX_STORED = 256 * 1024
_MAX_WAITING = 8 * 1024 * 1024


class EventLog:
    """
    The events of *response* of *owner*, which this process makes.

    Readers in this process get them at once. *store* gets them a few times a second, as rows whose ids are the numbers
    with which they begin; only the latest stay here.
    """

    def __init__(self, store: Store, response: ResponseObject, owner: str) -> None:
        self.response = response
        #: Makes the response.
        self.task: asyncio.Task[None] | None = None
        #: How many events there are, without the last ones.
        self.count = 0
        #: The last ones, once the response has ended.
        self.last: bytes | None = None
        self.owner = owner
        self._store = store
        self._key = response.id
        # Pieces of the latest events, each with its first number; their bytes; from which number on they are in no row.
        self._recent: deque[tuple[int, bytes]] = deque()
        self._size = 0
        self._unwritten = 0
        # The rows that the store may lack; the bytes that it lacks.
        self._rows: list[Row] = []
        self._waiting = 0
        self._news = asyncio.Event()
        self._work = asyncio.Event()
        self._closed = asyncio.Event()
        self._storing: asyncio.Task[None] | None = None

    @property
    def shown(self) -> ResponseObject:
        """The response as clients see it: its output and its end once they are stored."""
        status: ResponseStatus = "in_progress"
        if self.response.status == "queued":
            status = "queued"
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "output": (), "usage": None}
        return msgspec.structs.replace(self.response, status=status, **unknown)

    def start(self) -> None:
        """Store events until :meth:`close`; when somebody else has ended the response, the task is cancelled."""
        self._storing = asyncio.create_task(self._keep_storing())

    async def stop(self) -> None:
        """Stop making the response, and wait until that is kept."""
        if self.task is not None:
            if not self.task.cancelling():
                self.task.cancel()
            await asyncio.wait({self.task})

    def check_room(self) -> None:
        """Raise :class:`StoreUnavailable` if too much waits to be stored."""
        if self._waiting > _MAX_WAITING:
            raise StoreUnavailable("The store of responses cannot be used at the moment.", detail="events wait for it")

    def add(self, events: bytes) -> None:
        """Add whole *events*."""
        if events:
            self._recent.append((self.count, events))
            self.count += event_count(events)
            self._size += len(events)
            self._waiting += len(events)
            self._work.set()
            self._news.set()

    def end(self, last: bytes) -> None:
        """End the streams of the readers, with the *last* events."""
        self.last = last
        self._news.set()

    async def wait(self, seconds: float) -> None:
        """Wait for further events, or the last ones, for *seconds* at most."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def after(self, number: int) -> bytes | None:
        """Return the events from *number* on; ``None`` where only the store has them all."""
        following: list[bytes] = []
        for first, events in reversed(self._recent):
            if number >= first:
                following.append(without_events(events, number - first))
                break
            following.append(events)
        else:
            if number < self.count:
                return None
        return b"".join(reversed(following))

    async def _keep_storing(self) -> None:
        pause = _BATCH_SECONDS
        while not self._closed.is_set():
            await wait_any(self._work, self._closed, timeout=RENEW_SECONDS)
            await wait_any(self._closed, timeout=pause)
            if self._closed.is_set():
                return
            rows = self.rows()
            try:
                # Without news too: it renews the lease.
                if not await self._store.append(self._key, self.owner, rows, lease=(self._key, LEASE_SECONDS)):
                    if self.task is not None:
                        self.task.cancel()
                    return
                self._take_stored(rows)
                pause = _BATCH_SECONDS
            except StoreUnavailable as error:
                pause = min(2 * pause, RENEW_SECONDS)
                if self._store.available:
                    warn(_log, "events of a response are not stored yet", error, response=self._key)

    async def close(self) -> None:
        """Store nothing more: what is left is in :meth:`rows`."""
        self._closed.set()
        if self._storing is not None:
            await asyncio.wait({self._storing})

    def rows(self) -> Sequence[Row]:
        """Return the rows that the store may lack."""
        self._work.clear()
        pieces = [events for first, events in self._recent if first >= self._unwritten]
        if pieces:
            # It stays as it is: the store may have it although its answer was lost.
            self._rows.append(Row(EVENTS, str(self._unwritten), b"".join(pieces)))
            self._unwritten = self.count
        return tuple(self._rows)

    def _take_stored(self, rows: Sequence[Row]) -> None:
        del self._rows[: len(rows)]
        self._waiting -= sum(len(row.data) for row in rows)
        while self._size - self._waiting > _MAX_STORED:
            self._size -= len(self._recent.popleft()[1])
