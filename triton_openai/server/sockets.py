"""The sockets that something listens on."""

from __future__ import annotations

import contextlib
import socket

from triton_openai.errors import ConfigurationError


def bound_sockets(
    host: str, port: int, *, backlog: int | None, advice: str, reuse_port: bool = False
) -> list[socket.socket]:
    """
    Return sockets that listen on every address that *host* stands for, or without *backlog* only have it.

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
                if backlog is not None:
                    one.listen(backlog)
                sockets.append(one)
        except OSError as error:
            raise ConfigurationError(
                f"Cannot listen on {host} port {port}: {error.strerror or error}. {advice}"
            ) from error
        opened.pop_all()
        return sockets
