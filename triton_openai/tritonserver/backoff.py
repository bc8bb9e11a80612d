"""Growing pauses between the starts of something that keeps ending."""

from __future__ import annotations


class Pauses:
    """
    Seconds to wait before each new start: from *first* on doubled up to *longest*.

    What has lived for *stable_after* seconds has shown that it can: after it the pauses begin anew.
    """

    def __init__(self, *, first: float, longest: float, stable_after: float) -> None:
        self._first = first
        self._longest = longest
        self._stable_after = stable_after
        self._next = first

    def after(self, lived: float) -> float:
        """Return the pause after an end that came *lived* seconds after the start (0: it did not start at all)."""
        if lived >= self._stable_after:
            self._next = self._first
        pause = self._next
        self._next = min(2 * pause, self._longest)
        return pause
