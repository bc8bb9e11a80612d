"""
A few threads that advance every running request, as an in-flight batcher does.

A benchmark with a thread per request would measure mainly the stand-in's thread switches. A single thread could do the
work, but sending a response blocks until Triton has taken it; with a few threads these waits overlap.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Protocol

_LANES = 4


class Job(Protocol):
    """A request in the batcher, which always calls its `advance` on the same thread."""

    def advance(self) -> float | None:
        """Do what is due and return the seconds until the next call, None when the request has ended."""
        ...


class Batcher:
    """Calls each job when it is due, always on the same one of a few lanes."""

    def __init__(self) -> None:
        self._lanes = [_Lane(number) for number in range(_LANES)]
        self._next = itertools.cycle(self._lanes)

    def submit(self, job: Job, delay: float) -> None:
        """Add a job."""
        next(self._next).submit(job, delay)

    def hasten(self, job: Job) -> None:
        """Call *job* now, instead of when it is due."""
        for lane in self._lanes:
            lane.hasten(job)

    def close(self) -> None:
        """End the threads; jobs that still run are dropped."""
        for lane in self._lanes:
            lane.close()


class _Lane:
    """One thread and its jobs, on an event loop."""

    def __init__(self, number: int) -> None:
        self._timers: dict[Job, asyncio.TimerHandle] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"batcher-{number}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, delay: float) -> None:
        """Add a job."""
        self._loop.call_soon_threadsafe(self._schedule, job, delay)

    def hasten(self, job: Job) -> None:
        """Call *job* now, instead of when it is due."""
        self._loop.call_soon_threadsafe(self._hasten, job)

    def close(self) -> None:
        """End the thread; jobs that still run are dropped."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _schedule(self, job: Job, delay: float) -> None:
        self._timers[job] = self._loop.call_later(delay, self._advance, job)

    def _advance(self, job: Job) -> None:
        del self._timers[job]
        delay = job.advance()
        if delay is not None:
            self._schedule(job, delay)

    def _hasten(self, job: Job) -> None:
        if job in self._timers:
            self._timers[job].cancel()
            self._schedule(job, 0.0)


class Threads:
    """Calls each job on its own thread: for an engine on whose tokens a job waits."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def submit(self, job: Job, delay: float) -> None:
        """Add a job."""
        threading.Thread(target=self._run, args=(job, delay), daemon=True).start()

    def hasten(self, job: Job) -> None:
        """Do nothing: the job is never far from its next step."""

    def close(self) -> None:
        """Drop the jobs that still run."""
        self._closed.set()

    def _run(self, job: Job, delay: float | None) -> None:
        while delay is not None and not self._closed.wait(delay):
            delay = job.advance()
