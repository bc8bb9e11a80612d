"""When Python's garbage collector looks through all objects: not in the midst of large requests, if it can wait."""

from __future__ import annotations

import asyncio
import gc

# Young objects are collected all the time. So many of those collections make one of everything worthwhile, as in
# Python, which no longer decides it before there were so many that no quiet moment can have come.
_WORTHWHILE, _OVERDUE = 10, 1000
# Seconds between two looks, and the objects among which a collection takes some ten milliseconds at most.
_INTERVAL, _FEW = 1.0, 20_000


def collect_if_few() -> bool:
    """Collect all garbage if that is worthwhile and few objects are alive, and return whether it was done."""
    if gc.get_count()[2] < _WORTHWHILE or len(gc.get_objects()) > _FEW:
        return False
    gc.collect()
    return True


async def collect_garbage() -> None:
    """
    Collect what reference cycles keep, at quiet moments, until cancelled.

    A collection of everything holds the event loop for as long as it looks at what all requests have in memory. What
    exists now stays, and is not looked at again: that cuts the longest pauses to a tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _OVERDUE)
    while True:
        await asyncio.sleep(_INTERVAL)
        collect_if_few()
