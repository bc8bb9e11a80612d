"""A log that nobody reads, and a disk that has no room for it: clients do not notice, the operator does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.clients.service import Service, exchange, serving, until
from tests.faults.surroundings import Own
from tests.scrape import Scrape

_LOST = "triton_openai_log_lines_lost_total"
# Their log lines are more than a pipe holds.
_MANY = 400


def _log_to(path: Path) -> None:
    number = os.open(path, os.O_WRONLY)
    os.dup2(number, 2)
    os.close(number)


def _answers(service: Service, count: int = _MANY) -> set[int]:
    """Return the statuses of *count* answers, each over the same connection."""
    with contextlib.closing(service.connect()) as connection:
        body = {"model": "text_embedding", "input": "a"}
        return {exchange(connection, "POST", "/v1/embeddings", body).status for _ in range(count)}


def _lost(service: Service) -> float:
    return Scrape(service.send("GET", "/metrics").body.decode()).sum(_LOST)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_disk_without_room(own: Own, tmp_path: Path, workers: str) -> None:
    """The service starts, answers, counts the lines that are lost in all of its processes, and ends in order."""
    arguments, first = ("--triton-url", own.url("http"), "--workers", workers), partial(_log_to, Path("/dev/full"))
    with serving(tmp_path, *arguments, first=first, XDG_RUNTIME_DIR=str(tmp_path)) as service:
        until(lambda: service.status("/health/ready") == 200)
        before = _lost(service)
        assert {200} == _answers(service, 20) | _answers(service, 20)
        until(lambda: _lost(service) >= before + 40)
        service.process.send_signal(signal.SIGTERM)
        assert 0 == service.process.wait(120)


def test_a_reader_that_does_not_read(own: Own, tmp_path: Path) -> None:
    """The pipe is full; nobody waits for it. A reader that reads again gets what has waited, and new lines."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with serving(tmp_path, "--triton-url", own.url("http"), first=partial(_log_to, fifo)) as service:
        assert {200} == _answers(service)
        assert 200 == service.status("/health/ready")
        # It has the size of a pipe only when it is read.
        os.set_blocking(reading, True)
        with os.fdopen(reading) as log:
            events = (json.loads(line) for line in log)
            requests = (event for event in events if event.get("path") == "/v1/embeddings")
            assert [200] * _MANY == [next(requests)["status"] for _ in range(_MANY)]
            assert 0 == _lost(service)
            # Nobody reads while it ends.
            assert {200} == _answers(service)
            service.process.send_signal(signal.SIGTERM)
            assert 0 == service.process.wait(120)


def test_a_reader_that_leaves(own: Own, tmp_path: Path) -> None:
    """Who reads later is told how many lines are missing, as the metric says."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with serving(tmp_path, "--triton-url", own.url("http"), first=partial(_log_to, fifo)) as service:
        os.close(reading)
        assert {200} == _answers(service, 20)
        assert 200 == service.status("/health/ready")
        until(lambda: _lost(service) >= 20)
        with os.fdopen(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)) as log:
            os.set_blocking(log.fileno(), True)
            assert {200} == _answers(service, 1)
            events = map(json.loads, log)
            told = next(event for event in events if event["event"] == "log lines were lost")
            assert ("error", "Broken pipe", _lost(service)) == (told["level"], told["reason"], told["lines"])
        service.process.send_signal(signal.SIGTERM)
        assert 0 == service.process.wait(120)
