"""
Runs batches: validates them, begins their lines where live traffic leaves room, keeps the results, and ends them.

What survives the death of this process is on the disk. A result is appended to a part file, synced, and then its line
is marked with the place, so that a line is in the files once or not at all. Whoever takes over a batch goes on with the
lines that have no result.

A line that ran when a process or a Triton ended may be what ended it. Such lines are quarantined: they run again while
no others of the process do, an eighth of those that ran together at a time, and in the end alone. Of all processes, one
runs quarantined lines at a time; the others run normal lines meanwhile. Only a death while it ran alone counts against
a line.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import compress, count
from operator import not_
from typing import Any, NamedTuple, Protocol

import structlog

from triton_openai import errors, offload
from triton_openai.access.rate_limits import Reservation
from triton_openai.batches.away_models import AwayModels, Prober
from triton_openai.batches.file_folder import Files, on_disk, opened
from triton_openai.batches.inputs import InputReader, id_and_body
from triton_openai.batches.line_errors import Verdict, lacks_capacity, may_hang, verdict_on
from triton_openai.batches.line_limits import FirstTokens, Limit, is_open
from triton_openai.batches.results import Outcome, Results, rendered
from triton_openai.batches.running_batch import Attempts, Phase, RunningBatch
from triton_openai.config.tree import BatchesSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_store import (
    FAILED,
    SUCCEEDED,
    Batch,
    BatchError,
    Done,
    LeaseLost,
    Line,
    StoredFile,
    failed_write,
    next_group,
)
from triton_openai.tasks import cancel, wait_any
from triton_openai.telemetry.instruments import (
    BATCH_LIMIT,
    BATCH_LINES,
    BATCH_MODELS_AWAY,
    BATCH_QUARANTINED,
    BATCH_RUNNING,
    BATCHES_ENDED,
    BATCHES_PAUSED,
)
from triton_openai.telemetry.metrics import Metrics

_log = structlog.get_logger(__name__)
# The tables are looked at this often, and leases renewed so many times while they last.
_POLL = 1.0
_RENEWALS = 4
# Batches of one owner, and of all, that a process runs at the same time.
_OWNERS_BATCHES = 16
_BATCHES = 256
# Lines that are looked at together, and are added to the tables at once.
_WINDOW = 1000
_CHUNK = 1000
# Of a batch; with lines for models that are away, which are read over.
_MAX_WINDOW = 10_000
# Results are kept together: those of so many seconds, or so many.
_GROUP_SECONDS = 0.2
_GROUP = 100
# A line is not begun again once so many processes, or so many Tritons, have ended while it ran alone. To start a Triton
# takes minutes, so that fewer of those have to.
_MAX_PROCESSES = 3
_MAX_TRITONS = 2
# Where lines turn out not to be what ends them, others may run once more for each of those, so often at most.
_MAX_EXONERATED = 3
# A line whose model answers others is tried so often again.
_RETRIES = 3
_RETRY_SECONDS = 1.0
_LONGEST_RETRY = 60.0
# Lines of a batch for one model that wait for another attempt; no others begin then.
_MAX_RETRYING = 32
_CANCEL_SECONDS = 600.0
# Before what failed because of the disk or the tables is tried again.
_TROUBLE_SECONDS = 2.0
_SWEEP_SECONDS = 600.0


class Host(Prober, Protocol):
    """The service that answers the lines."""

    @property
    def settings(self) -> BatchesSettings:
        """The settings now."""

    @property
    def stopping(self) -> bool:
        """Whether nothing new may begin."""

    @property
    def most_running(self) -> int:
        """How many lines of one model may run in this process."""

    @property
    def longest_line(self) -> int:
        """The bytes that a line may have."""

    def problem(self, batch: Batch) -> BatchError | None:
        """Return why *batch* may not run any more: its key has lost a right that its lines need."""

    def check_line(self, line: bytes) -> None:
        """Raise :class:`InvalidRequest` for a line that exceeds the limits of a request's JSON. Runs in a thread."""

    def room(self, target: str, running: int) -> bool:
        """Return whether live traffic leaves room for another line, where *running* are there."""

    async def check(self, batch: Batch, model: str, *, brings_template: bool) -> None:
        """
        Raise :class:`InvalidRequest` or :class:`ConfigurationError` if a batch cannot ask *model*.

        *brings_template* is for lines with a chat template of their own. Raises :class:`UpstreamUnavailable` if that is
        not known at the moment.
        """

    async def admit(self, owner: str) -> Reservation | None:
        """
        Count a line of *owner* against the limits of its key; ``None`` for a key without limits.

        The line may not begin if the reservation has a refusal. Raises :class:`ServiceError` if nobody can tell.
        """

    async def answer(self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None) -> Outcome:
        """Return the answer to a line, and close its *reservation*."""

    def refusal(self, batch: Batch, error: ServiceError) -> Outcome:
        """Return *error* as the answer to a line."""


class _Admission(NamedTuple):
    """Whether the limits of a key admit a line, and what it uses of them, if there are any."""

    admitted: bool
    reservation: Reservation | None


class BatchRunner:
    """Runs the batches in *files* that nobody else runs, and counts in *metrics*; *host* answers their lines."""

    def __init__(self, files: Files, host: Host, first_tokens: FirstTokens, metrics: Metrics | None = None) -> None:
        self._files = files
        self._store = files.store
        self._host = host
        self._first_tokens = first_tokens
        self._series = (metrics or Metrics(Worker())).child
        self._holder = os.urandom(16).hex()
        self._held: dict[str, RunningBatch] = {}
        self._limits: dict[str, Limit] = {}
        # When each owner that has used up the limits of its key may begin lines again.
        self._due: dict[str, float] = {}
        # When each owner had its last turn.
        self._turns: dict[str, int] = {}
        self._order = count()
        self._woken = asyncio.Event()
        self._away = AwayModels(host, self._woken.set)
        self._results = Results(files, self._series)
        # Whether this process has the lease to run quarantined lines, and whether some of them run.
        self._has_quarantine = False
        self._isolated = False
        self._next_poll = self._next_renewal = self._next_sweep = 0.0
        self._lock = -1
        self._in_trouble = False
        self._sweeping: asyncio.Task[None] | None = None

    def wake(self) -> None:
        """Look at the tables now: a batch was made or cancelled."""
        self._next_poll = 0.0
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            try:
                if self._files.exist:
                    await self._look()
                    await self._begin()
                self._show(0)
                if self._in_trouble:
                    self._in_trouble = False
                    _log.info("batches go on")
            except Exception as error:  # noqa: BLE001 - the last resort: logged, and the batches go on
                expected = isinstance(error, ServiceError)
                if not (expected and self._in_trouble):
                    _log.warning("batches wait", reason=getattr(error, "reason", repr(error)), exc_info=not expected)
                self._in_trouble = True
                self._show(1)
                await asyncio.sleep(_TROUBLE_SECONDS)
            await wait_any(self._woken, timeout=_POLL)
            self._woken.clear()

    def _show(self, paused: int) -> None:
        """Set the gauges, of which one says how many batches are *paused*, at least."""
        most = self._host.most_running
        for target, limit in self._limits.items():
            self._series(BATCH_LIMIT, target).set(min(limit.allowed, most))
        self._series(BATCH_RUNNING).set(sum(limit.running for limit in self._limits.values()))
        held = self._held.values()
        self._series(BATCHES_PAUSED).set(max(paused, sum(one.phase is Phase.PAUSED for one in held)))
        self._series(BATCH_MODELS_AWAY).set(len(self._away))
        self._series(BATCH_QUARANTINED).set(sum(len(one.quarantined) for one in held))

    async def close(self) -> None:
        """Give all batches back: lines that run wait again. Call it after :meth:`run` was cancelled."""
        if self._sweeping is not None:
            await cancel(self._sweeping)
        await self._away.close()
        for held in list(self._held.values()):
            await cancel(*held.running.values(), *([] if held.task is None else [held.task]))
            with suppress(ServiceError, LeaseLost):
                await self._results.keep(held, at_once=True)
                # What was about to be noted for them may have been cancelled.
                await self._store.quarantine(held.batch, held.quarantined)
                await self._store.release(held.batch)
            held.close()
        if self._lock >= 0:
            os.close(self._lock)
            with suppress(ServiceError):
                # One may have been claimed by what was cancelled.
                await self._store.bury(self._holder)
                await self._files.forget(self._holder)

    # Leases

    async def _look(self) -> None:
        now = time.monotonic()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            # Leases are renewed meanwhile, however many files there are.
            self._sweeping = asyncio.create_task(self._sweep())
        if now < self._next_poll:
            return
        self._next_poll = now + _POLL
        if self._held and now >= self._next_renewal:
            self._next_renewal = now + self._host.settings.lease / _RENEWALS
            await self._store.renew(self._holder, self._host.settings.lease)
        slowest = self._host.settings.live_first_token
        if slowest is not None and self._first_tokens.slowest() > slowest:
            for limit in self._limits.values():
                limit.overloaded(now)
        if self._held:
            found = await self._store.held(self._holder)
        else:
            found = {}
        for batch_id, held in list(self._held.items()):
            batch = found.get(batch_id)
            if batch is None or batch.generation != held.batch.generation:
                # Of one that has ended its own task is about to hear, or that another process has it.
                if held.phase is not Phase.ENDING:
                    self._lose(held)
            elif batch.status == "cancelling" and held.batch.status in ("validating", "in_progress"):
                # Nothing else of a batch is changed by others.
                held.batch.status = batch.status
                held.batch.times = batch.times
                held.woken.set()
        if not self._host.stopping:
            await self._claim()

    async def _sweep(self) -> None:
        try:
            await self._files.sweep()
        except (ServiceError, OSError) as error:
            _log.warning("files that have expired are not deleted yet", reason=getattr(error, "reason", str(error)))

    async def _claim(self) -> None:
        """Take one more batch. Others are left to other processes for a while."""
        if len(self._held) >= _BATCHES:
            return
        if self._lock < 0:
            await self._files.check()
            self._lock = await opened(on_disk(self._files.hold, self._holder))
        for holder in await self._store.holders():
            if holder != self._holder and await on_disk(self._files.has_died, holder):
                _log.warning("a process that ran batches has died: its batches are taken over")
                await self._store.bury(holder)
                # Last: whoever finds no lock has to wait until the leases have ended.
                await self._files.forget(holder)
        owners = [held.batch.owner for held in self._held.values()]
        full = {owner for owner in owners if owners.count(owner) >= _OWNERS_BATCHES}
        lease = self._host.settings.lease
        max_running = self._host.most_running
        batch = await self._store.claim(self._holder, lease, max_running=max_running, full=full)
        if batch is None:
            return
        if (older := self._held.get(batch.id)) is not None:
            self._lose(older)
        held = self._held[batch.id] = RunningBatch(batch)
        held.task = asyncio.create_task(self._attend(held))

    def _lose(self, held: RunningBatch) -> None:
        """Leave a batch to whoever has it now."""
        _log.warning("another process has taken a batch over", batch=held.batch.id)
        self._forget(held)
        for task in filter(None, (held.task, *held.running.values())):
            task.cancel()

    def _forget(self, held: RunningBatch) -> None:
        if self._held.get(held.batch.id) is held:
            del self._held[held.batch.id]

    # Lines

    async def _begin(self) -> None:
        """Begin lines, owner by owner, while there is room for one."""
        settings = self._host.settings
        if self._host.stopping or settings.paused or not is_open(settings.hours):
            return
        now = time.monotonic()
        for held in self._held.values():
            held.put_back_due(now)
        self._away.look(self._held.values())
        self._due = {owner: due for owner, due in self._due.items() if due > now}
        if await self._begin_quarantined():
            return
        by_owner: dict[str, list[RunningBatch]] = {}
        for held in sorted(self._held.values(), key=lambda held: held.batch.created):
            if held.batch.owner not in self._due:
                by_owner.setdefault(held.batch.owner, []).append(held)
        self._turns = {owner: self._turns.get(owner, -1) for owner in by_owner}
        owners = deque(sorted(by_owner, key=self._turns.__getitem__))
        picked: dict[str, list[tuple[Line, Limit]]] = {}
        while owners:
            owner = owners.popleft()
            for held in by_owner[owner]:
                if (line := self._next(held)) is not None:
                    picked.setdefault(held.batch.id, []).append(line)
                    self._turns[owner] = next(self._order)
                    owners.append(owner)
                    break
        await asyncio.gather(*(self._start(self._held[batch_id], lines) for batch_id, lines in picked.items()))

    async def _begin_quarantined(self) -> bool:
        """
        Begin the next quarantined lines, if nothing else of this process runs; return whether no other lines may begin.

        While another process has the lease, other lines begin: as many as there is room for, then the lease is asked
        for again when they have ended.
        """
        # What has an answer is kept first: no line has to answer for another one.
        busy = any(limit.running for limit in self._limits.values())
        busy |= any(held.done and held.phase is Phase.RUNNING for held in self._held.values())
        self._isolated = self._isolated and busy
        if self._isolated:
            return True
        if any(self._host.target(line.model) is not None for _, line in self._candidates()):
            if busy:
                return True
            # Each time: the lease may have ended while this process was frozen.
            self._has_quarantine = await self._store.enter_quarantine(self._holder, self._host.settings.lease)
            if not self._has_quarantine:
                # Another process runs its own. Once the lines that begin now have ended, this one asks again.
                return False
            await self._begin_group()
        if self._has_quarantine and not self._isolated:
            await self._store.leave_quarantine(self._holder)
            self._has_quarantine = False
        return self._isolated

    def _candidates(self) -> list[tuple[RunningBatch, Line]]:
        """Return the quarantined lines that may begin next: fewest deaths first, then the largest groups."""
        found = [
            (held, line)
            for held in self._held.values()
            if held.begins_lines and held.batch.owner not in self._due
            for line in held.candidates(self._away)
        ]
        return sorted(found, key=lambda one: (one[1].deaths, -one[1].max_group))

    async def _begin_group(self) -> None:
        """Begin quarantined lines, as many as may run together."""
        size = math.inf
        picked: dict[str, list[tuple[Line, Limit]]] = {}
        for held, line in self._candidates():
            size = min(size, line.max_group)
            if sum(map(len, picked.values())) >= size:
                break
            limit = self._limit(line.model)
            if limit is not None:
                limit.running += 1
                held.quarantined.remove(line)
                picked.setdefault(held.batch.id, []).append((line, limit))
        self._isolated = bool(picked)
        await asyncio.gather(*(self._start(self._held[batch_id], lines) for batch_id, lines in picked.items()))

    def _next(self, held: RunningBatch) -> tuple[Line, Limit] | None:
        """Return a line that may begin, with the limit that it counts in."""
        if not held.begins_lines or len(held.done) > 2 * _GROUP:
            return None
        retrying = Counter(line.model for _, _, line in held.retrying)
        for model, lines in held.waiting.items():
            if not lines or model in self._away or retrying[model] >= _MAX_RETRYING:
                continue
            if (limit := self._limit(model)) is not None:
                limit.running += 1
                return lines.popleft(), limit
        return None

    def _limit(self, model: str) -> Limit | None:
        """Return what limits lines for *model*, if it has room for one."""
        target = self._host.target(model)
        most = self._host.most_running
        if target is None:
            return None
        limit = self._limits.get(target) or self._limits.setdefault(target, Limit(most))
        if limit.has_room(most) and self._host.room(target, limit.running):
            return limit
        return None

    async def _start(self, held: RunningBatch, picked: Sequence[tuple[Line, Limit]]) -> None:
        """Begin those of the *picked* lines that the limits of their key admit; the others wait again."""
        answers = await asyncio.gather(*(self._admit(held.batch.owner) for _ in picked))
        admitted = [admission.admitted for admission in answers]
        self._put_back(held, list(compress(picked, map(not_, admitted))))
        picked = list(compress(picked, admitted))
        reservations = [admission.reservation for admission in compress(answers, admitted)]
        if held.batch.status != "in_progress":
            # It was cancelled or has ended while its lines were asked about.
            self._release(reservations)
            self._put_back(held, picked)
            return
        if not picked:
            return
        numbers = [line.number for line, _ in picked]
        try:
            await self._store.begin(held.batch, numbers)
            contents = await on_disk(lambda: [os.pread(held.input, line.length, line.place) for line, _ in picked])
        except Exception as error:
            self._release(reservations)
            if not isinstance(error, ServiceError | LeaseLost):
                with suppress(ServiceError, LeaseLost):
                    await self._store.stopped(held.batch, numbers)
            # Last: what waits may begin, and what has begun must not be marked.
            self._put_back(held, picked)
            if isinstance(error, LeaseLost):
                self._lose(held)
                return
            if self._held.get(held.batch.id) is not held:
                # It has ended meanwhile, and its files are closed.
                return
            if isinstance(error, OSError):
                raise failed_write(error) from error
            raise
        for (line, limit), content, reservation in zip(picked, contents, reservations, strict=True):
            task = asyncio.create_task(self._run(held, line, content, limit, reservation))
            held.running[line.number] = task
            task.add_done_callback(partial(self._left, held, line.number, limit, reservation))

    async def _admit(self, owner: str) -> _Admission:
        """Ask the limits of *owner*'s key for another line. If they refuse it, the owner waits."""
        try:
            reservation = await self._host.admit(owner)
        except ServiceError as error:
            wait = error.retry_after or _POLL
        except Exception:  # noqa: BLE001 - the last resort: logged, and other owners go on
            _log.exception("the limits of a key cannot be asked")
            wait = _TROUBLE_SECONDS
        else:
            if reservation is None or reservation.refusal is None:
                return _Admission(True, reservation)
            wait = reservation.refusal.retry_after or _POLL
        self._due[owner] = time.monotonic() + wait
        return _Admission(False, None)

    @staticmethod
    def _release(reservations: Sequence[Reservation | None]) -> None:
        for reservation in reservations:
            if reservation is not None:
                reservation.close(0)

    @staticmethod
    def _put_back(held: RunningBatch, picked: Sequence[tuple[Line, Limit]]) -> None:
        """Let *picked* lines, which have not begun, wait again where they were."""
        for line, limit in reversed(picked):
            limit.leave()
            held.put_back(line)

    async def _run(
        self, held: RunningBatch, line: Line, content: bytes, limit: Limit, reservation: Reservation | None
    ) -> None:
        """Have a line answered, and keep its result, or let it wait for another attempt."""
        batch = held.batch
        began = time.monotonic()
        custom_id = ""
        try:
            custom_id, body = await offload.run(id_and_body, content, cost=offload.json_cost(len(content)))
            outcome: Outcome | None
            fatal = _fatal_error(batch, line)
            if fatal is not None:
                outcome = self._host.refusal(batch, fatal)
            else:
                outcome = await self._host.answer(batch, custom_id, body, reservation)
                outcome = await self._result_of(held, line, outcome, limit, began)
            if outcome is not None:
                await self._add_result(held, line, custom_id, outcome)
        except Exception:  # noqa: BLE001 - the last resort: logged, and the line is tried again
            _log.exception("a line failed", batch=batch.id, line=line.number)
            await self._after_mistake(held, line, custom_id)

    async def _after_mistake(self, held: RunningBatch, line: Line, custom_id: str) -> None:
        """Have a line that the service failed to run wait for another attempt; after the last one, the line fails."""
        error = ServiceError(f"The service failed to run line {line.number} of the input.")
        if self._retry(held, line, error, counts=True):
            with suppress(ServiceError, LeaseLost):
                await self._store.stopped(held.batch, [line.number])
            return
        # Without an id if the input cannot be read.
        await self._add_result(held, line, custom_id, self._host.refusal(held.batch, error))

    @staticmethod
    async def _add_result(held: RunningBatch, line: Line, custom_id: str, outcome: Outcome) -> None:
        """Have *outcome* kept as the result of a line."""
        if outcome.error is None:
            state = SUCCEEDED
        else:
            state = FAILED
        cost = offload.BYTE * len(outcome.body)
        data = await offload.run(rendered, held.batch, line.number, custom_id, outcome, cost=cost)
        exonerated = state == SUCCEEDED and line.deaths > 0
        held.done.append((Done(line.number, state, -1, len(data), outcome.usage, exonerated), data))

    def _left(self, held: RunningBatch, number: int, limit: Limit, reservation: Reservation | None, _: object) -> None:
        """Count a line out. Not where it runs: a task that is cancelled before it has begun never does."""
        if reservation is not None:
            reservation.close(0)
            # A key that may have a few requests at the same time has room for another one now.
            if self._due.get(held.batch.owner, 0.0) <= time.monotonic() + _POLL:
                self._due.pop(held.batch.owner, None)
        if self._isolated or len(held.done) >= _GROUP:
            held.full.set()
        limit.leave()
        held.running.pop(number, None)
        self._woken.set()
        held.woken.set()

    async def _result_of(
        self, held: RunningBatch, line: Line, outcome: Outcome, limit: Limit, began: float
    ) -> Outcome | None:
        """Return the result of a line that had *outcome*; ``None`` if the line waits for another attempt."""
        error = outcome.error
        if error is None:
            verdict = Verdict.ENDS
        else:
            verdict = verdict_on(error)
        if error is None or verdict is Verdict.ENDS:
            limit.ended(self._host.most_running)
            return outcome
        if lacks_capacity(error):
            limit.overloaded(began)
        if (
            verdict is Verdict.DOUBTFUL
            and not self._host.stopping
            and not await self._away.answers(held.batch, line.model)
        ):
            # A model that did not end the request itself may hang because of it.
            if may_hang(error):
                verdict = Verdict.DIED
            else:
                verdict = Verdict.AWAY
        if self._host.stopping:
            # No line begins any more: whoever takes the batch over begins this one.
            held.put_back(line)
        elif verdict is Verdict.DIED:
            await self._after_death(held, line, error, limit, began)
            return None
        elif verdict is Verdict.AWAY:
            # The line has a wait of its own, too: the model may be away for this line alone.
            self._retry(held, line, error, counts=False)
            self._away.pause(line.model, error.reason)
        elif not self._retry(held, line, error, counts=verdict is Verdict.DOUBTFUL):
            return outcome
        with suppress(ServiceError, LeaseLost):
            await self._store.stopped(held.batch, [line.number])
        return None

    def _retry(self, held: RunningBatch, line: Line, error: ServiceError, *, counts: bool) -> bool:
        """Let a line wait for a while, and return ``True``; not if the attempt *counts* and was the last one."""
        before = held.attempts.pop(line.number, Attempts())
        after = Attempts(before.failed + counts, before.waits + 1)
        if after.failed > _RETRIES:
            return False
        held.attempts[line.number] = after
        wait = min(_RETRY_SECONDS * 5.0**before.waits, _LONGEST_RETRY)
        if isinstance(error, errors.ServiceOverloaded):
            # Live requests took the room meanwhile. The line begins again where there is room.
            wait = _RETRY_SECONDS
        held.retry(line, max(wait, min(error.retry_after or 0.0, _LONGEST_RETRY)))
        return True

    async def _after_death(
        self, held: RunningBatch, line: Line, error: ServiceError, limit: Limit, began: float
    ) -> None:
        """Quarantine a line whose Triton ended while it ran."""
        ran = limit.died(began)
        if line.max_group == 1:
            line = line._replace(triton_deaths=line.triton_deaths + 1)
        else:
            line = line._replace(max_group=next_group(ran))
        _log.warning(
            "Triton ended while a line ran",
            batch=held.batch.id,
            line=line.number,
            deaths=line.deaths,
            max_group=line.max_group,
            reason=error.reason,
        )
        held.quarantined.append(line)
        self._away.pause(line.model, error.reason)
        with suppress(ServiceError, LeaseLost):
            await self._store.quarantine(held.batch, [line])

    # The life of a batch

    async def _attend(self, held: RunningBatch) -> None:
        """Take a batch from its beginning to its end."""
        try:
            while held.batch.open:
                try:
                    await self._advance(held)
                    if held.phase is Phase.PAUSED:
                        held.phase = Phase.RUNNING
                        _log.info("a batch goes on", batch=held.batch.id)
                        self._woken.set()
                except FileNotFoundError:
                    text = "The input file is not there any more."
                    held.problems = [BatchError(code="input_file_missing", message=text)]
                except (OSError, ServiceError) as error:
                    if held.phase is not Phase.PAUSED:
                        reason = getattr(error, "reason", str(error))
                        _log.warning("a batch is paused", batch=held.batch.id, reason=reason)
                        held.phase = Phase.PAUSED
                    await asyncio.sleep(_TROUBLE_SECONDS)
                except LeaseLost:
                    self._lose(held)
                    return
                except Exception:  # noqa: BLE001 - the last resort: logged, and the batch ends
                    _log.exception("a batch failed", batch=held.batch.id)
                    held.problems = [BatchError(code="server_error", message="The service failed to run the batch.")]
                    await asyncio.sleep(_TROUBLE_SECONDS)
        finally:
            self._forget(held)
            if not self._host.stopping:
                held.close()

    async def _advance(self, held: RunningBatch) -> None:
        """Do what is next."""
        batch = held.batch
        if held.problems:
            batch.outcome, batch.problems = "failed", list(held.problems)
            await cancel(*held.running.values())
            await self._end(held, {})
            return
        if held.input < 0:
            held.input = await self._files.open_input(batch)
        if batch.outcome:
            await self._end(held, await self._results.make_files(held))
            return
        if "validated_at" not in batch.times:
            problem = self._host.problem(batch)
            if problem is None:
                await self._validate(held)
            else:
                held.problems = [problem]
            return
        await self._keep(held)
        batch = held.batch
        now = time.time()
        outcome = ""
        if self._host.problem(batch) is not None:
            outcome = "failed"
        elif batch.status == "cancelling":
            outcome = "cancelled"
        elif now >= batch.expires:
            outcome = "expired"
        if outcome:
            held.waiting.clear()
            held.quarantined.clear()
            held.retrying.clear()
            patient = outcome == "cancelled" and now < batch.times["cancelling_at"] + _CANCEL_SECONDS
            if not patient:
                await cancel(*held.running.values())
            if not held.running:
                await self._keep(held, at_once=True)
                await self._decide(held, outcome)
                return
        elif held.more and held.ready(self._away) < _WINDOW // 2 and held.window < _MAX_WINDOW:
            await self._refill(held)
            self._woken.set()
        elif batch.succeeded + batch.failed == batch.total:
            await self._decide(held, "completed")
            return
        await wait_any(held.woken, timeout=_POLL)
        held.woken.clear()
        if held.done and (held.running or held.window) and len(held.done) < _GROUP:
            await wait_any(held.full, timeout=_GROUP_SECONDS)

    async def _validate(self, held: RunningBatch) -> None:
        batch = held.batch
        await self._store.clear_lines(batch)
        most = self._host.settings.max_requests
        longest = self._host.longest_line
        make = partial(InputReader, held.input, batch, most=most, longest=longest, check=self._host.check_line)
        with closing(await asyncio.to_thread(make)) as reader:
            checked = 0
            while lines := await asyncio.to_thread(reader.read, _CHUNK):
                for (model, brings_template), number in list(reader.asked.items())[checked:]:
                    try:
                        await self._host.check(batch, model, brings_template=brings_template)
                    except (errors.UpstreamUnavailable, errors.InvalidRequest, errors.ConfigurationError) as error:
                        if isinstance(error, errors.UpstreamUnavailable) or error.retry_after is not None:
                            # What ends in any case does not wait for Triton.
                            if batch.status != "cancelling" and time.time() < batch.expires:
                                raise
                        else:
                            reader.report(error.code, error.message, "body.model", number)
                checked = len(reader.asked)
                if not reader.problems:
                    await self._store.add_lines(batch, lines)
        if reader.problems:
            held.problems = reader.problems
            return

        def begin(found: Batch) -> None:
            found.total, found.times["validated_at"] = reader.total, int(time.time())
            if len(reader.models) == 1:
                found.model = next(iter(reader.models))
            else:
                found.model = None
            if found.status == "validating":
                found.enter("in_progress")

        await self._change(held, begin)

    async def _change(self, held: RunningBatch, change: Callable[[Batch], None]) -> None:
        batch = await self._store.change(held.batch.id, change, generation=held.batch.generation)
        assert batch is not None
        held.batch = batch

    async def _refill(self, held: RunningBatch) -> None:
        """Read the next lines; those that begin alike come together."""
        lines = await self._store.waiting(held.batch, held.last, _WINDOW)
        held.more = len(lines) == _WINDOW
        first: dict[int, int] = {}
        for line in lines:
            held.last = line.number
            first.setdefault(line.prefix, line.number)

        known = bool(held.quarantined)
        for line in sorted(lines, key=lambda line: (first[line.prefix], line.number)):
            if line.max_group:
                held.quarantined.append(line)
            else:
                held.waiting.setdefault(line.model, deque()).append(line)
        for model in [model for model, queue in held.waiting.items() if not queue]:
            del held.waiting[model]
        if held.quarantined and not known:
            count = len(held.quarantined)
            _log.warning("lines that ran when a process or Triton ended run alone", batch=held.batch.id, lines=count)

    async def _keep(self, held: RunningBatch, *, at_once: bool = False) -> None:
        if await self._results.keep(held, at_once=at_once):
            self._woken.set()

    async def _decide(self, held: RunningBatch, outcome: Any) -> None:
        problem = self._host.problem(held.batch)

        def decide(found: Batch) -> None:
            if found.status == "cancelling" and outcome == "completed":
                found.outcome = "cancelled"
            else:
                found.outcome = outcome
            if found.status != "cancelling":
                found.enter("finalizing")
            if outcome == "failed":
                if problem is None:
                    found.problems = []
                else:
                    found.problems = [problem]
            never = found.total - found.succeeded - found.failed
            if found.succeeded or (found.kind == "anthropic" and found.total):
                found.output = f"file-{os.urandom(16).hex()}"
            if found.kind == "openai" and (found.failed or never):
                found.errors = f"file-{os.urandom(16).hex()}"

        await self._change(held, decide)

    async def _end(self, held: RunningBatch, sizes: Mapping[str, int]) -> None:
        """End a batch with its files, of which *sizes* are known."""
        batch = held.batch
        now = time.time()
        seconds = batch.output_seconds or self._files.settings.max_age * 86_400
        names = {batch.output: "output", batch.errors: "error"}
        files = [
            StoredFile(
                id=file_id,
                owner=batch.owner,
                purpose="batch_output",
                filename=f"{batch.id}_{names[file_id]}.jsonl",
                bytes=size,
                created=now,
                expires=now + seconds,
            )
            for file_id, size in sizes.items()
        ]

        def end(found: Batch) -> None:
            found.outcome = batch.outcome
            found.problems = batch.problems
            if found.outcome:
                found.enter(found.outcome)

        held.phase = Phase.ENDING
        done = held.batch = await self._store.finish(batch, files, end)
        self._forget(held)
        self._series(BATCHES_ENDED, done.status).inc()
        self._series(BATCH_LINES, "never_ran").inc(done.total - done.succeeded - done.failed)
        counts = {"total": done.total, "completed": done.succeeded, "failed": done.failed}
        _log.info("batch has ended", batch=done.id, status=done.status, **counts)
        with suppress(ServiceError):
            await self._files.clear(batch)


def _fatal_error(batch: Batch, line: Line) -> ServiceError | None:
    """Return the result of a *line* that ends whatever runs it; ``None`` for a line that may run (again)."""
    further = min(batch.exonerated, _MAX_EXONERATED)
    if line.triton_deaths >= _MAX_TRITONS + further:
        times = line.triton_deaths
        what = "Triton"
    elif line.process_deaths >= _MAX_PROCESSES + further:
        times = line.process_deaths
        what = "The service"
    else:
        return None
    message = f"{what} ended {times} times while the request ran as the only one of a batch in its process."
    if what == "Triton":
        return errors.UpstreamLost(message)
    return ServiceError(message, code="server_error")
