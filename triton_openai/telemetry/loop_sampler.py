"""How late the event loop is, measured all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERVAL = 0.25


async def sample_loop_lag(note: Callable[[float], None], *, interval: float = _INTERVAL) -> None:
    """Tell *note*, until cancelled, by how many seconds a timer of *interval* seconds came too late."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        note(loop.time() - due)
