"""The HTTP server, and the sockets that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Any, cast
from weakref import WeakSet

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage

from triton_openai.config.tree import LimitSettings, ServerSettings, Settings
from triton_openai.draining import Draining
from triton_openai.errors import ConfigurationError
from triton_openai.serving.connections import Connection
from triton_openai.serving.request_body import EXPECTS_CONTINUE, without_misread_headers
from triton_openai.tasks import cancel, spawn, wait_any
from triton_openai.telemetry.request_record import OBSERVERS, Observer

# At the end: how long clients that have connected have to send a request, how long the last answers have to leave, and
# how often the connections are checked.
_LAST_REQUESTS_SECONDS = 1.0
_LAST_ANSWERS_SECONDS = 1.0
_POLL_SECONDS = 0.1
# Turns of the event loop in which it reads what has come, parses it, and begins to answer.
_TURNS = 5
# aiohttp waits this long, twice, for handlers that are left when the server closes.
_SHUTDOWN_SECONDS = 0.5
#: Seconds after which a client that takes nothing of its answer is disconnected (on Linux).
WRITE_TIMEOUT = 300.0
_VERSIONS = HttpVersion11, HttpVersion10
# Connections that may wait to be accepted; net.core.somaxconn limits it too.
_BACKLOG = 4096
# How many of them are accepted in a turn of the event loop. uvloop accepts one: where its turns are long, clients that
# connect would wait for seconds, while those that have connected are served. More in one turn would leave none to the
# other workers.
_ACCEPTED_IN_A_TURN = 16


class HttpServer:
    """
    Serves *app*; *tls* is for all of its sockets.

    A client that leaves cancels the handler of its request.
    """

    def __init__(self, app: web.Application, limits: LimitSettings, *, tls: ssl.SSLContext | None = None) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._limits = limits
        # The arguments with which connections are made: those of TLS, if there is a context.
        self._tls: dict[str, Any] = {}
        if tls is not None:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": limits.header_timeout}
        self._observer = app.get(OBSERVERS, Observer())
        self._listeners: list[tuple[socket.socket, asyncio.Server]] = []
        # With TLS, all connections: aiohttp has those whose handshake has ended.
        self._handshakes: WeakSet[Connection] = WeakSet()
        self._taking: set[asyncio.Task[None]] = set()
        # Whether the next turn of the event loop accepts further connections.
        self._accepts_more = False
        self._stopping = False

    async def start(self) -> None:
        """Start the application."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        make: Callable[..., web.BaseRequest] = server.request_factory

        def begin(message: RawRequestMessage, payload: StreamReader, protocol: Any, *rest: Any) -> web.BaseRequest:
            """Make a request when its head is complete."""
            protocol.begin_answer()
            message, expects_continue = without_misread_headers(message)
            if message.version not in _VERSIONS:
                # The parser takes HTTP/0.9 and HTTP/2.0 too, which look like HTTP/1.0 to it.
                message = message._replace(version=HttpVersion10, should_close=True)
            request = make(message, payload, protocol, *rest)
            if expects_continue:
                request[EXPECTS_CONTINUE] = True
            return request

        server.request_factory = begin

    async def listen(self, sock: socket.socket) -> None:
        """Accept connections on *sock*, a bound TCP socket."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it. The kernel ends the connection of a client that takes nothing.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(WRITE_TIMEOUT * 1000))
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self._connection, sock=sock, backlog=_BACKLOG, **self._tls)
        self._listeners.append((sock, listener))

    def _connection(self) -> Connection:
        server = self._runner.server
        assert server is not None
        connection = Connection(server, self._limits, self._observer)
        if self._tls:
            self._handshakes.add(connection)
        connection.closes = self._stopping
        if not self._accepts_more:
            self._accepts_more = True
            asyncio.get_running_loop().call_soon(self._accept_more)
        return connection

    def _accept_more(self) -> None:
        """Accept what else waits: a client that connects seldom does so alone."""
        self._accepts_more = False
        for sock, _ in self._listeners:
            for accepted in _accepted(sock, _ACCEPTED_IN_A_TURN):
                spawn(self._take(accepted), self._taking)

    def _connections(self) -> set[Connection]:
        server = self._runner.server
        if server is None:
            known = []
        else:
            known = server.connections
        return {*cast(list[Connection], known), *self._handshakes}

    async def _stop_listening(self) -> None:
        """Accept no more connections. Those that the kernel has accepted are taken first: closing would reset them."""
        accepted: list[socket.socket] = []
        for sock, listener in self._listeners:
            accepted += _accepted(sock, _BACKLOG)
            listener.close()
        self._listeners.clear()
        taken = [spawn(self._take(one), self._taking) for one in accepted]
        if not self._tls:
            await asyncio.gather(*taken)
        await _turns()

    async def _take(self, accepted: socket.socket) -> None:
        # An error is that of a client that has left, or of its handshake.
        with contextlib.suppress(OSError):
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(self._connection, accepted, **self._tls)

    async def stop(self, draining: Draining, grace: float, hurried: asyncio.Event) -> None:
        """
        Answer what clients have sent, and accept nothing more.

        Clients that have just connected get a moment to send their request. *draining* ends the requests, which have
        *grace* seconds, or less when *hurried*; later ones are refused. Then the last answers have time to leave.
        """
        draining.begun = True
        self._stopping = True
        for connection in self._connections():
            connection.closes = True
        await self._stop_listening()
        await self._while_any(Connection.awaits_request, _LAST_REQUESTS_SECONDS, hurried)
        # However busy the event loop was, what has come until now is read: closing would reset its connection.
        await _turns()
        for connection in self._connections():
            connection.close_idle()
        deadline = time.monotonic() + grace
        await draining.drain(grace, hurried)
        if hurried.is_set():
            deadline = 0.0
            hurried = asyncio.Event()
        left = max(deadline - time.monotonic(), _LAST_ANSWERS_SECONDS)
        await self._while_any(Connection.has_unsent_answer, left, hurried)

    async def _while_any(self, state: Callable[[Connection], bool], timeout: float, hurried: asyncio.Event) -> None:
        deadline = time.monotonic() + timeout
        while any(map(state, self._connections())) and not hurried.is_set() and time.monotonic() < deadline:
            await wait_any(hurried, timeout=_POLL_SECONDS)

    async def close(self) -> None:
        """Stop the application, and close all that is open."""
        for _, listener in self._listeners:
            listener.close()
        self._listeners.clear()
        await cancel(*self._taking)
        await self._runner.cleanup()


def _accepted(sock: socket.socket, count: int) -> Iterator[socket.socket]:
    """Accept *count* connections at most that wait at *sock*."""
    for _ in range(count):
        try:
            yield sock.accept()[0]
        except ConnectionError:
            # Its client has left.
            continue
        except OSError:
            # There is none left, or no descriptor for it.
            return


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@contextlib.contextmanager
def listening_sockets(server: ServerSettings) -> Iterator[list[socket.socket]]:
    """
    Yield sockets that listen on every address of the configured host. Raises :class:`ConfigurationError`.

    They are made before anything else is started, because a port in use is the most common error.
    """
    host = server.host
    port = server.port
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(addresses):
                own_port = port
                if sockets:
                    # With port 0, all use the port of the first socket.
                    own_port = sockets[0].getsockname()[1]
                # A socket for IPv6 leaves IPv4 to a socket of its own. It listens now and not when the service starts:
                # some systems report a port in use only here.
                listening = socket.create_server((address[0], own_port, *address[2:]), family=family, backlog=_BACKLOG)
                sockets.append(opened.enter_context(listening))
        except OSError as error:
            # Those of a socket repeat the address in their words.
            if isinstance(error, socket.gaierror):
                reason = error.strerror
            else:
                reason = os.strerror(error.errno or 0)
            raise ConfigurationError(
                f"Cannot listen on {host} port {port}: {reason}. Choose another with --port or --host."
            ) from error
        yield sockets


def address_of(settings: Settings, bound: socket.socket) -> str:
    """Return a URL for clients on this machine: one cannot connect to the address of all interfaces."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    if settings.tls.certificate is None:
        scheme = "http"
    else:
        scheme = "https"
    if ":" in host:
        host = f"[{host}]"
    return f"{scheme}://{host}:{bound.getsockname()[1]}"
