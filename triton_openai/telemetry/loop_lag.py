"""How late the event loop is: the measure of a process that has more to do than it can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from aiohttp import web

_INTERVAL = 0.1
# Late once is a pause of the garbage collector; late this many times in a row is a process that cannot follow.
_SAMPLES = 5


class LoopLag:
    """Measures, while :meth:`run` runs, by how many seconds the loop's timers come too late, and tells *tell*."""

    def __init__(
        self, *, interval: float = _INTERVAL, samples: int = _SAMPLES, tell: Callable[[float], None] | None = None
    ) -> None:
        self._interval = interval
        self._tell = tell
        self._latest: deque[float] = deque(maxlen=samples)

    @property
    def latest(self) -> float:
        """The last measurement, in seconds; 0 before the first."""
        return self._latest[-1] if self._latest else 0.0

    @property
    def sustained(self) -> float:
        """The least of the last measurements, in seconds: a lag that has not gone by itself; 0 until there are all."""
        return min(self._latest) if len(self._latest) == self._latest.maxlen else 0.0

    def note(self, late: float) -> None:
        """Take one measurement in."""
        late = max(0.0, late)
        self._latest.append(late)
        if self._tell is not None:
            self._tell(late)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval
            await asyncio.sleep(self._interval)
            self.note(loop.time() - due)


LOOP_LAG: web.AppKey[LoopLag] = web.AppKey("loop_lag", LoopLag)
