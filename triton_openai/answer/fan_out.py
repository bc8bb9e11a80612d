"""The answers to one request: the deltas of one or several runs, as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from triton_openai.answer.run import Run
from triton_openai.errors import ServiceError
from triton_openai.generation import Delta

# Prompts of one request that are sent to Triton at the same time.
_PARALLEL_RUNS = 32


class Step(msgspec.Struct, gc=False):
    """What run number *choice* adds, and whether that was its end; the last step may add nothing."""

    choice: int
    deltas: Sequence[Delta]
    finished: bool


class Answers:
    """
    The deltas of one or several runs as they come. Whoever makes it must :meth:`close` it; that closes every run.

    One run is read directly. Several are read by a task each, into a queue that is bounded: a slow client holds all of
    them back.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self._queue: asyncio.Queue[Step | Exception] = asyncio.Queue(maxsize=2 * len(runs))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Send the requests. Raises :class:`ServiceError`."""
        if len(self.runs) == 1:
            run = self.runs[0]
            try:
                await run.start()
            except ServiceError as error:
                run.error = error
                raise
            return
        gate = asyncio.Semaphore(_PARALLEL_RUNS)
        for number, run in enumerate(self.runs):
            self._tasks.append(asyncio.create_task(self._pump(number, run, gate)))
            # A request is made of a whole prompt: not of all of them in one turn of the event loop.
            await asyncio.sleep(0)

    async def read(self) -> Step:
        """
        Return the next step of any run. Not to be called once every run has finished. Raises the first error of any.
        """
        if not self._tasks:
            run = self.runs[0]
            try:
                deltas = await run.read()
            except ServiceError as error:
                run.error = error
                raise
            return Step(0, deltas, run.finished)
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error*."""
        if not self._tasks:
            self.runs[0].abort(error)
            return
        for task in self._tasks:
            task.cancel()
        # What is still in the queue is late already.
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(error)

    async def close(self) -> None:
        """Stop what still runs."""
        # Each will have what it was cancelled with, whose traceback has this object: kept here, that were a cycle.
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for run in self.runs:
            run.close()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, number: int, run: Run, gate: asyncio.Semaphore) -> None:
        try:
            async with gate:
                await run.start()
                while not run.finished:
                    deltas = await run.read()
                    await self._queue.put(Step(number, deltas, run.finished))
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            if isinstance(error, ServiceError):
                run.error = error
            await self._queue.put(error)
