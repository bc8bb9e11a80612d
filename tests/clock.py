"""A clock that a test moves, so that nobody has to wait."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

import pytest


class Clock:
    """
    The monotonic time of this process. It stands still until the test moves it, so a slow machine is no slow service.

    The timers of asyncio's own event loops follow it, those of uvloop do not.
    """

    def __init__(self) -> None:
        #: By how many seconds the test has moved it.
        self.moved = 0.0
        self._real: Callable[[], float] = time.monotonic
        self._start = self._real()
        self._runs = False

    def __call__(self) -> float:
        now = self._start
        if self._runs:
            now = self._real()
        return now + self.moved

    def run(self) -> None:
        """Let time pass as usual too, for a test that needs the service's own pauses."""
        self._runs = True

    def advance(self, seconds: float) -> None:
        """Let *seconds* pass at once; timers that are due then run in the next turn of their loop."""
        self.moved += seconds

    async def elapse(self, seconds: float, steps: int = 1) -> None:
        """Let *seconds* pass in so many *steps*, and the loop react to each."""
        for _ in range(steps):
            self.advance(seconds / steps)
            await turns()


async def turns(count: int = 5) -> None:
    """Let the event loop take so many turns, in each of which it reads what has arrived and runs what is due."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the service and of the test's event loop; see :class:`Clock`."""
    real, clock = time.monotonic, Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith("triton_openai.") and getattr(module, "monotonic", None) is real:
            monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(time, "monotonic", clock)
    return clock
