"""Settings that are read again while the service runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from triton_openai.cli.stopping import handled_signal
from triton_openai.reload import Reloader


@contextlib.asynccontextmanager
async def reloading(reloader: Reloader | None) -> AsyncIterator[None]:
    """Keep the settings up to date: with their file, and on SIGHUP."""
    if reloader is None:
        yield
        return
    with handled_signal(asyncio.get_running_loop(), signal.SIGHUP, reloader.request):
        running = asyncio.create_task(reloader.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
