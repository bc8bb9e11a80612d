"""
What this process has of batches: batches that it takes to their ends, and parts that it runs.

The lines of a part wait, run, or have a result that is not stored yet.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import Counter, deque
from collections.abc import Collection, Container, Sequence
from enum import Enum
from itertools import count
from typing import Any, NamedTuple

import structlog

from triton_openai.storage.batch_records import Batch, BatchError, Done, Line, Part

_log = structlog.get_logger(__name__)
# Results that are written together, at most.
_MAX_GROUP = 100
# Lines for one model that wait for another attempt; no others start then.
_MAX_RETRYING = 32
# Of retries that are due at the same time, the first one that was noted comes first.
_order = count()


class Phase(Enum):
    """The state of a batch, or of a part of one, in this process."""

    RUNNING = "running"
    #: Its disk or its database fails.
    PAUSED = "paused"
    #: It is being ended: the table may show its end already.
    ENDING = "ending"
    #: It was taken from this process.
    LOST = "lost"


class Attempts(NamedTuple):
    """The attempts of a line so far, in this process."""

    #: Those that failed although the model answers.
    failed: int = 0
    #: All after which the line had to wait.
    waits: int = 0


class Leased:
    """A batch, or a part of one, of which this process has the lease."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phase = Phase.RUNNING
        #: The descriptor of the input; -1 for none.
        self.input = -1
        #: Set when something has changed.
        self.woken = asyncio.Event()
        #: The task that takes it to its end.
        self.task: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether it was taken from this process."""
        return self.phase is Phase.LOST

    def lose(self) -> None:
        """Stop: the lease has expired, and another process may have it."""
        if self.lost:
            return
        self.phase = Phase.LOST
        _log.warning("batch lease lost", batch=self.batch.id)
        self._cancel_tasks()

    def _cancel_tasks(self, *others: asyncio.Task[Any]) -> None:
        for task in (self.task, *others):
            if task is not None and task is not asyncio.current_task():
                task.cancel()

    def close_input(self) -> None:
        """Close the input."""
        if self.input >= 0:
            os.close(self.input)
            self.input = -1


class LeasedBatch(Leased):
    """
    A batch that this process takes to its end. Lines of it may run in any process.

    It validates the input, waits for the lines, and makes the files.
    """

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        #: Why it can only fail, without files.
        self.problems: Sequence[BatchError] = ()

    def update(self, batch: Batch) -> None:
        """
        Note what other processes have changed in *batch*, as the table had it a moment ago.

        What this process has changed since is newer.
        """
        mine = self.batch
        if batch.status == "cancelling" and mine.status in ("validating", "in_progress"):
            mine.status = batch.status
            mine.times = batch.times
            self.woken.set()
        if batch.unfinished < mine.unfinished:
            mine.succeeded = batch.succeeded
            mine.failed = batch.failed
            self.woken.set()
        if batch.problems and not mine.problems:
            mine.problems = batch.problems
            self.woken.set()


class RunningPart(Leased):
    """
    The *part* of a *batch* that this process runs.

    It has more than 20 methods because the parts that claim, schedule and run lines share it: none of the methods has
    more than a few statements, and none waits.
    """

    def __init__(self, batch: Batch, part: Part) -> None:
        super().__init__(batch)
        self.part = part
        #: Lines that may start, by model.
        self.waiting: dict[str, deque[Line]] = {}
        #: Lines that ran when a process or a Triton ended. They run while no others do.
        self.quarantined: list[Line] = []
        #: Lines that wait for another attempt, with the times when it is due.
        self.retrying: list[tuple[float, int, Line]] = []
        self.attempts: dict[int, Attempts] = {}
        #: The task that starts lines, and those of the lines that run.
        self.starting: asyncio.Task[None] | None = None
        self.running: dict[int, asyncio.Task[None]] = {}
        #: When lines were claimed or started last.
        self.moved_at = time.monotonic()
        #: When lines may start, after a failure of the database.
        self.start_time = 0.0
        #: Results that are not written yet, whose offsets are not known.
        self.done: list[tuple[Done, bytes]] = []
        #: Whether the table may have more lines that wait.
        self.more = True
        #: Whether the table may have other lines for this process than those here: a write may have been done or not.
        self.unsure = False
        #: The descriptor of the file with results; -1 for none.
        self.output = -1
        #: Lines that were claimed, and whose bytes may not be in the file of the input yet.
        self.unloaded: list[Line] = []
        #: Whether the last read of the input failed.
        self.unreadable = False
        #: The bytes of the file; the bytes that are safe, and since when; and results that are not marked as safe yet.
        self.size = 0
        self.safe = 0
        self.safe_at = time.monotonic()
        self.written: list[Done] = []
        #: Set when results are to be written at once.
        self.full = asyncio.Event()

    def close(self) -> None:
        """Close the input and the results."""
        self.close_input()
        if self.output >= 0:
            os.close(self.output)
            self.output = -1

    def lose(self, *, ended: bool = False) -> None:
        """Stop running the lines: the lease has expired, or the batch has *ended*."""
        if self.lost:
            return
        self.phase = Phase.LOST
        # A process that was frozen has lost its lines, also when others have ended the batch since.
        if self.running or not ended:
            _log.warning("batch lease lost", batch=self.batch.id)
        self._cancel_tasks(*self.running.values())

    # Lines that wait

    @property
    def window(self) -> int:
        """The number of lines that were claimed and have not started."""
        return sum(map(len, self.waiting.values())) + len(self.quarantined)

    def ready(self, away: Container[str]) -> int:
        """Return the number of those lines that are not quarantined, and whose models are not *away*."""
        return sum(len(lines) for model, lines in self.waiting.items() if model not in away)

    def idle_lines(self) -> Sequence[Line]:
        """Return the lines that were claimed, and do not run."""
        waiting = [line for lines in self.waiting.values() for line in lines]
        return [*waiting, *self.quarantined, *(line for _, _, line in self.retrying)]

    def models(self) -> set[str]:
        """Return the models of the lines that wait."""
        models = {model for model, lines in self.waiting.items() if lines}
        models.update(line.model for line in self.quarantined)
        models.update(line.model for _, _, line in self.retrying)
        return models

    def add_waiting(self, lines: Sequence[Line]) -> None:
        """Add lines that were claimed. Lines that begin alike come together."""
        self.unloaded += lines
        self.moved_at = time.monotonic()
        first: dict[int, int] = {}
        for line in lines:
            first.setdefault(line.prefix, line.number)
        for line in sorted(lines, key=lambda line: (first[line.prefix], line.number)):
            self._append(line)
        for model in [model for model, queue in self.waiting.items() if not queue]:
            del self.waiting[model]

    def _append(self, line: Line) -> None:
        """Make *line* the last one that waits."""
        if line.max_group:
            self.quarantined.append(line)
        else:
            self.waiting.setdefault(line.model, deque()).append(line)

    def put_back(self, line: Line) -> None:
        """Make *line*, which does not run, the next one that waits."""
        if line.max_group:
            self.quarantined.append(line)
        else:
            self.waiting.setdefault(line.model, deque()).appendleft(line)

    def retry(self, line: Line, seconds: float) -> None:
        """Put *line* back in so many *seconds*."""
        heapq.heappush(self.retrying, (time.monotonic() + seconds, next(_order), line))

    def put_back_due(self, now: float) -> None:
        """Put the lines back whose retry is due. They come after those that have not run: they may fail again."""
        while self.retrying and self.retrying[0][0] <= now:
            _, _, line = heapq.heappop(self.retrying)
            self._append(line)

    def numbers(self) -> set[int]:
        """Return the numbers of the lines that this process has, while none are about to start."""
        ended = [*(done for done, _ in self.done), *self.written]
        return {
            *self.running,
            *(line.number for line in self.idle_lines()),
            *(done.number for done in ended),
        }

    def drop(self, numbers: Collection[int]) -> None:
        """Drop lines that wait, which other processes are to run."""
        dropped = set(numbers)
        for model, lines in list(self.waiting.items()):
            self.waiting[model] = deque(line for line in lines if line.number not in dropped)
            if not self.waiting[model]:
                del self.waiting[model]

    def drop_waiting(self) -> None:
        """Start no more lines."""
        self.waiting.clear()
        self.quarantined.clear()
        self.retrying.clear()

    # Lines that start

    @property
    def runs_lines(self) -> bool:
        """Whether its lines are run, and not ended."""
        return self.batch.status == "in_progress" and self.phase is Phase.RUNNING

    @property
    def starts_lines(self) -> bool:
        """Whether lines of it may start now."""
        return self.runs_lines and self.input >= 0 and self.starting is None and time.monotonic() >= self.start_time

    @property
    def backlogged(self) -> bool:
        """Whether so many results wait to be written that no line may start."""
        return len(self.done) > 2 * _MAX_GROUP

    def candidates(self, away: Container[str]) -> Sequence[deque[Line]]:
        """Return the queues whose first lines may start; none for models that are *away*."""
        retrying = Counter(line.model for _, _, line in self.retrying)
        return [
            lines
            for model, lines in self.waiting.items()
            if lines and model not in away and retrying[model] < _MAX_RETRYING
        ]

    def quarantined_candidates(self, away: Container[str]) -> Sequence[Line]:
        """
        Return the quarantined lines that may start next; none for models that are *away*.

        A line that has a death comes after all other lines of the batch: those that wait for models that are not away,
        those that are not read yet, and those of any model that wait for another attempt. So repeated kills of the
        process meet another line each time, and only a line that ends it by itself has all its deaths.
        """
        lines = [line for line in self.quarantined if line.model not in away]
        without_death = [line for line in lines if not line.deaths]
        if without_death:
            return without_death
        others = any(waiting and model not in away for model, waiting in self.waiting.items())
        if others or self.more or self.retrying:
            return []
        return lines

    # Results

    @property
    def has_full_group(self) -> bool:
        """Whether as many results wait as are written together at most."""
        return len(self.done) >= _MAX_GROUP

    @property
    def active(self) -> bool:
        """Whether lines run or are about to."""
        return bool(self.running) or self.starting is not None

    @property
    def busy(self) -> bool:
        """Whether it has lines without results that are marked."""
        return bool(self.active or self.window or self.retrying or self.done or self.written)

    @property
    def idle(self) -> bool:
        """Whether it has no lines that run or wait."""
        return not (self.active or self.window or self.retrying or self.more)
