"""Work that outlives the request which started it, such as telling an engine to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from triton_openai.errors import ServiceError

_log = structlog.get_logger(__name__)


class Background:
    """Holds running tasks, so that none is lost to the garbage collector or left behind at the end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any], *, timeout: float) -> None:
        """Run *work* for at most *timeout* seconds. What it raises of ours is logged; nobody waits for it."""
        task = asyncio.create_task(self._guarded(work, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float = 2.0) -> None:
        """Give what runs a moment to finish, then cancel it."""
        if self._tasks:
            _, pending = await asyncio.wait(self._tasks, timeout=timeout)
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    @staticmethod
    async def _guarded(work: Coroutine[Any, Any, Any], timeout: float) -> None:
        try:
            await asyncio.wait_for(work, timeout)
        except ServiceError as error:
            _log.warning("background work failed", reason=error.reason)
        except asyncio.TimeoutError:
            _log.warning("background work took too long", seconds=timeout)
