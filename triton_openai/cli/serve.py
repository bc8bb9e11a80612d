"""``triton-openai serve``: the service as a process, from its sockets to its signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from triton_openai.api.service import SERVICE
from triton_openai.app import control_of, create_app, models_of, take_over
from triton_openai.cli.banner import Banner, banner_of, render_banner, show
from triton_openai.cli.descriptors import raise_limit
from triton_openai.cli.launching import supervised, to_be_launched
from triton_openai.cli.reloading import reloading
from triton_openai.cli.sockets import address_of, listening_sockets
from triton_openai.cli.stopping import Stop, run_loop, told_by_signals
from triton_openai.config import Settings
from triton_openai.draining import DRAINING, first_of
from triton_openai.kserve import FRONTENDS, start_frontends
from triton_openai.reload import Reloader, Source
from triton_openai.server.connections import Connection, Site
from triton_openai.server.relay_door import RELAY_DOOR
from triton_openai.supervisor import LaunchedTriton
from triton_openai.tls import server_context
from triton_openai.worker import WORKER, Worker

# What happens after the banner, and what the process's exit status then is; None: go on serving.
Talk = Callable[[Banner], Awaitable[int | None]]

# Connections that were accepted last may not have had the time to send their request: how long they have, and how often
# it is looked whether they needed it.
_LAST_REQUESTS_SECONDS = 1.0
_LOOK_SECONDS = 0.1


def serve(settings: Settings, source: Source, environ: Mapping[str, str]) -> int:
    """Serve until told to stop, and keep up with the *source* of the settings."""
    raise_limit()
    with listening_sockets(settings.server) as sockets:
        launched = to_be_launched(settings, environ)
        return run_loop(serve_until_stopped(settings, sockets, launched, source=source))


async def serve_until_stopped(
    settings: Settings,
    sockets: Sequence[socket.socket],
    launched: LaunchedTriton | None = None,
    talk: Talk | None = None,
    *,
    source: Source | None = None,
) -> int:
    """
    Serve on *sockets* until SIGTERM or SIGINT, or until *talk* has returned an exit status; return the exit status.

    With *launched*, that Triton is started, supervised, and stopped at the end. The service answers meanwhile, and says
    that it is not ready. Settings are read again from *source*, where there is one.
    """
    # Before Triton is started: files that cannot be used are to be told at once.
    scheme = "http" if server_context(settings.tls) is None else "https"
    stop = Stop()

    def adapted(settings: Settings) -> Settings:
        return settings if launched is None else launched.settings(settings)

    # Left in the opposite order: requests in flight still have their Triton while the service drains.
    with told_by_signals(stop):
        async with supervised(settings, launched) as supervision:
            ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop.asked.wait())]
            started: asyncio.Event | None = None
            if supervision is not None:
                supervisor, running = supervision
                ends.append(running)
                started = supervisor.started
                if talk is not None:
                    # Somebody looks on: one thing after the other, without complaints about a Triton that is not there
                    # yet.
                    waiting = asyncio.create_task(started.wait())
                    await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
                    waiting.cancel()
            async with listening(adapted(settings), sockets, stop) as app:
                address = address_of(settings.server, sockets[0], scheme)
                greeting = asyncio.create_task(_greet(adapted(settings), app, address, started, talk))

                async def take(new: Settings, renew: bool) -> None:
                    await take_over(app, adapted(new), renew)

                try:
                    async with reloading(None if source is None else Reloader(settings, source, take)):
                        return await _first_end(ends, greeting)
                finally:
                    greeting.cancel()
                    await asyncio.gather(greeting, return_exceptions=True)


async def _first_end(ends: list[asyncio.Task[Any]], greeting: asyncio.Task[int | None]) -> int:
    """Wait for the first of *ends*, or for a *greeting* that ends with an exit status; return the exit status."""
    waiting: set[asyncio.Task[Any]] = {*ends, greeting}
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            result = task.result()
            if task is not greeting:
                return 0
            if result is not None:
                return int(result)


async def _greet(
    settings: Settings, app: web.Application, address: str, started: asyncio.Event | None, talk: Talk | None
) -> int | None:
    if started is not None:
        await started.wait()
    banner = await banner_for(settings, app, address, launched=started is not None)
    show(render_banner(banner, settings.server.log_format))
    return await talk(banner) if talk is not None else None


async def banner_for(settings: Settings, app: web.Application, address: str, *, launched: bool) -> Banner:
    """Return the banner of *app*, when it can be made; *launched* is whether its Triton was started here."""
    # In explicit mode a Triton may well start without any model.
    has_models = settings.triton.model_control_mode == "none" or bool(settings.triton.load_model)
    banner = await banner_of(settings, models_of(app), address, wait_for_model=launched and has_models)
    host = urlsplit(address).netloc.rpartition(":")[0]
    relays = tuple(f"{frontend.scheme}://{host}:{frontend.port}" for frontend in app[FRONTENDS])
    return msgspec.structs.replace(banner, kserve=relays)


@contextlib.asynccontextmanager
async def listening(
    settings: Settings, sockets: Sequence[socket.socket], stop: Stop, worker: Worker | None = None
) -> AsyncIterator[web.Application]:
    """Yield the application, running and listening; end it in order, as *stop* says."""
    app = create_app(settings, worker=worker)
    tls = server_context(settings.tls)
    frontends = app[FRONTENDS] = []
    runner = web.AppRunner(
        app,
        # A client that leaves must stop the work that was begun for it.
        handler_cancellation=True,
        # What is asked for has ended by then, see below; aiohttp waits this long, twice, for what is left.
        shutdown_timeout=0.5,
    )
    await runner.setup()
    try:
        frontends += await start_frontends(
            settings,
            door=app[RELAY_DOOR],
            changed=control_of(app).changed_elsewhere,
            reuse_port=app[WORKER].count > 1,
        )
        for one in sockets:
            await Site(runner, one, limits=settings.limits, ssl_context=tls, backlog=settings.server.backlog).start()
        yield app
    finally:
        await _end(runner, app, stop)


async def _end(runner: web.AppRunner, app: web.Application, stop: Stop) -> None:
    """
    End the service without losing a request, as far as that is in its hands.

    First load balancers notice that it is not ready any more; then nobody can connect; then what runs may finish.
    """
    server, draining = app[SERVICE].settings.server, app[DRAINING]
    draining.begin()
    if stop.notice:
        await first_of([stop.hurried], timeout=server.shutdown_delay)
    for site in list(runner.sites):
        await site.stop()
    if runner.server is not None and runner.server.connections:
        await _last_requests(runner.server, stop)
        # Connections over which nothing is being answered; the others close after their answer.
        runner.server.pre_shutdown()
    grace = server.shutdown_grace
    frontends = [frontend.close(grace, stop.hurried) for frontend in app[FRONTENDS]]
    await asyncio.gather(draining.drain(grace, stop.hurried), *frontends)
    await runner.cleanup()


async def _last_requests(server: web.Server, stop: Stop) -> None:
    """Wait until who has connected has also asked something, for some time."""
    for _ in range(round(_LAST_REQUESTS_SECONDS / _LOOK_SECONDS)):
        await first_of([stop.hurried], timeout=_LOOK_SECONDS)
        if stop.hurried.is_set() or not any(
            isinstance(each, Connection) and each.silent for each in server.connections
        ):
            break
