"""
What the workers of one service count together: requests and tokens of the last minute, and requests that run now.

The counts of a key are its *account*: one record in a shared table, read and changed under a lock on its place.

A minute is counted in ticks of a second, of which the last 61 are kept: any minute begins and ends within ticks, and
both count whole, so that no minute ever has more than a limit allows. Requests that run now are counted for each
worker on its own, so that the counts of one that died are cleared by the one that takes its place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from triton_openai.server.shared_table import ID_WORDS, SharedTable

#: Seconds in which limits "per minute" are counted.
WINDOW = 60
# A minute that begins within a tick ends within the one that is 60 later.
_TICKS = WINDOW + 1


class Window(msgspec.Struct, frozen=True):
    """The ticks of the last minute that have counts, oldest first."""

    now: float
    ticks: list[tuple[int, int]]

    @property
    def used(self) -> int:
        """What was counted in the last minute."""
        return sum([count for _, count in self.ticks])

    @property
    def empty_in(self) -> float:
        """Seconds until nothing of it counts any more."""
        return self._left(self.ticks[-1][0]) if self.ticks else 0.0

    @property
    def full_in(self) -> float:
        """Seconds until what is counted now counts no more."""
        return self._left(int(self.now))

    def below_in(self, limit: int) -> float:
        """Return the seconds until there are fewer than *limit*."""
        used = self.used
        wait = 0.0
        for tick, count in self.ticks:
            if used < limit:
                break
            used -= count
            wait = self._left(tick)
        return wait

    def _left(self, tick: int) -> float:
        return max(0.0, tick + _TICKS - self.now)


class Account:
    """The counts of one key. Use it within :meth:`held` only."""

    def __init__(self, counts: Counts, start: int) -> None:
        self._counts = counts
        self._start = start
        self._running = start + ID_WORDS
        self._requests = self._running + counts.workers
        self._tokens = self._requests + 2 * _TICKS

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Keep all others from this account."""
        return self._counts.locked(self._start)

    @property
    def running(self) -> int:
        """How many requests run now, in all workers."""
        return sum(self._counts.words[self._running : self._running + self._counts.workers])

    def enter(self) -> None:
        """Count a request in."""
        self._counts.words[self._running + self._counts.index] += 1

    def leave(self) -> None:
        """Count a request out."""
        place = self._running + self._counts.index
        if self._counts.words[place]:
            self._counts.words[place] -= 1

    def requests(self) -> Window:
        """Return the requests of the last minute."""
        return self._window(self._requests)

    def tokens(self) -> Window:
        """Return the tokens of the last minute."""
        return self._window(self._tokens)

    def add_request(self) -> None:
        """Count one request."""
        self._add(self._requests, 1)

    def add_tokens(self, tokens: int) -> None:
        """Count *tokens*."""
        self._add(self._tokens, tokens)

    def _window(self, at: int) -> Window:
        words, now = self._counts.words, self._counts.clock()
        oldest = int(now) - WINDOW
        pairs = zip(words[at : at + _TICKS].tolist(), words[at + _TICKS : at + 2 * _TICKS].tolist(), strict=True)
        return Window(now, sorted([(tick, count) for tick, count in pairs if count and tick >= oldest]))

    def _add(self, at: int, number: int) -> None:
        words, tick = self._counts.words, int(self._counts.clock())
        place = at + tick % _TICKS
        if words[place] != tick:
            # In this order: a process that dies in between leaves nothing that counts.
            words[place + _TICKS] = 0
            words[place] = tick
        words[place + _TICKS] += number


class Counts(SharedTable):
    """
    The table of the accounts.

    *clock* has to be the same in all processes (``time.monotonic`` is, on one machine). Raises
    :class:`ConfigurationError`.
    """

    def __init__(
        self,
        file: Path | None = None,
        *,
        index: int = 0,
        workers: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(file, index=index, workers=workers, width=workers + 4 * _TICKS)
        self.clock = clock
        self._accounts: dict[str, Account] = {}
        # What a worker that died in this one's place had running.
        for start in self.starts():
            self.words[start + ID_WORDS + index] = 0

    def account(self, name: str) -> Account:
        """Return the account *name*, a new one if need be. Raises ``OverflowError`` when there is no room for it."""
        known = self._accounts.get(name)
        if known is None:
            known = self._accounts[name] = Account(self, self.find(name))
        return known
