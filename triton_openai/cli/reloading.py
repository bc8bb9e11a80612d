"""Settings that are read again while the service runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from triton_openai.reload import Reloader


@contextlib.asynccontextmanager
async def reloading(reloader: Reloader | None) -> AsyncIterator[None]:
    """Keep the settings up to date: with their file, and on SIGHUP."""
    if reloader is None:
        yield
        return
    # Until the process ends: who asks while requests still run to their end asks too late, and must not cut them off.
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.request)
    running = asyncio.create_task(reloader.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
