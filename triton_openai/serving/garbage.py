"""Decides when Python's garbage collector looks through all objects: while little is in memory, if it can wait."""

from __future__ import annotations

import asyncio
import gc

# Collections of younger objects after which one of all objects is worthwhile: Python's default. After so many more,
# Python runs one at once, whatever is in memory.
_WORTHWHILE = 10
_OVERDUE = 1000
# Seconds between two looks, and the objects that a collection looks through in some ten milliseconds.
_INTERVAL = 1.0
_FEW = 20_000


def collect_if_few() -> None:
    """Collect all garbage if that is worthwhile and few objects are alive."""
    if gc.get_count()[2] >= _WORTHWHILE and len(gc.get_objects()) <= _FEW:
        gc.collect()


async def collect_garbage() -> None:
    """
    Collect what reference cycles keep, at quiet moments, until cancelled.

    A collection of all objects holds the event loop while it looks through what all requests have in memory. What
    exists now stays, and is not looked through again, which cuts the longest pauses to a tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _OVERDUE)
    while True:
        await asyncio.sleep(_INTERVAL)
        collect_if_few()
