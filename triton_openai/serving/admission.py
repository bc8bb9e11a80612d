"""
Admission of requests: a limit on running requests, in all and per model, and a bounded queue in front of it.

A request counts from when it is admitted to when its last byte has left. A request that cannot be admitted soon is
refused at once, so that its client can go elsewhere. Limits are divided among the workers of a service: each worker
enforces its own share and has its own queue, so no worker ever waits for another one.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from triton_openai.config.tree import ServerSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import ModelUnloading, ServiceOverloaded
from triton_openai.models.draining import Draining, ModelDraining
from triton_openai.telemetry.observation import Observation, Observer


class Waiting:
    """One request that waits: its future has a result when it is let in, and an error when it waited too long."""

    __slots__ = ("future", "model", "since")

    def __init__(self, model: str) -> None:
        self.model = model
        self.since = time.monotonic_ns()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def admitted(self) -> bool:
        """Whether it was let in, though it may not have noticed yet."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


class Queue:
    """A line for each model; adding, removing and looking at the first cost the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Waiting, None]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, waiting: Waiting) -> None:
        """Put *waiting* at the end of its line."""
        self._lines.setdefault(waiting.model, {})[waiting] = None
        self._length += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take *waiting* out, wherever it stands; return whether it was there."""
        line = self._lines.get(waiting.model)
        if line is None or waiting not in line:
            return False
        del line[waiting]
        self._length -= 1
        if not line:
            del self._lines[waiting.model]
        return True

    def first(self, has_room: Callable[[str], bool]) -> Waiting | None:
        """Return who has waited longest of those whose model *has_room*."""
        heads = [next(iter(line)) for model, line in self._lines.items() if has_room(model)]
        return min(heads, key=_since, default=None)

    def line(self, model: str) -> Sequence[Waiting]:
        """Return who waits for *model*, in the order in which they came."""
        return list(self._lines.get(model, ()))


def _since(waiting: Waiting) -> int:
    return waiting.since


class Admission:
    """
    Admits the requests of one process, first come, first served.

    A request whose model is full does not hold up those for other models. *lag* returns the seconds by which the event
    loop is late; *model_draining* knows which models take no requests now; *worker* is this process among those that
    serve together, which gets its share of each limit.
    """

    def __init__(
        self,
        settings: ServerSettings,
        lag: Callable[[], float],
        *,
        worker: Worker | None = None,
        model_draining: ModelDraining | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._lag = lag
        self._worker = worker or Worker()
        self._model_draining = model_draining or ModelDraining(Draining())
        self._model_draining.turn_away = self.turn_away
        self._observer = observer or Observer()
        self._queue = Queue()
        self._running: Counter[str] = Counter()
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Apply the limits of *settings* from now on. Requests that run or wait already are kept."""
        self._settings = settings
        self._limit = self._share(settings.max_running_requests)
        self._model_limit = self._share(settings.max_running_requests_per_model)
        self._queue_limit = self._worker.share(settings.max_queued_requests)
        self._admit()

    def _share(self, limit: int | None) -> float:
        return math.inf if limit is None else self._worker.share(limit)

    @property
    def running(self) -> Mapping[str, int]:
        """Requests that run in this process, by model."""
        return self._running

    @property
    def queued(self) -> int:
        """Requests that wait in this process."""
        return len(self._queue)

    @asynccontextmanager
    async def enter(
        self, model: str, observation: Observation, *, patience: float | None = None
    ) -> AsyncIterator[None]:
        """
        Admit the current request for *model*, after a wait of at most *patience* seconds, and count it out at the end.

        Raises :class:`ServiceOverloaded` at once where the queue is full or the process cannot follow, and when the
        wait was too long; and :class:`ModelUnloading` where the model is being unloaded.
        """
        self._model_draining.check(model)
        limit = self._settings.max_loop_lag
        if limit is not None and self._lag() > limit:
            raise ServiceOverloaded("The service has more to do than it can.", retry_after=1)
        if self._has_room(model):
            # Nobody waits for this model: a request that leaves admits those that its place has room for.
            self._running[model] += 1
        else:
            await self._wait(model, observation, patience)
        try:
            with self._model_draining.entered(model):
                yield
        finally:
            self._leave(model)

    async def _wait(self, model: str, observation: Observation, patience: float | None) -> None:
        if len(self._queue) >= self._queue_limit:
            raise ServiceOverloaded(
                "Too many requests are running and waiting already.", retry_after=self._settings.queue_timeout
            )
        waiting = Waiting(model)
        self._queue.add(waiting)
        seconds = min(self._settings.queue_timeout, math.inf if patience is None else patience)
        stage = observation.stage("wait in queue")
        self._observer.queued(observation)
        timer = asyncio.get_running_loop().call_later(seconds, _give_up, waiting, seconds)
        try:
            await waiting.future
        except BaseException:
            if waiting.admitted:
                # Admitted at the very moment of leaving: the place goes to the next one.
                self._leave(waiting.model)
            raise
        finally:
            timer.cancel()
            self._queue.remove(waiting)
            stage.ended = time.monotonic()
            observation.queued_seconds = stage.ended - stage.began
            self._observer.admitted(observation)

    def turn_away(self, model: str) -> None:
        """Refuse the requests that wait here for *model*, which is being unloaded."""
        for waiting in self._queue.line(model):
            if not waiting.future.done():
                waiting.future.set_exception(ModelUnloading(model))

    def _leave(self, model: str) -> None:
        self._running[model] -= 1
        if not self._running[model]:
            del self._running[model]
        self._admit()

    def _admit(self) -> None:
        """Admit those that wait and have room, longest wait first."""
        while (waiting := self._queue.first(self._has_room)) is not None:
            self._queue.remove(waiting)
            # One that has given up has had no turn yet to leave the queue.
            if not waiting.future.done():
                # Counted here and not when it wakes up, so that nobody else takes the place meanwhile.
                self._running[waiting.model] += 1
                waiting.future.set_result(None)

    def _has_room(self, model: str) -> bool:
        # Not by index, which would leave a zero behind for every model that was asked for.
        return self._running.total() < self._limit and self._running.get(model, 0) < self._model_limit


def _give_up(waiting: Waiting, seconds: float) -> None:
    if not waiting.future.done():
        reason = f"The request waited {seconds:g} seconds for others to end."
        waiting.future.set_exception(ServiceOverloaded(reason, retry_after=seconds))
