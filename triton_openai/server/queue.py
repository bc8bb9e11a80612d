"""The requests that wait to be let in, in the order in which they came, model by model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence


class Waiting:
    """One request that waits: its future has a result when it is let in, and an error when it waited too long."""

    __slots__ = ("future", "model", "since")

    def __init__(self, model: str) -> None:
        self.model = model
        #: In nanoseconds, on the clock that all processes of a machine have.
        self.since = time.monotonic_ns()
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def admitted(self) -> bool:
        """Whether it was let in, though it may not have noticed yet."""
        return self.future.done() and not self.future.cancelled() and self.future.exception() is None


class Queue:
    """A line for each model; adding, removing and looking at the first cost the same however many wait."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[Waiting, None]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, waiting: Waiting) -> None:
        """Put *waiting* at the end of its line."""
        self._lines.setdefault(waiting.model, {})[waiting] = None
        self._length += 1

    def remove(self, waiting: Waiting) -> bool:
        """Take *waiting* out, wherever it stands; return whether it was there."""
        line = self._lines.get(waiting.model)
        if line is None or waiting not in line:
            return False
        del line[waiting]
        self._length -= 1
        if not line:
            del self._lines[waiting.model]
        return True

    def first(self, has_room: Callable[[str], bool]) -> Waiting | None:
        """Return who has waited longest of those whose model *has_room*."""
        heads = [next(iter(line)) for model, line in self._lines.items() if has_room(model)]
        return min(heads, key=_since, default=None)

    def since(self, model: str) -> int:
        """Return since when somebody has waited for *model*; 0 where nobody does."""
        line = self._lines.get(model)
        return next(iter(line)).since if line else 0

    def models(self) -> Collection[str]:
        """Return the models that somebody waits for."""
        return self._lines.keys()

    def line(self, model: str) -> Sequence[Waiting]:
        """Return who waits for *model*, in the order in which they came."""
        return list(self._lines.get(model, ()))


def _since(waiting: Waiting) -> int:
    return waiting.since
