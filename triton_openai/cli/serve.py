"""
``triton-openai serve``: the service as a process, from its sockets to its signals.

With several workers this process answers no request itself: it has the listening sockets, which outlive any worker,
and the Triton if one is started; it starts the workers, replaces them, and passes signals and new settings on.
"""

from __future__ import annotations

import asyncio
import contextlib
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
import uvloop
from aiohttp import web

from triton_openai.app import SERVICE, apply_settings, create_app
from triton_openai.cli.banner import Banner, banner_of, render_banner, show
from triton_openai.config.files import warn_if_readable_by_all
from triton_openai.config.reload import ApplySettings, Reloader, Source
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings
from triton_openai.config.worker import Worker, private_directory
from triton_openai.draining import DRAINING
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.prompter import check_files
from triton_openai.serving.garbage import collect_garbage
from triton_openai.serving.server import HttpServer, address_of, listening_sockets
from triton_openai.serving.workers.pool import Pool, WorkerProcess
from triton_openai.serving.workers.shared import SharedClient, SharedState
from triton_openai.tasks import cancel, wait_any
from triton_openai.tritonserver.embedded import EmbeddedTriton
from triton_openai.tritonserver.supervisor import Supervisor, triton_for

log = structlog.get_logger(__name__)
# Enough for every stream of one process. Not more, because some programs loop over all possible descriptors.
_ENOUGH_FILES = 65_536

#: Called after the banner is shown. Returns the exit status, or ``None`` to go on serving.
OnReady = Callable[[Banner], Awaitable[int | None]]


class Running(msgspec.Struct, frozen=True):
    """A running service: how to give it new settings, how to show its banner, and the tasks that end with it."""

    apply_settings: ApplySettings
    show_banner: Callable[[], Awaitable[int | None]]
    tasks: tuple[asyncio.Task[Any], ...] = ()


class Stop:
    """The request to stop the service."""

    def __init__(self) -> None:
        #: Set when it has to stop.
        self.asked = asyncio.Event()
        #: Set when it has to stop without waiting.
        self.hurried = asyncio.Event()
        #: Whether load balancers get time to notice. A Ctrl-C needs no such wait.
        self.notice = False

    def begin(self, why: str, *, notice: bool) -> None:
        """Begin to stop, unless that has begun."""
        if not self.asked.is_set():
            self.notice = notice
            self.asked.set()
            log.info("stopping", why=why)

    def hurry(self) -> None:
        """Stop without waiting."""
        self.asked.set()
        self.hurried.set()


#: Runs a service with these settings, and ends it as the :class:`Stop` asks.
Runner = Callable[[Settings, Stop], AbstractAsyncContextManager[Running]]


def serve(settings: Settings, source: Source, environ: Mapping[str, str]) -> int:
    """Serve until a signal ends it, and keep up with the *source* of the settings."""
    # The workers inherit the limit.
    raise_file_limit()
    with contextlib.ExitStack() as opened:
        sockets = opened.enter_context(listening_sockets(settings.server))
        triton = None
        if settings.triton.model_repository:
            triton = triton_for(settings, environ)
        common: Mapping[str, Any] = {"sockets": sockets, "launched": triton is not None}
        service: Runner = partial(_one_process, **common)
        if settings.server.workers > 1:
            directory = opened.enter_context(private_directory(environ))
            environ = {**environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
            service = partial(_workers, **common, directory=directory, environ=environ)
        return run_loop(_serve(settings, service, triton, source))


def serve_demo(settings: Settings, sockets: Sequence[socket.socket], triton: EmbeddedTriton, on_ready: OnReady) -> int:
    """Start *triton*, then serve on *sockets* until a signal, or an exit status of *on_ready*."""
    service = partial(_one_process, sockets=sockets, launched=True, on_ready=on_ready)
    return run_loop(_serve(settings, service, triton))


def raise_file_limit() -> None:
    """
    Raise this process's limit of open files, which is 1024 on most systems, as far as allowed and useful.

    Systems keep the low default for programs that use ``select``, which this one does not.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        limit = _ENOUGH_FILES
    else:
        limit = min(hard, _ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def run_loop(main: Coroutine[Any, Any, int]) -> int:
    """Run *main* on uvloop and return its exit status."""
    try:
        return uvloop.run(main)
    except asyncio.CancelledError:
        # After the third signal.
        return 130


@contextlib.contextmanager
def stopped_by_signals(stop: Stop, *, insist: bool = True) -> Iterator[None]:
    """
    Stop at SIGTERM and SIGINT: the first asks, the second one stops the waiting, the third one cancels the main task.

    Without *insist*, further signals are ignored. So workers do: service managers send a signal to every process, and
    the one that the parent passes on would count as the second.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()

    def handle(number: signal.Signals) -> None:
        if not stop.asked.is_set():
            stop.begin(number.name, notice=number == signal.SIGTERM)
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
    settings: Settings, service: Runner, triton: EmbeddedTriton | None, source: Source | None = None
) -> int:
    """
    Run what *service* makes of *settings* until a signal ends it, or it ends by itself; return the exit status.

    *triton* is started, supervised, and stopped at the end. Settings are read again from *source*. The service answers,
    as not ready, while Triton starts. Without *source*, as in the demo, the service starts after Triton.
    """
    # Before Triton starts, so that wrong files are reported at once.
    server_context(settings.tls)
    check_files(settings)
    warn_if_readable_by_all(settings.tls.key, "private key of --tls-key")
    if source is not None and source.has_secrets():
        warn_if_readable_by_all(source.file, "settings file, which holds secrets")
    for folder in settings.triton.repository:
        if not folder.is_dir():
            raise ConfigurationError(f"There is no folder {folder} given by --triton-repository.")
    stop = Stop()

    def adapted(settings: Settings) -> Settings:
        if triton is None:
            return settings
        return settings.with_triton(triton.http_url, triton.grpc_url, metrics_url=triton.metrics_url)

    async with contextlib.AsyncExitStack() as opened:
        opened.enter_context(stopped_by_signals(stop))
        started = asyncio.Event()
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop.asked.wait())]
        if triton is None:
            started.set()
        else:
            if settings.server.enable_kserve_frontends and (settings.access.api_key or settings.access.api_keys_file):
                log.warning("API keys do not protect Triton's own protocol", http=triton.http_url, grpc=triton.grpc_url)
            supervisor = Supervisor(triton)
            started = supervisor.started
            ends.append(asyncio.create_task(supervisor.run()))
            # What is opened first ends last: requests in flight can finish before Triton stops.
            opened.push_async_callback(cancel, ends[-1])
            if settings.server.log_format == "console":
                opened.push_async_callback(cancel, asyncio.create_task(_show_start(started)))
        if source is None:
            # Until its ports are asked for, a Triton that finds them taken tries others.
            starting = asyncio.create_task(started.wait())
            await asyncio.wait([starting, *ends], return_when=asyncio.FIRST_COMPLETED)
            starting.cancel()
        running = await opened.enter_async_context(service(adapted(settings), stop))

        async def show_banner() -> int:
            await started.wait()
            status = await running.show_banner()
            if status is None:
                # Serve until something else ends.
                await asyncio.Event().wait()
            return status or 0

        async def take(new: Settings, reload: bool) -> None:
            await running.apply_settings(adapted(new), reload)

        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(show_banner())]
        if source is not None:
            reloader = Reloader(settings, source, take)
            # It stays until the process ends: without it, a SIGHUP during shutdown would kill the process.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.request)
            tasks.append(asyncio.create_task(reloader.run()))
        opened.push_async_callback(cancel, *tasks)
        done, _ = await asyncio.wait([*tasks, *ends, *running.tasks], return_when=asyncio.FIRST_COMPLETED)
        results = {task: task.result() for task in done}
        return int(results.get(tasks[0], 0))


async def _show_start(started: asyncio.Event) -> None:
    """Say that Triton starts, and on a terminal for how long."""
    line = "Starting Triton ..."
    terminal = sys.stderr.isatty()
    begin = time.monotonic()
    print(line, end="" if terminal else "\n", file=sys.stderr, flush=True)
    while terminal and not started.is_set():
        await wait_any(started, timeout=1)
        if started.is_set():
            end = "\n"
        else:
            end = ""
        print(f"\r{line} {time.monotonic() - begin:.0f} s", end=end, file=sys.stderr, flush=True)


# One process


@contextlib.asynccontextmanager
async def _one_process(
    settings: Settings, stop: Stop, *, sockets: Sequence[socket.socket], launched: bool, on_ready: OnReady | None = None
) -> AsyncIterator[Running]:
    async with listening(settings, sockets, stop) as app:

        async def show_banner() -> int | None:
            banner = await banner_of(settings, app, address_of(settings, sockets[0]), launched=launched)
            show(render_banner(banner, settings.server.log_format))
            if on_ready is None:
                return None
            return await on_ready(banner)

        yield Running(partial(apply_settings, app), show_banner)


@contextlib.asynccontextmanager
async def listening(
    settings: Settings,
    sockets: Sequence[socket.socket],
    stop: Stop,
    worker: Worker | None = None,
    shared: SharedClient | None = None,
) -> AsyncIterator[web.Application]:
    """Yield the application, running and listening; shut it down as *stop* asks."""
    app = create_app(settings, worker=worker, shared=shared)
    server = HttpServer(app, settings.limits, tls=server_context(settings.tls))
    await server.start()
    collecting = asyncio.create_task(collect_garbage())
    try:
        for listening_socket in sockets:
            await server.listen(listening_socket)
        yield app
    finally:
        await cancel(collecting)
        await _shut_down(server, app, stop)


async def _shut_down(http: HttpServer, app: web.Application, stop: Stop) -> None:
    """
    Shut the service down without losing a request, as far as possible.

    First readiness turns false, for load balancers; then the sockets close; then running requests may finish.
    """
    server = app[SERVICE].settings.server
    draining = app[DRAINING]
    draining.begun = True
    if stop.notice:
        await wait_any(stop.hurried, timeout=server.shutdown_delay)
    await http.stop(draining, server.shutdown_grace, stop.hurried)
    await http.close()


# Several workers


@contextlib.asynccontextmanager
async def _workers(
    settings: Settings,
    stop: Stop,
    *,
    sockets: Sequence[socket.socket],
    launched: bool,
    directory: Path,
    environ: Mapping[str, str],
) -> AsyncIterator[Running]:
    """Serve with workers, which share *directory*."""
    count = settings.server.workers
    address = address_of(settings, sockets[0])

    async def start(index: int, settings: Settings) -> WorkerProcess:
        worker = Worker(index=index, count=count, directory=directory)
        return await WorkerProcess.start(worker, settings, sockets=sockets, address=address, environment=environ)

    async def show_banner() -> None:
        show(await pool.banner(launched=launched))

    pool = Pool(settings, count, start, SharedState(directory))
    serving = asyncio.create_task(pool.run())
    try:
        yield Running(pool.apply_settings, show_banner, (serving,))
    finally:
        # The workers still accept connections. When the last one has closed its sockets, clients are refused at once.
        for listening_socket in sockets:
            listening_socket.close()
        await pool.end(notice=stop.notice, hurried=stop.hurried)
        await asyncio.gather(serving, return_exceptions=True)
