"""Work with a limit of time: its result, its errors, its end, and nothing left to complain about."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from triton_openai.deadlines import within


class Work:
    """Waits for ever; cancelled, it fails in another way, as a request does whose connection breaks then."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        """Do it."""
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended = True
            raise OSError("the connection broke")


@pytest.fixture
async def complaints():
    """What the loop reports that nobody looked at."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: found.append(context))
    yield found
    gc.collect()
    assert [] == found


async def test_results_and_errors_come_through(complaints):
    """As if it were awaited."""

    async def fail() -> None:
        raise ValueError("no")

    assert 5 == await within(1, asyncio.sleep(0, 5))
    assert 5 == await within(None, asyncio.sleep(0, 5))
    with pytest.raises(ValueError, match="no"):
        await within(1, fail())


async def test_too_late(complaints):
    """The work has ended when that is told, and what it said to it is forgotten."""
    work = Work()

    with pytest.raises(asyncio.TimeoutError):
        await within(0.01, work.run())

    assert work.ended


async def test_a_caller_that_leaves(complaints):
    """A cancellation stays one, whatever the work makes of it."""
    work = Work()
    caller = asyncio.create_task(within(60, work.run()))
    await work.begun.wait()
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller

    assert work.ended


async def test_a_caller_that_leaves_at_the_very_end(complaints):
    """A cancellation that comes together with the end of the work is not lost."""
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait() -> None:
        await work

    caller = asyncio.create_task(within(60, wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    work.set_result(None)
    caller.cancel()

    with pytest.raises(asyncio.CancelledError):
        await caller
