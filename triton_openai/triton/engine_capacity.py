"""
How many requests the engines that report their queue should get.

An engine runs a number of requests at most. More of them wait in it, where nobody can refuse them, and where they hold
memory. So it gets only the next ones, and the rest waits in this service. The next ones are a quarter of what it runs:
when one ends, another one is there already.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

# The smallest number of requests that may wait in an engine.
_MIN_WAITING = 8
_WAITING_SHARE = 4
# The requests that an engine gets before it has reported its queue. vLLM runs at least so many at a time by default.
_UNKNOWN = 256


class _Capacity(msgspec.Struct, frozen=True):
    """What one engine takes."""

    #: How many more requests; negative where too many wait.
    more: float = math.inf
    #: How many at a time.
    limit: float = math.inf


class EngineCapacity:
    """The capacity of all engines that report their queue, by model."""

    def __init__(self) -> None:
        #: Called with a model, how many more requests its engines take now, and how many at a time.
        self.on_change: Callable[[str, float, float], None] = _ignore
        #: Returns how many Tritons take requests for a model.
        self.tritons: Callable[[str], int] = _one
        # By model, then by what reports.
        self._engines: dict[str, dict[object, _Capacity]] = {}

    def expect(self, model: str, source: object) -> None:
        """Count an engine of *model* that *source* will report about."""
        self._put(model, source, _Capacity(more=_UNKNOWN, limit=_UNKNOWN))

    def report(self, model: str, source: object, queue: tuple[int, int] | None) -> None:
        """Take the *queue* of an engine: how many requests wait in it and how many it runs at most, if it says so."""
        if queue is None:
            self._put(model, source, _Capacity())
            return
        waiting, max_running = queue
        max_waiting = max(_MIN_WAITING, max_running // _WAITING_SHARE)
        self._put(model, source, _Capacity(more=max_waiting - waiting, limit=max_running + max_waiting))

    def forget(self, model: str, source: object) -> None:
        """Forget the engine that *source* reported about. The limit stays when it was the last one of the model."""
        engines = self._engines.get(model, {})
        capacity = engines.pop(source, None)
        if engines:
            self._announce(model)
        elif capacity is not None:
            self.on_change(model, math.inf, capacity.limit)

    def _put(self, model: str, source: object, capacity: _Capacity) -> None:
        self._engines.setdefault(model, {})[source] = capacity
        self._announce(model)

    def _announce(self, model: str) -> None:
        engines = list(self._engines[model].values())
        # Those that have got no requests lately report nothing.
        silent = max(0, self.tritons(model) - len(engines))
        engines += silent * [_Capacity(more=_UNKNOWN, limit=_UNKNOWN)]
        self.on_change(model, sum(capacity.more for capacity in engines), sum(capacity.limit for capacity in engines))


def _ignore(model: str, more: float, limit: float) -> None:
    """Do nothing: nobody admits requests."""


def _one(model: str) -> int:
    """Return 1."""
    return 1
