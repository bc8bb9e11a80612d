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


def check_relay_ports(server: ServerSettings) -> None:
    """
    Look whether anybody else listens where each of several workers is going to listen for itself.

    They share these ports, and the system would share them with another service of the same user as well, without a
    word: its clients would be answered by either.

    :raises ConfigurationError: when a port is taken.
    """
    if not server.enable_kserve_frontends:
        return
    for flag, port in (
        ("--kserve-http-port", server.kserve_http_port),
        ("--kserve-grpc-port", server.kserve_grpc_port),
    ):
        for one in bound_sockets(server.host, port, backlog=server.backlog, advice=f"Choose another with {flag}."):
            one.close()


def address_of(server: ServerSettings, bound: socket.socket, scheme: str) -> str:
    """Return a URL for clients on this machine: an address that means every interface is none to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.host, server.host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
