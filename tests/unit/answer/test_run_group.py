"""The runs of one request, without a model."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from tests.clock import Clock, turns
from triton_openai.answer.run_group import RunGroup, collect
from triton_openai.errors import UpstreamError, UpstreamTimeout


class FakeRun:
    """A run that ends when a test says so; *left* are the seconds until it wants to be checked again."""

    def __init__(self, left: float = 60.0) -> None:
        self.left = left
        self.failure: Exception | None = None
        self.no_answer_cause = "Nobody knows."
        self.calls: list[str] = []
        self.checks = 0
        self.end: Callable[[], None] = lambda: None

    def start(self, number: int, push: object, done: Callable[[int], None]) -> None:
        """Begin."""
        self.calls.append("start")
        self.end = lambda: done(number)

    def check(self, now: float) -> float:
        """Count it."""
        self.checks += 1
        return self.left

    async def finalize(self) -> None:
        """Note it, as the others do."""
        self.calls.append("finalize")

    def pause(self) -> None:
        """Note it."""
        self.calls.append("pause")

    def resume(self) -> None:
        """Note it."""
        self.calls.append("resume")

    def close(self) -> None:
        """Note it."""
        self.calls.append("close")


def started(runs: list[Any]) -> int:
    """Return how many of *runs* have begun."""
    return sum("start" in run.calls for run in runs)


async def test_many_runs() -> None:
    """One begins in each turn of the loop, 32 run at a time, and one that ends makes room for the next."""
    runs: list[Any] = [FakeRun() for _ in range(40)]
    group = RunGroup(runs, lambda *_: None)
    starting = asyncio.create_task(group.start())
    await asyncio.sleep(0)
    assert 1 == started(runs)
    await starting
    assert 32 == started(runs)
    runs[3].end()
    assert [3] == list(await group.wait())
    assert (33, 39) == (started(runs), group.unfinished)
    group.pause()
    group.resume()
    group.close()

    assert ["start", "finalize", "pause", "resume", "close"] == runs[3].calls
    assert ["pause", "resume", "close"] == runs[39].calls


async def test_the_time_for_all_runs(clock: Clock) -> None:
    """The time for all runs ends the wait, also when no run is to be looked at before; the likely cause is told."""
    for timeout in (0.0, 30.0):
        collecting = asyncio.create_task(collect([FakeRun()], timeout=timeout))  # type: ignore[list-item]
        await turns()
        clock.advance(timeout)
        with pytest.raises(UpstreamTimeout, match="Nobody knows"):
            await collecting


async def test_what_is_left_behind() -> None:
    """Every run is looked at when it wants to be; after the close nothing is, and what took the answer is free."""
    problems: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    runs: list[Any] = [FakeRun(), FakeRun(left=0.0)]
    taken: list[object] = []

    def push(*deltas: object) -> None:
        taken.append(deltas)

    reference = weakref.ref(push)
    group = RunGroup(runs, push)
    del push
    await group.start()
    for _ in range(5):
        await asyncio.sleep(0)
    assert runs[0].checks == runs[1].checks > 1
    group.close()
    checks = runs[1].checks
    for _ in range(5):
        await asyncio.sleep(0)

    assert (checks, [], None) == (runs[1].checks, problems, reference())


async def test_a_run_that_fails() -> None:
    """The others are closed too."""
    runs: list[Any] = [FakeRun(), FakeRun()]
    collecting = asyncio.create_task(collect(runs, timeout=None))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    runs[0].failure = UpstreamError("gone")
    runs[0].end()
    with pytest.raises(UpstreamError, match="gone"):
        await collecting

    assert ["close", "close"] == [run.calls[-1] for run in runs]
