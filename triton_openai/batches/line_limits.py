"""How many requests of batches run at the same time: fewer while others wait, more while nothing is refused."""

from __future__ import annotations

import time
from collections import deque

from triton_openai.telemetry.request_record import Observer, RequestRecord

# Seconds after which a model that is away is looked for again: the first ones, and the most.
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
# What is known of first tokens is that of the last seconds, and of so many requests.
_SECONDS = 10.0
_MOST = 1000


class Limit:
    """
    How many lines of one model may run: *most*, or fewer.

    One more for each window of that many lines that ended well; half as many when one was refused for lack of capacity.
    """

    def __init__(self, most: int) -> None:
        self.running = 0
        self.allowed = max(1, most // 2)
        self._well = 0
        self._halved = 0.0
        # When the Triton ended last, and how many lines ran then.
        self._died = 0.0
        self._ran = 0

    def has_room(self, most: int) -> bool:
        """Return whether another line may run now, of *most*."""
        return self.running < min(self.allowed, most)

    def leave(self) -> None:
        """Count a line out."""
        self.running -= 1

    def ended(self, most: int) -> None:
        """Note a line that was answered."""
        self._well += 1
        if self._well >= self.allowed:
            self._well = 0
            self.allowed = min(self.allowed + 1, most)

    def overloaded(self, began: float) -> None:
        """Note that a line which *began* at some time was refused. Those of the same window count once."""
        if began > self._halved:
            self.allowed, self._well, self._halved = max(1, self.allowed // 2), 0, time.monotonic()

    def died(self, began: float) -> int:
        """
        Note that the Triton ended while a line ran that *began* at some time; return how many lines ran then.

        The lines that ran at that moment report it one after the other, and get the same number.
        """
        if began > self._died:
            self._died = time.monotonic()
            self._ran = self.running
        return self._ran


class Pause:
    """A model that is away: none of its lines begins until it is found again. It is looked for at growing intervals."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE
        self._due = time.monotonic() + self._seconds
        self._looking = False

    @property
    def due(self) -> bool:
        """Whether it is time to look for the model."""
        return not self._looking and time.monotonic() >= self._due

    def look(self) -> None:
        """Note that the model is looked for."""
        self._looking = True

    def go_on(self) -> None:
        """Note that it was not found."""
        self._looking = False
        self._seconds = min(2 * self._seconds, _LONGEST_PAUSE)
        self._due = time.monotonic() + self._seconds


class FirstTokens(Observer):
    """Observes how long live requests wait for their first tokens."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MOST)

    def ended(self, record: RequestRecord) -> None:
        wait = record.time_to_first_token
        # All answers of a request come whole, or none does.
        if record.batch is None and wait is not None and not record.answers[0].whole:
            self._waits.append((time.monotonic(), wait))

    def slowest(self) -> float:
        """Return the seconds that 19 in 20 requests of the last seconds did not exceed; 0 for none."""
        since = time.monotonic() - _SECONDS
        while self._waits and self._waits[0][0] < since:
            self._waits.popleft()
        waits = sorted(wait for _, wait in self._waits)
        if waits:
            return waits[len(waits) * 19 // 20]
        return 0.0


def is_open(hours: str | None) -> bool:
    """Return whether it is within *hours*, ``HH:MM-HH:MM`` in local time; they may pass midnight."""
    if hours is None:
        return True
    begin, end = hours.split("-")
    now = time.strftime("%H:%M")
    if begin < end:
        return begin <= now < end
    return now >= begin or now < end
