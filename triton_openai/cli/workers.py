"""
``triton-openai serve --workers N``: the process that starts the workers, replaces them, and passes on what it is told.

It answers no request itself: it has the listening sockets, which outlive any worker, and the Triton if one is started.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from triton_openai.cli.banner import show
from triton_openai.cli.descriptors import raise_limit
from triton_openai.cli.launching import supervised, to_be_launched
from triton_openai.cli.reloading import reloading
from triton_openai.cli.sockets import address_of, listening_sockets, relay_ports
from triton_openai.cli.stopping import Stop, run_loop, told_by_signals
from triton_openai.config import ServerSettings, Settings
from triton_openai.reload import Reloader, Source
from triton_openai.server.places import vacate
from triton_openai.supervisor import LaunchedTriton
from triton_openai.telemetry.metrics import forget_worker, metrics_folder
from triton_openai.tls import server_context
from triton_openai.worker import Worker
from triton_openai.workers.directory import private_directory
from triton_openai.workers.pool import Pool
from triton_openai.workers.process import WorkerProcess


def serve_with_workers(settings: Settings, source: Source, environ: Mapping[str, str]) -> int:
    """Serve with several processes until told to stop, and keep up with the *source* of the settings."""
    # The workers inherit it.
    raise_limit()
    with (
        listening_sockets(settings.server) as sockets,
        relay_ports(settings.server) as relayed,
        private_directory(environ) as directory,
    ):
        launched = to_be_launched(settings, environ)
        # prometheus_client looks for it when it is imported.
        environ = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder(directory))}
        return run_loop(_serve(settings, source, sockets, relayed, launched, directory, environ))


async def _serve(
    settings: Settings,
    source: Source,
    sockets: Sequence[socket.socket],
    relayed: ServerSettings,
    launched: LaunchedTriton | None,
    directory: Path,
    environ: Mapping[str, str],
) -> int:
    stop = Stop()
    # Before Triton is started: files that cannot be used are to be told at once.
    scheme = "http" if server_context(settings.tls) is None else "https"
    count, address = settings.server.workers, address_of(settings.server, sockets[0], scheme)

    def adapted(settings: Settings) -> Settings:
        ports = {name: getattr(relayed, name) for name in ("kserve_http_port", "kserve_grpc_port")}
        settings = msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **ports))
        return settings if launched is None else launched.settings(settings)

    async def start(index: int, settings: Settings) -> WorkerProcess:
        worker = Worker(index=index, count=count, directory=directory)
        return await WorkerProcess.start(
            worker, settings, sockets=sockets, address=address, environment=environ, heard=pool.heard
        )

    def forget(index: int) -> None:
        forget_worker(directory, index)
        vacate(directory, index, count)

    async def take(new: Settings, renew: bool) -> None:
        await pool.take_over(adapted(new), renew)

    pool = Pool(adapted(settings), count, start, forget=forget)
    with told_by_signals(stop):
        async with supervised(settings, launched) as supervision:
            serving = asyncio.create_task(pool.run())
            ends: set[asyncio.Task[Any]] = {serving, asyncio.create_task(stop.asked.wait())}
            started: asyncio.Event | None = None
            if supervision is not None:
                supervisor, running = supervision
                ends.add(running)
                started = supervisor.started
            greeting = asyncio.create_task(_greet(pool, started))
            try:
                async with reloading(Reloader(settings, source, take)):
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                greeting.cancel()
                # While the workers have them, nobody is turned away; when the last lets go, nobody is kept waiting.
                for one in sockets:
                    one.close()
                await pool.end(notice=stop.notice, hurried=stop.hurried)
                await asyncio.gather(serving, greeting, return_exceptions=True)
    return 0


async def _greet(pool: Pool, started: asyncio.Event | None) -> None:
    if started is not None:
        await started.wait()
    pool.greet(launched=started is not None)
    show(await pool.greeting)
