"""
``triton-openai serve --workers N``: the process that starts the workers, replaces them, and passes on what it is told.

It answers no request itself: it has the listening sockets, which outlive any worker, and the Triton if one is started.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from triton_openai.cli.banner import show
from triton_openai.cli.serve import Stop, raise_limit, run_loop, supervised, to_be_launched, told_by_signals
from triton_openai.config import ServerSettings, Settings
from triton_openai.config.reload import Reloader, Source, reloading
from triton_openai.config.tls import server_context
from triton_openai.config.worker import Worker, private_directory
from triton_openai.serving.sockets import address_of, listening_sockets, relay_ports
from triton_openai.serving.workers.pool import Pool, WorkerProcess
from triton_openai.serving.workers.shared import SharedState
from triton_openai.telemetry.metrics import forget_worker, metrics_folder
from triton_openai.tritonserver.supervisor import LaunchedTriton


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
    shared = SharedState()
    count, address = settings.server.workers, address_of(settings.server, sockets[0], scheme)

    def adapted(settings: Settings) -> Settings:
        ports = {name: getattr(relayed, name) for name in ("kserve_http_port", "kserve_grpc_port")}
        settings = msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **ports))
        return settings if launched is None else launched.settings(settings)

    async def start(index: int, settings: Settings) -> WorkerProcess:
        worker = Worker(index=index, count=count, directory=directory)
        member = await WorkerProcess.start(worker, settings, sockets=sockets, address=address, environment=environ)
        member.channel.methods |= shared.methods(index)
        return member

    def listens(index: int, member: WorkerProcess) -> None:
        shared.add(index, member.channel)

    def forget(index: int) -> None:
        shared.forget(index)
        forget_worker(directory, index)

    async def take(new: Settings, renew: bool) -> None:
        await pool.take_over(adapted(new), renew)

    pool = Pool(adapted(settings), count, start, listens=listens, forget=forget)
    with told_by_signals(stop):
        async with supervised(settings, launched) as (ends, started):
            serving = asyncio.create_task(pool.run())
            ends += [serving, asyncio.create_task(stop.asked.wait())]
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
