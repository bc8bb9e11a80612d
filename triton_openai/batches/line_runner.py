"""Runs lines: starts them, has the service answer them, and stores each result or schedules another attempt."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import structlog

from triton_openai import errors, offload
from triton_openai.batches import timing
from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.file_folder import Files, on_disk
from triton_openai.batches.host import Host, Outcome
from triton_openai.batches.inputs import id_and_body
from triton_openai.batches.key_limits import KeyLimits
from triton_openai.batches.leased import Attempts, RunningPart
from triton_openai.batches.line_errors import Verdict, lacks_capacity, may_hang, verdict_on
from triton_openai.batches.line_limits import PickedLine
from triton_openai.batches.quarantine import Quarantine, fatal_error
from triton_openai.batches.results import add_result
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import LeaseLost, Line, next_group

_log = structlog.get_logger(__name__)
# A line whose model answers other requests is tried so often again.
_MAX_RETRIES = 3
# The pause before another attempt grows so many times.
_MAX_STEPS = 10

# Lines that begin in one turn of the event loop: each takes half a millisecond of it.
_STARTS_A_TURN = 16


class LineRunner:
    """Runs the lines that were picked. *wake* is called when others may be picked."""

    def __init__(
        self,
        host: Host,
        files: Files,
        away: AwayModels,
        keys: KeyLimits,
        quarantine: Quarantine,
        wake: Callable[[], None],
    ) -> None:
        self._host = host
        self._files = files
        self._lines = files.store.lines
        self._away = away
        self._keys = keys
        self._quarantine = quarantine
        self._wake = wake

    def start(self, running: RunningPart, picked: Sequence[PickedLine]) -> None:
        """
        Start *picked* lines of a batch.

        A task starts them: when the disk of one batch is slow, or hangs, other batches do not wait for it.
        """
        running.moved_at = time.monotonic()
        running.starting = asyncio.create_task(self._start(running, picked))
        running.starting.add_done_callback(partial(self._end_start, running))

    def _end_start(self, running: RunningPart, _: object) -> None:
        running.starting = None
        running.woken.set()
        self._wake()

    async def _start(self, running: RunningPart, picked: Sequence[PickedLine]) -> None:
        # The lines that are counted in limits. Those that have not started wait again, also if this is cancelled.
        reserved = [*picked]
        try:
            reserved = await self._admit(running, picked)
            # The batch may have been cancelled or lost meanwhile.
            if not (reserved and _may_start(running)):
                return
            contents = await self._contents(running, reserved)
            if running.lost or not (contents and reserved):
                return
            if not _may_start(running):
                # It was cancelled while its input was read.
                await self._mark_stopped(running, [candidate.line.number for candidate in reserved])
                return
            await self._run_all(running, reserved, contents)
        finally:
            self._give_back(running, reserved)

    async def _contents(self, running: RunningPart, reserved: list[PickedLine]) -> Sequence[bytes | OSError]:
        """
        Mark the *reserved* lines as running, and return their contents; nothing if they cannot start now.

        While a slow disk is read, they are given back, so that other batches run.
        """
        lines = [candidate.line for candidate in reserved]
        reading = asyncio.create_task(self._mark_and_read(running, lines))
        try:
            await asyncio.wait([reading], timeout=timing.SLOW_READ)
            if not reading.done():
                _log.warning("input is slow, other batches run", batch=running.batch.id)
                self._give_back(running, reserved)
                reserved.clear()
            contents = await reading
        finally:
            reading.cancel()
        if contents and not reserved:
            await self._mark_stopped(running, [line.number for line in lines])
        return contents

    async def _mark_and_read(self, running: RunningPart, lines: Sequence[Line]) -> Sequence[bytes | OSError]:
        """Mark lines as running, and return their contents; nothing if they cannot start now."""
        numbers = [line.number for line in lines]
        try:
            if running.unloaded:
                unloaded = running.unloaded[:]
                await self._files.load(running.batch, running.input, unloaded)
                del running.unloaded[: len(unloaded)]
            await self._lines.mark_running(running.part, numbers)
            return await on_disk(_read, running.input, lines)
        except LeaseLost:
            running.lose()
        except ServiceError as error:
            running.start_time = time.monotonic() + timing.FAILURE_PAUSE
            _log.warning("lines cannot start", batch=running.batch.id, reason=error.reason)
        except Exception:  # noqa: BLE001 - the last resort: logged, and tried again
            running.start_time = time.monotonic() + timing.FAILURE_PAUSE
            _log.exception("lines cannot start", batch=running.batch.id)
            await self._mark_stopped(running, numbers)
        return ()

    async def _admit(self, running: RunningPart, picked: Sequence[PickedLine]) -> list[PickedLine]:
        """Return those of *picked* that the limits of their key admit; the others wait again."""
        owner = running.batch.owner
        answers = await asyncio.gather(*(self._keys.admit(owner) for _ in picked), return_exceptions=True)
        admitted: list[PickedLine] = []
        refused: list[PickedLine] = []
        for candidate, answer in zip(picked, answers, strict=True):
            if isinstance(answer, BaseException):
                refused.append(candidate)
            else:
                admitted.append(candidate._replace(reservation=answer))
        self._give_back(running, refused)
        return admitted

    def _give_back(self, running: RunningPart, picked: Sequence[PickedLine]) -> None:
        """Put lines back that have not started, in their order."""
        for candidate in reversed(picked):
            self._count_out(running, candidate)
            running.put_back(candidate.line)

    def _count_out(self, running: RunningPart, candidate: PickedLine) -> None:
        """Count a line out of the limits of its key and of its model."""
        self._keys.release(running.batch.owner, candidate.reservation)
        candidate.limit.leave()

    async def _run_all(
        self, running: RunningPart, reserved: list[PickedLine], contents: Sequence[bytes | OSError]
    ) -> None:
        """Run the *reserved* lines that could be read, and remove them there. The others wait for another attempt."""
        unread: list[int] = []
        for content in contents:
            if running.lost:
                return
            candidate = reserved.pop(0)
            if isinstance(content, OSError):
                unread.append(candidate.line.number)
                if not running.unreadable:
                    number = candidate.line.number
                    _log.warning("input cannot be read", batch=running.batch.id, line=number, reason=str(content))
                running.unreadable = True
                self._count_out(running, candidate)
                self._retry(running, candidate.line, errors.StoreUnavailable("The input cannot be read."), counts=False)
            else:
                task = asyncio.create_task(self._run(running, candidate, content))
                running.running[candidate.line.number] = task
                task.add_done_callback(partial(self._end_line, running, candidate))
                if len(running.running) % _STARTS_A_TURN == 0:
                    # Live requests have turns of the event loop between the first steps of lines.
                    await asyncio.sleep(0)
        if unread:
            await self._mark_stopped(running, unread)
        else:
            running.unreadable = False
        if len(unread) == len(contents):
            # Its task opens it again. An old descriptor can stay stale after the server of files has returned.
            running.close_input()

    async def _run(self, running: RunningPart, started: PickedLine, content: bytes) -> None:
        """Run one line; store its result or schedule a retry."""
        batch = running.batch
        line = started.line
        custom_id = ""
        try:
            custom_id, body = await offload.run(id_and_body, content, cost=offload.json_cost(len(content)))
            fatal = fatal_error(batch, line)
            outcome: Outcome | None
            if fatal is not None:
                outcome = self._host.refusal(batch, fatal)
            else:
                started_at = time.monotonic()
                outcome = await self._host.answer(batch, custom_id, body, started.reservation, started.limit.endpoint)
                outcome = await self._result_of(running, started, outcome, started_at)
            if outcome is not None:
                running.attempts.pop(line.number, None)
                await add_result(running, line, custom_id, outcome)
        except Exception:  # noqa: BLE001 - the last resort: logged, and the line is tried again
            _log.exception("line failed", batch=batch.id, line=line.number)
            await self._after_exception(running, line, custom_id)

    def _end_line(self, running: RunningPart, ended: PickedLine, _: object) -> None:
        """Count a line out. A callback does it, because a task that is cancelled before its first step never runs."""
        if self._quarantine.runs or running.has_full_group:
            running.full.set()
        self._count_out(running, ended)
        running.running.pop(ended.line.number, None)
        running.woken.set()
        self._wake()

    async def _result_of(
        self, running: RunningPart, ran: PickedLine, outcome: Outcome, started_at: float
    ) -> Outcome | None:
        """Return the result of a line that had *outcome*; ``None`` if the line waits for another attempt."""
        error = outcome.error
        if error is None:
            ran.limit.succeeded()
            return outcome
        verdict = verdict_on(error)
        if verdict is Verdict.ENDS:
            ran.limit.succeeded()
            return outcome
        if lacks_capacity(error):
            ran.limit.overloaded(started_at)
        if verdict is Verdict.DOUBTFUL:
            verdict = await self._settled(running, ran.line, error)
        if self._host.stopping:
            # No line starts any more. The process that claims the batch next runs this one.
            running.put_back(ran.line)
        elif verdict is Verdict.DIED:
            await self._after_death(running, ran, error, started_at)
            return None
        elif verdict is Verdict.AWAY:
            # The line has a wait of its own, too: the model may be away for this line alone.
            self._retry(running, ran.line, error, counts=False)
            self._away.pause(ran.line.model, error.reason)
        elif not self._retry(running, ran.line, error, counts=verdict is Verdict.DOUBTFUL):
            return outcome
        await self._mark_stopped(running, [ran.line.number])
        return None

    async def _settled(self, running: RunningPart, line: Line, error: ServiceError) -> Verdict:
        """Return what follows from an *error* that does not show whether the line or the model is to blame."""
        if self._host.stopping or await self._away.answers(running.batch, line.model):
            return Verdict.DOUBTFUL
        if may_hang(error):
            # A model that did not end the request itself may hang because of it.
            return Verdict.DIED
        return Verdict.AWAY

    def _retry(self, running: RunningPart, line: Line, error: ServiceError, *, counts: bool) -> bool:
        """Schedule another attempt of a line; return ``False`` if this one *counts* and was the last one."""
        before = running.attempts.pop(line.number, Attempts())
        after = Attempts(before.failed + counts, before.waits + 1)
        if after.failed > _MAX_RETRIES:
            return False
        running.attempts[line.number] = after
        if isinstance(error, errors.ServiceOverloaded):
            # Live requests took the room meanwhile. The line starts again when there is room.
            seconds = timing.RETRY
        else:
            # A line may wait for days: no longer pause comes after some waits, and no number is too large.
            seconds = min(timing.RETRY * 5.0 ** min(before.waits, _MAX_STEPS), timing.MAX_RETRY)
        wanted = min(error.retry_after or 0.0, timing.MAX_RETRY)
        running.retry(line, max(seconds, wanted))
        return True

    async def _after_death(self, running: RunningPart, ran: PickedLine, error: ServiceError, started_at: float) -> None:
        """Quarantine a line whose Triton ended while it ran."""
        line = ran.line
        size = ran.limit.died(started_at)
        if line.max_group == 1:
            line = line._replace(triton_deaths=line.triton_deaths + 1)
        else:
            line = line._replace(max_group=next_group(size))
        _log.warning(
            "Triton ended while a line ran",
            batch=running.batch.id,
            line=line.number,
            deaths=line.deaths,
            max_group=line.max_group,
            reason=error.reason,
        )
        running.quarantined.append(line)
        self._away.pause(line.model, error.reason)
        with suppress(ServiceError, LeaseLost):
            await self._lines.quarantine(running.part, [line])

    async def _after_exception(self, running: RunningPart, line: Line, custom_id: str) -> None:
        """Schedule another attempt of a line that the service failed to run; after the last one, the line fails."""
        error = ServiceError(f"The service failed to run line {line.number} of the input.")
        if self._retry(running, line, error, counts=True):
            await self._mark_stopped(running, [line.number])
        else:
            # Without an id if the input is damaged.
            await add_result(running, line, custom_id, self._host.refusal(running.batch, error))

    async def _mark_stopped(self, running: RunningPart, numbers: Sequence[int]) -> None:
        with suppress(ServiceError, LeaseLost):
            await self._lines.mark_stopped(running.part, numbers)


def _may_start(running: RunningPart) -> bool:
    """Return whether lines of a batch may still start: it is neither cancelled nor lost."""
    return running.batch.status == "in_progress" and not running.lost


def _read(descriptor: int, lines: Sequence[Line]) -> list[bytes | OSError]:
    """Return the bytes of each line, or the error of its read. Runs in a thread."""
    contents: list[bytes | OSError] = []
    for line in lines:
        try:
            contents.append(os.pread(descriptor, line.length, line.offset))
        except OSError as error:
            contents.append(error)
    return contents
