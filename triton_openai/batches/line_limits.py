"""
How many lines run at the same time: more while nothing shows trouble, fewer when something does.

Each model has a limit at each Triton. A limit doubles with each window of lines that succeeded until the first trouble;
from then on it grows by a part. Refusals and long waits of live requests halve it, and a queue in front of the engine
takes the queued lines away from it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from triton_openai.access.rate_limits import Reservation
from triton_openai.batches.host import Host
from triton_openai.storage.batch_records import Line

# How many lines run at first.
_FIRST = 8
# After the first trouble, a limit grows by this part with each window of lines that succeeded.
_GROWTH_DIVISOR = 8
# Beside live requests, it grows by less, and a queue makes it leave them a part of the engine.
_GROWTH_DIVISOR_BESIDE_LIVE = 32
_SHARE_BESIDE_LIVE = 0.8
# A queue of this part of the running lines keeps the engine busy. A limit does not grow then, and does not shrink.
_QUEUE_SHARE = 0.05
# A queue takes no more than this part of a limit away at once.
_MAX_LOSS = 0.5


class Limit:
    """
    How many lines for one model run at one Triton: *max_running*, or fewer.

    *endpoint* is the name of the Triton; it is empty for all of them together.
    """

    def __init__(self, max_running: int, endpoint: str = "") -> None:
        self.endpoint = endpoint
        self.max_running = max_running
        self.running = 0
        self.allowed = min(_FIRST, max_running)
        self._succeeded = 0
        self._halved_at = 0.0
        # Whether there was no trouble yet, and whether the engine has a queue.
        self._doubles = True
        self._queued = False
        # Whether live requests come, too.
        self._live = False
        # When the Triton ended last, and how many lines ran then.
        self._died_at = 0.0
        self._ran = 0

    @property
    def has_room(self) -> bool:
        """Whether another line may run now."""
        return self.running < min(self.allowed, self.max_running)

    def leave(self) -> None:
        """Count a line out."""
        self.running -= 1

    def succeeded(self) -> None:
        """Note a line that was answered. A limit that is not used up does not grow: it shows nothing about more."""
        if self._queued or 2 * self.running < self.allowed:
            return
        self._succeeded += 1
        if self._doubles:
            growth = 1
        elif self._succeeded >= self.allowed:
            growth = max(1, self.allowed // self._growth_divisor)
        else:
            return
        self._succeeded = 0
        self.allowed = min(self.allowed + growth, self.max_running)

    def overloaded(self, started_at: float) -> None:
        """Note the refusal of a line that started at a time. Refusals of lines of the same window count once."""
        if started_at > self._halved_at:
            self._shrink(self.allowed // 2)
            self._halved_at = time.monotonic()

    def queue(self, waiting: float, *, live: bool = False) -> None:
        """
        Note that so many lines of this process wait in front of the engine.

        Beside *live* requests, which wait there too, lines leave room for them.
        """
        self._queued = waiting > 0
        self._live = live
        if live and waiting > 0:
            self._shrink(min(self.allowed, int(_SHARE_BESIDE_LIVE * (self.running - waiting))))
        elif waiting > max(1.0, _QUEUE_SHARE * self.running):
            loss = min(waiting, _MAX_LOSS * self.running)
            # Until the lines have ended, each look shows the same queue.
            self._shrink(min(self.allowed, self.running - math.ceil(loss)))

    @property
    def _growth_divisor(self) -> int:
        if self._live:
            return _GROWTH_DIVISOR_BESIDE_LIVE
        return _GROWTH_DIVISOR

    def _shrink(self, allowed: int) -> None:
        self.allowed = max(1, allowed)
        self._succeeded = 0
        self._doubles = False

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
    """The limits of all models, by Triton model and Triton. *slots* are the lines that all processes may run."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits: dict[str, dict[str, Limit]] = {}
        #: How many lines for a Triton model this process may run; the slots set it.
        self.slots: Mapping[str, int] = {}

    @property
    def running(self) -> int:
        """The number of lines that run."""
        return sum(self.running_for(target) for target in self._limits)

    @property
    def targets(self) -> Collection[str]:
        """The Triton models for which lines have run."""
        return self._limits.keys()

    def running_for(self, target: str) -> int:
        """Return how many lines run for a Triton model."""
        return sum(limit.running for limit in self._limits.get(target, {}).values())

    def allowed(self) -> Mapping[str, int]:
        """Return how many lines of each Triton model may run."""
        return {target: self.allowed_for(target) for target in self._limits}

    def allowed_for(self, target: str) -> int:
        """Return how many lines of a Triton model may run, whatever other processes run."""
        return sum(min(limit.allowed, limit.max_running) for limit in self.of(target))

    def of(self, target: str) -> Sequence[Limit]:
        """Return the limits of a Triton model at the Tritons that take lines for it now."""
        limits = self._limits.setdefault(target, {})
        names = self._host.endpoints(target)
        max_running = self._host.max_running
        if not names:
            names = ("",)
            max_running = self.total(target)
        for name in names:
            limits.setdefault(name, Limit(max_running, name)).max_running = max_running
        return [limits[name] for name in names]

    def total(self, target: str) -> int:
        """Return how many lines of a Triton model all processes may run together."""
        return self._host.max_running * max(1, self._host.tritons(target))

    def has_room(self, model: str) -> bool:
        """Return whether there is room for a line for *model*."""
        target = self._host.target(model)
        return target is not None and self._with_room(target) is not None

    def is_roomy(self, model: str) -> bool:
        """Return whether live requests leave room for a line for *model*, whatever other processes run."""
        target = self._host.target(model)
        return target is not None and self._host.has_room(target, self.running_for(target))

    def take(self, model: str) -> Limit | None:
        """Count a line for *model* in, and return its limit; ``None`` if there is no room for it."""
        target = self._host.target(model)
        if target is None:
            return None
        limit = self._with_room(target)
        if limit is not None:
            limit.running += 1
        return limit

    def _with_room(self, target: str) -> Limit | None:
        """Return the limit with the fewest lines that has room."""
        running = self.running_for(target)
        if running >= self.slots.get(target, 0) or not self._host.has_room(target, running):
            return None
        limits = [limit for limit in self.of(target) if limit.has_room]
        return min(limits, key=lambda limit: limit.running, default=None)

    def slow_down(self, target: str) -> None:
        """Halve the limits of a Triton model: live requests wait too long."""
        now = time.monotonic()
        for limit in self.of(target):
            limit.overloaded(now)


def is_open(hours: str | None) -> bool:
    """Return whether it is within *hours*, ``HH:MM-HH:MM`` in local time; they may pass midnight."""
    if hours is None:
        return True
    begin, end = hours.split("-")
    now = time.strftime("%H:%M")
    if begin < end:
        return begin <= now < end
    return now >= begin or now < end
