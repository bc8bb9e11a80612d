"""``triton-openai serve``: the service as a process, from its sockets to its signals."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import web

from triton_openai.access.guard import RELAY_GUARD
from triton_openai.api.service import SERVICE
from triton_openai.app import control_of, create_app, models_of, take_over
from triton_openai.cli.banner import Banner, banner_of, render_banner, show
from triton_openai.config import Settings
from triton_openai.config.reload import Reloader, Source, reloading
from triton_openai.config.tls import server_context
from triton_openai.config.worker import WORKER, Worker
from triton_openai.models.draining import DRAINING, first_of
from triton_openai.serving.connections import HttpServer
from triton_openai.serving.sockets import address_of, listening_sockets
from triton_openai.serving.workers.shared import SharedClient
from triton_openai.triton.relay.frontends import FRONTENDS, start_frontends
from triton_openai.tritonserver.supervisor import LaunchedTriton, Supervisor, trace_options

# Enough for every stream that one process can carry. Not more: some programs walk over all that there might be.
_ENOUGH = 65_536


def raise_limit() -> None:
    """
    Raise this process's limit of open files, which is 1024 on most systems, to as many as it may have.

    The lower one is kept by systems for programs that wait with ``select``, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


log = structlog.get_logger(__name__)


class Stop:
    """
    Whether the service has been *asked* to end, and whether whoever asked is in a hurry (*hurried*).

    *notice* is whether load balancers get time to notice: a person at a terminal has none to wait for.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurried = asyncio.Event()
        self.notice = False

    def ask(self, why: str, *, notice: bool) -> None:
        """Begin the end, unless it has begun."""
        if not self.asked.is_set():
            log.info("stopping", why=why)
            self.notice = notice
            self.asked.set()

    def hurry(self) -> None:
        """Cut waiting short."""
        self.asked.set()
        self.hurried.set()


@contextlib.contextmanager
def told_by_signals(stop: Stop, *, insist: bool = True) -> Iterator[None]:
    """
    Let SIGTERM and SIGINT begin the end; a second one hurries it, a third one breaks it off.

    A worker lets nobody *insist*: service managers send their signals to every process, and what its parent passes on
    would be the second.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def tell(number: signal.Signals) -> None:
        if not stop.asked.is_set():
            stop.ask(number.name, notice=number == signal.SIGTERM)
        elif insist and not stop.hurried.is_set():
            stop.hurry()
        elif insist and main is not None:
            main.cancel()

    with contextlib.ExitStack() as handled:
        for number in (signal.SIGTERM, signal.SIGINT):
            handled.enter_context(handled_signal(loop, number, lambda number=number: tell(number)))  # type: ignore[misc]
        yield


@contextlib.contextmanager
def handled_signal(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, handle: Callable[[], None]
) -> Iterator[None]:
    """Call *handle* in *loop* whenever signal *number* comes."""
    loop.add_signal_handler(number, handle)
    try:
        yield
    finally:
        loop.remove_signal_handler(number)


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run *main* on uvloop where that is installed, otherwise on asyncio's own loop."""
    try:
        import uvloop  # there is none for some platforms
    except ImportError:
        run: Callable[[Coroutine[Any, Any, int]], int] = asyncio.run
    else:
        run = uvloop.run
    try:
        return run(main)
    except asyncio.CancelledError:
        # A third signal: whoever sent it did not want to wait for anything.
        return 130


# What happens after the banner, and what the process's exit status then is; None: go on serving.
Talk = Callable[[Banner], Awaitable[int | None]]

# How long clients that connected last have for their request, and how often it is looked whether one has not sent it.
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
        async with supervised(settings, launched) as (ends, started):
            ends.append(asyncio.create_task(stop.asked.wait()))
            if started is not None and talk is not None:
                # Somebody looks on: one thing after the other, without complaints about a Triton that is not there yet.
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
    settings: Settings,
    sockets: Sequence[socket.socket],
    stop: Stop,
    worker: Worker | None = None,
    shared: SharedClient | None = None,
) -> AsyncIterator[web.Application]:
    """Yield the application, running and listening; end it in order, as *stop* says."""
    app = create_app(settings, worker=worker, shared=shared)
    frontends = app[FRONTENDS] = []
    server = HttpServer(app, settings.limits, tls=server_context(settings.tls))
    await server.start()
    try:
        frontends += await start_frontends(
            settings,
            guard=app[RELAY_GUARD],
            changed=control_of(app).changed_elsewhere,
            reuse_port=app[WORKER].count > 1,
        )
        for one in sockets:
            await server.listen(one, settings.server.backlog)
        # What is there by now stays: without it, the longest pauses of the garbage collector are a tenth as long.
        gc.collect()
        gc.freeze()
        yield app
    finally:
        await _end(server, app, stop)


async def _end(http: HttpServer, app: web.Application, stop: Stop) -> None:
    """
    End the service without losing a request, as far as that is in its hands.

    First load balancers notice that it is not ready any more; then nobody can connect; then what runs may finish.
    """
    server, draining = app[SERVICE].settings.server, app[DRAINING]
    draining.begin()
    if stop.notice:
        await first_of([stop.hurried], timeout=server.shutdown_delay)
    await http.stop_listening()
    # Clients that have just connected get a moment to send their request.
    deadline = time.monotonic() + _LAST_REQUESTS_SECONDS
    while http.awaits_requests and not stop.hurried.is_set() and time.monotonic() < deadline:
        await first_of([stop.hurried], timeout=_LOOK_SECONDS)
    http.close_idle()
    grace = server.shutdown_grace
    frontends = [frontend.close(grace, stop.hurried) for frontend in app[FRONTENDS]]
    await asyncio.gather(draining.drain(grace, stop.hurried), *frontends)
    await http.close()


@contextlib.asynccontextmanager
async def supervised(
    settings: Settings, launched: LaunchedTriton | None
) -> AsyncIterator[tuple[list[asyncio.Task[Any]], asyncio.Event | None]]:
    """
    Keep *launched* running, if there is one, and stop it in the end.

    Yields the tasks whose end is that of the service, and the event of Triton's start; without *launched*, none.
    """
    if launched is None:
        yield [], None
        return
    if settings.server.log_format == "console":
        print("Starting Triton ...", file=sys.stderr, flush=True)
    supervisor = Supervisor(launched.server)
    running = asyncio.create_task(supervisor.run())
    try:
        yield [running], supervisor.started
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
