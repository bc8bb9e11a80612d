"""
Fair shares of a resource that all keys use, such as the queue, and what batches leave to live requests.

A key that uses some of it may take more only if at least as much stays free as it already uses. So one key gets at most
a half, and three keys with unlimited demand get a quarter each; a key that uses nothing always gets some. A service
without keys, or with a single one, does not limit shares.
"""

from __future__ import annotations

import math
from contextvars import ContextVar

#: The name of the key of the current request; ``None`` if shares are not limited.
SHARING_KEY: ContextVar[str | None] = ContextVar("sharing_key", default=None)
# A live request has no capacity in so many cases, about.
_WAITING_SHARE = 0.05
# So many standard deviations of the number of live requests are exceeded in as many cases.
_DEVIATIONS = 1.645
# No more than this part of what live requests leave free is kept for them.
_MAX_RESERVE = 0.5


def may_take(amount: float, *, own: float, free: float) -> bool:
    """Return whether the key of the current request may take *amount* of what is *free*, where it has its *own*."""
    if amount > free:
        return False
    return SHARING_KEY.get() is None or not own or own + amount <= free


def live_reserve(live: float, limit: float) -> int:
    """
    Return how many of *limit* requests to keep free beside *live* ones, so that 19 of 20 new ones find capacity.

    Batches fill the rest. Above that level nothing of a batch starts, so the excess is the queue of a M/M/1 system:
    each step up is as much less likely as live requests have a smaller part of what ends. It is not more than the
    number of live requests, which has a Poisson distribution, varies by itself.
    """
    live = max(live, 1.0)
    if limit == math.inf or limit <= live:
        # Without a limit there is always capacity, and beyond the limit there is none to keep.
        return 1
    load = min(live / limit, 0.99)
    excess = math.log(_WAITING_SHARE) / math.log(load)
    spread = _DEVIATIONS * math.sqrt(live)
    wanted = math.ceil(min(excess, spread)) + 1
    return max(1, min(wanted, math.ceil(_MAX_RESERVE * (limit - live))))
