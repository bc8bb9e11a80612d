"""A Triton that is started with the service."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Mapping

from triton_openai.config import Settings
from triton_openai.supervisor import LaunchedTriton, Supervisor
from triton_openai.triton.trace_options import trace_options


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


def to_be_launched(settings: Settings, environ: Mapping[str, str]) -> LaunchedTriton | None:
    """Return the Triton that is to be started with the service, if *settings* name a model repository for it."""
    triton = settings.triton
    if not triton.model_repository:
        return None
    return LaunchedTriton(
        triton.model_repository,
        environ,
        model_control_mode=triton.model_control_mode,
        load_models=triton.load_model,
        extra_args=trace_options(settings.traces),
    )
