"""
The gates of the models: which requests run on a model, and whether it takes new ones.

A model that is to be unloaded is closed first: what runs may finish for a while, and what comes is refused. In a
service of several processes each has its own gates, and tells the others of changes through :class:`Peers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal, Protocol

from triton_openai.errors import ModelConflict, ModelUnloading
from triton_openai.models.draining import Draining

#: What happens to models: their gates are closed, their requests ended, their gates opened, Triton's list looked at.
GateAction = Literal["close", "end", "open", "renew"]

# Longest time that requests which were told to end may take to say so to their clients, and that other processes may
# take to make a change.
_FAREWELL_SECONDS = 1.0


class Peers(Protocol):
    """The other processes of the service."""

    async def claim(self, models: Collection[str]) -> str | None:
        """Claim *models* among all processes, this one included; return the one that is claimed already, if any is."""
        ...

    def unclaim(self, models: Collection[str]) -> None:
        """Give the claim back."""
        ...

    def change(self, action: GateAction, models: Collection[str]) -> asyncio.Future[Any]:
        """Have the others :meth:`ModelGates.apply` this at once; the result is there when all have."""
        ...


class NoPeers:
    """Those of a process that serves alone."""

    def __init__(self) -> None:
        self._claimed: set[str] = set()

    async def claim(self, models: Collection[str]) -> str | None:
        """See :class:`Peers`."""
        taken = next((model for model in models if model in self._claimed), None)
        if taken is None:
            self._claimed.update(models)
        return taken

    def unclaim(self, models: Collection[str]) -> None:
        """See :class:`Peers`."""
        self._claimed.difference_update(models)

    def change(self, action: GateAction, models: Collection[str]) -> asyncio.Future[Any]:
        """See :class:`Peers`."""
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


class Queue(Protocol):
    """Requests of this process that have not come to a gate yet."""

    def turn_away(self, model: str) -> None:
        """Refuse those that wait for *model* with :class:`ModelUnloading`."""
        ...


class ModelGates:
    """The gates of one process, whose *peers* are the others. Models are those that Triton knows, not their aliases."""

    def __init__(self, draining: Draining, peers: Peers | None = None) -> None:
        self._draining = draining
        self._peers = peers or NoPeers()
        self._running: dict[str, set[asyncio.Task[Any]]] = {}
        # Set whenever the last request on some model has ended.
        self._ended = asyncio.Event()
        self._queue: Queue | None = None
        self._closed: set[str] = set()
        #: Differs once another process has loaded or unloaded a model.
        self.version = 0

    def watch_queue(self, queue: Queue) -> None:
        """Turn away at once who waits in *queue* for a model whose gate is closed."""
        self._queue = queue

    def check(self, model: str) -> None:
        """Raise :class:`ModelUnloading` when *model* takes no new requests."""
        if model in self._closed:
            raise ModelUnloading(model)

    @contextmanager
    def entered(self, model: str) -> Iterator[None]:
        """Count the current request in and out. Raises :class:`ModelUnloading`."""
        self.check(model)
        task = asyncio.current_task()
        assert task is not None
        tasks = self._running.setdefault(model, set())
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)
            if not tasks:
                del self._running[model]
                self._ended.set()

    @asynccontextmanager
    async def claim(self, models: Collection[str]) -> AsyncIterator[None]:
        """
        Be the only one to load or unload *models*, among all processes of the service.

        Raises :class:`ModelConflict` at once when somebody else does.
        """
        taken = await self._peers.claim(models)
        if taken is not None:
            raise ModelConflict(
                f"The model '{taken}' is being loaded or unloaded by another request.",
                param="model",
                code="model_busy",
            )
        try:
            yield
        finally:
            self._peers.unclaim(models)

    @asynccontextmanager
    async def closed(self, models: Collection[str], grace: float) -> AsyncIterator[None]:
        """
        Let no new requests to *models*, which the caller has claimed, and wait until those that run have ended.

        After *grace* seconds they are told that the model is being unloaded. Opened again at the end.
        """
        self._close(models)
        others = self._peers.change("close", models)
        here = asyncio.create_task(self._idle(models))
        try:
            _, busy = await asyncio.wait({here, others}, timeout=grace)
            if busy:
                self._end(models)
                self._peers.change("end", models)
                await asyncio.wait(busy, timeout=_FAREWELL_SECONDS)
            yield
        finally:
            here.cancel()
            self._closed.difference_update(models)
            await self._tell("open", models)

    async def changed(self) -> None:
        """Tell the other processes that a model was loaded or unloaded."""
        await self._tell("renew", ())

    async def _tell(self, action: GateAction, models: Collection[str]) -> None:
        """Have the other processes make a change, and wait until they have: the client may ask one of them next."""
        await asyncio.wait({self._peers.change(action, models)}, timeout=_FAREWELL_SECONDS)

    async def apply(self, action: GateAction, models: Collection[str]) -> None:
        """Make a change that another process tells of; return when it is made: a closed model is idle then."""
        if action == "close":
            self._close(models)
            await self._idle(models)
        elif action == "end":
            self._end(models)
        elif action == "open":
            self._closed.difference_update(models)
        else:
            self.version += 1

    def _close(self, models: Collection[str]) -> None:
        self._closed.update(models)
        if self._queue is not None:
            for model in models:
                self._queue.turn_away(model)

    async def _idle(self, models: Collection[str]) -> None:
        """Wait until nothing runs on *models* here."""
        while not self._running.keys().isdisjoint(models):
            self._ended.clear()
            await self._ended.wait()

    def _end(self, models: Collection[str]) -> None:
        for model in models:
            for task in tuple(self._running.get(model, ())):
                self._draining.cancel(task, ModelUnloading(model))
