"""
Who is let in: a limit on running requests, in all and per model, and a bounded queue in front of it.

A request counts from when it is let in to when its last byte has left. What cannot be let in soon is refused at once:
a client that is told so can go elsewhere, one that waits in vain cannot.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager

from triton_openai.config.tree import ServerSettings
from triton_openai.draining import Draining
from triton_openai.errors import ModelUnloading, ServiceOverloaded
from triton_openai.model_gates import ModelGates
from triton_openai.telemetry.observation import Observation, Observer


class _Waiting:
    """One request in the queue: its future has a result when it is let in, and an error when it waited too long."""

    __slots__ = ("future", "model")

    def __init__(self, model: str) -> None:
        self.model = model
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def admitted(self) -> bool:
        """Whether it was let in, though it may not have noticed yet."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


class Admission:
    """
    The entry of one process of *workers*. *lag* tells the seconds by which its event loop is late; *gates* which models
    take no requests now.

    The queue is first come, first served, but a request whose model is full does not hold up those for others.
    """

    def __init__(
        self,
        settings: ServerSettings,
        lag: Callable[[], float],
        *,
        workers: int = 1,
        gates: ModelGates | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._lag = lag
        self._workers = workers
        self._gates = gates or ModelGates(Draining())
        self._gates.watch_queue(self)
        self._observer = observer or Observer()
        # Kept in the order of arrival
        self._queue: dict[_Waiting, None] = {}
        self._running: Counter[str] = Counter()
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Go by the limits of *settings* from now on. What runs already, and the waits that have begun, go on."""
        self._settings = settings
        # The limits are the service's: each of its processes has its share.
        self._total = _share(settings.max_running_requests, self._workers)
        self._per_model = _share(settings.max_running_requests_per_model, self._workers)
        self._longest_queue = _share(settings.max_queued_requests, self._workers)
        self._admit()

    @property
    def running(self) -> Mapping[str, int]:
        """Requests that run, by model."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    @asynccontextmanager
    async def enter(self, model: str, observation: Observation) -> AsyncIterator[None]:
        """
        Be let in for *model*, wait for it if need be, and leave at the end.

        Raises :class:`ServiceOverloaded` at once where the queue is full or the process cannot follow, and when the
        wait was too long; and :class:`ModelUnloading` where the model is being unloaded.
        """
        self._gates.check(model)
        limit = self._settings.max_loop_lag
        if limit is not None and self._lag() > limit:
            raise ServiceOverloaded("The service has more to do than it can.", retry_after=1)
        if self._has_room(model):
            self._running[model] += 1
        else:
            await self._wait(model, observation)
        try:
            with self._gates.entered(model):
                yield
        finally:
            self._leave(model)

    async def _wait(self, model: str, observation: Observation) -> None:
        if self._longest_queue is not None and len(self._queue) >= self._longest_queue:
            raise ServiceOverloaded(
                "Too many requests are running and waiting already.", retry_after=self._settings.queue_timeout
            )
        waiting = _Waiting(model)
        self._queue[waiting] = None
        began = time.monotonic()
        self._observer.queued(observation)
        # No wait_for, which in Python 3.11 lets a cancellation go by that comes together with the end of the wait.
        timer = asyncio.get_running_loop().call_later(self._settings.queue_timeout, self._give_up, waiting)
        try:
            await waiting.future
        except BaseException:
            if waiting.admitted:
                # Let in at the very moment of leaving: the place goes to the next.
                self._leave(model)
            raise
        finally:
            timer.cancel()
            self._queue.pop(waiting, None)
            observation.queued_seconds = time.monotonic() - began
            self._observer.admitted(observation)

    def waiting(self) -> Collection[str]:
        """Return the models that requests wait for."""
        return {waiting.model for waiting in self._queue}

    def turn_away(self, model: str) -> None:
        """Refuse the requests that wait for *model*, which is being unloaded."""
        for waiting in self._queue:
            if waiting.model == model and not waiting.future.done():
                waiting.future.set_exception(ModelUnloading(model))

    def _give_up(self, waiting: _Waiting) -> None:
        if not waiting.future.done():
            seconds = self._settings.queue_timeout
            reason = f"The request waited {seconds:g} seconds for others to end."
            waiting.future.set_exception(ServiceOverloaded(reason, retry_after=seconds))

    def _leave(self, model: str) -> None:
        self._running[model] -= 1
        if not self._running[model]:
            del self._running[model]
        self._admit()

    def _admit(self) -> None:
        """Let in whoever waits and has room."""
        for waiting in list(self._queue):
            if self._is_full():
                return
            if self._has_room(waiting.model) and not waiting.future.done():
                # Counted here and not when it wakes up, so that nobody else takes the place meanwhile.
                del self._queue[waiting]
                self._running[waiting.model] += 1
                waiting.future.set_result(None)

    def _is_full(self) -> bool:
        return self._total is not None and self._running.total() >= self._total

    def _has_room(self, model: str) -> bool:
        # Not by index, which would leave a zero behind for every model that was asked for.
        running = self._running.get(model, 0)
        return not self._is_full() and (self._per_model is None or running < self._per_model)


def _share(limit: int | None, workers: int) -> int | None:
    """Return what one of *workers* processes gets of *limit*, rounded up: no limit becomes 0."""
    return None if limit is None else -(-limit // workers)
