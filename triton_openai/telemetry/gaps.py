"""The time between the arrivals of one answer's text, counted by the answer itself until it ends."""

from __future__ import annotations

from bisect import bisect_left

#: Upper bounds in seconds. From what a small model needs for a token to what nobody waits for; the upper ones are
#: those of vLLM's server.
BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


class Gaps:
    """
    How far apart the arrivals of an answer's text were; what came together is one arrival.

    ``counts`` are the gaps up to each of :data:`BOUNDS`, and last those above all of them; they are empty where there
    was no gap. ``seconds`` is their sum.
    """

    __slots__ = ("_last", "counts", "seconds")

    def __init__(self) -> None:
        self._last: float | None = None
        self.counts: list[int] = []
        self.seconds = 0.0

    def arrived(self, now: float) -> None:
        """Take in that text has come at *now*, in seconds of any clock that does not go back; the same is the same."""
        last, self._last = self._last, now
        if last is None or last == now:
            return
        gap = now - last
        if not self.counts:
            # Most of the answers in one piece never need it.
            self.counts = [0] * (len(BOUNDS) + 1)
        self.counts[bisect_left(BOUNDS, gap)] += 1
        self.seconds += gap
