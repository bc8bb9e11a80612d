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
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from triton_openai.config.tree import ServerSettings
from triton_openai.config.worker import Worker
from triton_openai.draining import Draining, ModelDraining
from triton_openai.errors import ModelUnloading, ServiceOverloaded
from triton_openai.shares import SHARING_KEY, live_reserve, may_take
from triton_openai.telemetry.process import LoopLag
from triton_openai.telemetry.request_record import Observer, RequestRecord

# Event loop lag in seconds, five times in a row, above which the process refuses new requests.
_MAX_LOOP_LAG = 1.0
# After these seconds without a live request for a model, lines of batches get the share that is kept for such requests.
_LIVE_SECONDS = 60.0
_Task = asyncio.Task[Any] | None


class Admission:
    """
    Admits the requests of one process, first come, first served.

    A request for a model at its limit does not delay those for other models. *lag* measures by how much the
    event loop is late; *model_draining* has the models that take no requests now; *worker* is this process among those
    that serve together, which gets its share of each limit. *capacity* returns how many requests for a model the
    Tritons that have it take from this process.
    """

    def __init__(
        self,
        settings: ServerSettings,
        lag: LoopLag,
        *,
        worker: Worker | None = None,
        model_draining: ModelDraining | None = None,
        observer: Observer | None = None,
        capacity: Callable[[str], float] = lambda _: math.inf,
    ) -> None:
        self._lag = lag
        self._capacity = capacity
        self._worker = worker or Worker()
        self._model_draining = model_draining or ModelDraining(Draining())
        self._model_draining.reject_queued = self.reject_queued
        self._observer = observer or Observer()
        #: The tasks of the requests that run in this process, by model.
        self.running = self._model_draining.running
        #: The waiting requests, in the order in which they came: each with its model, its task and its key.
        self.queue: OrderedDict[asyncio.Future[None], tuple[str, _Task, str | None]] = OrderedDict()
        # When other requests than lines of batches were there last, by model.
        self._live_at: dict[str, float] = {}
        # By model, how many requests its engines should get, as far as they report their queue.
        self._engine_limits: dict[str, float] = {}
        # The lines of batches that run, with their models, and how many each model has.
        self._lines: dict[_Task, str] = {}
        self._line_counts: Counter[str] = Counter()
        self.replace(settings)

    def replace(self, settings: ServerSettings) -> None:
        """Apply the limits of *settings* from now on. Requests that run or wait already are kept."""
        self._settings = settings
        self._limit = self._share(settings.max_running_requests)
        self._model_limit = self._share(settings.max_running_requests_per_model)
        self._by_endpoint = settings.max_running_requests_per_endpoint is not None
        self._queue_limit = self._worker.share(settings.max_queued_requests)
        self.admit()

    def _share(self, limit: int | None) -> float:
        if limit is None:
            return math.inf
        return self._worker.share(limit)

    def set_engine_capacity(self, model: str, more: float, limit: float) -> None:
        """
        Admit so many *more* requests for *model* from now on, and up to *limit* at a time.

        *more* is negative where too many wait in the model's engines: then as many have to end first.
        """
        self._engine_limits[model] = min(len(self.running.get(model, ())) + more, limit)
        if self.queue:
            self.admit()

    async def enter(self, model: str, record: RequestRecord, *, patience: float | None = None) -> _Task:
        """
        Admit the current request for *model*, after a wait of at most *patience* seconds.

        Returns the task, which :meth:`leave` takes. Raises :class:`ServiceOverloaded` at once if the queue is full or
        the event loop is late, and when the wait was too long; and :class:`ModelUnloading` if the model is being
        unloaded.
        """
        if record.batch is None:
            self._live_at[model] = time.monotonic()
        has_room = self.has_room(model)
        task = asyncio.current_task()
        if has_room:
            # No request waits for this model: each one that ends admits those that have room.
            self._model_draining.enter(model, task)
            if record.batch is not None:
                self._lines[task] = model
                self._line_counts[model] += 1
        elif record.batch is not None:
            # A line of a batch waits elsewhere, and not before live requests.
            raise ServiceOverloaded("No capacity for batch requests now.", retry_after=1)
        else:
            await self._wait(model, task, record, patience)
        return task

    def live(self, model: str) -> int | None:
        """Return how many requests other than lines of batches run for *model*; ``None`` if none came for a minute."""
        live = len(self.running.get(model, ())) - self._line_counts[model]
        if live == 0 and time.monotonic() - self._live_at.get(model, -math.inf) > _LIVE_SECONDS:
            return None
        return live

    def capacity(self, model: str) -> float:
        """Return how many requests for *model* the settings say that its Tritons run; infinity if they do not."""
        if self._by_endpoint:
            return min(self._model_limit, self._capacity(model))
        return self._model_limit

    def spare(self, model: str, lines: int, share: float) -> bool:
        """
        Return whether another line of a batch may run for *model*, where *lines* do already, or are about to.

        Beside live requests, they have this *share* of the model's limit at most, and of what live requests leave free,
        and capacity for further live requests stays free. Without live requests for a while, they have all of it. No
        line begins while a live request waits for the model.
        """
        if self._lag.sustained > _MAX_LOOP_LAG or self._is_awaited(model):
            return False
        live = self.live(model)
        limit = min(self._model_limit, self._capacity(model), self._engine_limit(model))
        others = self._total() - self._line_counts[model]
        free = min(limit - (live or 0), self._limit - others)
        if live is None:
            return lines < free
        max_lines = min(share * free, free - live_reserve(live, live + free))
        if live == 0:
            max_lines = max(1, max_lines)
        return lines < min(max_lines, free) and lines + 1 <= max(1, share * limit)

    def _is_awaited(self, model: str) -> bool:
        """Return whether a request waits for *model*."""
        return any(waiting_for == model for waiting_for, _, _ in self.queue.values())

    def has_room(self, model: str) -> bool:
        """Return whether a request for *model* would run at once. Raises the errors of :meth:`enter` without a wait."""
        self._model_draining.check(model)
        if self._lag.sustained > _MAX_LOOP_LAG:
            raise ServiceOverloaded("The service is overloaded.", retry_after=1)
        if self._total() < self._limit and self._is_below_limit(model):
            return True
        key = SHARING_KEY.get()
        own = sum(waiting == key for _, _, waiting in self.queue.values())
        free = self._queue_limit - len(self.queue)
        if not may_take(1, own=own, free=free):
            if free <= 0:
                whose = "Too many requests"
            else:
                whose = "Too many requests of this key"
            raise ServiceOverloaded(
                f"{whose} are running and waiting already.", retry_after=self._settings.queue_timeout
            )
        return False

    def leave(self, model: str, task: _Task) -> None:
        """Count the request of *task*, which was admitted for *model*, out."""
        if self._lines.pop(task, None) is None:
            self._live_at[model] = time.monotonic()
        else:
            self._line_counts[model] -= 1
        self._model_draining.leave(model, task)
        if self.queue:
            self.admit()

    async def _wait(self, model: str, task: _Task, record: RequestRecord, patience: float | None) -> None:
        seconds = self._settings.queue_timeout
        if patience is not None:
            seconds = min(seconds, patience)
        turn = asyncio.get_running_loop().create_future()
        self.queue[turn] = model, task, SHARING_KEY.get()
        stage = record.stage("wait in queue")
        self._observer.queued(record)
        try:
            async with asyncio.timeout(seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # It was admitted, and gave up: the next one is admitted.
                self.leave(model, task)
            if isinstance(error, TimeoutError):
                reason = f"The request waited {seconds:g} seconds for others to end."
                raise ServiceOverloaded(reason, retry_after=seconds) from None
            raise
        finally:
            self.queue.pop(turn, None)
            stage.ended = time.monotonic()
            record.queued_seconds = stage.ended - stage.began
            self._observer.admitted(record)

    def reject_queued(self, model: str) -> None:
        """Refuse the requests that wait here for *model*, which is being unloaded."""
        for turn, (waiting_for, _, _) in self.queue.items():
            if waiting_for == model and not turn.done():
                turn.set_exception(ModelUnloading(model))

    def admit(self) -> None:
        """Admit waiting requests that have room, longest wait first."""
        while self.queue and self._total() < self._limit:
            turn = self._next_turn()
            if turn is None:
                return
            model, task, _ = self.queue.pop(turn)
            # One that has given up may not have left the queue yet.
            if not turn.done():
                # Counted now and not when it wakes up, so that no other request is admitted in its place.
                self._model_draining.enter(model, task)
                turn.set_result(None)

    def _next_turn(self) -> asyncio.Future[None] | None:
        """Return the first request in the queue whose model is not at its limit."""
        for turn, (model, _, _) in self.queue.items():
            if self._is_below_limit(model):
                return turn
        return None

    def _total(self) -> int:
        return sum(map(len, self.running.values()))

    def _is_below_limit(self, model: str) -> bool:
        running = len(self.running.get(model, ()))
        if running >= self._model_limit or running >= self._engine_limit(model):
            return False
        return not self._by_endpoint or running < self._capacity(model)

    def _engine_limit(self, model: str) -> float:
        """Return how many requests for *model* its engines should get from this process."""
        if not self._settings.follow_engine_queue:
            return math.inf
        return self._engine_limits.get(model, math.inf)
