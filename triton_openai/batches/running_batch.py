"""A batch that this process runs: its lines that wait, run, or have a result that is not kept yet."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections import deque
from collections.abc import Container, Sequence
from enum import Enum
from itertools import count
from typing import NamedTuple

from triton_openai.storage.batch_store import Batch, BatchError, Done, Line

# Of retries that are due at the same time, the one that was noted first comes first.
_order = count()


class Phase(Enum):
    """How a process runs a batch."""

    RUNNING = "running"
    #: Its disk or its database fails.
    PAUSED = "paused"
    #: It is being ended: the tables may say already that it has.
    ENDING = "ending"


class Attempts(NamedTuple):
    """The attempts of a line so far, in this process."""

    #: Those that failed although the model answers.
    failed: int = 0
    #: All after which the line had to wait.
    waits: int = 0


class RunningBatch:
    """A batch that this process runs."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phase = Phase.RUNNING
        #: Lines that may begin, by model.
        self.waiting: dict[str, deque[Line]] = {}
        #: Lines that ran when a process or a Triton ended. They run while no others do.
        self.quarantined: list[Line] = []
        #: Lines that are to be tried again, with their times.
        self.retrying: list[tuple[float, int, Line]] = []
        self.attempts: dict[int, Attempts] = {}
        self.running: dict[int, asyncio.Task[None]] = {}
        #: Results that are not written yet: their places are not known.
        self.done: list[tuple[Done, bytes]] = []
        #: The last line that was read, and whether there are more.
        self.last = 0
        self.more = True
        self.input = -1
        self.output = -1
        #: The bytes of the part, and those that rows tell of, since when; and results of which no row tells yet.
        self.size = 0
        self.safe = 0
        self.safe_at = time.monotonic()
        self.written: list[Done] = []
        self.woken = asyncio.Event()
        self.full = asyncio.Event()
        #: Why it can only fail.
        self.problems: Sequence[BatchError] = ()
        self.task: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Close its files."""
        for descriptor in (self.input, self.output):
            if descriptor >= 0:
                os.close(descriptor)
        self.input = -1
        self.output = -1

    @property
    def window(self) -> int:
        """The lines that were read and have not begun."""
        return sum(map(len, self.waiting.values())) + len(self.quarantined)

    def ready(self, away: Container[str]) -> int:
        """Return how many of those are for models that are not *away*."""
        waiting = sum(len(lines) for model, lines in self.waiting.items() if model not in away)
        return waiting + sum(line.model not in away for line in self.quarantined)

    @property
    def idle(self) -> bool:
        """Whether it has no lines that run or wait."""
        return not (self.running or self.window or self.retrying or self.more)

    @property
    def begins_lines(self) -> bool:
        """Whether lines of it may begin."""
        return self.batch.status == "in_progress" and self.phase is Phase.RUNNING

    def put_back(self, line: Line) -> None:
        """Have *line*, which does not run, wait as the next one."""
        if line.max_group:
            self.quarantined.append(line)
        else:
            self.waiting.setdefault(line.model, deque()).appendleft(line)

    def retry(self, line: Line, seconds: float) -> None:
        """Have *line* wait for *seconds*."""
        heapq.heappush(self.retrying, (time.monotonic() + seconds, next(_order), line))

    def put_back_due(self, now: float) -> None:
        """Have lines whose time has come wait as the next ones."""
        while self.retrying and self.retrying[0][0] <= now:
            _, _, line = heapq.heappop(self.retrying)
            self.put_back(line)

    def models(self) -> set[str]:
        """Return the models of the lines that wait."""
        models = {model for model, lines in self.waiting.items() if lines}
        models.update(line.model for line in self.quarantined)
        models.update(line.model for _, _, line in self.retrying)
        return models

    def candidates(self, away: Container[str]) -> Sequence[Line]:
        """
        Return the quarantined lines that may begin next; none for models that are *away*.

        A line that has a death comes after all other lines of the batch: those that wait for models that are there,
        those that are not read yet, and those of any model that wait for another attempt. So whoever kills the process
        again and again meets another line each time, and only a line that ends it by itself has all its deaths.
        """
        lines = [line for line in self.quarantined if line.model not in away]
        fresh = [line for line in lines if not line.deaths]
        if fresh:
            return fresh
        others = any(waiting and model not in away for model, waiting in self.waiting.items())
        if others or self.more or self.retrying:
            return []
        return lines
