"""
Draining of the service, or of a model: running requests may finish for a while, then they are cancelled with a reason.

A model that is to be unloaded takes no new requests first. In a service of several processes each drains its own
requests, and has its peers make the same changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

from aiohttp import web

from triton_openai.errors import InvalidApiKey, ModelConflict, ModelUnloading, ServiceError, UpstreamUnavailable
from triton_openai.tasks import wait_any
from triton_openai.telemetry.request_record import RequestRecord

# Longest time that cancelled requests may take to answer their clients, and other processes to make a change.
_ANSWER_SECONDS = 1.0


class Draining:
    """The requests that are being answered."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[Any], RequestRecord | None] = {}
        self._reasons: dict[asyncio.Task[Any], ServiceError] = {}
        self._none = asyncio.Event()
        #: Whether draining has begun: the service still answers, but is not ready any more, and closes every connection
        #: after its next answer.
        self.begun = False
        #: Set when the end begins.
        self.started = asyncio.Event()
        self._ended = False

    def check(self) -> None:
        """Raise :class:`UpstreamUnavailable` once the draining time is over."""
        if self._ended:
            raise _stopping()

    def enter(self, record: RequestRecord | None = None) -> asyncio.Task[Any]:
        """Add the request of the current task, with its *record*; return the task, for :meth:`leave`."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = record
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """Remove a request that has ended."""
        self._tasks.pop(task, None)
        self._reasons.pop(task, None)
        if not self._tasks:
            self._none.set()

    def cancel(self, task: asyncio.Task[Any], error: ServiceError) -> None:
        """Cancel a request that runs; its client gets *error*."""
        if task in self._tasks and task not in self._reasons:
            self._reasons[task] = error
            task.cancel()

    def end_removed_keys(self, ring: Mapping[bytes, object]) -> None:
        """Cancel the requests whose key was removed: *ring* has the digests of all keys."""
        for task, record in self._tasks.items():
            if record is not None and record.key_digest and record.key_digest not in ring:
                self.cancel(task, InvalidApiKey("The API key was removed."))

    def reason(self) -> ServiceError | None:
        """Return the error for the client of the cancelled request; ``None`` if the client disconnected."""
        task = asyncio.current_task()
        if task is None:
            return None
        return self._reasons.get(task)

    async def drain(self, grace: float, hurried: asyncio.Event | None = None) -> None:
        """Wait until every request has ended, for *grace* seconds at most or until *hurried*; then cancel the rest."""
        self.begun = True
        self.started.set()
        if self._tasks:
            self._none.clear()
            ends = [self._none]
            if hurried is not None:
                ends.append(hurried)
            await wait_any(*ends, timeout=grace)
        self._ended = True
        for task in self._tasks:
            self.cancel(task, _stopping())
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_ANSWER_SECONDS)


def _stopping() -> ServiceError:
    return UpstreamUnavailable("The service is stopping.", code="service_stopping", retry_after=1)


DRAINING: web.AppKey[Draining] = web.AppKey("draining", Draining)

#: A change that all processes make: models take no requests, their requests are cancelled, they take requests again;
#: or Triton's list of models is another one.
ModelChange = Literal["close", "end", "open", "reload"]


class Peers(Protocol):
    """The other processes of the service."""

    async def claim(self, models: Collection[str]) -> str | None:
        """Claim *models* among all processes; return the one that is claimed already, if any is."""

    def unclaim(self, models: Collection[str]) -> None:
        """Give the claim back."""

    def change(self, action: ModelChange, models: Collection[str]) -> asyncio.Future[Any]:
        """Start a change in all other processes; the future ends when they have made it."""


class ModelDraining:
    """
    The requests of one process by model, and the models that take no new ones.

    Models are named as in Triton, not by their aliases.
    """

    def __init__(self, draining: Draining, peers: Peers | None = None) -> None:
        self._draining = draining
        self._peers = peers
        self._claimed: set[str] = set()
        #: The tasks of the requests that run, by model.
        self.running: dict[str, set[Any]] = {}
        # Set whenever the last request on some model has ended.
        self._ended = asyncio.Event()
        self._closed: set[str] = set()
        #: Refuses the requests of this process that wait for a model's turn with :class:`ModelUnloading`.
        self.reject_queued: Callable[[str], None] = lambda _: None
        #: Differs once another process has loaded or unloaded a model.
        self.version = 0

    def check(self, model: str) -> None:
        """Raise :class:`ModelUnloading` when *model* takes no new requests."""
        if model in self._closed:
            raise ModelUnloading(model)

    def enter(self, model: str, task: asyncio.Task[Any] | None) -> None:
        """Add the request of *task* on *model*."""
        self.running.setdefault(model, set()).add(task)

    def leave(self, model: str, task: asyncio.Task[Any] | None) -> None:
        """Remove a request that has ended."""
        tasks = self.running[model]
        tasks.discard(task)
        if not tasks:
            del self.running[model]
            self._ended.set()

    @asynccontextmanager
    async def claim(self, models: Collection[str]) -> AsyncIterator[None]:
        """
        Claim *models* among all processes of the service, to load or unload them.

        Raises :class:`ModelConflict` at once when another call does.
        """
        taken = next((model for model in models if model in self._claimed), None)
        if taken is None and self._peers is not None:
            taken = await self._peers.claim(models)
        if taken is not None:
            raise ModelConflict(
                f"The model '{taken}' is being loaded or unloaded by another request.",
                param="model",
                code="model_busy",
            )
        self._claimed.update(models)
        try:
            yield
        finally:
            self._claimed.difference_update(models)
            if self._peers is not None:
                self._peers.unclaim(models)

    @asynccontextmanager
    async def drained(self, models: Collection[str], grace: float) -> AsyncIterator[None]:
        """
        Take no new requests for *models*, which the caller has claimed, and wait until those that run have ended.

        After *grace* seconds they are cancelled. Requests are taken again at the end.
        """
        others = self._change_peers("close", models)
        here = asyncio.create_task(self.apply("close", models))
        try:
            _, busy = await asyncio.wait({here, *others}, timeout=grace)
            if busy:
                self._change_peers("end", models)
                await self.apply("end", models)
                await asyncio.wait(busy, timeout=_ANSWER_SECONDS)
            yield
        finally:
            here.cancel()
            await self.apply("open", models)
            await self.changed("open", models)

    async def changed(self, action: ModelChange = "reload", models: Collection[str] = ()) -> None:
        """Make a change in the other processes and wait until it is made: the client may ask one of them next."""
        if changing := self._change_peers(action, models):
            await asyncio.wait(changing, timeout=_ANSWER_SECONDS)

    def _change_peers(self, action: ModelChange, models: Collection[str]) -> set[asyncio.Future[Any]]:
        if self._peers is None:
            return set()
        return {self._peers.change(action, models)}

    async def apply(self, action: ModelChange, models: Collection[str]) -> None:
        """Make a change here and return when it is made: a closed model is idle then."""
        if action == "close":
            self._closed.update(models)
            for model in models:
                self.reject_queued(model)
            while not self.running.keys().isdisjoint(models):
                self._ended.clear()
                await self._ended.wait()
        elif action == "end":
            for model in models:
                for task in tuple(self.running.get(model, ())):
                    self._draining.cancel(task, ModelUnloading(model))
        elif action == "open":
            self._closed.difference_update(models)
        else:
            self.version += 1
