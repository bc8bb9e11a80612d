"""
``triton-openai serve``: the service as a process, from its sockets to its signals.

With several workers this process answers no request itself: it has the listening sockets, which outlive any worker,
and the Triton if one is started; it starts the workers, replaces them, and passes on what it is asked.
"""

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
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
from aiohttp import web

from triton_openai.access.guard import GUARD
from triton_openai.api.service import SERVICE
from triton_openai.app import create_app, take_over
from triton_openai.cli.banner import Banner, banner_of, render_banner, show
from triton_openai.config import ServerSettings, Settings
from triton_openai.config.reload import Reloader, Source, TakeOver, reloading
from triton_openai.config.tls import server_context
from triton_openai.config.worker import WORKER, Worker, private_directory
from triton_openai.models.draining import DRAINING, first_of
from triton_openai.serving.connections import HttpServer
from triton_openai.serving.sockets import address_of, listening_sockets, relay_ports
from triton_openai.serving.workers.pool import Pool, WorkerProcess
from triton_openai.serving.workers.shared import SharedClient, SharedState
from triton_openai.telemetry.metrics import forget_worker, metrics_folder
from triton_openai.triton.relay.frontends import FRONTENDS, start_frontends
from triton_openai.tritonserver.embedded import EmbeddedTriton
from triton_openai.tritonserver.supervisor import Supervisor, triton_for

log = structlog.get_logger(__name__)
# Enough for every stream that one process can carry. Not more: some programs walk over all that there might be.
_ENOUGH_FILES = 65_536
# How long clients that connected last have for their request, and how often it is looked whether one has not sent it.
_LAST_REQUESTS_SECONDS = 1.0
_LOOK_SECONDS = 0.1

#: What happens after the banner, and what the process's exit status then is; None: go on serving.
Talk = Callable[[Banner], Awaitable[int | None]]


class Running(msgspec.Struct, frozen=True):
    """What serves: how it takes new settings, how it says what is served, and the tasks whose end is its own."""

    take_over: TakeOver
    greet: Callable[[], Awaitable[int | None]]
    tasks: tuple[asyncio.Task[Any], ...] = ()


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


#: Makes a service of settings, and ends it as a :class:`Stop` says.
Service = Callable[[Settings, Stop], AbstractAsyncContextManager[Running]]


def serve(settings: Settings, source: Source, environ: Mapping[str, str]) -> int:
    """Serve until a signal ends it, and keep up with the *source* of the settings."""
    # Workers inherit it.
    raise_limit()
    with contextlib.ExitStack() as opened:
        sockets = opened.enter_context(listening_sockets(settings.server))
        triton = triton_for(settings, environ) if settings.triton.model_repository else None
        service: Service = partial(_one_process, sockets=sockets, launched=triton is not None)
        if settings.server.workers > 1:
            ports = opened.enter_context(relay_ports(settings.server))
            directory = opened.enter_context(private_directory(environ))
            environ = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(metrics_folder(directory))}
            service = partial(
                _workers,
                sockets=sockets,
                launched=triton is not None,
                ports=ports,
                directory=directory,
                environ=environ,
            )
        return run_loop(_serve(settings, service, triton, source))


def serve_and_talk(settings: Settings, sockets: Sequence[socket.socket], triton: EmbeddedTriton, talk: Talk) -> int:
    """Start *triton*, and then serve on *sockets* until a signal ends it, or *talk* returns an exit status."""
    service = partial(_one_process, sockets=sockets, launched=True, talk=talk)
    return run_loop(_serve(settings, service, triton))


def raise_limit() -> None:
    """
    Raise this process's limit of open files, which is 1024 on most systems, to as many as it may have.

    The lower one is kept by systems for programs that wait with ``select``, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


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


@contextlib.contextmanager
def stopped_by_signals(stop: Stop, *, insist: bool = True) -> Iterator[None]:
    """
    Let SIGTERM and SIGINT begin the end; a second one hurries it, a third one breaks it off.

    A worker lets nobody *insist*: service managers send their signals to every process, and what its parent passes on
    would be the second.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def handle(number: signal.Signals) -> None:
        if not stop.asked.is_set():
            stop.ask(number.name, notice=number == signal.SIGTERM)
        elif insist and not stop.hurried.is_set():
            stop.hurry()
        elif insist and main is not None:
            main.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _serve(
    settings: Settings, service: Service, triton: EmbeddedTriton | None, source: Source | None = None
) -> int:
    """
    Run what *service* makes of *settings* until a signal ends it, or it ends by itself; return the exit status.

    *triton* is started, supervised, and stopped at the end. Settings are read again from *source*, and the service
    answers while Triton starts, and says that it is not ready. Without *source* somebody looks on: then one thing comes
    after the other, without complaints about a Triton that is not there yet.
    """
    # Before Triton is started: files that cannot be used are to be reported at once.
    server_context(settings.tls)
    stop = Stop()

    def adapted(settings: Settings) -> Settings:
        if triton is None:
            return settings
        return settings.with_triton(triton.http_url, triton.grpc_url, metrics_url=triton.metrics_url)

    # Left in the opposite order: requests in flight still have their Triton while the service drains.
    with stopped_by_signals(stop):
        async with _supervised(settings, triton) as (ends, started):
            ends.append(asyncio.create_task(stop.asked.wait()))
            if source is None:
                starting = asyncio.create_task(started.wait())
                await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
                starting.cancel()
            async with service(adapted(settings), stop) as running:

                async def greet() -> int | None:
                    await started.wait()
                    return await running.greet()

                async def take(new: Settings, renew: bool) -> None:
                    await running.take_over(adapted(new), renew)

                greeting = asyncio.create_task(greet())
                try:
                    async with reloading(None if source is None else Reloader(settings, source, take)):
                        return await _first_end([*ends, *running.tasks], greeting)
                finally:
                    greeting.cancel()
                    await asyncio.gather(greeting, return_exceptions=True)


async def _first_end(ends: Sequence[asyncio.Task[Any]], greeting: asyncio.Task[int | None]) -> int:
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


@contextlib.asynccontextmanager
async def _supervised(
    settings: Settings, triton: EmbeddedTriton | None
) -> AsyncIterator[tuple[list[asyncio.Task[Any]], asyncio.Event]]:
    """Keep *triton* running, if there is one. Yield the tasks whose end is that of the service, and Triton's start."""
    started = asyncio.Event()
    if triton is None:
        started.set()
        yield [], started
        return
    if settings.server.log_format == "console":
        print("Starting Triton ...", file=sys.stderr, flush=True)
    supervisor = Supervisor(triton)
    running = asyncio.create_task(supervisor.run())
    try:
        yield [running], supervisor.started
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


# One process


@contextlib.asynccontextmanager
async def _one_process(
    settings: Settings, stop: Stop, *, sockets: Sequence[socket.socket], launched: bool, talk: Talk | None = None
) -> AsyncIterator[Running]:
    async with listening(settings, sockets, stop) as app:

        async def greet() -> int | None:
            banner = await banner_of(settings, app, address_of(settings, sockets[0]), launched=launched)
            show(render_banner(banner, settings.server.log_format))
            return None if talk is None else await talk(banner)

        yield Running(partial(take_over, app), greet)


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
            guard=app[GUARD],
            changed=app[SERVICE].control.changed_elsewhere,
            reuse_port=app[WORKER].count > 1,
        )
        for one in sockets:
            await server.listen(one)
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


# Several workers


@contextlib.asynccontextmanager
async def _workers(
    settings: Settings,
    stop: Stop,
    *,
    sockets: Sequence[socket.socket],
    launched: bool,
    ports: ServerSettings,
    directory: Path,
    environ: Mapping[str, str],
) -> AsyncIterator[Running]:
    """Serve with workers, whose relays listen on the *ports* of these settings, and which share *directory*."""
    shared = SharedState()
    count, address = settings.server.workers, address_of(settings, sockets[0])

    def with_ports(settings: Settings) -> Settings:
        held = {"kserve_http_port": ports.kserve_http_port, "kserve_grpc_port": ports.kserve_grpc_port}
        return msgspec.structs.replace(settings, server=msgspec.structs.replace(settings.server, **held))

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
        await pool.take_over(with_ports(new), renew)

    async def greet() -> None:
        pool.greet(launched=launched)
        show(await pool.greeting)

    pool = Pool(with_ports(settings), count, start, listens=listens, forget=forget)
    serving = asyncio.create_task(pool.run())
    try:
        yield Running(take, greet, (serving,))
    finally:
        # While the workers have them, nobody is turned away; when the last lets go, nobody is kept waiting.
        for one in sockets:
            one.close()
        await pool.end(notice=stop.notice, hurried=stop.hurried)
        await asyncio.gather(serving, return_exceptions=True)
