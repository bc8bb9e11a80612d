"""
Runs batches: claims them, starts their lines while live traffic leaves room, stores the results, and ends them.

The parts share the batches of this process: :class:`Claims` adds and removes them, :class:`LineSchedule` picks lines,
:class:`LineRunner` runs them, and :class:`BatchLifecycle` takes each batch from its validation to its end.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress

import structlog

from triton_openai.batches import timing
from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.batch_lifecycle import BatchLifecycle
from triton_openai.batches.claims import Claims
from triton_openai.batches.file_folder import Files
from triton_openai.batches.host import Host
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.line_limits import FirstTokens, ModelLimits
from triton_openai.batches.line_runner import LineRunner
from triton_openai.batches.line_schedule import LineSchedule
from triton_openai.batches.quarantine import Quarantine
from triton_openai.batches.results import Results
from triton_openai.batches.running_batch import Phase, RunningBatch
from triton_openai.config.worker import Worker
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import LeaseLost
from triton_openai.tasks import cancel, wait_any
from triton_openai.telemetry.instruments import (
    BATCH_LIMIT,
    BATCH_MODELS_AWAY,
    BATCH_QUARANTINED,
    BATCH_RUNNING,
    BATCHES_PAUSED,
)
from triton_openai.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)


class BatchRunner:
    """
    Runs the batches in *files* that no other process runs; *host* answers their lines.

    *first_tokens* shows how long live requests wait. *metrics* counts batches and lines.
    """

    def __init__(self, files: Files, host: Host, first_tokens: FirstTokens, metrics: Metrics | None = None) -> None:
        self._files = files
        self._store = files.store
        self._host = host
        self._first_tokens = first_tokens
        self._series = (metrics or Metrics(Worker())).child
        self._woken = asyncio.Event()
        self._next_poll = 0.0
        self._next_sweep = 0.0
        self._sweeping: asyncio.Task[None] | None = None
        self._failing = False
        holder = os.urandom(16).hex()
        wake = self._woken.set
        self._batches: dict[str, RunningBatch] = {}
        self._away = AwayModels(host, wake)
        self._limits = ModelLimits(host)
        self._results = Results(files, self._series)
        self._keys = KeyLimits(host)
        quarantine = Quarantine(host, self._store.leases, holder, self._batches, self._away, self._limits, self._keys)
        self._schedule = LineSchedule(host, self._batches, self._away, self._limits, self._keys, quarantine)
        self._lines = LineRunner(host, self._store.lines, self._away, self._keys, quarantine, wake)
        lifecycle = BatchLifecycle(files, host, self._away, self._results, self._series, wake)
        self._claims = Claims(files, host, holder, self._batches, lifecycle.run)

    def wake(self) -> None:
        """Read the tables now: a batch was created or cancelled."""
        self._next_poll = 0.0
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                if self._files.exist:
                    await self._step()
                self._resume()
            except Exception as error:  # noqa: BLE001 - the last resort: logged, and tried again
                self._pause(error)
                await asyncio.sleep(timing.TROUBLE)
            await wait_any(self._woken, timeout=timing.POLL)
            self._woken.clear()

    async def _step(self) -> None:
        """Delete what has expired, update the claims, and start lines."""
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + timing.SWEEP
            # In a task, so that leases are renewed meanwhile, however many files there are.
            self._sweeping = asyncio.create_task(self._sweep())
        if now >= self._next_poll:
            self._next_poll = now + timing.POLL
            await self._claims.update()
            max_wait = self._host.settings.live_first_token
            if max_wait is not None and self._first_tokens.slowest() > max_wait:
                self._limits.slow_down()
        for batch_id, picked in (await self._schedule.pick()).items():
            self._lines.start(self._batches[batch_id], picked)

    async def _sweep(self) -> None:
        try:
            await self._files.sweep()
        except (ServiceError, OSError) as error:
            _log.warning("expired files are not deleted yet", reason=getattr(error, "reason", str(error)))

    def _pause(self, error: Exception) -> None:
        expected = isinstance(error, ServiceError)
        if not (expected and self._failing):
            reason = getattr(error, "reason", repr(error))
            _log.warning("batch runner paused", reason=reason, exc_info=not expected)
        self._failing = True
        self._update_gauges()

    def _resume(self) -> None:
        if self._failing:
            self._failing = False
            _log.info("batch runner resumed")
        self._update_gauges()

    def _update_gauges(self) -> None:
        for target, allowed in self._limits.allowed().items():
            self._series(BATCH_LIMIT, target).set(allowed)
        batches = self._batches.values()
        paused = sum(running.phase is Phase.PAUSED or running.unreadable for running in batches)
        if self._failing:
            paused = max(1, paused)
        self._series(BATCHES_PAUSED).set(paused)
        self._series(BATCH_RUNNING).set(self._limits.running)
        self._series(BATCH_MODELS_AWAY).set(len(self._away))
        self._series(BATCH_QUARANTINED).set(sum(len(running.quarantined) for running in batches))

    async def close(self) -> None:
        """Release all batches: lines that run wait again. Call it after :meth:`run` was cancelled."""
        if self._sweeping is not None:
            await cancel(self._sweeping)
        await self._away.close()
        for running in list(self._batches.values()):
            tasks = [running.starting, running.task, *running.running.values()]
            await cancel(*[task for task in tasks if task is not None])
            with suppress(ServiceError, LeaseLost):
                await self._results.store(running, at_once=True)
                # The write of their deaths may have been cancelled.
                await self._store.lines.quarantine(running.batch, running.quarantined)
                await self._store.leases.release(running.batch)
            running.close()
        await self._claims.close()
