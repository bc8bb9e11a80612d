"""Signs of an overloaded process: event loop lag, and few file descriptors."""

from __future__ import annotations

import asyncio
import resource
from collections import deque
from collections.abc import Callable

import structlog
from aiohttp import web

_log = structlog.get_logger(__name__)
# Seconds between two measurements of the lag.
_INTERVAL = 0.1


class LoopLag:
    """
    Measures by how many seconds the event loop's timers are late, while :meth:`run` runs. *report* gets each number.

    One late timer is a pause of the garbage collector; five in a row are an overloaded process.
    """

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._latest: deque[float] = deque(maxlen=5)
        #: The lag, in seconds, that the last measurements agree on: it rises only when all are above it and falls only
        #: when all are below, so one short lag does not end the overload. 0 before there are enough.
        self.sustained = 0.0

    def note(self, late: float) -> None:
        """Add one measurement."""
        late = max(0.0, late)
        self._latest.append(late)
        if len(self._latest) == self._latest.maxlen:
            self.sustained = min(max(self.sustained, min(self._latest)), max(self._latest))
        self._report(late)

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL
            await asyncio.sleep(_INTERVAL)
            self.note(loop.time() - due)


LOOP_LAG: web.AppKey[LoopLag] = web.AppKey("loop_lag", LoopLag)
_QUIET_SECONDS = 60.0


class DescriptorWatch:
    """Warns, at most once a minute, when few file descriptors are left."""

    def __init__(self) -> None:
        self._warned = float("-inf")

    def check(self, number: int, now: float) -> None:
        """
        Look at the *number* of a new descriptor; *now* is in seconds.

        The kernel gives the lowest free one. The event loop closes the connection of a client for which there is none.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The reserve is more than one client takes, besides what the service needs.
        few = limit != resource.RLIM_INFINITY and number >= limit - max(8, limit // 20)
        if few and now - self._warned >= _QUIET_SECONDS:
            self._warned = now
            _log.warning("few file descriptors are left; new connections will be refused", limit=limit)


#: The watch of this process.
DESCRIPTORS = DescriptorWatch()
