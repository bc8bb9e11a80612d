"""Work with a limit of time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


async def within(seconds: float | None, work: Coroutine[Any, Any, _T]) -> _T:
    """
    Return what *work* returns. After *seconds*, or when the caller is cancelled, it is cancelled and waited for.

    Raises ``asyncio.TimeoutError``. Unlike Python 3.11's ``wait_for`` this loses no cancellation, and what *work*
    raises while it is being cancelled is not reported as an error that nobody looked at: nobody wants to know.
    """
    task = asyncio.create_task(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
        if not done:
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()
