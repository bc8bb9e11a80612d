"""
Claims: which batches this process runs.

A process has a lease of each batch that it runs, and renews it. When it ends, its lock shows that to others on the same
machine, which then claim its batches at once; others wait until the leases expire.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import structlog

from triton_openai.batches.file_folder import Files, on_disk, opened
from triton_openai.batches.host import Host
from triton_openai.batches.running_batch import Phase, RunningBatch
from triton_openai.errors import ServiceError

_log = structlog.get_logger(__name__)
# Leases are renewed so often before they expire.
_RENEWALS = 4
# Batches of one owner, and of all owners, that a process runs at the same time.
_MAX_OWNER_BATCHES = 16
_MAX_BATCHES = 256


class Claims:
    """
    Claims batches, and adds them to *batches* until they end.

    *holder* is the name of this process. *run* takes a batch to its end; a task of each batch calls it.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        holder: str,
        batches: dict[str, RunningBatch],
        run: Callable[[RunningBatch], Coroutine[Any, Any, None]],
    ) -> None:
        self._files = files
        self._leases = files.store.leases
        self._host = host
        self._holder = holder
        self._batches = batches
        self._run = run
        self._next_renewal = 0.0
        # The descriptor of the lock; -1 before the first claim.
        self._lock = -1

    async def update(self) -> None:
        """Renew the leases, note what others have changed, and claim another batch."""
        if self._batches:
            await self._renew()
            await self._reload()
        if not self._host.stopping:
            await self._claim()

    async def _renew(self) -> None:
        now = time.monotonic()
        if now >= self._next_renewal:
            lease = self._host.settings.lease
            self._next_renewal = now + lease / _RENEWALS
            await self._leases.renew(self._holder, lease)

    async def _reload(self) -> None:
        leased = await self._leases.batches_of(self._holder)
        for batch_id, running in list(self._batches.items()):
            batch = leased.get(batch_id)
            if batch is None or batch.generation != running.batch.generation:
                # The task of a batch that is ending finds out by itself whether it has ended or is lost.
                if running.phase is not Phase.ENDING:
                    running.lose()
            elif batch.status == "cancelling" and running.batch.status in ("validating", "in_progress"):
                # Other processes change nothing else.
                running.batch.status = batch.status
                running.batch.times = batch.times
                running.woken.set()

    async def _claim(self) -> None:
        """Claim one more batch. Others are left to other processes for a while."""
        if len(self._batches) >= _MAX_BATCHES:
            return
        if self._lock < 0:
            await self._files.check()
            self._lock = await opened(on_disk(self._files.locks.lock, self._holder))
        await self._expire_stale()
        counts = Counter(running.batch.owner for running in self._batches.values())
        batch = await self._leases.claim(
            self._holder,
            self._host.settings.lease,
            max_running=self._host.max_running,
            full={owner for owner, number in counts.items() if number >= _MAX_OWNER_BATCHES},
        )
        if batch is None:
            return
        older = self._batches.get(batch.id)
        if older is not None:
            older.lose()
        running = RunningBatch(batch)
        self._batches[batch.id] = running
        running.task = asyncio.create_task(self._run_to_end(running))

    async def _expire_stale(self) -> None:
        """End the leases of processes that have ended."""
        for holder in await self._leases.holders():
            if holder != self._holder and await on_disk(self._files.locks.is_stale, holder):
                _log.warning("leases of an ended process expired")
                await self._leases.expire_leases(holder)
                # Last: a process that finds no lock has to wait until the leases expire.
                await on_disk(self._files.locks.unlock, holder)

    async def _run_to_end(self, running: RunningBatch) -> None:
        try:
            await self._run(running)
        finally:
            if self._batches.get(running.batch.id) is running:
                del self._batches[running.batch.id]
            if not self._host.stopping:
                if running.starting is not None:
                    # It reads the input.
                    await asyncio.wait([running.starting])
                running.close()

    async def close(self) -> None:
        """End the leases of this process after its batches were released."""
        if self._lock >= 0:
            os.close(self._lock)
            with suppress(ServiceError):
                # A claim that was cancelled may have succeeded.
                await self._leases.expire_leases(self._holder)
                await on_disk(self._files.locks.unlock, self._holder)
