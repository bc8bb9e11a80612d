"""
Claims: which batches this process takes to their ends, and which parts of batches it has.

A process has leases of both, and renews them. When it ends, its lock shows that to others on the same machine, which
then claim its batches and lines at once; others wait until the leases expire.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

import structlog

from triton_openai.batches.file_folder import Files, on_disk, opened
from triton_openai.batches.host import Host
from triton_openai.batches.leased import LeasedBatch, Phase, RunningPart
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, LeaseLost, Part
from triton_openai.storage.lease_table import Overview
from triton_openai.tasks import cancel

_log = structlog.get_logger(__name__)
# Leases are renewed so often before they expire.
_RENEWALS = 4
# Batches of one owner, and of all owners, that a process takes to their ends at the same time.
_MAX_OWNER_BATCHES = 16
_MAX_BATCHES = 256


class Claims:
    """
    Claims batches. *holder* is the name of this process, and *batches* are the parts that it has.

    *run* takes a batch to its end; a task of each batch calls it.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        holder: str,
        batches: dict[str, RunningPart],
        run: Callable[[LeasedBatch], Coroutine[Any, Any, None]],
    ) -> None:
        self._files = files
        self._leases = files.store.leases
        self._host = host
        self._holder = holder
        self._batches = batches
        self._run = run
        #: The batches that this process takes to their ends, by their ids.
        self.leased_batches: dict[str, LeasedBatch] = {}
        #: The batches that have not ended, the oldest first, when this process looked last.
        self.open: Sequence[Batch] = ()
        self._next_renewal = 0.0
        # By how much the clock of the database is ahead of this process's monotonic one, and until when leases that
        # have expired by it are left alone because it leapt.
        self._clock_ahead = math.inf
        self._distrusted_until = 0.0
        # The descriptor of the lock; -1 before the first claim.
        self._lock = -1

    @property
    def renewal_due(self) -> bool:
        """Whether it is time to renew the leases."""
        return bool(self._batches or self.leased_batches) and time.monotonic() >= self._next_renewal

    async def update(self, *, polls: bool) -> bool:
        """
        Renew the leases, note what others have changed, and claim another batch; return whether one was claimed.

        The process of this machine that *polls* also ends the leases of processes that have ended.
        """
        if self.renewal_due:
            lease = self._host.settings.lease
            due = time.monotonic() + lease / _RENEWALS
            await self._leases.renew(self._holder, lease)
            self._next_renewal = due
        parts = list(self._batches.values())
        leased_batches = list(self.leased_batches.values())
        # The validation of a batch claims a part of it, which may be here only after the overview.
        validating = {leased.batch.id for leased in leased_batches if "validated_at" not in leased.batch.times}
        overview = await self._leases.overview(self._holder)
        self._compare_parts(parts, overview)
        self._compare_batches(leased_batches, overview)
        known = {*(running.part for running in parts), *(Part(leased.batch.id, 0) for leased in leased_batches)}
        unknown = [part for part in overview.leases if part not in known and part.batch not in validating]
        await self._release_unknown(unknown)
        self.open = overview.batches
        self._note_clock(overview.clock)
        if time.monotonic() < self._distrusted_until:
            return False
        # The clock may leap now: what counts is the time that was compared.
        if polls:
            await self._expire_stale(overview.clock)
        return not self._host.stopping and await self._claim(overview.clock)

    def _note_clock(self, clock: float) -> None:
        """
        Claim nothing for a while after the *clock* of the database has leapt ahead.

        All leases seem to have expired then, also those of processes that run. They renew them meanwhile.
        """
        ahead = clock - time.monotonic()
        lease = self._host.settings.lease
        if ahead - self._clock_ahead > lease / _RENEWALS:
            _log.warning("the clock of the database leapt ahead, leases are renewed", seconds=ahead - self._clock_ahead)
            self._distrusted_until = time.monotonic() + 2 * lease / _RENEWALS
            self._next_renewal = 0.0
        elif ahead > self._clock_ahead - lease:
            # An answer that came late makes the clock seem to be less ahead.
            ahead = max(ahead, self._clock_ahead)
        self._clock_ahead = ahead

    async def _release_unknown(self, unknown: Sequence[Part]) -> None:
        """
        End the leases of this process that it did not have before the overview.

        A claim whose answer was lost left them: the database has made it. They would be renewed without end.
        """
        for part in unknown:
            _log.warning("lease of a lost claim released", batch=part.batch, part=part.number)
            with suppress(LeaseLost):
                await self._leases.release_unknown(part, self._holder)

    def _compare_parts(self, parts: Sequence[RunningPart], overview: Overview) -> None:
        """Note what others have done to *parts*, which this process had before the overview."""
        batches = {batch.id: batch for batch in overview.batches}
        for running in parts:
            batch = batches.get(running.batch.id)
            if running.part not in overview.leases:
                # The task of a part that is ending finds out by itself.
                if running.phase is not Phase.ENDING:
                    running.lose(ended=batch is None)
            elif batch is not None and batch.status == "cancelling" and running.batch.status == "in_progress":
                running.batch.status = batch.status
                running.batch.times = batch.times
                running.woken.set()
            if batch is not None and batch.problems:
                running.batch.problems = batch.problems
                running.woken.set()

    def _compare_batches(self, leased_batches: Sequence[LeasedBatch], overview: Overview) -> None:
        """Note what others have done to *leased_batches*, which this process had before the overview."""
        batches = {batch.id: batch for batch in overview.batches}
        for leased in leased_batches:
            batch = batches.get(leased.batch.id)
            generation = leased.batch.generation
            if batch is None or batch.generation != generation or Part(batch.id, 0) not in overview.leases:
                # The task of a batch that is ending finds out by itself whether it has ended or is lost.
                if leased.phase is not Phase.ENDING:
                    leased.lose()
            else:
                leased.update(batch)

    async def _claim(self, now: float) -> bool:
        """Claim one more batch, whose lease has expired *now*. Others are left to other processes for a while."""
        if len(self.leased_batches) >= _MAX_BATCHES:
            return False
        if len(self.leased_batches) == len(self.open):
            # It has them all.
            return False
        await self.lock()
        counts = Counter(leased.batch.owner for leased in self.leased_batches.values())
        batch = await self._leases.claim(
            self._holder,
            self._host.settings.lease,
            now=now,
            full={owner for owner, number in counts.items() if number >= _MAX_OWNER_BATCHES},
        )
        if batch is None:
            return False
        older = self.leased_batches.get(batch.id)
        if older is not None:
            older.lose()
        leased = LeasedBatch(batch)
        self.leased_batches[batch.id] = leased
        leased.task = asyncio.create_task(self._run_to_end(leased))
        return True

    async def lock(self) -> None:
        """Lock the file that shows whether this process runs, before its first lease."""
        if self._lock < 0:
            await self._files.check()
            self._lock = await opened(on_disk(self._files.locks.lock, self._holder))

    async def _expire_stale(self, now: float) -> None:
        """End the leases of processes that have ended, and the parts whose leases have expired *now*."""
        for holder in await self._leases.holders():
            if holder != self._holder and await on_disk(self._files.locks.is_stale, holder):
                _log.warning("leases of an ended process expired")
                await self._leases.expire_leases(holder)
                # Last: a process that finds no lock has to wait until the leases expire.
                await on_disk(self._files.locks.unlock, holder)
        ended = await self._leases.end_expired_parts(now)
        for part, ran in ended.items():
            if ran:
                _log.warning("lines quarantined after the end of a process or Triton", batch=part.batch, lines=ran)

    async def _run_to_end(self, leased: LeasedBatch) -> None:
        try:
            await self._run(leased)
        finally:
            if self.leased_batches.get(leased.batch.id) is leased:
                del self.leased_batches[leased.batch.id]
            leased.close_input()

    async def close(self) -> None:
        """End the leases of this process after its parts were released."""
        for leased in list(self.leased_batches.values()):
            await cancel(leased.task)
            with suppress(ServiceError):
                await self._leases.release(leased.batch)
        if self._lock >= 0:
            os.close(self._lock)
            with suppress(ServiceError):
                # A claim that was cancelled may have succeeded.
                await self._leases.expire_leases(self._holder)
                await on_disk(self._files.locks.unlock, self._holder)
