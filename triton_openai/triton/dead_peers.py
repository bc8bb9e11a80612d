"""
Has the kernel find out that a machine or a way to it is gone without a word.

A connection whose other end vanished stays open for TCP's own patience: a quarter of an hour for what was sent and not
acknowledged, for ever while there is only something to wait for. A stream would wait for its first token that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

# Silence after which the other side is asked for a sign of life, how often, and how many times in vain.
_IDLE_SECONDS = 15
_INTERVAL_SECONDS = 5
_PROBES = 3
# What was sent has to be acknowledged within the same time.
_UNACKNOWLEDGED_MS = (_IDLE_SECONDS + _PROBES * _INTERVAL_SECONDS) * 1000

# Not every system has all of them.
_TCP_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE_SECONDS,
    "TCP_KEEPINTVL": _INTERVAL_SECONDS,
    "TCP_KEEPCNT": _PROBES,
    "TCP_USER_TIMEOUT": _UNACKNOWLEDGED_MS,
}


def notice(transport: asyncio.BaseTransport) -> None:
    """Have *transport* end within half a minute of the other side's disappearance, where the system can do that."""
    # uvloop's is no socket, but takes options.
    connection: socket.socket | None = transport.get_extra_info("socket")
    if connection is None:
        return
    _watch(connection)


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a socket for *address* (as ``getaddrinfo`` has them) whose connection ends in the same way."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    _watch(made)
    return made


def _watch(connection: socket.socket) -> None:
    # A connection that cannot be watched is still one.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            option = getattr(socket, name, None)
            if option is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
