"""The sockets that the service listens on, and the address that they stand for."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import msgspec

from triton_openai.config import ServerSettings, Settings
from triton_openai.errors import ConfigurationError

#: Connections that may wait to be accepted; net.core.somaxconn limits it too.
BACKLOG = 4096


def bound_sockets(
    host: str, port: int, *, advice: str, listen: bool = True, reuse_port: bool = False
) -> list[socket.socket]:
    """
    Return sockets that listen on every address that *host* stands for, or without *listen* only have it.

    With *reuse_port* other processes may listen there too. Raises :class:`ConfigurationError`, with *advice*, when the
    address cannot be had.
    """
    with contextlib.ExitStack() as opened:
        sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                one = opened.enter_context(socket.socket(family, kind, protocol))
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if reuse_port:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    # The IPv4 form of the address has a socket of its own where it is meant too.
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # With port 0 the first socket chooses for all.
                one.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                # Here and not when the service starts: some systems notice only now that the port is taken.
                if listen:
                    one.listen(BACKLOG)
                sockets.append(one)
        except OSError as error:
            message = f"Cannot listen on {host} port {port}: {error.strerror or error}. {advice}"
            raise ConfigurationError(message) from error
        opened.pop_all()
        return sockets


@contextlib.contextmanager
def listening_sockets(server: ServerSettings) -> Iterator[list[socket.socket]]:
    """
    Yield sockets bound to every address that the configured host stands for. Raises :class:`ConfigurationError`.

    They are made before anything else is started, because a port that is taken is the most common thing to go wrong.
    """
    advice = "Choose another with --port or --host."
    with contextlib.ExitStack() as opened:
        found = bound_sockets(server.host, server.port, advice=advice)
        yield [opened.enter_context(one) for one in found]


@contextlib.contextmanager
def relay_ports(server: ServerSettings) -> Iterator[ServerSettings]:
    """
    Yield settings with the ports on which several workers relay Triton's own protocol, each with a socket of its own.

    A socket that may share its port shares it with every process of the same user, another service's workers included,
    and chooses a port for itself. So the ports are had alone first, and then held, without listening, for the workers.
    Raises :class:`ConfigurationError` when a port cannot be had.
    """
    ports = {"kserve_http_port": server.kserve_http_port, "kserve_grpc_port": server.kserve_grpc_port}
    advice = {name: f"Choose another with --{name.replace('_', '-')}." for name in ports}
    with contextlib.ExitStack() as held:
        if server.enable_kserve_frontends:
            with contextlib.ExitStack() as alone:
                for name, port in ports.items():
                    for one in bound_sockets(server.host, port, advice=advice[name]):
                        ports[name] = alone.enter_context(one).getsockname()[1]
            for name, port in ports.items():
                for one in bound_sockets(server.host, port, advice=advice[name], listen=False, reuse_port=True):
                    held.enter_context(one)
        yield msgspec.structs.replace(server, **ports)


def address_of(settings: Settings, bound: socket.socket) -> str:
    """Return a URL for clients on this machine: an address that means every interface is none to connect to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    scheme = "http" if settings.tls.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
