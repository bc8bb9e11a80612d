"""Where work is done: here, in a thread, or in the thread for long work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import every_case
from triton_openai import offload
from triton_openai.errors import ServiceOverloaded


@pytest.fixture(autouse=True)
def _own_threads() -> Iterator[None]:
    """Have no work of other tests in the threads."""
    offload.lane.cache_clear()
    yield
    offload.lane.cache_clear()


async def held(gate: threading.Event, *, cost: float, count: int = 1) -> list[asyncio.Task[bool]]:
    """Start work that lasts until *gate* is set."""
    tasks = [asyncio.create_task(offload.run(gate.wait, cost=cost)) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


@every_case(
    "cost, where",
    [
        (offload.INLINE, "MainThread"),
        (offload.INLINE + 1, "work_"),
        (offload.LONG, "work_"),
        (offload.LONG + 1, "long"),
    ],
)
async def test_the_cost_decides(cost: float, where: str) -> None:
    """Up to a millisecond here, up to LONG in one of some threads, beyond it in the thread for that."""
    name = await offload.run(lambda: threading.current_thread().name, cost=cost)

    assert name.startswith(where)


async def test_no_work_waits_for_longer_work() -> None:
    """However much long work there is, the rest is done."""
    gate = threading.Event()
    long = await held(gate, cost=offload.LONG + 1, count=20)
    try:
        assert 7 == await asyncio.wait_for(offload.run(lambda: 7, cost=offload.LONG), 120)
        # asyncio's own threads, which resolve names and read files, are free as well.
        assert 7 == await asyncio.wait_for(asyncio.to_thread(lambda: 7), 120)
        assert not any(task.done() for task in long)
    finally:
        gate.set()
    assert [True] * 20 == await asyncio.gather(*long)


async def test_long_work_has_a_bound() -> None:
    """What can be refused is, with the seconds that the rest takes; other work waits, and what is left makes room."""
    gate, cost = threading.Event(), 4_000_000.0
    # Alone, it may be longer than all that may wait.
    first = await held(gate, cost=cost)
    second = asyncio.create_task(offload.run(gate.wait, cost=cost, refusable=True))
    await asyncio.sleep(0)
    try:
        with pytest.raises(ServiceOverloaded) as caught:
            await offload.run(gate.wait, cost=cost, refusable=True)
        assert 8 == caught.value.retry_after
        must = await held(gate, cost=cost)
        for task in (second, *must):
            task.cancel()
        await asyncio.gather(second, *must, return_exceptions=True)
        again = asyncio.create_task(offload.run(gate.wait, cost=cost, refusable=True))
        await asyncio.sleep(0)
        assert not again.done()
    finally:
        gate.set()
    assert [True, True] == await asyncio.gather(*first, again)
    assert await offload.run(lambda: True, cost=10**9, refusable=True)


async def test_shorter_work_has_a_bound() -> None:
    """Many texts that are not long cannot make an ordinary one wait without end either."""
    gate = threading.Event()
    waiting = await held(gate, cost=offload.LONG, count=50)
    try:
        with pytest.raises(ServiceOverloaded) as caught:
            await offload.run(gate.wait, cost=offload.LONG, refusable=True)
        assert 10 == caught.value.retry_after
        must = await held(gate, cost=offload.LONG)
        assert not must[0].done()
    finally:
        gate.set()
    assert [True] * 51 == await asyncio.gather(*waiting, *must)


async def test_memory_goes_back() -> None:
    """What long work has used, the process does not keep."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    def work() -> int:
        # Too small for mappings of their own, and more than Python's allocator takes.
        pieces = [bytes(2048) for _ in range(100_000)]
        return len(pieces)

    before = resident()
    assert 100_000 == await offload.run(work, cost=offload.LONG + 1)

    assert resident() - before < 50_000_000
