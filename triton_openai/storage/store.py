"""
What every store does: entries with rows, the time limit of an operation, and the sweep.

An entry has a head, which is replaced as a whole, and rows in named lists, which are added, read and deleted one by
one. It belongs to an owner, and may have a parent: entries that go on from each other are a chain. Whoever works on an
entry holds its lease.

What has not been used for longer than the configured age is dropped. So is what an owner used longest ago, while it has
more than its share, or while all have too much together and it has most.
"""

from __future__ import annotations

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

import structlog

from triton_openai.config.tree import ResponsesSettings
from triton_openai.errors import ServiceError, StoreUnavailable
from triton_openai.shares import may_take
from triton_openai.tasks import cancel, within

_log = structlog.get_logger(__name__)
# An error after this time counts as no answer.
_SLOW_SECONDS = 1.0
_SWEEP_SECONDS = 300.0
# The sweep also begins when this part of a size was written since the last one; writing ends at the other part.
_SWEEP_PART = 1 / 16
_MAX_PART = 1 / 2
# Entries and bytes that the sweep drops at once.
BATCH = 64
BATCH_SIZE = 8 * 1024 * 1024
# What is read becomes used at most this often.
TOUCH_SECONDS = 3600.0
#: No number of rows, bytes or positions is larger.
LARGEST = 2**62


class Row(NamedTuple):
    """A row of a list."""

    list: str
    #: An entry has no two rows with the same one.
    id: str
    data: bytes


class Entry(NamedTuple):
    """An entry without its rows."""

    owner: str
    head: bytes
    version: int
    parent: str | None
    #: The end of its lease.
    until: float
    #: The bytes of head and rows.
    size: int
    #: The number of its rows.
    rows: int


class Page(NamedTuple):
    """Rows of a list, and whether it has more of them."""

    rows: Sequence[Row]
    more: bool


class Link(NamedTuple):
    """An entry of a chain."""

    key: str
    #: False for an entry that was deleted, or that belongs to another owner.
    exists: bool
    #: The end of its lease.
    until: float


class Chain(NamedTuple):
    """An entry and its ancestors, the newest first."""

    links: Sequence[Link]
    #: The rows of the lists that were asked for, the oldest entry's first; empty if they exceed the limits.
    rows: Sequence[bytes]
    #: The number of those rows.
    length: int
    #: The bytes of those rows.
    size: int


class RowKey(NamedTuple):
    """The key of a row: that of its entry, and its id there."""

    key: str
    id: str


class EntryFull(Exception):
    """The rows would make an entry exceed a bound; nothing was added."""


class Change(NamedTuple):
    """What :meth:`Store.put`, :meth:`Store.append` and :meth:`Store.claim` do to an entry, all or nothing."""

    #: The owner that the entry must have; ``None`` for any.
    owner: str | None = None
    #: The version that the entry must have; 0 for an entry that does not exist yet, and ``None`` for any.
    version: int | None = None
    head: bytes | None = None
    parent: str | None = None
    ancestors: Sequence[str] = ()
    rows: Sequence[Row] = ()
    max_rows: int = LARGEST
    max_size: int = LARGEST
    #: The new holder of the lease, and its seconds; 0 ends the lease.
    lease: tuple[str, float] | None = None
    #: Whether the holder must have the lease already, or no other holder may have it.
    needs: Literal["own", "free", ""] = ""


class Store(ABC):
    """
    Stores entries. Every method raises :class:`StoreUnavailable` when it fails.

    It has many methods because each is one transaction, which a store does in its own way.

    An operation that takes too long fails and changes nothing. Then all operations fail at once, until the store
    answers again.

    A store of another package is registered under the entry point group ``triton_openai.stores``, by the scheme of its
    URL. It is created from the URL and the settings.
    """

    #: Longest time for one operation, in seconds.
    timeout: ClassVar[float] = 5.0
    #: A store that does not answer is asked this often whether it does again.
    probe_seconds: ClassVar[float] = 1.0

    def __init__(self, settings: ResponsesSettings) -> None:
        self._settings = settings
        self._share = settings.max_size_per_key or settings.max_size
        #: Bytes written by owner since the last sweep, less what that has dropped.
        self._written: Counter[str] = Counter()
        self._next_sweep = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether the store answers, as far as is known."""
        return self._probing is None

    async def verify(self) -> None:
        """
        Check that this release can use the store.

        Raises :class:`ConfigurationError` if it cannot, and :class:`StoreUnavailable` if the store does not answer.
        """
        await self._ping()

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """Return the entry of *key*."""

    async def put(
        self, key: str, owner: str, head: bytes, version: int, *, rows: Sequence[Row] = (), parent: str | None = None,
        ancestors: Sequence[str] = (), lease: tuple[str, float] | None = None,
    ) -> bool:  # fmt: skip
        """
        Replace the head of *version*, 0 for none, by *head*, and add *rows*.

        The parent of a new entry is *parent*, or if that was deleted, the first of *ancestors* that exists. *lease*
        gives the lease to a holder for so many seconds; 0 ends it. Returns whether the entry had the version.
        """
        await self._charge(owner, rows, len(head))
        return await self._change(key, Change(owner, version, head, parent, ancestors, rows, lease=lease))

    async def append(
        self, key: str, owner: str, rows: Sequence[Row], *, max_rows: int = LARGEST, max_size: int = LARGEST,
        lease: tuple[str, float] | None = None,
    ) -> bool:  # fmt: skip
        """
        Add *rows*, except those whose ids the entry has; return whether there is such an entry.

        With a *lease*, there is none unless that holder has it, who then has it for so many seconds.
        Raises :class:`EntryFull` if it would have more rows or bytes than allowed.
        """
        await self._charge(owner, rows)
        needs: Literal["own", ""] = ""
        if lease is not None:
            needs = "own"
        change = Change(owner, rows=rows, max_rows=max_rows, max_size=max_size, lease=lease, needs=needs)
        return await self._change(key, change)

    async def claim(self, key: str, owner: str, holder: str, seconds: float, *, renew: bool = False) -> bool:
        """
        Give *holder* the lease of an entry of *owner* for *seconds*, 0 to end it; return whether *holder* has it.

        A holder keeps its lease. A free lease is given away, unless the holder only wants to *renew* its own.
        """
        needs: Literal["own", "free"] = "free"
        if renew:
            needs = "own"
        return await self._change(key, Change(owner, lease=(holder, seconds), needs=needs))

    @abstractmethod
    async def _change(self, key: str, change: Change) -> bool:
        """Change the entry of *key*; return whether it could be. Raises :class:`EntryFull`."""

    @abstractmethod
    async def page(
        self, key: str, name: str, *, after: str | None = None, limit: int, max_size: int, reverse: bool = False
    ) -> Page | None:
        """
        Return *limit* rows of the list *name* that follow the row *after*; ``None`` if that row does not exist.

        They are fewer if they have more than *max_size* bytes, but at least one.
        """

    async def sizes(self, owner: str, row_keys: Collection[RowKey]) -> Mapping[RowKey, int]:
        """Return the sizes of those of the rows that *owner* has."""
        return await self._at("sizes", owner, row_keys)

    async def fetch(self, owner: str, row_keys: Collection[RowKey]) -> Mapping[RowKey, bytes]:
        """Return the data of those of the rows that *owner* has."""
        return await self._at("fetch", owner, row_keys)

    @abstractmethod
    async def _at(
        self, what: Literal["sizes", "fetch"], owner: str, row_keys: Collection[RowKey]
    ) -> Mapping[RowKey, Any]:
        """Return the sizes or the data of rows."""

    @abstractmethod
    async def chain(
        self, key: str, owner: str, names: Sequence[str], *, max_links: int, max_rows: int = LARGEST,
        max_size: int = LARGEST,
    ) -> Chain:  # fmt: skip
        """
        Return the entry of *key* and its ancestors, *max_links* in all, with the rows of their lists *names*.

        More than *max_rows* rows or *max_size* bytes are counted, and not read. The lists of an entry come in
        alphabetical order. All is read in one snapshot.
        """

    @abstractmethod
    async def entries(
        self, owner: str, prefix: str, *, after: str | None, limit: int, reverse: bool
    ) -> Sequence[tuple[str, bytes | None]]:
        """
        Return keys and heads of *limit* entries of *owner* in the order of their keys, from behind the key *after* on.

        The keys are *prefix* and hexadecimal digits, as many in each. An entry that is too old may have no head.
        """

    @abstractmethod
    async def delete(self, key: str, *, bridged: bool = False) -> bool:
        """
        Drop the entry of *key*; return whether there was one.

        If *bridged*, entries that go on from it go on from its parent.
        """

    @abstractmethod
    async def delete_row(self, key: str, row_id: str) -> bool:
        """Drop a row; return whether there was one."""

    @abstractmethod
    async def owners(self) -> Mapping[str, int]:
        """Return the bytes that every owner has."""

    @abstractmethod
    async def _drop(self, owner: str, before: float, surplus: int) -> int:
        """
        Drop a batch of what *owner* used longest ago: what was used before *before*, and *surplus* bytes.

        Returns their bytes.
        """

    @abstractmethod
    async def _ping(self) -> None:
        """Return if the store answers, as an inner operation."""

    @abstractmethod
    async def _disconnect(self) -> None: ...

    async def close(self) -> None:
        """Disconnect."""
        await cancel(self._sweeping, self._probing)
        await self._disconnect()

    @asynccontextmanager
    async def _operation(self, *, inner: bool = False) -> AsyncIterator[None]:
        """
        Apply the time limit to the block, and raise :class:`StoreUnavailable` for any error of a driver.

        *inner* operations are the store's own: they run while it is not available, and start no sweep.
        """
        if not (inner or self.available):
            raise _unavailable("it did not answer in time, and has not answered since")
        began = time.monotonic()
        try:
            async with within(self.timeout):
                yield
        except (ServiceError, EntryFull):
            raise
        except Exception as error:
            # A driver may have time limits of its own.
            slow = isinstance(error, TimeoutError) or time.monotonic() - began > _SLOW_SECONDS
            if slow and self._probing is None:
                _log.warning("response store unavailable")
                self._probing = asyncio.create_task(self._probe())
            raise _unavailable(f"{type(error).__name__}: {error}") from error
        finally:
            # Also when this was refused because too much was written.
            if not inner and self.available and time.monotonic() > self._next_sweep and self._sweeping is None:
                self._sweeping = asyncio.create_task(self._sweep())

    async def sweep(self) -> None:
        """Delete entries that are too old or too many. The store also does so by itself from time to time."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        await asyncio.shield(self._sweeping)

    async def _probe(self) -> None:
        answers = False
        while not answers:
            await asyncio.sleep(self.probe_seconds)
            try:
                await self._ping()
                answers = True
            except ServiceError as error:
                _log.debug("response store still unavailable", reason=error.reason)
        self._probing = None
        _log.info("response store available again")

    async def _charge(self, owner: str, rows: Sequence[Row], size: int = 0) -> None:
        """
        Count what *owner* writes: *rows*, and *size* bytes besides.

        Raises :class:`StoreUnavailable` if *owner* writes faster than the sweep drops.
        """
        size += sum(len(row.data) for row in rows)
        async with self._operation():
            own = self._written[owner] + size
            whole = self._written.total() + size
            part = max(own / self._share, whole / self._settings.max_size)
            if part > _SWEEP_PART:
                self._next_sweep = 0.0
            free = _MAX_PART * self._settings.max_size - self._written.total()
            if part > _MAX_PART or not may_take(size, own=self._written[owner], free=free):
                raise _unavailable("clients write faster than the store deletes, or more than it may have")
            self._written[owner] = own

    async def _sweep(self) -> None:
        # In batches, between which other operations run.
        try:
            before = time.time() - self._settings.max_age_seconds
            owners = dict(await self.owners())
            for owner in owners:
                while dropped := await self._drop_batch(owner, before, 0):
                    owners[owner] -= dropped
            while owners:
                largest = max(owners, key=owners.__getitem__)
                surplus = max(owners[largest] - self._share, sum(owners.values()) - self._settings.max_size)
                if surplus > 0:
                    dropped = await self._drop_batch(largest, before, surplus)
                else:
                    dropped = 0
                if not dropped:
                    break
                owners[largest] -= dropped
            self._written.clear()
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS * random.uniform(0.8, 1.2)
        except ServiceError as error:
            _log.warning("surplus responses are not deleted yet", reason=error.reason)
            self._next_sweep = time.monotonic() + _SWEEP_SECONDS / 10
        finally:
            self._sweeping = None

    async def _drop_batch(self, owner: str, before: float, surplus: int) -> int:
        began = time.monotonic()
        dropped = await self._drop(owner, before, surplus)
        self._written[owner] -= min(dropped, self._written[owner])
        if dropped:
            # Other operations get as much time as this one took.
            await asyncio.sleep(time.monotonic() - began)
        return dropped


def fitting(sizes: Iterable[int], max_total: int) -> int:
    """Return how many of *sizes*, from the first on, have a sum of *max_total* or less: at least one."""
    return max(1, sum(total <= max_total for total in accumulate(sizes)))


def _unavailable(detail: str) -> StoreUnavailable:
    return StoreUnavailable("The store of responses cannot be used at the moment.", detail=detail, retry_after=2)
