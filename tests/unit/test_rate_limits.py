"""Limits hold in every minute, over all workers, and nothing is lost or leaked by one that dies."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_openai.server.ratelimits import RateLimit, RateLimits, open_limits
from triton_openai.server.shared_counts import Counts
from triton_openai.server.shared_table import CAPACITY
from triton_openai.worker import Worker

Open = Callable[..., Counts]


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.25

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock."""
    return Clock()


@pytest.fixture(params=["alone", "shared"])
def open_counts(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> Iterator[Open]:
    """Open the table of one process, or that of several."""
    opened: list[Counts] = []

    def open_counts(index: int = 0, workers: int = 2) -> Counts:
        file = tmp_path / "counts" if request.param == "shared" else None
        counts = Counts(file, index=index, workers=workers, clock=clock)
        opened.append(counts)
        return counts

    yield open_counts
    for counts in opened:
        counts.close()


# Moves of the clock: bursts, rests, and what falls on the edges of ticks and minutes.
steps = st.lists(st.sampled_from([0.0, 0.001, 0.5, 0.749, 0.75, 1.0, 7.3, 29.9, 59.25, 60.0, 61.0]), max_size=120)


@pytest.mark.parametrize("shared", [False, True])
@settings(deadline=None, max_examples=60)
@given(steps=steps, limit=st.integers(1, 7))
def test_never_more_than_the_limit_in_any_minute(
    tmp_path_factory: pytest.TempPathFactory, shared: bool, steps: list[float], limit: int
) -> None:
    """Wherever a minute begins; and who waits for as long as it is told to is let in."""
    clock = Clock()
    file = tmp_path_factory.mktemp("limits") / "counts" if shared else None
    # Two workers of one service, or one process.
    all_counts = [Counts(file, index=index, workers=2, clock=clock) for index in range(2 if shared else 1)]
    workers = [RateLimits(counts) for counts in all_counts]
    allowed = RateLimit(requests_per_minute=limit)
    admitted: list[float] = []
    for number, step in enumerate(steps):
        clock.now += step
        ticket = workers[number % len(workers)].admit("a", allowed)
        if ticket.refusal is None:
            admitted.append(clock.now)
            left = limit - sum(time > clock.now - 60 for time in admitted)
            assert int(ticket.headers["x-ratelimit-remaining-requests"]) <= left
        else:
            account = all_counts[0].account("a")
            clock.now += account.requests().below_in(limit)
            retried = workers[-1].admit("a", allowed)
            assert retried.refusal is None
            admitted.append(clock.now)
    for counts in all_counts:
        counts.close()

    for end in admitted:
        assert sum(end - 60 < time <= end for time in admitted) <= limit


def test_tokens_are_charged_when_they_are_known(open_counts: Open, clock: Clock) -> None:
    """A request may go beyond the limit, and the next ones wait until the minute has room again."""
    limits = RateLimits(open_counts())
    limit = RateLimit(tokens_per_minute=100)
    first, second = limits.admit("a", limit), limits.admit("a", limit)
    assert "100" == second.headers["x-ratelimit-remaining-tokens"]
    first.close(70)
    clock.now += 10
    second.close(70)
    # Closing twice counts once.
    second.close(70)

    refused = limits.admit("a", limit)
    assert refused.refusal is not None
    assert {"type": "tokens", "code": "rate_limit_exceeded", "param": None} == {
        name: value for name, value in refused.refusal.body().items() if name != "message"
    }
    assert "0" == refused.headers["x-ratelimit-remaining-tokens"]
    # The first 70 go a minute after they came, within a tick.
    assert {"Retry-After": "51"} == dict(refused.refusal.headers())
    clock.now += 51
    again = limits.admit("a", limit)
    assert again.refusal is None
    assert ("100", "30", "10s") == tuple(
        again.headers[f"x-ratelimit-{what}-tokens"] for what in ("limit", "remaining", "reset")
    )
    # A refusal costs nothing, and another key has its own account.
    assert limits.admit("b", limit).headers["x-ratelimit-remaining-tokens"] == "100"


def test_concurrent_requests(open_counts: Open) -> None:
    """As many as allowed run at the same time, and one that ends makes room."""
    limits = RateLimits(open_counts())
    limit = RateLimit(concurrent_requests=2)
    one, two = limits.admit("a", limit), limits.admit("a", limit)
    refused = limits.admit("a", limit)

    assert (None, None) == (one.refusal, two.refusal)
    assert refused.refusal is not None
    assert "1" == refused.refusal.headers()["Retry-After"]
    refused.close(0)
    assert limits.admit("a", limit).refusal is not None
    one.close(0)
    assert limits.admit("a", limit).refusal is None


def test_a_worker_that_died_leaves_nothing(tmp_path: Path) -> None:
    """Its running requests are forgotten by the one in its place; those of the others, and the minute, are not."""
    limit = RateLimit(concurrent_requests=3, requests_per_minute=100)
    workers = [open_limits(Worker(index=index, count=2, directory=tmp_path)) for index in (0, 1)]
    workers[0].admit("a", limit)
    workers[0].admit("a", limit)
    workers[1].admit("a", limit)
    assert workers[1].admit("a", limit).refusal is not None

    # It dies: nobody closes anything.
    successor = open_limits(Worker(index=0, count=2, directory=tmp_path))
    tickets = [successor.admit("a", limit) for _ in range(3)]

    assert [True, True, False] == [ticket.refusal is None for ticket in tickets]
    assert "95" == tickets[1].headers["x-ratelimit-remaining-requests"]
    for opened in (*workers, successor):
        opened.close()


def test_limits_that_are_not_there(open_counts: Open) -> None:
    """They have no headers."""
    assert not RateLimit().any
    assert {} == RateLimits(open_counts()).admit("a", RateLimit(concurrent_requests=1)).headers


def test_more_accounts_than_there_is_room_for(open_counts: Open) -> None:
    """They are counted all the same, by each worker alone."""
    counts = open_counts()
    for number in range(CAPACITY):
        counts.account(str(number))
    limits = RateLimits(counts)
    limit = RateLimit(requests_per_minute=1)

    assert limits.admit("one more", limit).refusal is None
    assert limits.admit("one more", limit).refusal is not None


_HAMMER = """
import sys
from pathlib import Path
from triton_openai.server.ratelimits import RateLimit, open_limits
from triton_openai.worker import Worker
index, directory = int(sys.argv[1]), Path(sys.argv[2])
limits = open_limits(Worker(index=index, count=4, directory=directory))
limit = RateLimit(requests_per_minute=5000, tokens_per_minute=10**9, concurrent_requests=4)
print("ready", flush=True)
sys.stdin.readline()
admitted = most = 0
for turn in range(3000):
    ticket = limits.admit("a" if turn % 2 else "b", limit)
    if ticket.refusal is None:
        admitted += 1
        ticket.close(7)
print(admitted, flush=True)
"""


def test_several_processes_at_once(tmp_path: Path) -> None:
    """What four processes count at the same time adds up to the last one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _HAMMER, str(index), str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
    # All at the same moment.
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    admitted = [int(process.communicate(timeout=60)[0]) for process in processes]

    # Of either key 6000 were asked for, and 5000 allowed.
    counts = Counts(tmp_path / "rate-limits", index=0, workers=4)
    used = {name: (counts.account(name).requests().used, counts.account(name).tokens().used) for name in "ab"}
    running = [counts.account(name).running for name in "ab"]
    counts.close()
    assert {"a": (5000, 35000), "b": (5000, 35000)} == used
    assert 10_000 == sum(admitted)
    assert [0, 0] == running
