"""
Which of several Tritons gets a request: candidates, policies, ejection, and the budget for retries.

A :class:`Pool` has the :class:`Target` s of one model, one for each Triton that has it ready. Nothing here connects or
waits, and the clock is an argument. The cost of a choice does not depend on the number of Tritons.
"""

from __future__ import annotations

import heapq
import math
import random
import struct
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from triton_openai.config.tree import EjectionSettings, Policy, RoutingSettings

# With so few candidates all are compared; of more, two.
_FEW = 3
# Seconds in which a Triton that came back reaches its share of the requests, and the part that it begins with.
_WARM_UP = 10.0
_COLD = 0.1
# Points on the hash ring for each unit of weight. More Tritons than fill the ring have fewer points each.
_POINTS = 256
_RING = 1 << 16
# A digest of BLAKE2b gives as many points.
_DIGEST = struct.Struct(">8Q")
_POINTS_IN_DIGEST = 8
# More than the Tritons of a ring can ever be.
_PLACES = 1 << 24
# After so many Tritons that have too much, the one with the fewest requests is better.
_MAX_PASSED = 64
# So many changes are made one by one; for more, a new ring is made.
_MAX_CHANGES = 16
# The window of the budget, and the retries that it allows in any case.
_WINDOW = 10
_LEAST_RETRIES = 3


def prefix_key(routing: RoutingSettings, model: str, lora: str, prompt: str) -> bytes | None:
    """Return the key of the beginning of *prompt*, ``None`` unless the setting ``affinity`` has prompts."""
    if "prompt" not in routing.affinity:
        return None
    # A character has at least one byte.
    start = prompt[: routing.prefix_size].encode("utf-8", "surrogatepass")[: routing.prefix_size]
    return b"\0".join((model.encode(), lora.encode(), start))


def session_key(routing: RoutingSettings, *names: tuple[str, str | None]) -> str | None:
    """Return the value of *names* (kind and value) whose kind comes first in the setting ``affinity``."""
    values = dict(names)
    for kind in routing.affinity:
        value = values.get(kind)
        if value:
            return value
    return None


class Target:
    """One model on one Triton: how many requests of this process it has, and whether it takes more."""

    def __init__(self, endpoint: str, weight: float, *, since: float = -math.inf) -> None:
        self.endpoint = endpoint
        self.weight = weight
        #: Requests that have not ended.
        self.running = 0
        #: When it began to take requests, or began again.
        self.since = since
        #: Failures in a row.
        self.failures = 0
        #: Until when it gets no requests: the time after which a probe may bring it back.
        self.ejected_until: float | None = None
        self._ejections = 0

    def share(self, now: float) -> float:
        """Return the weight, less while it warms up."""
        age = now - self.since
        if age >= _WARM_UP:
            return self.weight
        return self.weight * max(_COLD, age / _WARM_UP)

    def succeed(self) -> None:
        """Learn that it answered."""
        self.failures = 0
        if self.ejected_until is None:
            self._ejections = 0

    def fail(self, now: float, settings: EjectionSettings) -> bool:
        """Learn that it failed, and return whether it is ejected by that."""
        self.failures += 1
        if self.ejected_until is not None or self.failures < settings.failures:
            return False
        self.eject(now, settings)
        return True

    def eject(self, now: float, settings: EjectionSettings) -> None:
        """Take no requests for a time that doubles with each ejection."""
        self.ejected_until = now + min(settings.time * 2.0**self._ejections, settings.max_time)
        self._ejections = min(self._ejections + 1, 32)

    def restore(self, now: float) -> None:
        """Take requests again, few at first."""
        self.ejected_until = None
        self.failures = 0
        self.since = now


class Pool:
    """The targets of one model, which change seldom, as do their ejections: :meth:`update` prepares the choice."""

    def __init__(self, policy: Policy, *, max_ejected: float, load_factor: float, seed: int | None = None) -> None:
        #: These three take effect with the next :meth:`update`.
        self.policy = policy
        self.max_ejected = max_ejected
        self.load_factor = load_factor
        self._random = random.Random(seed)
        #: All targets, those included that take no requests.
        self.targets: Sequence[Target] = ()
        #: Requests that one target runs at most, as long as another one has room.
        self.max_running = math.inf
        self._counted: Collection[Target] = frozenset()
        #: The targets that take requests, those included that are ejected.
        self.active: Sequence[Target] = ()
        #: The targets that take requests now.
        self.candidates: Sequence[Target] = ()
        #: Requests of all targets that have not ended.
        self.running = 0
        #: Whether so many are ejected that all are used.
        self.panics = False
        self._weights: Sequence[float] = ()
        self._turns: list[tuple[float, int, Target]] = []
        self._own_ring = Ring()
        self._ring = self._own_ring
        #: The candidates, for the policy ``affinity``.
        self._by_name: Mapping[str, Target] = {}

    def update(self, targets: Sequence[Target], *, ejected: Collection[str] = (), ring: Ring | None = None) -> None:
        """
        Take *targets* as they are now.

        *ejected* are Tritons that are ejected for all models. *ring* is one that has them all and perhaps others;
        without it, the pool has its own.
        """
        self.targets, self._counted = targets, frozenset(targets)
        self.running = sum(target.running for target in targets)
        active = self.active = [target for target in targets if target.weight > 0]
        sound = [target for target in active if target.ejected_until is None and target.endpoint not in ejected]
        self.panics = bool(active) and len(active) - len(sound) > self.max_ejected * len(active)
        if self.panics:
            self.candidates = active
        else:
            self.candidates = sound
        self._weights = list(accumulate(target.weight for target in self.candidates))
        self._turns = []
        self._by_name = {}
        if self.policy == "round_robin":
            self._turns = [(1 / one.weight, place, one) for place, one in enumerate(self.candidates)]
            heapq.heapify(self._turns)
        elif self.policy == "affinity":
            self._by_name = {target.endpoint: target for target in self.candidates}
            self._ring = ring or self._own_ring
            # Those included that are ejected, which come back.
            self._own_ring.update({} if ring else {target.endpoint: target.weight for target in active})

    def count(self, target: Target, number: int) -> None:
        """Count *number* more requests of *target*, which may be -1, and which may have left the pool."""
        target.running += number
        if target in self._counted:
            self.running += number

    def choose(self, now: float, *, key: bytes | None = None, avoid: Collection[str] = ()) -> Target | None:
        """
        Return the target for a request, ``None`` if there is none.

        *key* is what should stay at one Triton, for the policy ``affinity``; without one the request goes to where the
        fewest run. *avoid* are names of Tritons that have failed for it: where no other one is left, an ejected one is
        better than none. Where all have as much as they may, one gets more: what fails over, and further answers to a
        prompt, do not wait.
        """

        def fits(target: Target) -> bool:
            return target.running < self.max_running and target.endpoint not in avoid

        if len(self.candidates) == 1 and self.candidates[0].endpoint not in avoid:
            return self.candidates[0]
        found: Target | None = None
        if self.policy == "round_robin":
            found = self._next(fits)
        elif self._by_name and key is not None:
            found = self._nearest(key, fits)
        elif len(self.candidates) > _FEW:
            two = [one for one in (self._sample(now), self._sample(now)) if one is not None and fits(one)]
            found = min(two, key=lambda target: target.running / target.share(now), default=None)
        # Few, or those that were looked at do not fit: that is seldom, and then all are looked at.
        if found is not None:
            return found
        rest = [one for one in self.candidates if one.endpoint not in avoid]
        if avoid and not rest:
            rest = [one for one in self.active if one.endpoint not in avoid]
        return self._least([one for one in rest if fits(one)] or rest, now)

    def _least(self, targets: Sequence[Target], now: float) -> Target | None:
        """Return the target with the fewest requests for its weight, of equal ones at random by their weights."""
        if not targets:
            return None
        least = min(target.running / target.share(now) for target in targets)
        tied = [target for target in targets if target.running / target.share(now) == least]
        if len(tied) == 1:
            return tied[0]
        return self._random.choices(tied, [one.share(now) for one in tied])[0]

    def _sample(self, now: float) -> Target | None:
        """Return a candidate at random by its weight; ``None`` instead of one that is still to warm up."""
        place = bisect_right(self._weights, self._random.random() * self._weights[-1])
        target = self.candidates[min(place, len(self.candidates) - 1)]
        cold = target.share(now) < self._random.random() * target.weight
        if cold:
            return None
        return target

    def _next(self, fits: Callable[[Target], bool]) -> Target | None:
        """Return the target whose turn it is: the one with the earliest deadline, which moves on by 1 / weight."""
        passed: list[tuple[float, int, Target]] = []
        found = None
        while self._turns and found is None:
            deadline, place, target = heapq.heappop(self._turns)
            if fits(target):
                found = target
                deadline += 1 / target.weight
            passed.append((deadline, place, target))
        for turn in passed:
            heapq.heappush(self._turns, turn)
        return found

    def _nearest(self, key: bytes, fits: Callable[[Target], bool]) -> Target | None:
        """
        Return the first target behind *key* on the ring whose load is within the bound.

        Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): no target runs more than the load
        factor times its share of all requests, so a key moves on only while its own target has too much.
        ``None`` where many in a row have.
        """
        bound = self.load_factor * (self.running + 1) / self._weights[-1]
        full: set[str] = set()
        for name in self._ring.owners(key):
            target = self._by_name.get(name)
            if target is None or name in full:
                continue
            if fits(target) and target.running < math.ceil(bound * target.weight):
                return target
            full.add(name)
            if len(full) in (len(self._by_name), _MAX_PASSED):
                break
        return None


class Ring:
    """
    Points of Tritons on a circle, for consistent hashing. All pools of a fleet may share one.

    The points depend on names and weights alone, so every worker and every replica has the same ring. A change is made
    when the ring is read next, and costs what it changes: a ring of 1,000 Tritons takes tens of milliseconds to make.
    """

    def __init__(self) -> None:
        self._wanted: Mapping[str, float] = {}
        self._stale = False
        self._weights: Mapping[str, float] = {}
        #: Points for a unit of weight.
        self._density = 0
        # In order: a point in the upper bits, and the place of its Triton among the names in the lower ones.
        self._points: list[int] = []
        self._names: list[str] = []

    def update(self, weights: Mapping[str, float]) -> None:
        """Have the Tritons of these names and *weights* from now on."""
        self._wanted = weights
        self._stale = True

    def owners(self, key: bytes) -> Iterator[str]:
        """Yield the names of the Tritons behind *key*, once for each of their points."""
        if self._stale:
            self._apply()
        points = self._points
        names = self._names
        start = bisect_right(points, _value(_point(key), _PLACES - 1))
        for step in range(len(points)):
            yield names[points[start + step - len(points)] % _PLACES]

    def _apply(self) -> None:
        wanted = self._wanted
        weights = self._weights
        # Fewer points, where the ring is full, are a part of the others: what stays keeps its place. By powers of two,
        # so that a Triton more or less seldom makes a difference.
        room = _RING // max(1, len(wanted))
        density = min(_POINTS, max(_POINTS_IN_DIGEST, 1 << room.bit_length() - 1))
        changed = {name for name in weights.keys() | wanted.keys() if weights.get(name) != wanted.get(name)}
        added = [name for name in wanted if name in changed]
        # Those that have gone keep their places among the names.
        crowded = len(self._names) > 2 * len(wanted) + _MAX_CHANGES
        if density != self._density or crowded or len(changed) > _MAX_CHANGES:
            self._names = list(wanted)
            self._points = sorted(self._values(self._names, wanted, density))
        else:
            gone = {place for place, name in enumerate(self._names) if name in changed}
            self._points = [value for value in self._points if value % _PLACES not in gone]
            self._names = [*self._names, *added]
            for value in self._values(added, wanted, density):
                insort(self._points, value)
        self._weights = wanted
        self._density = density
        self._stale = False

    def _values(self, names: Sequence[str], weights: Mapping[str, float], density: int) -> Iterator[int]:
        first = len(self._names) - len(names)
        for place, name in enumerate(names, first):
            count = max(1, round(density * weights[name]))
            for number in range(-(-count // _POINTS_IN_DIGEST)):
                digest = blake2b(f"{name}#{number}".encode()).digest()
                for point in _DIGEST.unpack(digest)[: count - number * _POINTS_IN_DIGEST]:
                    yield _value(point, place)


def _value(point: int, place: int) -> int:
    return point * _PLACES + place


def _point(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class RetryBudget:
    """Bounds retries to a share of the requests of the last ten seconds, so that they cannot become a storm."""

    def __init__(self, share: float) -> None:
        self.share = share
        self._seconds: deque[tuple[int, list[int]]] = deque()

    def _now(self, now: float) -> list[int]:
        """Return the requests and the retries of this second."""
        second = int(now)
        while self._seconds and self._seconds[0][0] <= second - _WINDOW:
            self._seconds.popleft()
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, [0, 0]))
        return self._seconds[-1][1]

    def count(self, now: float) -> None:
        """Count a request."""
        self._now(now)[0] += 1

    def spend(self, now: float) -> bool:
        """Count a retry if the budget allows one, and return whether it does."""
        current = self._now(now)
        requests = sum(counts[0] for _, counts in self._seconds)
        retries = sum(counts[1] for _, counts in self._seconds)
        if retries >= max(_LEAST_RETRIES, self.share * requests):
            return False
        current[1] += 1
        return True
