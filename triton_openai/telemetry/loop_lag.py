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
        self._sustained = 0.0

    @property
    def latest(self) -> float:
        """The last measurement, in seconds; 0 before the first."""
        return self._latest[-1] if self._latest else 0.0

    @property
    def sustained(self) -> float:
        """
        A lag that stays, in seconds: it rises only when all of the last measurements are above it, and falls only when
        all are below, so that one good moment does not let everybody in at once. 0 until there are all.
        """
        return self._sustained

    def note(self, late: float) -> None:
        """Take one measurement in."""
        late = max(0.0, late)
        self._latest.append(late)
        if len(self._latest) == self._latest.maxlen:
            self._sustained = min(max(self._sustained, min(self._latest)), max(self._latest))
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
