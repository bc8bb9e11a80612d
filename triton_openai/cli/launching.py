"""A Triton that is started with the service."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

from triton_openai.config import Settings
from triton_openai.supervisor import LaunchedTriton, Supervisor


@contextlib.asynccontextmanager
async def supervised(
    settings: Settings, launched: LaunchedTriton | None
) -> AsyncIterator[tuple[Supervisor, asyncio.Task[None]] | None]:
    """Keep *launched* running, if there is one, and stop it in the end."""
    if launched is None:
        yield None
        return
    if settings.server.log_format == "console":
        print("Starting Triton ...", file=sys.stderr, flush=True)
    supervisor = Supervisor(launched.server)
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
