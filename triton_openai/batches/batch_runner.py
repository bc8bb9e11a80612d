"""
Runs batches: validates them, begins their lines where live traffic leaves room, keeps the results, and ends them.

What survives the death of this process is on the disk. A result is appended to a part file, synced, and then its line
is marked with the place, so that a line is in the files once or not at all. A line that has begun has an attempt
counted before. Whoever takes over a batch goes on with the lines that have no result.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from triton_openai import errors, offload
from triton_openai.access.rate_limits import Reservation
from triton_openai.batches.file_folder import Files, Writing, on_disk, opened, write_at
from triton_openai.batches.inputs import InputReader, id_and_body
from triton_openai.batches.line_limits import FirstTokens, Limit, is_open
from triton_openai.config.tree import BatchesSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_store import (
    FAILED,
    SUCCEEDED,
    Batch,
    BatchError,
    BatchUsage,
    Done,
    LeaseLost,
    Line,
    Result,
    StoredFile,
)
from triton_openai.tasks import cancel, wait_any
from triton_openai.telemetry.metrics import (
    BATCH_LIMIT,
    BATCH_LINES,
    BATCH_RUNNING,
    BATCHES_ENDED,
    BATCHES_PAUSED,
    Metrics,
)

_log = structlog.get_logger(__name__)
# The tables are looked at this often, and leases renewed so many times while they last.
_POLL, _RENEWALS = 1.0, 4
# Batches of one owner, and of all, that a process runs at the same time.
_OWNERS_BATCHES, _BATCHES = 16, 256
# Lines that are looked at together, and are added to the tables at once.
_WINDOW, _CHUNK = 1000, 1000
# Results are kept together: those of so many seconds, or so many.
_GROUP_SECONDS, _GROUP = 0.2, 100
# Results that become safe from the loss of this machine together, though no checkpoint is due: bytes, or lines.
_MOST_UNSAFE, _MOST_UNSAFE_LINES = 64 * 1024 * 1024, 10_000
# A line is not begun again once so many processes have died while it ran, or it was refused so often.
_ATTEMPTS, _RETRIES = 3, 3
_RETRY_SECONDS, _LONGEST_RETRY = 1.0, 60.0
# Lines of a batch that wait for another attempt; no others begin then.
_MOST_RETRYING = 32
_CANCEL_SECONDS = 600.0
# Before what failed because of the disk or the tables is tried again.
_TROUBLE_SECONDS = 2.0
_SWEEP_SECONDS = 600.0
_RETRIED = frozenset({429, 502, 503, 504})
_OVERLOADED = frozenset({429, 503, 504})
# What Anthropic's API calls it, and code and message of OpenAI's.
_NEVER_RAN = {
    "cancelled": ("canceled", "batch_cancelled", "The batch was cancelled before this request could be executed."),
    "expired": ("expired", "batch_expired", "This request could not be executed before the completion window expired."),
    "failed": ("errored", "batch_failed", "The batch failed before this request could be executed."),
}


class Outcome(NamedTuple):
    """The answer to a line."""

    status: int
    #: JSON.
    body: bytes
    request_id: str = ""
    #: Why there is no better answer.
    error: ServiceError | None = None
    usage: BatchUsage = BatchUsage()


class Host(Protocol):
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

    def target(self, model: str) -> str | None:
        """Return the Triton model behind the name *model*; ``None`` while it is not served."""

    def room(self, target: str, running: int) -> bool:
        """Return whether live traffic leaves room for another line, where *running* are there."""

    async def check(self, batch: Batch, model: str) -> None:
        """Raise :class:`ModelNotFound` or :class:`UpstreamUnavailable` if a batch cannot ask *model*."""

    async def admit(self, owner: str) -> Reservation | None:
        """
        Count a line of *owner* against the limits of its key; ``None`` for a key without limits.

        The line may not begin if the reservation has a refusal. Raises :class:`ServiceError` if nobody can tell.
        """

    async def answer(self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None) -> Outcome:
        """Return the answer to a line, and close its *reservation*."""


class _Held:
    """A batch that this process runs."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.waiting: dict[str, deque[Line]] = {}
        #: Lines that are to be tried again, with their times.
        self.retrying: list[tuple[float, int, Line]] = []
        self.tries: dict[int, int] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        #: Results that are not written yet: their places are not known.
        self.done: list[tuple[Done, bytes]] = []
        #: The last line that was read, and whether there are more.
        self.last, self.more = 0, True
        self.input = self.output = -1
        #: The bytes of the part, and those that rows tell of, since when; and results of which no row tells yet.
        self.size, self.safe, self.safe_at = 0, 0, time.monotonic()
        self.written: list[Done] = []
        #: Whether results are to become safe though no checkpoint is due.
        self.urgent = False
        self.woken, self.full = asyncio.Event(), asyncio.Event()
        #: Whether its disk or database fails, and whether the tables may say already that it has ended.
        self.in_trouble = self.ending = False
        #: Why it can only fail.
        self.problems: Sequence[BatchError] = ()
        self.task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close its files."""
        for descriptor in (self.input, self.output):
            if descriptor >= 0:
                os.close(descriptor)
        self.input = self.output = -1

    @property
    def window(self) -> int:
        """The lines that were read and have not begun."""
        return sum(map(len, self.waiting.values()))

    @property
    def idle(self) -> bool:
        """Whether it has no lines that run or wait."""
        return not (self.running or self.window or self.retrying or self.more)


class BatchRunner:
    """Runs the batches in *files* that nobody else runs, and counts in *metrics*; *host* answers their lines."""

    def __init__(self, files: Files, host: Host, first_tokens: FirstTokens, metrics: Metrics | None = None) -> None:
        self._files, self._store, self._host, self._first_tokens = files, files.store, host, first_tokens
        self._series = (metrics or Metrics(Worker())).child
        self._holder = os.urandom(16).hex()
        self._held: dict[str, _Held] = {}
        self._limits: dict[str, Limit] = {}
        # When each owner that has used up the limits of its key may begin lines again.
        self._due: dict[str, float] = {}
        # When each owner had its last turn.
        self._turns: dict[str, int] = {}
        self._order = count()
        self._woken = asyncio.Event()
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
        self._series(BATCHES_PAUSED).set(max(paused, sum(held.in_trouble for held in self._held.values())))

    async def close(self) -> None:
        """Give all batches back: lines that run wait again. Call it after :meth:`run` was cancelled."""
        if self._sweeping is not None:
            await cancel(self._sweeping)
        for held in list(self._held.values()):
            await cancel(*held.running.values(), *([] if held.task is None else [held.task]))
            with suppress(ServiceError, LeaseLost):
                await self._keep(held, at_once=True)
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
        found = await self._store.held(self._holder) if self._held else {}
        for batch_id, held in list(self._held.items()):
            batch = found.get(batch_id)
            if batch is None or batch.generation != held.batch.generation:
                # Of one that has ended its own task is about to hear, or that another process has it.
                if not held.ending:
                    self._lose(held)
            elif batch.status == "cancelling" and held.batch.status in ("validating", "in_progress"):
                # Nothing else of a batch is changed by others.
                held.batch.status, held.batch.times = batch.status, batch.times
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
        batch = await self._store.claim(self._holder, self._host.settings.lease, full=full)
        if batch is None:
            return
        if (older := self._held.get(batch.id)) is not None:
            self._lose(older)
        held = self._held[batch.id] = _Held(batch)
        held.task = asyncio.create_task(self._attend(held))

    def _lose(self, held: _Held) -> None:
        """Leave a batch to whoever has it now."""
        _log.warning("another process has taken a batch over", batch=held.batch.id)
        self._forget(held)
        for task in filter(None, (held.task, *held.running.values())):
            task.cancel()

    def _forget(self, held: _Held) -> None:
        if self._held.get(held.batch.id) is held:
            del self._held[held.batch.id]

    # Lines

    async def _begin(self) -> None:
        """Begin lines, owner by owner, while there is room for one."""
        settings = self._host.settings
        if self._host.stopping or settings.paused or not is_open(settings.hours):
            return
        now = time.monotonic()
        self._due = {owner: due for owner, due in self._due.items() if due > now}
        if (suspect := self._suspect()) is not None or any(limit.suspect for limit in self._limits.values()):
            # It runs alone, and is kept before the next one runs: no line has to answer for another one.
            busy = any(limit.running for limit in self._limits.values())
            busy |= any(held.done or held.urgent for held in self._held.values())
            if suspect is not None and not busy and (limit := self._limit(suspect[1][0].model)) is not None:
                limit.running, limit.suspect = 1, True
                await self._start(suspect[0], [(suspect[1].popleft(), limit, False)])
            return
        by_owner: dict[str, list[_Held]] = {}
        for held in sorted(self._held.values(), key=lambda held: held.batch.created):
            if held.batch.owner not in self._due:
                by_owner.setdefault(held.batch.owner, []).append(held)
        self._turns = {owner: self._turns.get(owner, -1) for owner in by_owner}
        owners = deque(sorted(by_owner, key=self._turns.__getitem__))
        picked: dict[str, list[tuple[Line, Limit, bool]]] = {}
        while owners:
            owner = owners.popleft()
            for held in by_owner[owner]:
                if (line := self._next(held)) is not None:
                    picked.setdefault(held.batch.id, []).append(line)
                    self._turns[owner] = next(self._order)
                    owners.append(owner)
                    break
        await asyncio.gather(*(self._start(self._held[batch_id], lines) for batch_id, lines in picked.items()))

    def _next(self, held: _Held) -> tuple[Line, Limit, bool] | None:
        """Return a line that may begin, with the limit that it counts in, and whether it is tried again."""
        if held.batch.status != "in_progress" or held.in_trouble or len(held.done) > 2 * _GROUP:
            return None
        if held.retrying and held.retrying[0][0] <= time.monotonic():
            line = held.retrying[0][2]
            if (limit := self._limit(line.model)) is not None:
                heapq.heappop(held.retrying)
                limit.running += 1
                return line, limit, True
        if len(held.retrying) >= _MOST_RETRYING:
            return None
        for model, lines in held.waiting.items():
            if lines and (limit := self._limit(model)) is not None:
                limit.running += 1
                return lines.popleft(), limit, False
        return None

    def _suspect(self) -> tuple[_Held, deque[Line]] | None:
        """Return a batch, and its lines of which the first one ran when processes died."""
        for held in self._held.values():
            waits = held.in_trouble or held.batch.owner in self._due
            if held.batch.status == "in_progress" and not waits:
                for model, lines in held.waiting.items():
                    if lines and 1 < lines[0].attempts < _ATTEMPTS and self._host.target(model) is not None:
                        return held, lines
        return None

    def _limit(self, model: str) -> Limit | None:
        """Return what limits lines for *model*, if it has room for one."""
        target, most = self._host.target(model), self._host.most_running
        if target is None:
            return None
        limit = self._limits.get(target) or self._limits.setdefault(target, Limit(most))
        return limit if limit.has_room(most) and self._host.room(target, limit.running) else None

    async def _start(self, held: _Held, picked: Sequence[tuple[Line, Limit, bool]]) -> None:
        """Begin those of the *picked* lines that the limits of their key admit; the others wait again."""
        answers = await asyncio.gather(*(self._admit(held.batch.owner) for _ in picked))
        self._put_back(held, [one for one, (admitted, _) in zip(picked, answers, strict=True) if not admitted])
        picked = [one for one, (admitted, _) in zip(picked, answers, strict=True) if admitted]
        reservations = [reservation for admitted, reservation in answers if admitted]
        if held.batch.status != "in_progress":
            # It was cancelled or has ended while its lines were asked about.
            self._release(reservations)
            self._put_back(held, picked)
            return
        if not picked:
            return
        try:
            await self._store.begin(held.batch, [line.number for line, _, _ in picked])
            contents = await on_disk(lambda: [os.pread(held.input, line.length, line.place) for line, _, _ in picked])
        except (ServiceError, LeaseLost) as error:
            self._release(reservations)
            self._put_back(held, picked)
            if isinstance(error, LeaseLost):
                self._lose(held)
                return
            raise
        for (line, limit, _), content, reservation in zip(picked, contents, reservations, strict=True):
            task = asyncio.create_task(self._run(held, line, content, limit, reservation))
            held.running[line.number] = task
            task.add_done_callback(partial(self._left, held, line.number, limit, reservation))

    async def _admit(self, owner: str) -> tuple[bool, Reservation | None]:
        """Return whether the limits of *owner*'s key admit another line, and its reservation if there are limits."""
        try:
            reservation = await self._host.admit(owner)
        except ServiceError as error:
            wait = error.retry_after or _POLL
        else:
            if reservation is None or reservation.refusal is None:
                return True, reservation
            wait = reservation.refusal.retry_after or _POLL
        self._due[owner] = time.monotonic() + wait
        return False, None

    @staticmethod
    def _release(reservations: Sequence[Reservation | None]) -> None:
        for reservation in reservations:
            if reservation is not None:
                reservation.close(0)

    def _put_back(self, held: _Held, picked: Sequence[tuple[Line, Limit, bool]]) -> None:
        """Let *picked* lines, which have not begun, wait again where they were."""
        for line, limit, again in reversed(picked):
            limit.leave()
            if again:
                heapq.heappush(held.retrying, (0.0, next(self._order), line))
            else:
                held.waiting.setdefault(line.model, deque()).appendleft(line)

    async def _run(
        self, held: _Held, line: Line, content: bytes, limit: Limit, reservation: Reservation | None
    ) -> None:
        """Have a line answered, and keep its result, or let it wait for another attempt."""
        batch, began = held.batch, time.monotonic()
        try:
            custom_id, body = await offload.run(id_and_body, content, cost=offload.json_cost(len(content)))
            if line.attempts >= _ATTEMPTS:
                error = ServiceError(
                    f"The service ended {line.attempts} times while it answered the request.", code="server_error"
                )
                outcome = Outcome(error.status, error.envelope(), error=error)
            else:
                outcome = await self._host.answer(batch, custom_id, body, reservation)
            if not self._again(held, line, outcome, limit, began):
                state = SUCCEEDED if outcome.error is None else FAILED
                cost = offload.JSON * len(outcome.body)
                data = await offload.run(rendered, batch, line.number, custom_id, outcome, cost=cost)
                held.done.append((Done(line.number, state, -1, len(data), outcome.usage), data))
                return
            with suppress(ServiceError, LeaseLost):
                await self._store.stopped(batch, [line.number])
        except Exception:  # noqa: BLE001 - the last resort: it is tried again when another process takes the batch
            _log.exception("a line failed", batch=batch.id)

    def _left(self, held: _Held, number: int, limit: Limit, reservation: Reservation | None, _: object) -> None:
        """Count a line out. Not where it runs: a task that is cancelled before it has begun never does."""
        if reservation is not None:
            reservation.close(0)
            # A key that may have a few requests at the same time has room for another one now.
            if self._due.get(held.batch.owner, 0.0) <= time.monotonic() + _POLL:
                self._due.pop(held.batch.owner, None)
        held.urgent |= limit.suspect
        if limit.suspect or len(held.done) >= _GROUP:
            held.full.set()
        limit.leave()
        held.running.pop(number, None)
        self._woken.set()
        held.woken.set()

    def _again(self, held: _Held, line: Line, outcome: Outcome, limit: Limit, began: float) -> bool:
        """Return whether a line is tried again, and let it wait for that."""
        error, tries = outcome.error, held.tries.pop(line.number, 0)
        if error is None or error.status not in _RETRIED:
            limit.ended(self._host.most_running)
            if not (isinstance(error, errors.ModelNotFound) and self._host.target(line.model) is None):
                return False
        assert error is not None
        # Where live requests took the room meanwhile, the next line waits for room, and that is all.
        if error.status in _OVERLOADED and not isinstance(error, errors.ServiceOverloaded):
            limit.overloaded(began)
        wait = min(_RETRY_SECONDS * 5.0**tries, _LONGEST_RETRY)
        if isinstance(error, errors.UpstreamUnavailable | errors.ModelNotFound):
            # It is not the line that is to blame.
            limit.unavailable()
        elif not isinstance(error, errors.ServiceOverloaded):
            if tries >= _RETRIES:
                return False
            tries += 1
        held.tries[line.number] = tries
        due = time.monotonic() + max(wait, min(error.retry_after or 0.0, _LONGEST_RETRY))
        heapq.heappush(held.retrying, (due, next(self._order), line))
        return True

    # The life of a batch

    async def _attend(self, held: _Held) -> None:
        """Take a batch from its beginning to its end."""
        try:
            while held.batch.open:
                try:
                    await self._advance(held)
                    if held.in_trouble:
                        held.in_trouble = False
                        _log.info("a batch goes on", batch=held.batch.id)
                        self._woken.set()
                except FileNotFoundError:
                    text = "The input file is not there any more."
                    held.problems = [BatchError(code="input_file_missing", message=text)]
                except (OSError, ServiceError) as error:
                    if not held.in_trouble:
                        reason = getattr(error, "reason", str(error))
                        _log.warning("a batch is paused", batch=held.batch.id, reason=reason)
                    held.in_trouble = True
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

    async def _advance(self, held: _Held) -> None:
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
            await self._finalize(held)
            return
        if "validated_at" not in batch.times:
            problem = self._host.problem(batch)
            if problem is None:
                await self._validate(held)
            else:
                held.problems = [problem]
            return
        await self._keep(held)
        batch, now = held.batch, time.time()
        outcome = ""
        if self._host.problem(batch) is not None:
            outcome = "failed"
        elif batch.status == "cancelling":
            outcome = "cancelled"
        elif now >= batch.expires:
            outcome = "expired"
        if outcome:
            held.waiting.clear()
            held.retrying.clear()
            patient = outcome == "cancelled" and now < batch.times["cancelling_at"] + _CANCEL_SECONDS
            if not patient:
                await cancel(*held.running.values())
            if not held.running:
                await self._keep(held, at_once=True)
                await self._decide(held, outcome)
                return
        elif held.more and held.window < _WINDOW // 2:
            await self._refill(held)
            self._woken.set()
        elif batch.succeeded + batch.failed == batch.total:
            await self._decide(held, "completed")
            return
        await wait_any(held.woken, timeout=_POLL)
        held.woken.clear()
        if held.done and (held.running or held.window) and len(held.done) < _GROUP:
            await wait_any(held.full, timeout=_GROUP_SECONDS)

    async def _validate(self, held: _Held) -> None:
        batch = held.batch
        await self._store.clear_lines(batch)
        most, longest = self._host.settings.max_requests, self._host.longest_line
        make = partial(InputReader, held.input, batch, most=most, longest=longest, check=self._host.check_line)
        with closing(await asyncio.to_thread(make)) as reader:
            checked = 0
            while lines := await asyncio.to_thread(reader.read, _CHUNK):
                for model, number in list(reader.models.items())[checked:]:
                    try:
                        await self._host.check(batch, model)
                    except errors.UpstreamUnavailable:
                        # What ends in any case does not wait for Triton.
                        if batch.status != "cancelling" and time.time() < batch.expires:
                            raise
                    except errors.InvalidRequest as error:
                        reader.report(error.code, error.message, "body.model", number)
                checked = len(reader.models)
                if not reader.problems:
                    await self._store.add_lines(batch, lines)
        if reader.problems:
            held.problems = reader.problems
            return

        def begin(found: Batch) -> None:
            found.total, found.times["validated_at"] = reader.total, int(time.time())
            found.model = next(iter(reader.models)) if len(reader.models) == 1 else None
            if found.status == "validating":
                found.enter("in_progress")

        await self._change(held, begin)

    async def _change(self, held: _Held, change: Callable[[Batch], None]) -> None:
        batch = await self._store.change(held.batch.id, change, generation=held.batch.generation)
        assert batch is not None
        held.batch = batch

    async def _refill(self, held: _Held) -> None:
        """Read the next lines; those that begin alike come together."""
        lines = await self._store.waiting(held.batch, held.last, _WINDOW)
        held.more = len(lines) == _WINDOW
        first: dict[int, int] = {}
        for line in lines:
            held.last = line.number
            first.setdefault(line.prefix, line.number)

        def order(line: Line) -> tuple[bool, int, int, int]:
            # Those that may end processes first: they run alone.
            return not 1 < line.attempts < _ATTEMPTS, -line.attempts, first[line.prefix], line.number

        for line in sorted(lines, key=order):
            held.waiting.setdefault(line.model, deque()).append(line)
        for model in [model for model, queue in held.waiting.items() if not queue]:
            del held.waiting[model]

    async def _keep(self, held: _Held, *, at_once: bool = False) -> None:
        """
        Write the results of lines that have ended, and then mark the lines.

        What has to leave this machine to be safe does so now and then, or *at_once*; lines are marked after that.
        """
        if held.done:
            await self._write(held)
        if not held.written:
            held.urgent = False
            return
        unsafe, seconds = held.size - held.safe, time.monotonic() - held.safe_at
        due = at_once or held.urgent or held.idle or seconds >= self._files.checkpoint
        if due or unsafe >= _MOST_UNSAFE or len(held.written) >= _MOST_UNSAFE_LINES:
            await self._files.keep_part(held.batch, held.output, held.safe, held.size)
            before, batch = held.batch, await self._store.end(held.batch, held.written)
            held.batch = batch
            self._series(BATCH_LINES, "succeeded").inc(batch.succeeded - before.succeeded)
            self._series(BATCH_LINES, "failed").inc(batch.failed - before.failed)
            held.written, held.urgent, held.safe, held.safe_at = [], False, held.size, time.monotonic()
            self._woken.set()

    async def _write(self, held: _Held) -> None:
        ended, place, done = held.done[:], held.size, list[Done]()
        for one, _ in ended:
            done.append(one._replace(place=place))
            place += one.length

        def write() -> None:
            if held.output < 0:
                held.output = self._files.make_part(held.batch)
            # What a failed attempt has left there is overwritten.
            write_at(held.output, b"".join([data for _, data in ended]), held.size)
            os.fdatasync(held.output)

        await on_disk(write)
        if self._files.checkpoint:
            await self._store.stopped(held.batch, [one.number for one in done])
        held.written += done
        held.size = place
        del held.done[: len(ended)]
        held.full.clear()
        self._woken.set()

    async def _decide(self, held: _Held, outcome: Any) -> None:
        problem = self._host.problem(held.batch)

        def decide(found: Batch) -> None:
            found.outcome = "cancelled" if found.status == "cancelling" and outcome == "completed" else outcome
            if found.status != "cancelling":
                found.enter("finalizing")
            if outcome == "failed":
                found.problems = [] if problem is None else [problem]
            never = found.total - found.succeeded - found.failed
            if found.succeeded or (found.kind == "anthropic" and found.total):
                found.output = f"file-{os.urandom(16).hex()}"
            if found.kind == "openai" and (found.failed or never):
                found.errors = f"file-{os.urandom(16).hex()}"

        await self._change(held, decide)

    async def _finalize(self, held: _Held) -> None:
        """Make the files of all results. Doing it again makes the same ones."""
        batch, writings, parts = held.batch, dict[str, Writing](), dict[int, int]()
        with ExitStack() as stack:
            for file_id in filter(None, (batch.output, batch.errors)):
                writings[file_id] = await self._files.write(file_id)
                stack.callback(writings[file_id].close)
            succeeded = writings.get(batch.output or "")
            failed = writings.get(batch.errors or "") or succeeded

            def copy(rows: Sequence[Result]) -> None:
                for row in rows:
                    into = succeeded if row.state == SUCCEEDED else failed
                    assert into is not None
                    into.put(os.pread(parts[row.part], row.length, row.place))

            def tell(lines: Sequence[Line]) -> None:
                for line in lines:
                    custom_id, _ = id_and_body(os.pread(held.input, line.length, line.place))
                    assert failed is not None
                    failed.put(never_ran(batch, line.number, custom_id))

            after = (0, -1)
            while rows := await self._store.results(batch, after, _CHUNK):
                for part in {row.part for row in rows} - parts.keys():
                    parts[part] = await self._files.open_part(batch, part)
                    stack.callback(os.close, parts[part])
                await on_disk(copy, rows)
                after = rows[-1].part, rows[-1].place
            last = 0
            while lines := await self._store.never_ran(batch, last, _CHUNK):
                await on_disk(tell, lines)
                last = lines[-1].number
            for writing in writings.values():
                await writing.end()
        await self._end(held, {file_id: writing.size for file_id, writing in writings.items()})

    async def _end(self, held: _Held, sizes: Mapping[str, int]) -> None:
        """End a batch with its files, of which *sizes* are known."""
        batch, now = held.batch, time.time()
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
            found.outcome, found.problems = batch.outcome, batch.problems
            if found.outcome:
                found.enter(found.outcome)

        held.ending = True
        done = held.batch = await self._store.finish(batch, files, end)
        self._forget(held)
        self._series(BATCHES_ENDED, done.status).inc()
        self._series(BATCH_LINES, "never_ran").inc(done.total - done.succeeded - done.failed)
        counts = {"total": done.total, "completed": done.succeeded, "failed": done.failed}
        _log.info("batch has ended", batch=done.id, status=done.status, **counts)
        with suppress(ServiceError):
            await self._files.clear(batch)


def rendered(batch: Batch, number: int, custom_id: str, outcome: Outcome) -> bytes:
    """Return the line of a batch's file with the answer to a line."""
    body = msgspec.Raw(outcome.body)
    kind, field = ("succeeded", "message") if outcome.error is None else ("errored", "error")
    response = {"status_code": outcome.status, "request_id": outcome.request_id, "body": body}
    return _line(batch, number, custom_id, {"type": kind, field: body}, response=response, error=None)


def never_ran(batch: Batch, number: int, custom_id: str) -> bytes:
    """Return the line of a batch's file for a line that never ran."""
    kind, code, message = _NEVER_RAN[batch.outcome]
    error = {"error": {"type": "error", "error": {"type": "api_error", "message": message}}}
    result = {"type": kind, **(error if kind == "errored" else {})}
    return _line(batch, number, custom_id, result, response=None, error={"code": code, "message": message})


def _line(batch: Batch, number: int, custom_id: str, result: Mapping[str, Any], **openai: Any) -> bytes:
    """Return a line of a batch's file: for Anthropic's clients with a *result*, for *openai*'s with other fields."""
    line: dict[str, Any] = {"custom_id": custom_id, "result": result}
    if batch.kind == "openai":
        # It is the same each time.
        digest = blake2b(f"{batch.id}:{number}".encode(), digest_size=16).hexdigest()
        line = {"id": f"batch_req_{digest}", "custom_id": custom_id, **openai}
    return msgspec.json.encode(line) + b"\n"
