"""
Ports for servers that tests start, and start again on the same port.

The kernel gives none of them to a server or a client that asks for any port, so they stay free while a server is down.
"""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator

import pytest

from triton_openai.tritonserver import embedded

# Below those that Linux gives away by itself, which begin at 32768.
_PORTS = range(16_000, 32_000)
# Tests and Hypothesis set the seed of the usual generator.
_CHANCE = random.SystemRandom()


def free_ports(count: int = 3) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as opened:
        found: list[int] = []
        while len(found) < count:
            port = _CHANCE.choice(_PORTS)
            one = opened.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    (port,) = free_ports(1)
    return port


@contextlib.contextmanager
def closed_port(port: int = 0) -> Iterator[int]:
    """
    Yield a port of 127.0.0.1 at which nobody listens during the block: *port*, whose server has ended, or any.

    The port of a server that has ended is free, and the kernel may give it to another test.
    """
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        # It does not listen, so the kernel refuses connections.
        yield bound.getsockname()[1]


@pytest.fixture(autouse=True, scope="session")
def _ports_of_tritons() -> Iterator[None]:
    """Start each Triton of this process on such ports, and wait for the last of them also on a slow machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "free_ports", free_ports)
        patch.setattr(embedded, "_METRICS_SECONDS", 120)
        yield
