"""The HTTP server, and the sockets that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, StreamReader, web
from aiohttp.http import RawRequestMessage

from triton_openai.config.tree import LimitSettings, ServerSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.serving.connections import Connection
from triton_openai.serving.request_body import EXPECTS_CONTINUE, without_expectations
from triton_openai.telemetry.observation import OBSERVERS, Observer

# How long the event loop has for the connections that the kernel has accepted when the service stops to listen.
_ACCEPT_SECONDS = 0.05
# aiohttp waits this long, twice, for handlers that are left when the server closes.
_SHUTDOWN_SECONDS = 0.5
#: Seconds after which a client that takes nothing of its answer is disconnected (on Linux).
WRITE_TIMEOUT = 300.0
_VERSIONS = HttpVersion11, HttpVersion10
# Connections that may wait to be accepted; net.core.somaxconn limits it too.
_BACKLOG = 4096


class HttpServer:
    """
    Serves *app*; *tls* is for all of its sockets.

    A client that leaves cancels the handler of its request.
    """

    def __init__(self, app: web.Application, limits: LimitSettings, *, tls: ssl.SSLContext | None = None) -> None:
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
        self._limits, self._tls = limits, tls
        self._observer = app.get(OBSERVERS, Observer())
        self._listeners: list[asyncio.Server] = []

    async def start(self) -> None:
        """Start the application."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        make: Callable[..., web.BaseRequest] = server.request_factory

        def begin(message: RawRequestMessage, payload: StreamReader, protocol: Any, *rest: Any) -> web.BaseRequest:
            """Make a request when its head is complete."""
            protocol.begin_answer()
            message, expects_continue = without_expectations(message)
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
        server, limits, tls = self._runner.server, self._limits, self._tls
        assert server is not None
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Accepted sockets inherit it. The kernel ends the connection of a client that takes nothing.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(WRITE_TIMEOUT * 1000))
        listener = await asyncio.get_running_loop().create_server(
            partial(Connection, server, limits, self._observer),
            sock=sock,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else limits.header_timeout,
        )
        self._listeners.append(listener)

    @property
    def awaits_requests(self) -> bool:
        """Whether a client has connected and has not sent a request yet."""
        return any(one.connected and not one.used for one in self._connections())

    async def stop_listening(self) -> None:
        """Accept no more connections. Those that the kernel has accepted are taken first: closing would reset them."""
        await asyncio.sleep(_ACCEPT_SECONDS)
        for listener in self._listeners:
            listener.close()

    def close_idle(self) -> None:
        """Close idle connections at once, and every other one after its answer."""
        for connection in self._connections():
            connection.drain()

    async def close(self) -> None:
        """Stop the application, and close all that is open."""
        for listener in self._listeners:
            listener.close()
        await self._runner.cleanup()

    def _connections(self) -> list[Connection]:
        server = self._runner.server
        return [] if server is None else cast(list[Connection], server.connections)


@contextlib.contextmanager
def listening_sockets(server: ServerSettings) -> Iterator[list[socket.socket]]:
    """
    Yield sockets that listen on every address of the configured host. Raises :class:`ConfigurationError`.

    They are made before anything else is started, because a port in use is the most common error.
    """
    host, port = server.host, server.port
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                one = opened.enter_context(socket.socket(family, kind, protocol))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    # IPv4 has a socket of its own.
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # With port 0, all use the port of the first socket.
                one.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                # Now and not when the service starts: some systems report a port in use only here.
                one.listen(_BACKLOG)
                sockets.append(one)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on {host} port {port}: {error.strerror or error}. Choose another with --port or --host."
            ) from error
        yield sockets


def address_of(settings: Settings, bound: socket.socket) -> str:
    """Return a URL for clients on this machine: one cannot connect to the address of all interfaces."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    scheme = "http" if settings.tls.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
