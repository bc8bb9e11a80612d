"""A batch that this process takes to its end: it validates the input, waits for the lines, and makes the files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

import structlog

from triton_openai.batches.running_batch import Phase
from triton_openai.storage.batch_records import Batch, BatchError

_log = structlog.get_logger(__name__)


class RunningLife:
    """A batch whose lease this process has. Lines of it may run in any process."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.phase = Phase.RUNNING
        #: The descriptor of the input; -1 for none.
        self.input = -1
        #: Why it can only fail, without files.
        self.problems: Sequence[BatchError] = ()
        #: Set when something has changed.
        self.woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def lost(self) -> bool:
        """Whether another process has it."""
        return self.phase is Phase.LOST

    def lose(self) -> None:
        """Stop, because another process has the batch."""
        if self.phase is Phase.LOST:
            return
        self.phase = Phase.LOST
        _log.warning("batch lease lost", batch=self.batch.id)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

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

    def close(self) -> None:
        """Close the input."""
        if self.input >= 0:
            os.close(self.input)
            self.input = -1
