"""The sockets that the service listens on, and the address that they stand for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from triton_openai.config import ServerSettings
from triton_openai.server.sockets import bound_sockets


@contextlib.contextmanager
def listening_sockets(server: ServerSettings) -> Iterator[list[socket.socket]]:
    """
    Yield sockets bound to every address that the configured host stands for.

    They are made before anything else is started, because a port that is taken is the most common thing to go wrong.

    :raises ConfigurationError: when the address cannot be had.
    """
    with contextlib.ExitStack() as opened:
        sockets = bound_sockets(
            server.host, server.port, backlog=server.backlog, advice="Choose another with --port or --host."
        )
        for one in sockets:
            opened.enter_context(one)
        yield sockets


def address_of(server: ServerSettings, bound: socket.socket, scheme: str) -> str:
    """Return a URL for clients on this machine: an address that means every interface is none to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
