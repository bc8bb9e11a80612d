"""
The end of the service, or of a model: it says so first, what runs may finish for a while, and what then still runs is
told so, not cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from triton_openai.errors import ServiceError, UpstreamUnavailable

# Longest time that requests which were told to stop may take to say so to their clients.
_FAREWELL_SECONDS = 1.0


class Draining:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._none = asyncio.Event()
        #: Whether the end has begun: not ready any more, and every connection is closed after its next answer.
        self.begun = False
        self._told: dict[asyncio.Task[Any], ServiceError] = {}

    def enter(self) -> asyncio.Task[Any] | None:
        """Count the running request in; returns what :meth:`leave` takes."""
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
        return task

    def leave(self, task: asyncio.Task[Any] | None) -> None:
        """Count a request out."""
        if task is not None:
            self._tasks.discard(task)
            self._told.pop(task, None)
            if not self._tasks:
                self._none.set()

    def begin(self) -> None:
        """Say from now on that the service is ending; it goes on serving."""
        self.begun = True

    def cancel(self, task: asyncio.Task[Any], error: ServiceError) -> None:
        """End a request that runs; *error* is what its client is told."""
        if task in self._tasks and task not in self._told:
            self._told[task] = error
            task.cancel()

    def reason(self) -> ServiceError | None:
        """Return what a request that is being cancelled tells its client; ``None`` when it is the client that left."""
        task = asyncio.current_task()
        return None if task is None else self._told.get(task)

    async def drain(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Wait until every request has ended, for *grace* seconds at most or until *hurried*; then cancel the rest."""
        self.begin()
        if self._tasks:
            self._none.clear()
            ends = [self._none, *([hurried] if hurried is not None else [])]
            await first_of(ends, timeout=grace)
        for task in self._tasks:
            self.cancel(task, UpstreamUnavailable("The service is stopping.", code="service_stopping", retry_after=1))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_SECONDS)


async def first_of(events: Sequence[asyncio.Event], *, timeout: float) -> None:
    """Wait until one of *events* is set, for *timeout* seconds at most."""
    waiting = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


DRAINING: web.AppKey[Draining] = web.AppKey("draining", Draining)
