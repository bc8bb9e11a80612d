"""
Runs batches: takes them to their ends, claims lines, and starts these while live traffic leaves room.

The parts share the batches of this process: :class:`Claims` claims batches, :class:`LineClaims` claims lines,
:class:`LineSchedule` picks lines, :class:`LineRunner` runs them, :class:`PartRunner` stores their results, and
:class:`BatchLifecycle` takes each batch from its validation to its end.
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
from triton_openai.batches.changes import Look
from triton_openai.batches.claims import Claims
from triton_openai.batches.congestion import CongestionMonitor
from triton_openai.batches.file_folder import Files, on_disk
from triton_openai.batches.first_tokens import FirstTokens
from triton_openai.batches.host import Host
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.leased import Phase, RunningPart
from triton_openai.batches.line_claims import LineClaims
from triton_openai.batches.line_limits import ModelLimits
from triton_openai.batches.line_runner import LineRunner
from triton_openai.batches.line_schedule import LineSchedule
from triton_openai.batches.notifications import Notifications
from triton_openai.batches.part_runner import PartRunner
from triton_openai.batches.quarantine import Quarantine
from triton_openai.batches.results import Results
from triton_openai.batches.slots import Slots
from triton_openai.errors import ServiceError
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
# A process that is not the poller looks at the tables by itself after so many times the usual seconds: the poller may
# be frozen.
_PATIENCE = 10


class BatchRunner:
    """
    Runs the batches in *files*, and their lines, together with other processes; *host* answers the lines.

    *first_tokens* shows how long live requests wait. *metrics* counts batches and lines.
    """

    def __init__(self, files: Files, host: Host, first_tokens: FirstTokens, metrics: Metrics) -> None:
        self._files = files
        self._store = files.store
        self._series = metrics.child
        self._woken = asyncio.Event()
        # Whether the tables are read in the next step, and whether others are to read them.
        self._looks = True
        self._announces = False
        self._next_watch = 0.0
        self._next_poll = 0.0
        self._next_sweep = 0.0
        self._changed = Look(changed=False, polls=False)
        self._sweeping: asyncio.Task[None] | None = None
        self._notifications = Notifications(files.store, self.wake)
        self._failing = False
        holder = os.urandom(16).hex()
        wake = self._woken.set
        self._batches: dict[str, RunningPart] = {}
        self._away = AwayModels(host, wake)
        self._limits = ModelLimits(host)
        self._congestion = CongestionMonitor(host, first_tokens, self._limits)
        results = Results(files, self._series)
        keys = KeyLimits(host)
        self._keys = keys
        quarantine = Quarantine(host, self._store.leases, holder, self._batches, self._away, self._limits, keys)
        self._schedule = LineSchedule(host, self._batches, self._away, self._limits, keys, quarantine)
        self._lines = LineRunner(host, files, self._away, keys, quarantine, wake)
        self._parts = PartRunner(files, host, self._batches, results, wake, self.wake)
        lifecycle = BatchLifecycle(files, host, holder, results, self._series, self._parts.add, self.wake)
        self._claims = Claims(files, host, holder, self._batches, lifecycle.run)
        self._slots = Slots(self._store.slots, host, holder, self._batches, self._limits)
        self._line_claims = LineClaims(
            files,
            host,
            holder,
            self._batches,
            self._claims,
            self._parts,
            self._away,
            self._limits,
            keys,
            self.wake,
        )

    def wake(self) -> None:
        """Read the tables now, here and in the other processes of this machine: this process has changed them."""
        self._looks = True
        self._announces = True
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                # Also before the first batch: what live requests wait without lines is the usual wait.
                self._congestion.check()
                if self._files.exist:
                    await self._step()
                self._resume()
            except Exception as error:  # noqa: BLE001 - the last resort: logged, and tried again
                self._pause(error)
                await asyncio.sleep(timing.FAILURE_PAUSE)
            await wait_any(self._woken, timeout=timing.WATCH)
            self._woken.clear()

    async def _step(self) -> None:
        """Note what has changed, claim batches and lines, and start lines."""
        now = time.monotonic()
        await self._watch(now)
        due = now >= self._next_poll
        if self._looks or due or self._claims.renewal_due:
            self._looks = False
            polls = due or self._changed.polls
            self._next_poll = now + self._poll_seconds()
            self._line_claims.reset()
            if await self._claims.update(polls=polls):
                # There may be another one.
                self._looks = True
                self._woken.set()
        swept = self._sweeping is None or self._sweeping.done()
        if self._changed.polls and now >= self._next_sweep and swept:
            self._next_sweep = now + timing.SWEEP
            # In a task, so that leases are renewed meanwhile, however many files there are.
            self._sweeping = asyncio.create_task(self._sweep())
        await self._slots.update()
        for batch_id, picked in (await self._schedule.pick()).items():
            self._lines.start(self._batches[batch_id], picked)
        if await self._line_claims.refill():
            self._woken.set()

    async def _watch(self, now: float) -> None:
        """Announce what this process has changed, and look for what others of this machine have."""
        changes = self._files.changes
        if self._announces:
            self._announces = False
            await on_disk(changes.announce)
        if now >= self._next_watch:
            self._next_watch = now + timing.WATCH
            self._changed = await on_disk(changes.look)
            self._looks = self._looks or self._changed.changed

    def _poll_seconds(self) -> float:
        """Return the seconds until the tables are read again without a reason."""
        if not self._changed.polls:
            return _PATIENCE * timing.POLL
        self._notifications.check()
        if self._notifications.active:
            return timing.NOTIFIED_POLL
        return timing.POLL

    async def _sweep(self) -> None:
        try:
            await self._files.sweep()
        except (ServiceError, OSError) as error:
            _log.warning("expired files are not deleted yet", reason=getattr(error, "reason", str(error)))
        except Exception:  # noqa: BLE001 - the last resort: logged, and tried again
            _log.exception("expired files are not deleted yet")

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
        paused = {running.batch.id for running in batches if running.phase is Phase.PAUSED or running.unreadable}
        paused |= {leased.batch.id for leased in self._claims.leased_batches.values() if leased.phase is Phase.PAUSED}
        number = len(paused)
        if self._failing:
            number = max(1, number)
        self._series(BATCHES_PAUSED).set(number)
        self._series(BATCH_RUNNING).set(self._limits.running)
        self._series(BATCH_MODELS_AWAY).set(len(self._away))
        self._series(BATCH_QUARANTINED).set(sum(len(running.quarantined) for running in batches))

    async def close(self) -> None:
        """Release all batches: lines that run wait again. Call it after :meth:`run` was cancelled."""
        await cancel(self._sweeping)
        await self._notifications.close()
        await self._away.close()
        await self._congestion.close()
        await self._parts.close()
        await self._claims.close()
        with suppress(ServiceError):
            if self._files.exist:
                await on_disk(self._files.changes.announce)
        self._files.changes.close()
