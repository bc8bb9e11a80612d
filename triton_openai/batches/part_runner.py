"""
The parts of batches that this process runs: results are stored as they come, and a part ends with its batch.

What survives the death of this process is on the disk. A result is appended to the file of the part, synced, and then
its line is marked with the offset, so that a line is in the files once or not at all. Any process goes on with the
lines that have no result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from triton_openai.batches import timing
from triton_openai.batches.batch_steps import early_outcome, run_steps
from triton_openai.batches.file_folder import Files
from triton_openai.batches.host import Host
from triton_openai.batches.leased import Phase, RunningPart
from triton_openai.batches.results import Results
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, LeaseLost, Part
from triton_openai.tasks import cancel, wait_any


class PartRunner:
    """
    Runs parts, which are in *batches* by the ids of their batches until they end.

    *wake* is called when lines may start, *announce* when other processes can go on.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        batches: dict[str, RunningPart],
        results: Results,
        wake: Callable[[], None],
        announce: Callable[[], None],
    ) -> None:
        self._files = files
        self._store = files.store
        self._host = host
        self._batches = batches
        self._results = results
        self._wake = wake
        self._announce = announce

    def add(self, batch: Batch, part: Part) -> RunningPart:
        """Begin to run *part* of *batch*, of which this process has no other part."""
        running = RunningPart(batch, part)
        self._batches[batch.id] = running
        running.task = asyncio.create_task(self._run_to_end(running))
        return running

    async def _run_to_end(self, running: RunningPart) -> None:
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

    async def _run(self, running: RunningPart) -> None:
        async def advance() -> bool:
            paused = running.phase is Phase.PAUSED
            ended = await self._advance(running)
            if paused:
                # Its lines may start again.
                self._wake()
            return ended

        async def fail(problem: BatchError) -> None:
            running.batch.problems = [problem]
            with suppress(ServiceError):
                await self._store.batches.report(running.batch.id, [problem])
                self._announce()

        await run_steps(running, advance, fail)

    async def _advance(self, running: RunningPart) -> bool:
        """Store the results that have come, and wait for others; return whether the part has ended."""
        await self._store_results(running)
        batch = running.batch
        outcome = early_outcome(self._host, batch)
        if outcome is not None:
            running.drop_waiting()
            cancelled_at = batch.times.get("cancelling_at", 0)
            if outcome != "cancelled" or time.time() >= cancelled_at + timing.CANCEL:
                await cancel(*running.running.values())
            if not running.active:
                await self._store_results(running, at_once=True)
                await self._release(running)
                return True
        elif running.input < 0:
            running.input = await self._files.open_lines(batch)
            running.unloaded = [*running.idle_lines()]
            self._wake()
            return False
        elif batch.total and not batch.unfinished and not running.busy:
            await self._release(running)
            return True
        await wait_any(running.woken, timeout=timing.POLL)
        running.woken.clear()
        if running.done and (running.running or running.window) and not running.has_full_group:
            await wait_any(running.full, timeout=timing.GROUP)
        return False

    async def _store_results(self, running: RunningPart, *, at_once: bool = False) -> None:
        if await self._results.store(running, at_once=at_once):
            if not running.batch.unfinished:
                self._announce()
            self._wake()

    async def _release(self, running: RunningPart) -> None:
        running.phase = Phase.ENDING
        # The process that ends the batch has ended the part, too.
        with suppress(LeaseLost):
            await self._store.leases.release_part(running.part)
        self._announce()

    async def close(self) -> None:
        """Release all parts: lines that run wait again."""
        for running in list(self._batches.values()):
            await cancel(running.starting, running.task, *running.running.values())
            with suppress(ServiceError, LeaseLost):
                await self._results.store(running, at_once=True)
                # The write of their deaths may have been cancelled.
                await self._store.lines.quarantine(running.part, running.quarantined)
                await self._store.leases.release_part(running.part)
            running.close()
