"""The end of the service, or of a model: what runs may finish for a while, and what then still runs is told so."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from triton_openai.errors import ServiceError, UpstreamUnavailable

# Longest time that requests which were told to stop may take to say so to their clients.
_FAREWELL_SECONDS = 1.0


class Draining:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
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

    def cancel(self, task: asyncio.Task[Any], error: ServiceError) -> None:
        """End a request that runs; *error* is what its client is told."""
        if task in self._tasks and task not in self._told:
            self._told[task] = error
            task.cancel()

    def reason(self) -> ServiceError | None:
        """Return what a request that is being cancelled tells its client; ``None`` when it is the client that left."""
        task = asyncio.current_task()
        return None if task is None else self._told.get(task)

    async def drain(self, grace: float) -> None:
        """Wait until every request has ended, for *grace* seconds at most; then cancel the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace)
        for task in self._tasks:
            self.cancel(task, UpstreamUnavailable("The service is stopping.", code="service_stopping", retry_after=1))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_FAREWELL_SECONDS)


DRAINING: web.AppKey[Draining] = web.AppKey("draining", Draining)
