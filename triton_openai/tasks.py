"""Starts and cancels tasks, waits for events, and delays new attempts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import structlog

from triton_openai.errors import ServiceError

_log = structlog.get_logger(__name__)
_Result = TypeVar("_Result")
# Into how many steps the wait for another program is divided.
_STEPS = 10
# How long work in the background may take when the service ends.
_LAST_SECONDS = 2.0


def spawn(work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
    """Start *work*. *tasks* holds its task until the end, so that it is not garbage-collected."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def cancel(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel *tasks*, and return when they have ended, in whichever way. ``None`` stands for a task never started."""
    started = list(filter(None, tasks))
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


async def wait_with_signs(
    work: Awaitable[_Result], seconds: float, on_silence: Callable[[], Awaitable[None]]
) -> _Result:
    """
    Return the result of *work*, and await *on_silence* every so many *seconds* until it is there.

    An exception of *on_silence* cancels the work.
    """
    task = asyncio.ensure_future(work)
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=seconds)
            if done:
                return task.result()
            await on_silence()
    finally:
        if not task.done():
            await cancel(task)


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """
    Limit the time of the block, as :func:`asyncio.timeout` does, and keep the cancellation of its task.

    A database driver may turn the cancellation of the current task into an error of its own, or return an answer that
    has just arrived. Then the task that cancels would wait forever.
    """
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    try:
        async with asyncio.timeout(seconds):
            yield
    except Exception as error:
        if task.cancelling() > cancellations:
            raise asyncio.CancelledError from error
        raise
    if task.cancelling() > cancellations:
        raise asyncio.CancelledError


async def answered_within(work: Awaitable[_Result], seconds: float) -> _Result:
    """
    Return the result of *work*, for which another program has to answer within *seconds*.

    Time in which this event loop was busy with something else does not count: the wait is divided into short steps,
    and each counts for its own length, however late it ends. Raises :class:`TimeoutError`.
    """
    task = asyncio.ensure_future(work)
    try:
        for _ in range(_STEPS):
            await asyncio.wait([task], timeout=seconds / _STEPS)
            if task.done():
                return task.result()
        # What arrived during the last step is read in the next turns.
        for _ in range(_STEPS):
            await asyncio.sleep(0)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            await cancel(task)


async def wait_any(*events: asyncio.Event, timeout: float | None) -> None:
    """Wait until one of *events* is set, for *timeout* seconds at most; ``None`` for any time."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


class Background:
    """Runs work without waiting for it. At the end of the service, running work has a few more seconds."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, timeout: float) -> None:
        """Run *work* for at most *timeout* seconds without waiting for it. A :class:`ServiceError` is logged."""
        spawn(self._guarded(work, timeout), self._tasks)

    async def close(self) -> None:
        """Wait a moment for the tasks, then cancel them."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=_LAST_SECONDS)
            await cancel(*pending)

    @staticmethod
    async def _guarded(work: Coroutine[Any, Any, Any], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await work
        except ServiceError as error:
            _log.warning("background work failed", reason=error.reason)
        except TimeoutError:
            _log.warning("background work took too long", seconds=timeout)


class Backoff:
    """
    Seconds to wait before each restart: *first* seconds, then doubled up to *max_pause*.

    A run of *stable_after* seconds or more resets the pause.
    """

    def __init__(self, *, first: float, max_pause: float, stable_after: float) -> None:
        self._first = first
        self._max_pause = max_pause
        self._stable_after = stable_after
        self._next = first

    def after(self, lived: float) -> float:
        """Return the pause after an end that came *lived* seconds after the start (0: it did not start at all)."""
        if lived >= self._stable_after:
            self._next = self._first
        pause = self._next
        self._next = min(2 * pause, self._max_pause)
        return pause
