"""
The gates of the models: which requests run on a model, and whether it takes new ones.

A model that is to be unloaded is closed first: what runs may finish for a while, and what comes is refused. In a
service of several processes each has its own gates, and what they must agree on stands in files
(:class:`SharedGates`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from aiohttp import web

from triton_openai.draining import Draining
from triton_openai.errors import ModelConflict, ModelUnloading
from triton_openai.shared_gates import SharedGates

# How often the other processes are asked, and how often they look whether they are asked to end what runs.
_LOOK_SECONDS = 0.1
# Longest time that requests which were told to end may take to say so to their clients.
_FAREWELL_SECONDS = 1.0


class Queue(Protocol):
    """Requests of this process that have not come to a gate yet."""

    def waiting(self) -> Collection[str]:
        """Return the models that they wait for."""
        ...

    def turn_away(self, model: str) -> None:
        """Refuse those that wait for *model* with :class:`ModelUnloading`."""
        ...


class ModelGates:
    """
    The gates of one process. Models are those that Triton knows, not their aliases.

    *directory* is what the processes of the service share, if there are several.
    """

    def __init__(self, draining: Draining, directory: Path | None = None) -> None:
        self._draining = draining
        self._shared = SharedGates(directory) if directory is not None else None
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        self._queue: Queue | None = None
        self._closed: set[str] = set()
        self._claimed: set[str] = set()

    def watch_queue(self, queue: Queue) -> None:
        """Turn away at once who waits in *queue* for a model whose gate is closed."""
        self._queue = queue

    def check(self, model: str) -> None:
        """Raise :class:`ModelUnloading` when *model* takes no new requests."""
        if model in self._closed or (self._shared is not None and self._shared.is_closed(model)):
            raise ModelUnloading(model)

    @contextmanager
    def entered(self, model: str) -> Iterator[None]:
        """Count the current request in and out. Raises :class:`ModelUnloading`."""
        task = asyncio.current_task()
        assert task is not None
        tasks = self._running.get(model, set())
        # Counted first and looked second: who closes a gate does it the other way round.
        if not tasks and self._shared is not None and not self._shared.hold(model):
            raise ModelUnloading(model)
        tasks.add(task)
        self._running[model] = tasks
        try:
            self.check(model)
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                del self._running[model]
                if self._shared is not None:
                    self._shared.release(model)

    @contextmanager
    def claim(self, models: Collection[str]) -> Iterator[None]:
        """
        Be the only one to load or unload *models*, among all processes of the service.

        Raises :class:`ModelConflict` at once when somebody else does.
        """
        done: list[str] = []
        try:
            for model in models:
                if model in self._claimed or (self._shared is not None and not self._shared.claim(model)):
                    raise ModelConflict(
                        f"The model '{model}' is being loaded or unloaded by another request.",
                        param="model",
                        code="model_busy",
                    )
                self._claimed.add(model)
                done.append(model)
            yield
        finally:
            for model in done:
                self._claimed.discard(model)
                if self._shared is not None:
                    self._shared.disclaim(model)

    @asynccontextmanager
    async def closed(self, models: Collection[str], grace: float) -> AsyncIterator[None]:
        """
        Let no new requests to *models*, which the caller has claimed, and wait until those that run have ended.

        After *grace* seconds they are told that the model is being unloaded. Opened again at the end.
        """
        self._closed.update(models)
        if self._shared is not None:
            self._shared.close(models)
        self._turn_away(models)
        try:
            if not await self._idle(models, grace):
                self._end(models)
                if self._shared is not None:
                    self._shared.end(models)
                await self._idle(models, _FAREWELL_SECONDS)
            yield
        finally:
            self._closed.difference_update(models)
            if self._shared is not None:
                self._shared.open(models)

    @property
    def version(self) -> int:
        """A number that differs once another process has loaded or unloaded a model."""
        return 0 if self._shared is None else self._shared.version

    def changed(self) -> None:
        """Tell the other processes that a model was loaded or unloaded."""
        if self._shared is not None:
            self._shared.changed()

    async def watch(self) -> None:
        """
        End what runs here on models that another process unloads, and turn away who waits for them; for ever, and at
        once where there is none.
        """
        while self._shared is not None:
            if self._queue is not None:
                self._turn_away([model for model in self._queue.waiting() if self._shared.is_closed(model)])
            self._end([model for model in self._running if self._shared.is_ending(model)])
            await asyncio.sleep(_LOOK_SECONDS)

    async def _idle(self, models: Collection[str], timeout: float) -> bool:
        """Wait until nothing runs on *models*; return whether that came true in time."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            here = {task for model in models for task in self._running.get(model, ())}
            left = deadline - loop.time()
            if not here and (self._shared is None or all(map(self._shared.is_idle, models))):
                return True
            if left <= 0:
                return False
            if here:
                await asyncio.wait(here, timeout=left)
            else:
                await asyncio.sleep(min(left, _LOOK_SECONDS))

    def _turn_away(self, models: Collection[str]) -> None:
        if self._queue is not None:
            for model in models:
                self._queue.turn_away(model)

    def _end(self, models: Collection[str]) -> None:
        for model in models:
            for task in tuple(self._running.get(model, ())):
                self._draining.cancel(task, ModelUnloading(model))


MODEL_GATES: web.AppKey[ModelGates] = web.AppKey("model_gates", ModelGates)
