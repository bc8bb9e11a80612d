"""The ports of Triton's own protocol where several processes listen on them."""

from __future__ import annotations

import socket

import pytest

from tests.cases import every_case
from triton_openai.config.tree import ServerSettings
from triton_openai.errors import ConfigurationError
from triton_openai.serving.server import relay_ports


def listener(port: int, *, shared: bool) -> socket.socket:
    """Return a socket that listens on *port*, as each worker has one."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
    try:
        made.bind(("127.0.0.1", port))
        made.listen()
    except OSError:
        made.close()
        raise
    return made


def settings(http: int, grpc: int) -> ServerSettings:
    return ServerSettings(enable_kserve_frontends=True, kserve_http_port=http, kserve_grpc_port=grpc)


def test_free_ports_are_the_same_for_all_workers() -> None:
    """They are chosen once, and every worker can listen on them, also one that is replaced."""
    with relay_ports(settings(0, 0)) as found:
        ports = {found.kserve_http_port, found.kserve_grpc_port}
        assert 2 == len(ports - {0})
        for port in ports:
            for _ in range(2):
                with listener(port, shared=True), listener(port, shared=True):
                    pass


@every_case("shared", [False, True])
@every_case("flag", ["--kserve-http-port", "--kserve-grpc-port"])
def test_ports_of_others_are_refused(flag: str, shared: bool) -> None:
    """Those of another service too, whose workers share theirs: calls would go to one or the other."""
    with listener(0, shared=shared) as other:
        port = other.getsockname()[1]
        ports = (port, 0) if flag == "--kserve-http-port" else (0, port)
        with pytest.raises(ConfigurationError, match=f"{port}.*in use.*{flag}"), relay_ports(settings(*ports)):
            pass


def test_one_port_is_not_two() -> None:
    """Both protocols on one port would have each client meet either."""
    with relay_ports(settings(0, 0)) as free:
        port = free.kserve_http_port
    with pytest.raises(ConfigurationError, match="in use"), relay_ports(settings(port, port)):
        pass


def test_they_can_be_had_again() -> None:
    """What is held is let go."""
    with relay_ports(settings(0, 0)) as found:
        pass
    with relay_ports(found) as again:
        assert found == again


def test_nothing_is_held_without_the_relays() -> None:
    """Then the ports are only names."""
    with listener(0, shared=False) as other:
        server = ServerSettings(kserve_http_port=other.getsockname()[1])
        with relay_ports(server) as same:
            assert server == same
