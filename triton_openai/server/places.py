"""
The places that the workers of one service share: how many requests run in each, and who waits there.

Limits of running requests are the service's. So each worker writes down, in a table that all of them map, what it has
running and waiting, model by model; who lets a request in looks at the numbers of all under one lock, and who leaves a
place free rings for whoever has waited longest. A process alone needs none of that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from triton_openai.errors import ConfigurationError
from triton_openai.server.bells import Bells
from triton_openai.server.shared_table import ID_WORDS, SharedTable
from triton_openai.telemetry.logging import get_logger
from triton_openai.worker import Worker

_log = get_logger(__name__)

_FILE = "places"
# The record of all models together; no model has an empty name.
_ALL = ""
# The one lock, because all numbers are looked at together. The table itself locks word 0.
_LOCK = 1


class Head(msgspec.Struct, frozen=True, gc=False):
    """
    The first in another worker's queue for a model.

    ``since`` is when it came, in nanoseconds of ``time.monotonic_ns``; ``running`` is how many requests run on its
    model in all workers.
    """

    worker: int
    since: int
    running: int


class Places:
    """What the other workers have running and waiting: nothing, where there are none."""

    #: Whether there are others.
    shared = False

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep the other workers from looking and changing meanwhile; the next five are called within it."""
        return contextlib.nullcontext()

    def running(self, model: str | None = None) -> int:
        """Return how many requests the others have running on *model*, or on all."""
        return 0

    def waiting(self) -> int:
        """Return how many requests wait in the others."""
        return 0

    def heads(self) -> Iterator[Head]:
        """Yield the first in each queue of the others."""
        yield from ()

    def set_running(self, model: str, count: int, total: int) -> None:
        """Tell the others that *count* requests run here on *model*, and *total* on all."""

    def set_waiting(self, model: str, since: int, total: int) -> None:
        """Tell the others since when somebody has waited here for *model* (0: nobody does), and how many in all."""

    def ring(self, worker: int) -> None:
        """Have *worker* look whether it can let somebody in."""

    def listen(self, heard: Callable[[], None]) -> None:
        """Call *heard* from now on, in the running loop, when another worker has rung."""

    def close(self) -> None:
        """Let go of what is shared."""


class SharedPlaces(Places):
    """
    Those of several workers, of which this process is *worker*. Raises :class:`ConfigurationError`.

    A record has for each worker the number of requests that run there, and then since when somebody has waited there:
    in that of all models, how many wait.
    """

    shared = True

    def __init__(self, worker: Worker) -> None:
        assert worker.directory is not None
        self._index, self._count = worker.index, worker.count
        self._table = _open(worker.directory, worker.index, worker.count)
        self._bells = Bells(worker.directory, worker.index)
        self._starts: dict[str, int] = {}
        self._all = self._start(_ALL)
        with self.held():
            _clear(self._table, worker.index)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """See the base class."""
        return self._table.locked(_LOCK)

    def running(self, model: str | None = None) -> int:
        """See the base class."""
        start = self._all if model is None else self._start(model)
        return self._sum(start) - self._table.words[start + self._index]

    def waiting(self) -> int:
        """See the base class."""
        start = self._all + self._count
        return self._sum(start) - self._table.words[start + self._index]

    def heads(self) -> Iterator[Head]:
        """See the base class."""
        for start in self._table.starts():
            start += ID_WORDS  # noqa: PLW2901
            if start == self._all:
                continue
            queues = self._table.words[start + self._count : start + 2 * self._count].tolist()
            for worker, since in enumerate(queues):
                if since and worker != self._index:
                    yield Head(worker, since, self._sum(start))

    def set_running(self, model: str, count: int, total: int) -> None:
        """See the base class."""
        self._table.words[self._start(model) + self._index] = count
        self._table.words[self._all + self._index] = total

    def set_waiting(self, model: str, since: int, total: int) -> None:
        """See the base class."""
        self._table.words[self._start(model) + self._count + self._index] = since
        self._table.words[self._all + self._count + self._index] = total

    def ring(self, worker: int) -> None:
        """See the base class."""
        self._bells.ring(worker)

    def listen(self, heard: Callable[[], None]) -> None:
        """See the base class."""
        self._bells.listen(heard)

    def close(self) -> None:
        """See the base class."""
        self._bells.close()
        self._table.close()

    def _sum(self, start: int) -> int:
        return sum(self._table.words[start : start + self._count])

    def _start(self, model: str) -> int:
        start = self._starts.get(model)
        if start is None:
            start = self._starts[model] = self._table.find(model) + ID_WORDS
        return start


def open_places(worker: Worker) -> Places:
    """Return the places of all workers of *worker*'s service. Raises :class:`ConfigurationError`."""
    return Places() if worker.directory is None else SharedPlaces(worker)


def vacate(directory: Path, index: int, workers: int) -> None:
    """
    Clear what worker *index* of *workers* had running and waiting when it ended; the others look by themselves.

    Where that cannot be done the log says so, and the worker is replaced all the same.
    """
    try:
        with contextlib.closing(_open(directory, index, workers)) as table, table.locked(_LOCK):
            _clear(table, index)
    except ConfigurationError as error:
        _log.error("what an ended worker had running is not cleared", worker=index, reason=error.message)


def _open(directory: Path, index: int, workers: int) -> SharedTable:
    return SharedTable(directory / _FILE, index=index, workers=workers, width=2 * workers)


def _clear(table: SharedTable, index: int) -> None:
    for start in table.starts():
        table.words[start + ID_WORDS + index] = table.words[start + ID_WORDS + table.workers + index] = 0
