"""The sockets that the service listens on, and their address."""

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
    Return sockets that listen on every address of *host*, or, without *listen*, are only bound to it.

    With *reuse_port* other processes may listen there too. Raises :class:`ConfigurationError`, with *advice*, if the
    address is not available.
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
                    # IPv4 has a socket of its own.
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                # With port 0, all use the port of the first socket.
                one.bind((address[0], sockets[0].getsockname()[1] if sockets else port, *address[2:]))
                # Now and not when the service starts: some systems report a port in use only here.
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
    Yield sockets that listen on every address of the configured host. Raises :class:`ConfigurationError`.

    They are made before anything else is started, because a port in use is the most common error.
    """
    advice = "Choose another with --port or --host."
    with contextlib.ExitStack() as opened:
        found = bound_sockets(server.host, server.port, advice=advice)
        yield [opened.enter_context(one) for one in found]


@contextlib.contextmanager
def relay_ports(server: ServerSettings) -> Iterator[ServerSettings]:
    """
    Yield settings with the ports on which several workers relay Triton's own protocol, each with a socket of its own.

    With ``SO_REUSEPORT`` a socket shares its port with every process of the same user, also with another service's
    workers. So each port is first bound exclusively, and then reserved for the workers by a socket that does not
    listen. Raises :class:`ConfigurationError` if a port is not available.
    """
    ports = {"kserve_http_port": server.kserve_http_port, "kserve_grpc_port": server.kserve_grpc_port}
    advice = {name: f"Choose another with --{name.replace('_', '-')}." for name in ports}
    with contextlib.ExitStack() as reserved:
        if server.enable_kserve_frontends:
            with contextlib.ExitStack() as exclusive:
                for name, port in ports.items():
                    for one in bound_sockets(server.host, port, advice=advice[name]):
                        ports[name] = exclusive.enter_context(one).getsockname()[1]
            for name, port in ports.items():
                for one in bound_sockets(server.host, port, advice=advice[name], listen=False, reuse_port=True):
                    reserved.enter_context(one)
        yield msgspec.structs.replace(server, **ports)


def address_of(settings: Settings, bound: socket.socket) -> str:
    """Return a URL for clients on this machine: one cannot connect to the address of all interfaces."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.server.host, settings.server.host)
    scheme = "http" if settings.tls.certificate is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
