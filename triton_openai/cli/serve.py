"""``triton-openai serve``: the service as a process, from its sockets to its signals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from aiohttp import web

from triton_openai.app import create_app, models_of
from triton_openai.cli.banner import Banner, banner_of, render_banner
from triton_openai.cli.descriptors import raise_limit
from triton_openai.config import ServerSettings, Settings
from triton_openai.draining import DRAINING
from triton_openai.errors import ConfigurationError
from triton_openai.supervisor import LaunchedTriton, Supervisor
from triton_openai.telemetry.logging import get_logger

log = get_logger(__name__)

# What happens after the banner, and what the process's exit status then is; None: go on serving.
Talk = Callable[[Banner], Awaitable[int | None]]


def serve(settings: Settings, environ: Mapping[str, str]) -> int:
    """Serve until told to stop."""
    raise_limit()
    with listening_sockets(settings.server) as sockets:
        launched = None
        if settings.triton.model_repository:
            launched = LaunchedTriton(settings.triton.model_repository, environ)
        return run_loop(serve_until_stopped(settings, sockets, launched))


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
        # A second signal: whoever sent it did not want to wait for the end of the first one's work.
        return 130


async def serve_until_stopped(
    settings: Settings,
    sockets: Sequence[socket.socket],
    launched: LaunchedTriton | None = None,
    talk: Talk | None = None,
) -> int:
    """
    Serve on *sockets* until SIGTERM or SIGINT, or until *talk* has returned an exit status; return the exit status.

    With *launched*, that Triton is started, supervised, and stopped at the end. The service answers meanwhile, and says
    that it is not ready.
    """
    if launched is not None:
        settings = settings.with_triton(launched.http_url, launched.grpc_url)
    # Left in the opposite order: requests in flight still have their Triton while the service drains.
    async with _stop_signal() as stopped, _supervised(settings, launched) as supervised:
        ends: list[asyncio.Task[Any]] = [stopped]
        started: asyncio.Event | None = None
        if supervised is not None:
            supervisor, running = supervised
            ends.append(running)
            started = supervisor.started
            if talk is not None:
                # Somebody looks on: one thing after the other, without complaints about a Triton that is not there yet.
                waiting = asyncio.create_task(started.wait())
                await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
        async with _listening(settings, sockets) as app:
            address = _address(settings.server, sockets[0])
            greeting = asyncio.create_task(_greet(settings, app, address, started, talk))
            try:
                return await _first_end(ends, greeting)
            finally:
                greeting.cancel()
                await asyncio.gather(greeting, return_exceptions=True)


@contextlib.asynccontextmanager
async def _supervised(
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
    banner = await banner_of(settings, models_of(app), address, wait_for_model=started is not None)
    print(render_banner(banner, settings.server.log_format), flush=True)
    return await talk(banner) if talk is not None else None


@contextlib.asynccontextmanager
async def _listening(settings: Settings, sockets: Sequence[socket.socket]) -> AsyncIterator[web.Application]:
    """Yield the application, running and listening."""
    app = create_app(settings)
    runner = web.AppRunner(
        app,
        # A client that leaves must stop the work that was begun for it.
        handler_cancellation=True,
        access_log=None,
        # Longer than the idle timeout of common load balancers (60 s), so that they close a connection first.
        keepalive_timeout=75,
        # Tokens of identity providers are long, and a refusal here is not in OpenAI's form.
        max_field_size=64 * 1024,
        max_line_size=64 * 1024,
        # What is asked for has ended by then, see below; aiohttp waits this long, twice, for what is left.
        shutdown_timeout=0.5,
    )
    await runner.setup()
    try:
        for one in sockets:
            await web.SockSite(runner, one, backlog=settings.server.backlog).start()
        yield app
    finally:
        for site in list(runner.sites):
            await site.stop()
        await app[DRAINING].drain(settings.server.shutdown_grace)
        await runner.cleanup()


@contextlib.contextmanager
def listening_sockets(server: ServerSettings) -> Iterator[list[socket.socket]]:
    """
    Yield sockets bound to every address that the configured host stands for.

    They are made before anything else is started, because a port that is taken is the most common thing to go wrong.

    :raises ConfigurationError: when the address cannot be had.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                one = opened.enter_context(socket.socket(family, kind, protocol))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # The IPv4 form of the address has a socket of its own where it is meant too.
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # With port 0 the first socket chooses for all.
                port = sockets[0].getsockname()[1] if sockets else server.port
                one.bind((address[0], port, *address[2:]))
                # Here and not when the service starts: some systems notice only now that the port is taken.
                one.listen(server.backlog)
                sockets.append(one)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on {server.host} port {server.port}: {error.strerror or error}. "
                "Choose another with --port or --host."
            ) from error
        yield sockets


def _address(server: ServerSettings, bound: socket.socket) -> str:
    """Return a URL for clients on this machine: an address that means every interface is none to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _stop_signal() -> AsyncIterator[asyncio.Task[Any]]:
    """Yield a task that ends with the first SIGTERM or SIGINT; a second one cuts the clean end short."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    main = asyncio.current_task()

    def stop(number: signal.Signals) -> None:
        if asked.is_set():
            if main is not None:
                main.cancel()
            return
        log.info("stopping", signal=number.name)
        asked.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield asyncio.create_task(asked.wait())
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
