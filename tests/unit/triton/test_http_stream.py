"""The pool of kept connections to Triton, and what a stream keeps; what travels over them is in ``test_transports``."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

from triton_openai import offload
from triton_openai.triton import http_stream
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.http_stream import IDLE_SECONDS, ConnectionPool, HttpStream


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """The clock of the pool, which stands still."""
    found = Mock(return_value=0.0)
    monkeypatch.setattr(http_stream, "monotonic", found)
    return found


@pytest.fixture
def pool() -> ConnectionPool:
    """An empty pool."""
    return ConnectionPool("http://127.0.0.1:1", ConnectionSettings(connect_timeout=1.0))


def kept(pool: ConnectionPool, count: int = 1) -> list[Mock]:
    """Return connections that *pool* was given back."""
    connections = [Mock(usable=True) for _ in range(count)]
    for connection in connections:
        pool.keep(connection)
    return connections


def closed(connections: list[Mock]) -> list[bool]:
    """Return which of *connections* were closed."""
    return [connection.close.called for connection in connections]


def test_the_newest_comes_first(pool: ConnectionPool, clock: Mock) -> None:
    """The others may have been closed by Triton meanwhile; one of which that is known is passed over."""
    connections = kept(pool, 3)
    connections[2].usable = False

    assert [connections[1], connections[0], None] == [pool.idle() for _ in range(3)]
    assert [False, False, True] == closed(connections)


def test_idle_for_too_long(pool: ConnectionPool, clock: Mock) -> None:
    """Nobody gets such a connection, and the next one that is kept closes it."""
    old = kept(pool, 2)
    clock.return_value = IDLE_SECONDS - 1
    (new,) = kept(pool)
    assert [False, False] == closed(old)
    clock.return_value = IDLE_SECONDS
    (newest,) = kept(pool)
    assert [True, True] == closed(old)
    clock.return_value = 2 * IDLE_SECONDS - 1

    assert [newest, None] == [pool.idle(), pool.idle()]
    assert new.close.called


def test_no_more_than_so_many(pool: ConnectionPool, clock: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back to a full pool is closed."""
    monkeypatch.setattr(http_stream, "MAX_IDLE", 2)

    assert [False, False, True] == closed(kept(pool, 3))


def test_a_closed_pool(pool: ConnectionPool, clock: Mock) -> None:
    """A closed pool has no connections, and keeps none."""
    before = kept(pool, 2)
    pool.close()

    assert [True, True, True] == closed([*before, *kept(pool)])
    assert pool.idle() is None


class Message:
    """Stands for the bytes of a request: of this, one can tell whether it is still there."""


@pytest.mark.parametrize("cost", [0.0, 2 * offload.INLINE])
async def test_a_request_is_not_kept(pool: ConnectionPool, clock: Mock, cost: float) -> None:
    """What was sent takes no memory while it is answered. For a connection that was stale, it is made again."""
    made: list[weakref.ref[Message]] = []

    def message() -> Any:
        one = Message()
        made.append(weakref.ref(one))
        return one

    connection = Mock(usable=True)
    connection.send = lambda data, stream: None
    pool.keep(connection)
    stream = HttpStream(pool, Mock(model="m", outputs=(), cost=cost), Mock(), message=message)
    if stream._connecting is not None:
        await stream._connecting

    # A thread that has made it may not have let go of it yet.
    async with asyncio.timeout(120):
        while [None] != [one() for one in made]:  # noqa: ASYNC110 - nothing reports that
            await asyncio.sleep(0)
