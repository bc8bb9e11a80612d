"""Limits of keys that several services with several workers count in one Redis."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Service, until
from tests.integration.test_worker_limits import ASK, KEYS, begin, run_one_more
from tests.integration.test_workers import pids, workers
from tests.store_fixture import Server
from tests.triton_fixture import TestTriton


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
            (folder / "keys.yaml").write_text(KEYS)
            access = {"api_keys_file": str(folder / "keys.yaml"), "limits_store": database}
            settings = {"access": access, "defaults": {"tokenizer": str(triton.tokenizer)}}
            found.append(opened.enter_context(workers(folder, triton, 2, settings=settings)))
        yield tuple(found)


def test_services_with_workers_count_exactly(services: tuple[Service, ...], database: str) -> None:
    """
    As many requests as the limits allow are answered by all of them together, and as many run at once.

    The running requests of a service that is killed count until their leases end, and those of the other one stay.
    """

    def ask(number: int) -> int:
        return services[number % 2].post("/v1/completions", ASK, **{"api-key": "sk-requests"}).status

    with ThreadPoolExecutor(4) as pool:
        assert {200: 50, 429: 70} == Counter(pool.map(ask, range(120)))

    one, two = services
    with contextlib.ExitStack() as clients:
        for service in (one, one, two):
            connection = service.connect()
            clients.callback(connection.close)
            assert 200 == begin(connection)
        assert not [more for service in services for _ in range(4) if (more := run_one_more(service))]
        for pid in (one.process.pid, *pids(one).values()):
            os.kill(pid, signal.SIGKILL)
        assert run_one_more(two) is None
        time_passes(database)
        for _ in range(2):
            clients.callback(until(lambda: run_one_more(two)).close)
        assert run_one_more(two) is None


def time_passes(database: str) -> None:
    """Let the leases that nobody renews any more end, which are the oldest two, without waiting for it."""
    import redis as client

    with contextlib.closing(client.Redis.from_url(database)) as connection:
        key = "triton_openai:{slots}:c"
        leases: list[tuple[Any, float]] = connection.zrange(key, 0, -1, withscores=True)  # type: ignore[assignment]
        assert len(leases) == 3
        assert all(score <= time.time() + 60 for _, score in leases)
        for lease, _ in leases[:2]:
            connection.zincrby(key, -60, lease)
