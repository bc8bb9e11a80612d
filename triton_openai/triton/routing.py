"""
The choice among several Tritons: candidates, policies, ejection times, and the retry budget.

A :class:`Pool` has the :class:`Target` s of one model, one for each Triton that has it ready. Nothing here connects or
waits, and the clock is an argument. The cost of a choice does not depend on the number of Tritons.
"""

from __future__ import annotations

import heapq
import math
import random
import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from triton_openai.config.tree import EjectionSettings, Policy, RoutingSettings

# Up to this number of candidates, all are compared; of more candidates, two.
_MAX_COMPARED = 3
# The seconds in which a restored Triton reaches its share of the requests, and the part that it begins with.
_WARM_UP = 10.0
_COLD = 0.1
# Points on the hash ring for each unit of weight. More Tritons than fill the ring have fewer points each.
_POINTS = 256
_RING = 1 << 16
# A digest of BLAKE2b gives as many points.
_DIGEST = struct.Struct(">8Q")
_POINTS_IN_DIGEST = 8
# After this number of Tritons over their bound, the one with the fewest requests is chosen.
_MAX_PASSED = 64
# The window of the retry budget in seconds, and the retries that it allows in any case.
_WINDOW = 10
_MIN_RETRIES = 3


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
    """One model on one Triton: the requests of this process that run there, and whether it takes more."""

    def __init__(self, endpoint: str, weight: float, *, since: float = -math.inf) -> None:
        self.endpoint = endpoint
        self.weight = weight
        #: Requests that have not ended.
        self.running = 0
        #: When it was added or restored.
        self.since = since
        #: Consecutive failures.
        self.failures = 0
        #: Until when it gets no requests. After that time, a probe may restore it.
        self.ejected_until: float | None = None
        self._ejections = 0

    def effective_weight(self, now: float) -> float:
        """Return the weight, which is lower during warm-up."""
        age = now - self.since
        if age >= _WARM_UP:
            return self.weight
        return self.weight * max(_COLD, age / _WARM_UP)

    def load(self, now: float) -> float:
        """Return the running requests for each unit of :meth:`effective_weight`."""
        return self.running / self.effective_weight(now)

    def succeed(self) -> None:
        """Record an answer."""
        self.failures = 0
        if self.ejected_until is None:
            self._ejections = 0

    def fail(self, now: float, settings: EjectionSettings) -> bool:
        """Record a failure, and return whether it ejects the target."""
        self.failures += 1
        if self.ejected_until is not None or self.failures < settings.failures:
            return False
        self.eject(now, settings)
        return True

    def eject(self, now: float, settings: EjectionSettings) -> None:
        """Eject it for a time that doubles with each ejection."""
        self.ejected_until = now + min(settings.time * 2.0**self._ejections, settings.max_time)
        self._ejections = min(self._ejections + 1, 32)

    def restore(self, now: float) -> None:
        """Send it requests again, few at first."""
        self.ejected_until = None
        self.failures = 0
        self.since = now


class Pool:
    """The targets of one model. They and their ejections change seldom: :meth:`update` prepares the choice."""

    def __init__(
        self,
        policy: Policy = "least_requests",
        *,
        max_ejected: float = 0.0,
        load_factor: float = 1.0,
        seed: int | None = None,
    ) -> None:
        #: The policy and the two limits take effect with the next :meth:`update`.
        self.policy = policy
        self.max_ejected = max_ejected
        self.load_factor = load_factor
        self._random = random.Random(seed)
        #: All targets, including those that take no requests.
        self.targets: Sequence[Target] = ()
        #: The requests that one target runs at most, as long as another one has capacity.
        self.max_running = math.inf
        self._counted: Collection[Target] = frozenset()
        #: The targets with a weight, including those that are ejected.
        self.active: Sequence[Target] = ()
        #: The targets that take requests.
        self.candidates: Sequence[Target] = ()
        #: Requests of all targets that have not ended.
        self.running = 0
        #: Whether too many are ejected, so that all are used.
        self.panics = False
        self._weights: Sequence[float] = ()
        self._turns: list[tuple[float, int, Target]] = []
        self._own_ring = Ring()
        self._ring = self._own_ring
        #: The candidates, for the policy ``affinity``.
        self._by_name: Mapping[str, Target] = {}

    def update(self, targets: Sequence[Target], *, ejected: Collection[str] = (), ring: Ring | None = None) -> None:
        """
        Use *targets* as they are now.

        *ejected* are the names of Tritons that are ejected for all models. *ring* is a common one with all Tritons of
        the targets; without it, the pool has its own.
        """
        self.targets = targets
        self._counted = frozenset(targets)
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
            self._turns = [(1 / target.weight, index, target) for index, target in enumerate(self.candidates)]
            heapq.heapify(self._turns)
        elif self.policy == "affinity":
            self._by_name = {target.endpoint: target for target in self.candidates}
            if ring is not None:
                self._ring = ring
                self._own_ring.update({})
            else:
                self._ring = self._own_ring
                # With the ejected targets, which will be restored.
                self._own_ring.update({target.endpoint: target.weight for target in active})

    def count(self, target: Target, number: int) -> None:
        """Count *number* (1 or -1) more running requests of *target*, which may have left the pool."""
        target.running += number
        if target in self._counted:
            self.running += number

    def choose(self, now: float, *, key: bytes | None = None, avoid: Collection[str] = ()) -> Target | None:
        """
        Return the target for a request, ``None`` if there is none.

        With the policy ``affinity``, requests with the same *key* get the same target; without a key, the target with
        the fewest requests. *avoid* are the names of Tritons that have failed for this request: where no other one is
        left, an ejected one is used. Where all targets run the most requests that they may, one gets more: retries, and
        further answers to a prompt, do not wait.
        """

        def fits(target: Target) -> bool:
            return target.running < self.max_running and target.endpoint not in avoid

        if len(self.candidates) == 1 and self.candidates[0].endpoint not in avoid:
            return self.candidates[0]
        target: Target | None = None
        if self.policy == "round_robin":
            target = self._next(fits)
        elif self._by_name and key is not None:
            target = self._nearest(key, fits)
        elif len(self.candidates) > _MAX_COMPARED:
            target = self._best_of_two(fits, now)
        if target is not None:
            return target
        # There are few candidates, or those that were looked at do not fit. That is seldom; all are looked at then.
        rest = [target for target in self.candidates if target.endpoint not in avoid]
        if avoid and not rest:
            rest = [target for target in self.active if target.endpoint not in avoid]
        fitting = [target for target in rest if fits(target)]
        return self._least_loaded(fitting or rest, now)

    def _best_of_two(self, fits: Callable[[Target], bool], now: float) -> Target | None:
        """Return the less loaded one of two random candidates that fit; ``None`` if none of them does."""
        best: Target | None = None
        for target in (self._sample(now), self._sample(now)):
            if target is None or not fits(target):
                continue
            if best is None or target.load(now) < best.load(now):
                best = target
        return best

    def _least_loaded(self, targets: Sequence[Target], now: float) -> Target | None:
        """Return the target with the lowest load; among equal ones, a random one by weight."""
        if not targets:
            return None
        lowest = min(target.load(now) for target in targets)
        tied = [target for target in targets if target.load(now) == lowest]
        if len(tied) == 1:
            return tied[0]
        return self._random.choices(tied, [target.effective_weight(now) for target in tied])[0]

    def _sample(self, now: float) -> Target | None:
        """Return a random candidate by weight; ``None`` in place of one that has to warm up."""
        index = bisect_right(self._weights, self._random.random() * self._weights[-1])
        target = self.candidates[min(index, len(self.candidates) - 1)]
        cold = target.effective_weight(now) < self._random.random() * target.weight
        if cold:
            return None
        return target

    def _next(self, fits: Callable[[Target], bool]) -> Target | None:
        """Return the target with the earliest deadline, which is then put off by 1 / weight."""
        passed: list[tuple[float, int, Target]] = []
        chosen = None
        while self._turns and chosen is None:
            deadline, index, target = heapq.heappop(self._turns)
            if fits(target):
                chosen = target
                deadline += 1 / target.weight
            passed.append((deadline, index, target))
        for turn in passed:
            heapq.heappush(self._turns, turn)
        return chosen

    def _nearest(self, key: bytes, fits: Callable[[Target], bool]) -> Target | None:
        """
        Return the first target behind *key* on the ring whose load is within the bound.

        Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): no target runs more than the load
        factor times its share of all requests, so a key moves on only while its own target is over its bound. ``None``
        where many targets in a row are.
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
    The points of Tritons on a circle, for consistent hashing. All pools of a fleet may share one ring.

    The points depend on names and weights alone, so every worker and every replica has the same ring. A change is
    applied when the ring is read next: to make a ring of 1,000 Tritons takes tens of milliseconds.
    """

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._stale = False
        # By name and number of points: those points, which are made once.
        self._made: dict[tuple[str, int], Sequence[int]] = {}
        self._owners: dict[int, str] = {}
        # In order.
        self._points: list[int] = []

    def update(self, weights: Mapping[str, float]) -> None:
        """Use the Tritons of these names and *weights* from now on."""
        self._stale = self._stale or weights != self._weights
        self._weights = weights

    def owners(self, key: bytes) -> Iterator[str]:
        """Yield the names of the Tritons after *key* on the ring, once for each of their points."""
        if self._stale:
            self._apply()
        points = self._points
        start = bisect_right(points, _point(key))
        for step in range(len(points)):
            yield self._owners[points[start + step - len(points)]]

    def _apply(self) -> None:
        # On a full ring each Triton has fewer points, a part of those that it had. Their number is a power of two, so
        # that one Triton more or less seldom changes it.
        available = _RING // max(1, len(self._weights))
        density = min(_POINTS, max(_POINTS_IN_DIGEST, 1 << available.bit_length() - 1))
        made: dict[tuple[str, int], Sequence[int]] = {}
        for name, weight in self._weights.items():
            count = max(1, round(density * weight))
            made[name, count] = self._made.get((name, count)) or _points(name, count)
        self._made = made
        self._owners = {point: name for (name, _), points in made.items() for point in points}
        self._points = sorted(self._owners)
        self._stale = False


def _points(name: str, count: int) -> Sequence[int]:
    """Return the first *count* points of the Triton *name*."""
    points: list[int] = []
    while len(points) < count:
        number = len(points) // _POINTS_IN_DIGEST
        points += _DIGEST.unpack(blake2b(f"{name}#{number}".encode()).digest())
    return points[:count]


def _point(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


class RetryBudget:
    """Limits retries to a share of the requests of the last ten seconds, so that they cannot multiply the load."""

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
        if retries >= max(_MIN_RETRIES, self.share * requests):
            return False
        current[1] += 1
        return True
