"""
A few threads that advance every running request, as an in-flight batcher does.

A benchmark with a thread per request would measure mainly the stand-in's thread switches. A single thread could do the
work, but sending a response blocks until Triton has taken it; with a few threads these waits overlap.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
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

    def submit(self, job: Job, delay: float = 0.0) -> None:
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
    """One thread and its jobs."""

    def __init__(self, number: int) -> None:
        self._due: list[tuple[float, int, Job]] = []
        self._serial: dict[Job, int] = {}
        self._counter = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=f"batcher-{number}", daemon=True)
        self._thread.start()

    def submit(self, job: Job, delay: float = 0.0) -> None:
        """Add a job."""
        with self._changed:
            self._push(job, delay)
            self._changed.notify()

    def hasten(self, job: Job) -> None:
        """Call *job* now, instead of when it is due."""
        with self._changed:
            if job in self._serial:
                self._push(job, 0.0)
                self._changed.notify()

    def close(self) -> None:
        """End the thread; jobs that still run are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(5)

    def _push(self, job: Job, delay: float) -> None:
        serial = next(self._counter)
        self._serial[job] = serial  # an older entry of the same job is stale from now on
        heapq.heappush(self._due, (time.monotonic() + delay, serial, job))

    def _run(self) -> None:
        while True:
            with self._changed:
                job = self._next()
            if job is None:
                return
            delay = job.advance()
            with self._changed:
                if delay is None:
                    self._serial.pop(job, None)
                elif self._serial.get(job) == -1:
                    self._push(job, delay)

    def _next(self) -> Job | None:
        """Return the job that is due, None when the batcher is closed. Called with the lock held."""
        while not self._closed:
            if not self._due:
                self._changed.wait()
                continue
            due, serial, job = self._due[0]
            if self._serial.get(job) != serial:
                heapq.heappop(self._due)
                continue
            wait = due - time.monotonic()
            if wait > 0:
                self._changed.wait(wait)
                continue
            heapq.heappop(self._due)
            self._serial[job] = -1  # running; `hasten` replaces this mark and wins over the job's own delay
            return job
        return None


class Threads:
    """Calls each job on its own thread: for an engine on whose tokens a job waits."""

    def __init__(self) -> None:
        self._closed = threading.Event()

    def submit(self, job: Job, delay: float = 0.0) -> None:
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
