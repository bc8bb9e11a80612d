"""How many lines run at the same time: fewer while live requests wait, more while none is refused."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from triton_openai.access.rate_limits import Reservation
from triton_openai.batches.host import Host
from triton_openai.storage.batch_records import Line
from triton_openai.telemetry.request_record import Observer, RequestRecord

# The first tokens that count: those of the last seconds, and of so many requests at most.
_SECONDS = 10.0
_MAX_WAITS = 1000


class Limit:
    """
    How many lines of one model may run: *max_running*, or fewer.

    One more for each window of that many lines that succeeded; half as many when one was refused for lack of capacity.
    """

    def __init__(self, max_running: int) -> None:
        self.running = 0
        self.allowed = max(1, max_running // 2)
        self._succeeded = 0
        self._halved_at = 0.0
        # When the Triton ended last, and how many lines ran then.
        self._died_at = 0.0
        self._ran = 0

    def has_room(self, max_running: int) -> bool:
        """Return whether another line may run now, of *max_running*."""
        return self.running < min(self.allowed, max_running)

    def leave(self) -> None:
        """Count a line out."""
        self.running -= 1

    def succeeded(self, max_running: int) -> None:
        """Note a line that was answered."""
        self._succeeded += 1
        if self._succeeded >= self.allowed:
            self._succeeded = 0
            self.allowed = min(self.allowed + 1, max_running)

    def overloaded(self, started_at: float) -> None:
        """Note the refusal of a line that started at a time. Refusals of lines of the same window count once."""
        if started_at > self._halved_at:
            self.allowed = max(1, self.allowed // 2)
            self._succeeded = 0
            self._halved_at = time.monotonic()

    def died(self, started_at: float) -> int:
        """
        Note that the Triton ended while a line ran that started at a time; return how many lines ran then.

        The lines that ran at that moment report it one after the other, and get the same number.
        """
        if started_at > self._died_at:
            self._died_at = time.monotonic()
            self._ran = self.running
        return self._ran


class PickedLine(NamedTuple):
    """A line that was picked to start, the limit that counts it, and what counts it against its key."""

    line: Line
    limit: Limit
    reservation: Reservation | None = None


class ModelLimits:
    """The limits of all models, by Triton model."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits: dict[str, Limit] = {}

    @property
    def running(self) -> int:
        """The number of lines that run."""
        return sum(limit.running for limit in self._limits.values())

    def allowed(self) -> Mapping[str, int]:
        """Return how many lines of each model may run."""
        max_running = self._host.max_running
        return {target: min(limit.allowed, max_running) for target, limit in self._limits.items()}

    def take(self, model: str) -> Limit | None:
        """Count a line for *model* in, and return its limit; ``None`` if there is no room for it."""
        target = self._host.target(model)
        if target is None:
            return None
        max_running = self._host.max_running
        limit = self._limits.get(target)
        if limit is None:
            limit = Limit(max_running)
            self._limits[target] = limit
        if not (limit.has_room(max_running) and self._host.has_room(target, limit.running)):
            return None
        limit.running += 1
        return limit

    def slow_down(self) -> None:
        """Halve all limits: live requests wait too long."""
        now = time.monotonic()
        for limit in self._limits.values():
            limit.overloaded(now)


class FirstTokens(Observer):
    """Observes how long live requests wait for their first tokens."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MAX_WAITS)

    def ended(self, record: RequestRecord) -> None:
        wait = record.time_to_first_token
        # All answers of a request come whole, or none does.
        if record.batch is None and wait is not None and not record.answers[0].whole:
            self._waits.append((time.monotonic(), wait))

    def slowest(self) -> float:
        """Return the 95th percentile of the waits of the last seconds, in seconds; 0 if there were none."""
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
