"""A word in the log before a process has no file descriptor left for its next client."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

from triton_openai.telemetry.logging import get_logger

_log = get_logger(__name__)
_QUIET_SECONDS = 60.0
# Each is more than what one client takes, and what the service needs besides them.
_LEAST_LEFT = 8
_PART_LEFT = 20


class DescriptorWatch:
    """
    Looks at the numbers of new descriptors: the kernel gives the lowest that is free, so a high one says that all below
    it are taken. Counting them would take a look at each.

    A client that finds none left is turned away by the event loop without a word. *clock* gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said = float("-inf")

    def taken(self, number: int) -> None:
        """Take in that *number* was given; warn when few are left, at most once a minute."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY or number < limit - max(_LEAST_LEFT, limit // _PART_LEFT):
            return
        now = self._clock()
        if now - self._said >= _QUIET_SECONDS:
            self._said = now
            _log.warning("hardly any file descriptors are left, clients will be turned away", limit=limit)


#: That of this process.
DESCRIPTORS = DescriptorWatch()
