"""
How many lines run at the same time: more while nothing shows saturation, fewer when something does.

Each model has a limit at each Triton, which counts lines and live requests. It grows fast until the first sign of
saturation, and slowly from then on (slow start and additive increase, as TCP has them). Refusals and long waits of live
requests halve the part of the lines, and a queue in front of the engine sets the limit to what the engine runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from triton_openai.access.rate_limits import Reservation
from triton_openai.batches.host import Host
from triton_openai.shares import live_reserve
from triton_openai.storage.batch_records import Line

# How many lines run at first, where no setting says what the engine can run.
_FIRST = 8
# After the first saturation, a limit grows by this part with each window of lines that succeeded.
_GROWTH_DIVISOR = 8
# Beside live requests, it grows by one for so many successes until then, not for each one: those that are too many make
# live requests wait.
_SLOW_START_BESIDE_LIVE = 4
# Beside live requests, it grows by less: each growth beyond what the engine runs makes some of them wait.
_GROWTH_DIVISOR_BESIDE_LIVE = 64
# A queue of this part of the running lines keeps the engine busy. A limit does not grow then, and does not shrink.
_QUEUE_SHARE = 0.05
# A queue takes no more than this part of a limit away at once.
_MAX_LOSS = 0.5


class Limit:
    """
    How many lines for one model run at one Triton: *max_running*, or fewer.

    *endpoint* is the name of the Triton; it is empty for all of them together. *first* is how many run at first.
    """

    def __init__(self, max_running: int, endpoint: str = "", *, first: float = _FIRST) -> None:
        self.endpoint = endpoint
        self.max_running = max_running
        self.running = 0
        #: How many requests of this process may run: in slow start lines alone, then lines and live requests.
        self.allowed = max(1, math.ceil(min(first, max_running)))
        #: Whether live requests came lately, how many of this process run now, and how much to keep free for new ones.
        self.live_lately = False
        self.live = 0.0
        self.reserve = 0.0
        self._succeeded = 0
        self._halved_at = 0.0
        # Whether nothing has shown saturation yet, and whether the engine has a queue.
        self._slow_start = True
        self._queued = False
        # When the Triton ended last, and how many lines ran then.
        self._died_at = 0.0
        self._ran = 0

    @property
    def lines(self) -> int:
        """How many lines may run now, beside the live requests that run: 1 at least."""
        lines = self.allowed
        if not self._slow_start:
            lines = math.floor(self.allowed - self.live - self.reserve)
        return min(max(1, lines), self.max_running)

    @property
    def _total(self) -> int:
        """How many lines and live requests may run."""
        if self._slow_start:
            return self.allowed + math.ceil(self.live)
        return self.allowed

    @property
    def is_exceeded(self) -> bool:
        """Whether more runs than may, since the limit shrank: lines that run are not ended."""
        return self.running + self.live > self._total

    @property
    def has_room(self) -> bool:
        """Whether another line may run now."""
        return self.running < self.lines

    def leave(self) -> None:
        """Count a line out."""
        self.running -= 1

    def succeeded(self) -> None:
        """Note a line that was answered. A limit that is not used up does not grow: it shows nothing about more."""
        if self._queued or 2 * self.running < self.lines:
            return
        self._succeeded += 1
        if self._succeeded < self._window:
            return
        growth = 1
        if not self._slow_start:
            growth = max(1, self.allowed // self._growth_divisor)
        self._succeeded = 0
        self._grow(growth)

    @property
    def _window(self) -> int:
        """After how many successes the limit grows."""
        if not self._slow_start:
            return self.running
        if self.live_lately:
            return _SLOW_START_BESIDE_LIVE
        return 1

    @property
    def _growth_divisor(self) -> int:
        if self.live_lately:
            return _GROWTH_DIVISOR_BESIDE_LIVE
        return _GROWTH_DIVISOR

    def _grow(self, growth: int) -> None:
        self.allowed = min(self.allowed + growth, self.max_running)

    def overloaded(self, started_at: float) -> None:
        """Note the refusal of a line that started at a time. Refusals of lines of the same window count once."""
        if started_at > self._halved_at:
            self._shrink(self._total - self.lines // 2)
            self._halved_at = time.monotonic()

    def queue(self, waiting: float | None) -> None:
        """
        Note that so many requests of this process wait in front of the engine; ``None`` if that is not known.

        In slow start, a limit that is used up and makes no queue is doubled at once.
        """
        self._queued = waiting is not None and waiting > 0
        if waiting is None:
            return
        running = self.running + self.live
        if self.live_lately and waiting > 0:
            # What the engine runs is all that it can run.
            self._shrink(min(self._total, math.floor(running - waiting)))
        elif waiting > max(1.0, _QUEUE_SHARE * running):
            loss = min(waiting, _MAX_LOSS * running)
            # Until the lines have ended, each look shows the same queue.
            self._shrink(min(self._total, math.floor(running - loss)))
        elif self._slow_start and not waiting and not self.live_lately and self.running >= self.allowed:
            self._grow(self.allowed)

    def _shrink(self, allowed: int) -> None:
        self.allowed = max(1, allowed)
        self._succeeded = 0
        self._slow_start = False

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

    def is_exceeded(self, target: str) -> bool:
        """Return whether a limit of a Triton model shrank, and the lines that are too many have not ended."""
        return target in self._limits and any(limit.is_exceeded for limit in self.of(target))

    def allowed(self) -> Mapping[str, int]:
        """Return how many lines of each Triton model may run."""
        return {target: self.allowed_for(target) for target in self._limits}

    def allowed_for(self, target: str) -> int:
        """Return how many lines of a Triton model may run, whatever other processes run."""
        return sum(limit.lines for limit in self.of(target))

    def of(self, target: str) -> Sequence[Limit]:
        """Return the limits of a Triton model at the Tritons that take lines for it now."""
        limits = self._limits.setdefault(target, {})
        names = self._host.endpoints(target)
        max_running = self._host.max_running
        if not names:
            names = ("",)
            max_running = self.total(target)
        for name in names:
            if name not in limits:
                limits[name] = Limit(max_running, name, first=self._first(target, len(names)))
        for name in [name for name, limit in limits.items() if name not in names and not limit.running]:
            # Its Triton does not take requests any more.
            del limits[name]
        used = [limits[name] for name in names]
        self._update(target, used, max_running)
        return used

    def _first(self, target: str, tritons: int) -> float:
        """Return with how many lines a limit begins: with all that the settings allow, if they say what that is."""
        capacity = self._host.capacity(target)
        if capacity == math.inf:
            return _FIRST
        return capacity / tritons

    def _update(self, target: str, limits: Sequence[Limit], max_running: int) -> None:
        """Set what *limits*, which are all of a Triton model, depend on now."""
        live = self._host.live(target)
        part = 0.0
        reserve = 0.0
        if live is not None:
            # Live requests go to the Triton with the fewest, so each has about the same part of them.
            part = live / len(limits)
            total = sum(limit.allowed for limit in limits)
            reserve = live_reserve(live, total) / len(limits) + 1
        for limit in limits:
            limit.max_running = max_running
            limit.live_lately = live is not None
            limit.live = part
            limit.reserve = reserve

    def total(self, target: str) -> int:
        """Return how many lines of a Triton model all processes may run together."""
        return self._host.max_running * max(1, self._host.tritons(target))

    def has_room(self, model: str) -> bool:
        """Return whether there is room for a line for *model*."""
        target = self._host.target(model)
        return target is not None and self._with_room(target) is not None

    def has_live_capacity(self, model: str) -> bool:
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
