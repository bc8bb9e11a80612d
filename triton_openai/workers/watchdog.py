"""Who notices that a worker hangs: its event loop turns no more, and it does not end by itself."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Protocol

from triton_openai.telemetry.logging import get_logger

log = get_logger(__name__)

# Looks in a row without a sign of life that make a worker one that hangs. They are counted instead of the time, which
# also goes on while this process gets no turn, or the whole machine stands still.
_LOOKS = 8
# What a worker has to write down where it is before it is killed.
_LAST_WORDS_SECONDS = 0.5


class Watched(Protocol):
    """What is watched; ``signs`` counts what it has said."""

    pid: int
    listening: bool
    signs: int

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""

    def kill(self) -> None:
        """End it at once."""


async def watch(worker: Watched, index: int, timeout: Callable[[], float]) -> None:
    """
    Kill *worker* when it has said nothing for *timeout* seconds, once it has begun to listen; else watch for ever.

    A worker that is busy speaks late, but speaks: only one that is stopped, or stuck in a call that does not return,
    is silent. It is told to write down where that is (SIGQUIT) before it is killed.
    """
    signs, silent = worker.signs, 0
    while silent < _LOOKS:
        await asyncio.sleep(timeout() / _LOOKS)
        silent = silent + 1 if worker.listening and worker.signs == signs else 0
        signs = worker.signs
    log.error("worker hangs and is killed", worker=index, pid=worker.pid, silent_for=timeout())
    worker.signal(signal.SIGQUIT)
    await asyncio.sleep(_LAST_WORDS_SECONDS)
    worker.kill()
