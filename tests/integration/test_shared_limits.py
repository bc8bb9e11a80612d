"""Limits of keys that several services with several workers count in one Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Service, until
from tests.integration.test_worker_limits import ASK, KEYS, begin, run_one_more
from tests.integration.test_workers import pids, workers
from tests.stopped import stop_process
from tests.store_fixture import Server
from tests.triton_fixture import TestTriton

#: Each has the limit of the key "requests".
REQUEST_KEYS = ("sk-requests", *(f"sk-{number}" for number in range(8)))
_KEYS = KEYS + "".join(f"  - {{name: k{key}, key: {key}, requests_per_minute: 50}}\n" for key in REQUEST_KEYS[1:])
#: What a service logs when it counts alone, and when it does no more.
_SILENT, _ANSWERS = "rate limit store unavailable", "rate limit store available again"
#: Where Redis has the leases of the key "slots".
SLOTS = "triton_openai:{slots}:c"


@pytest.fixture
def database(redis: Server) -> str:
    """The address of an empty database."""
    return redis.url()


@pytest.fixture
def services(triton: TestTriton, database: str, tmp_path: Path) -> Iterator[tuple[Service, ...]]:
    """Two services with two workers each."""
    with contextlib.ExitStack() as opened:
        found = []
        for name in ("one", "two"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "keys.yaml").write_text(_KEYS)
            access = {"api_keys_file": str(folder / "keys.yaml"), "limits_store": database}
            settings = {"access": access, "defaults": {"tokenizer": str(triton.tokenizer)}}
            found.append(opened.enter_context(workers(folder, triton, 2, settings=settings)))
        yield tuple(found)


def test_services_with_workers_count_exactly(services: tuple[Service, ...], database: str) -> None:
    """
    As many requests as the limits allow are answered by all of them together, and as many run at once.

    The running requests of a service that is killed count until their leases end, and those of the other one stay.
    """

    def ask(key: str, number: int) -> int:
        return services[number % 2].post("/v1/completions", ASK, **{"api-key": key}).status

    # A service counts alone while Redis is silent, as on a machine that stands still: then the next key shows it.
    for key in REQUEST_KEYS:
        until(lambda: all(map(answering, services)))
        lost = silences(services)
        with ThreadPoolExecutor(4) as pool:
            counts = Counter(pool.map(partial(ask, key), range(120)))
        if counts == {200: 50, 429: 70}:
            break
        # Its line is written a moment later.
        until(lambda: silences(services) > lost)  # noqa: B023
    else:
        pytest.fail("Redis was silent in each round.")

    one, two = services
    with contextlib.ExitStack() as clients:
        of_one = fill(services, database, clients)
        # Nobody replaces the workers, and none of them notices that its parent has gone and ends in order.
        stop_process(one.process.pid)
        for pid in (*pids(one).values(), one.process.pid):
            os.kill(pid, signal.SIGKILL)
        assert not has_room(two, services)
        time_passes(database, of_one)
        for _ in range(2):
            clients.callback(until(lambda: run_one_more(two)).close)
        assert not has_room(two, services)


def fill(services: tuple[Service, ...], database: str, clients: contextlib.ExitStack) -> dict[Any, float]:
    """
    Begin two streams at the first service and one at the second, which *clients* close, while Redis answers.

    Return the leases of the first two. There is no room for another stream then.
    """
    one, two = services
    for _ in range(10):
        until(lambda: all(map(answering, services)) and not leases(database))
        lost = silences(services)
        with contextlib.ExitStack() as opened:
            statuses = [_begin(one, opened), _begin(one, opened)]
            of_one = leases(database)
            statuses.append(_begin(two, opened))
            more = [has_room(service, services) for service in services for _ in range(4)]
            if len(leases(database)) == 3 and silences(services) == lost and all(map(answering, services)):
                assert [200] * 3 == statuses
                assert len(of_one) == 2
                assert not any(more)
                clients.push(opened.pop_all())
                return of_one
    pytest.fail("Redis was silent each time.")


def _begin(service: Service, opened: contextlib.ExitStack) -> int:
    connection = service.connect()
    opened.callback(connection.close)
    return begin(connection)


def has_room(service: Service, services: tuple[Service, ...]) -> bool:
    """Return whether *service* lets one more stream in while Redis answers."""
    while True:
        until(lambda: all(map(answering, services)))
        lost = silences(services)
        name = uuid.uuid4().hex
        with contextlib.closing(service.connect()) as connection:
            if begin(connection, name) != 200:
                return False
        # A worker that counts alone has room, and has logged that it does before the line of the request.
        until(lambda: any(name in line for line in service.log_lines()))  # noqa: B023
        if silences(services) == lost:
            return True


def silences(services: tuple[Service, ...]) -> int:
    """Return how often a worker has found that Redis is silent."""
    lines = [line for service in services for line in service.log_lines()]
    return sum(_SILENT in line for line in lines)


def answering(service: Service) -> bool:
    """Return whether Redis answers each worker that found it silent again."""
    lines = service.log_lines()
    return sum(_SILENT in line for line in lines) == sum(_ANSWERS in line for line in lines)


def leases(database: str) -> dict[Any, float]:
    """Return when the leases of the running requests end, in seconds since 1970."""
    import redis as client

    with contextlib.closing(client.Redis.from_url(database)) as connection:
        return dict(connection.zrange(SLOTS, 0, -1, withscores=True))  # type: ignore[arg-type]


def time_passes(database: str, ended: Iterable[Any]) -> None:
    """End the leases *ended*, which nobody renews any more, without waiting for it."""
    import redis as client

    running = leases(database)
    assert len(running) == 3
    assert all(score <= time.time() + 60 for score in running.values())
    with contextlib.closing(client.Redis.from_url(database)) as connection:
        for lease in ended:
            connection.zincrby(SLOTS, -60, lease)
