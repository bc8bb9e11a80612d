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


class _Engine(msgspec.Struct):
    """What one engine takes, as its carriers have reported."""

    #: How many more requests; negative where too many wait.
    more: float = _UNKNOWN
    #: How many at a time.
    limit: float = _UNKNOWN
    #: The carriers that report it: one for each transport.
    carriers: set[object] = msgspec.field(default_factory=set)


class EngineCapacity:
    """The capacity of all engines that report their queue, by model."""

    def __init__(self) -> None:
        #: Called with a model, how many more requests its engines take now, and how many at a time.
        self.on_change: Callable[[str, float, float], None] = _ignore
        #: Returns how many Tritons take requests for a model.
        self.tritons: Callable[[str], int] = _one
        # By model, then by what stands for the Triton.
        self._engines: dict[str, dict[object, _Engine]] = {}

    def expect(self, model: str, triton: object, carrier: object) -> None:
        """Count the engine of *model* on a *triton*, of which *carrier* will report the queue."""
        engine = self._engines.setdefault(model, {}).setdefault(triton, _Engine())
        engine.carriers.add(carrier)
        self._announce(model)

    def report(self, model: str, triton: object, carrier: object, queue: tuple[int, int] | None) -> None:
        """Take the *queue* of an engine: how many requests wait in it and how many it runs at most, if it says so."""
        engine = self._engines.setdefault(model, {}).setdefault(triton, _Engine())
        engine.carriers.add(carrier)
        engine.more = math.inf
        engine.limit = math.inf
        if queue is not None:
            waiting, max_running = queue
            max_waiting = max(_MIN_WAITING, max_running // _WAITING_SHARE)
            engine.more = max_waiting - waiting
            engine.limit = max_running + max_waiting
        self._announce(model)

    def forget(self, model: str, triton: object, carrier: object) -> None:
        """
        Take the end of *carrier*: after the last one, the engine reports nothing more.

        The limit stays when it was the last engine of the model.
        """
        engines = self._engines.get(model, {})
        engine = engines.get(triton)
        if engine is None:
            return
        engine.carriers.discard(carrier)
        if engine.carriers:
            return
        del engines[triton]
        if engines:
            self._announce(model)
        else:
            del self._engines[model]
            self.on_change(model, math.inf, engine.limit * self.tritons(model))

    def _announce(self, model: str) -> None:
        engines = list(self._engines[model].values())
        # Those that have got no requests lately report nothing.
        silent = max(0, self.tritons(model) - len(engines))
        engines += silent * [_Engine()]
        self.on_change(model, sum(engine.more for engine in engines), sum(engine.limit for engine in engines))


def _ignore(model: str, more: float, limit: float) -> None:
    """Do nothing: nobody admits requests."""


def _one(model: str) -> int:
    """Return 1."""
    return 1
