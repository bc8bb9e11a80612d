"""The sockets that the service listens on, and the address that they stand for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from triton_openai.config import ServerSettings
from triton_openai.errors import ConfigurationError


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


def address_of(server: ServerSettings, bound: socket.socket, scheme: str) -> str:
    """Return a URL for clients on this machine: an address that means every interface is none to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
