"""Limits of keys with several processes under load: what they count together, and what one leaves behind that dies."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.clients.service import Service, steered, until
from tests.integration.test_workers import answered_by, connections_to_all, pids, workers
from tests.triton_fixture import TestTriton

KEYS = """
keys:
  - {name: requests, key: sk-requests, requests_per_minute: 50}
  - {name: tokens, key: sk-tokens, tokens_per_minute: 100}
  - {name: slots, key: sk-slots, concurrent_requests: 3}
"""
ASK: dict[str, Any] = {"model": "ensemble", "prompt": steered(text="one two three"), "max_tokens": 8}
# Streams for as long as a test lasts; their clients leave before.
ENDLESS = {**ASK, "stream": True, "prompt": steered(text="a b c d", repeat=500, delay_ms=100), "max_tokens": 2000}


@pytest.fixture(scope="module")
def service(triton: TestTriton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Three workers that ask for keys, of which each test has its own."""
    folder = tmp_path_factory.mktemp("limits")
    keys = folder / "keys.yaml"
    keys.write_text(KEYS)
    with workers(folder, triton, 3, "--api-keys-file", str(keys), "--tokenizer", str(triton.tokenizer)) as service:
        yield service


def statuses(service: Service, key: str, *, clients: int, requests: int) -> Counter[int]:
    """Ask *requests* times, *clients* at once, and return how often each status came."""
    start = threading.Barrier(clients)

    def ask(number: int) -> int:
        if number < clients:
            start.wait(120)
        return service.post("/v1/completions", ASK, **{"api-key": key}).status

    with ThreadPoolExecutor(clients) as pool:
        return Counter(pool.map(ask, range(requests)))


def test_requests_of_a_minute(service: Service) -> None:
    """As many as the limit allows are answered, by all workers together, and not one more or less."""
    assert {200: 50, 429: 150} == statuses(service, "sk-requests", clients=32, requests=200)
    until(lambda: answered_by(service) == {0, 1, 2})


def test_tokens_of_a_minute(service: Service) -> None:
    """Whoever answers, the tokens go to one account; only what runs at the same time can go beyond the limit."""
    used = service.post("/v1/completions", ASK, **{"api-key": "sk-tokens"}).json["usage"]["total_tokens"]
    before = 1
    while service.post("/v1/completions", ASK, **{"api-key": "sk-tokens"}).status == 200:
        before += 1

    assert before == -(-100 // used)
    assert {429: 100} == statuses(service, "sk-tokens", clients=16, requests=100)


def begin(connection: http.client.HTTPConnection, request_id: str = "") -> int:
    """Ask for a stream over *connection* and return its status; let in, it runs until the connection is closed."""
    headers = {"api-key": "sk-slots", "x-request-id": request_id}
    connection.request("POST", "/v1/completions", json.dumps(ENDLESS), headers)
    return connection.getresponse().status


def run_one_more(service: Service) -> http.client.HTTPConnection | None:
    """Return the connection of a stream that was let in; ``None`` when there was no room for it."""
    connection = service.connect()
    if begin(connection) == 200:
        return connection
    connection.close()
    return None


def test_slots_of_a_worker_that_is_killed(service: Service) -> None:
    """A request has its slot in all workers; what a killed one had running counts no more when it has been replaced."""
    before = pids(service)
    with contextlib.ExitStack() as clients:
        found = connections_to_all(service)
        for _, connection in found:
            clients.callback(connection.close)
        for connection in dict(found).values():
            assert 200 == begin(connection)
        assert not [more for _ in range(10) if (more := run_one_more(service))]

        os.kill(before[0], signal.SIGKILL)
        clients.callback(until(lambda: run_one_more(service)).close)
        until(lambda: pids(service)[0] != before[0])
        # One place was free, and not all three.
        assert not [more for _ in range(10) if (more := run_one_more(service))]
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            clients.callback(until(lambda: run_one_more(service)).close)
        assert not [more for _ in range(10) if (more := run_one_more(service))]
