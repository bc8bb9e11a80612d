"""
Keeps the event loop free: small work runs in place, large work goes to a thread.

A hop to a thread and back costs about 70 µs of latency, more under load, so it only pays for work that takes
longer than that by an order of magnitude.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import msgspec

_Result = TypeVar("_Result")


async def run(function: Callable[[], _Result], *, size: int, threshold: int) -> _Result:
    """
    Call *function* here when *size* is at most *threshold*, else in a thread.

    Raises whatever *function* raises. A cancelled caller returns at once; the thread then finishes unheard.
    """
    if size <= threshold:
        return function()
    return await asyncio.to_thread(function)


def weigh(value: Any, limit: int, *, per_item: int = 0) -> int:
    """
    Return about how many characters of text *value* (lists, mappings, structs and strings) holds.

    Each item of a list, mapping or struct counts *per_item* more. Counting stops once the sum passes *limit*, so that
    asking never costs more than what it avoids.
    """
    total = 0
    pending: list[Any] = [value]
    while pending and total <= limit:
        item = pending.pop()
        if isinstance(item, str):
            total += len(item)
            continue
        children: Iterable[Any]
        if isinstance(item, Mapping):
            children = item.values()
        elif isinstance(item, list | tuple):
            children = item
        elif isinstance(item, msgspec.Struct):
            children = [value for value in msgspec.structs.astuple(item) if value is not None]
        else:
            continue
        before = len(pending)
        pending.extend(children)
        total += per_item * (len(pending) - before)
    return total
