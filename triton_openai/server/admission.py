"""
Who is let in: a limit on running requests, in all and per model, and a bounded queue in front of it.

A request counts from when it is let in to when its last byte has left. What cannot be let in soon is refused at once:
a client that is told so can go elsewhere, one that waits in vain cannot.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

from triton_openai.config.tree import ServerSettings
from triton_openai.draining import Draining
from triton_openai.errors import ModelUnloading, ServiceOverloaded
from triton_openai.model_gates import ModelGates
from triton_openai.server.places import Places
from triton_openai.server.queue import Queue, Waiting
from triton_openai.telemetry.observation import Observation, Observer

# How long a worker that was told of a free place has for taking it; then others take it who have waited less long, and
# after a while it is told again.
_PATIENCE_SECONDS = 0.2
_AGAIN_SECONDS = 5.0
# Nobody tells of the places of a worker that died, nor of one that was not taken.
_LOOK_SECONDS = 0.1


class Admission:
    """
    The entry of one process. *lag* tells the seconds by which its event loop is late; *gates* which models take no
    requests now; *places* what the other processes of the service have let in: the limits are those of all together.

    The queue is first come, first served, but a request whose model is full does not hold up those for others, and
    a process that is late does not hold up the others.
    """

    def __init__(
        self,
        settings: ServerSettings,
        lag: Callable[[], float],
        *,
        places: Places | None = None,
        gates: ModelGates | None = None,
        observer: Observer | None = None,
    ) -> None:
        self._lag = lag
        self._places = places or Places()
        self._gates = gates or ModelGates(Draining())
        self._gates.watch_queue(self)
        self._observer = observer or Observer()
        self._queue = Queue()
        self._running: Counter[str] = Counter()
        # Models of which the other workers have been told something.
        self._told: set[str] = set()
        # Heads of other workers' queues that were rung for, and when.
        self._rung: dict[tuple[int, int], float] = {}
        self._look: asyncio.TimerHandle | None = None
        self._settings = settings

    def replace(self, settings: ServerSettings) -> None:
        """Go by the limits of *settings* from now on. What runs already, and the waits that have begun, go on."""
        with self._places.held():
            self._settings = settings
            if self._limited:
                for model in self._told.union(self._running):
                    self._tell_running(model)
            self._admit()

    def open(self) -> None:
        """Begin to listen to the other workers, in the running loop."""
        self._places.listen(self._heard)

    def close(self) -> None:
        """Let go of what is shared with them."""
        if self._look is not None:
            self._look.cancel()
        self._places.close()

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
        Be let in for *model*, wait for it if need be, for *patience* seconds at most, and leave at the end.

        Raises :class:`ServiceOverloaded` at once where the queue is full or the process cannot follow, and when the
        wait was too long; and :class:`ModelUnloading` where the model is being unloaded.
        """
        self._gates.check(model)
        limit = self._settings.max_loop_lag
        if limit is not None and self._lag() > limit:
            raise ServiceOverloaded("The service has more to do than it can.", retry_after=1)
        waiting = self._begin(model)
        if waiting is not None:
            await self._wait(waiting, observation, patience)
        try:
            with self._gates.entered(model):
                yield
        finally:
            self._leave(model)

    def _begin(self, model: str) -> Waiting | None:
        """Let a request in, or return its place in the queue. Raises :class:`ServiceOverloaded` for a full queue."""
        with self._held():
            if self._has_room(model) and self._queue.first(self._has_room) is None and not self._yields(None):
                self._count(model, 1)
                return None
            if len(self._queue) + self._places.waiting() >= self._settings.max_queued_requests:
                raise ServiceOverloaded(
                    "Too many requests are running and waiting already.", retry_after=self._settings.queue_timeout
                )
            waiting = Waiting(model)
            self._queue.add(waiting)
            self._tell_waiting(model)
            self._admit()
        self._look_later()
        return waiting

    async def _wait(self, waiting: Waiting, observation: Observation, patience: float | None) -> None:
        seconds = min(self._settings.queue_timeout, math.inf if patience is None else patience)
        stage = observation.stage("wait in queue")
        self._observer.queued(observation)
        # No wait_for, which in Python 3.11 lets a cancellation go by that comes together with the end of the wait.
        timer = asyncio.get_running_loop().call_later(seconds, _give_up, waiting, seconds)
        try:
            await waiting.future
        except BaseException:
            if waiting.admitted:
                # Let in at the very moment of leaving: the place goes to the next.
                self._leave(waiting.model)
            raise
        finally:
            timer.cancel()
            self._forget(waiting)
            stage.ended = time.monotonic()
            observation.queued_seconds = stage.ended - stage.began
            self._observer.admitted(observation)

    def waiting(self) -> Collection[str]:
        """Return the models that requests wait for in this process."""
        return self._queue.models()

    def turn_away(self, model: str) -> None:
        """Refuse the requests that wait here for *model*, which is being unloaded."""
        for waiting in self._queue.line(model):
            if not waiting.future.done():
                waiting.future.set_exception(ModelUnloading(model))

    def _forget(self, waiting: Waiting) -> None:
        """Take who waits no more out of the queue; whoever is let in was taken out by that."""
        if self._queue.remove(waiting):
            with self._held():
                self._tell_waiting(waiting.model)
                # A worker that it stood before may have been waiting for it.
                self._admit()

    def _leave(self, model: str) -> None:
        with self._held():
            self._count(model, -1)
            self._admit()

    def _held(self) -> AbstractContextManager[None]:
        # Where there are no limits there is nothing to agree upon.
        return self._places.held() if self._limited else nullcontext()

    # Below, the places are held.

    def _count(self, model: str, change: int) -> None:
        """Count requests in or out."""
        self._running[model] += change
        if not self._running[model]:
            del self._running[model]
        if self._limited:
            self._tell_running(model)

    def _tell_running(self, model: str) -> None:
        if self._places.shared:
            self._told.add(model)
            self._places.set_running(model, self._running.get(model, 0), self._running.total())

    def _tell_waiting(self, model: str) -> None:
        self._places.set_waiting(model, self._queue.since(model), len(self._queue))

    def _admit(self) -> None:
        """Let in whoever waits and has room, longest wait first; ring for who has waited longer in another process."""
        while (waiting := self._queue.first(self._has_room)) is not None:
            if waiting.future.done():
                # It waits no more, and has had no turn yet to say so.
                self._queue.remove(waiting)
            elif self._yields(waiting.since):
                return
            else:
                # Counted here and not when it wakes up, so that nobody else takes the place meanwhile.
                self._queue.remove(waiting)
                self._count(waiting.model, 1)
                waiting.future.set_result(None)
            self._tell_waiting(waiting.model)
        self._yields(None)

    def _yields(self, since: int | None) -> bool:
        """
        Return whether somebody who could be let in has waited in another process, and longer than *since*.

        That process is told so. If it has not taken the place soon, it is passed over for a while.
        """
        if not self._limited or not self._places.waiting():
            return False
        now, limit = time.monotonic(), self._settings.max_running_requests_per_model
        heads = {
            (head.worker, head.since): head
            for head in self._places.heads()
            if (limit is None or head.running < limit) and (since is None or head.since < since)
        }
        self._rung = {
            key: when
            for key, when in self._rung.items()
            if now - when < _AGAIN_SECONDS and (key in heads or since is not None)
        }
        if not heads or self._is_full():
            return False
        patient = [key for key in heads if now - self._rung.get(key, now) < _PATIENCE_SECONDS]
        if not patient:
            return False
        first = min(patient, key=lambda key: key[1])
        if first not in self._rung:
            self._rung[first] = now
            self._places.ring(first[0])
        return True

    @property
    def _limited(self) -> bool:
        settings = self._settings
        return settings.max_running_requests is not None or settings.max_running_requests_per_model is not None

    def _is_full(self) -> bool:
        limit = self._settings.max_running_requests
        return limit is not None and self._running.total() + self._places.running() >= limit

    def _has_room(self, model: str) -> bool:
        if self._is_full():
            return False
        limit = self._settings.max_running_requests_per_model
        # Not by index, which would leave a zero behind for every model that was asked for.
        return limit is None or self._running.get(model, 0) + self._places.running(model) < limit

    # Below, they are not.

    def _heard(self) -> None:
        with self._places.held():
            self._admit()

    def _look_later(self) -> None:
        if self._places.shared and self._look is None and len(self._queue):
            self._look = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._look = None
        self._heard()
        self._look_later()


def _give_up(waiting: Waiting, seconds: float) -> None:
    if not waiting.future.done():
        reason = f"The request waited {seconds:g} seconds for others to end."
        waiting.future.set_exception(ServiceOverloaded(reason, retry_after=seconds))
