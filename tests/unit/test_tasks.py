"""What several hold together, and tasks that are cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from triton_openai.errors import ServiceOverloaded
from triton_openai.tasks import Room, cancel, within


class Holder:
    """Holds a share of *room* until it is told to end."""

    def __init__(self, room: Room, size: int, order: list[int], patience: float = 60) -> None:
        self.end = asyncio.Event()
        self.task = asyncio.create_task(self._hold(room, size, order, patience))

    async def _hold(self, room: Room, size: int, order: list[int], patience: float) -> None:
        async with room.hold(size, most=10, patience=patience):
            order.append(size)
            await self.end.wait()


async def begin(room: Room, sizes: Sequence[int], order: list[int]) -> list[Holder]:
    """Return who holds or waits for *sizes*, in this order."""
    holders = []
    for size in sizes:
        holders.append(Holder(room, size, order))
        await turns()
    return holders


async def turns() -> None:
    """Let everything happen that can happen by now."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served() -> None:
    """Nobody goes before who came first, however little they want."""
    room, order = Room(), list[int]()
    first, second, third, fourth = await begin(room, [6, 4, 7, 1], order)
    assert ([6, 4], 10) == (order, room.held)
    second.end.set()
    await turns()
    assert [6, 4] == order, "the third still has no room"
    first.end.set()
    await turns()
    assert ([6, 4, 7, 1], 8) == (order, room.held)
    third.end.set()
    fourth.end.set()
    await turns()
    assert 0 == room.held


async def test_what_is_larger_than_the_room() -> None:
    """It has all of it, alone."""
    room, order = Room(), list[int]()
    first, large, last = await begin(room, [1, 50, 2], order)
    first.end.set()
    await turns()
    assert ([1, 50], 50) == (order, room.held)
    large.end.set()
    await turns()
    assert [1, 50, 2] == order
    last.end.set()
    await last.task


async def test_who_gives_up() -> None:
    """Who leaves, or has waited too long, holds up nobody and holds nothing."""
    room, order = Room(), list[int]()
    first, leaving = await begin(room, [10, 3], order)
    impatient = Holder(room, 4, order, patience=0.001)
    with pytest.raises(ServiceOverloaded):
        await impatient.task
    await cancel(leaving.task)
    (last,) = await begin(room, [5], order)
    first.end.set()
    await turns()
    assert ([10, 5], 5) == (order, room.held)
    last.end.set()
    await last.task
    assert 0 == room.held


@pytest.mark.parametrize("swallows", ["fails", "answers"])
async def test_a_driver_that_takes_a_cancellation_for_its_own(swallows: str) -> None:
    """A failure or an answer in place of the cancellation keeps no task."""

    async def work() -> None:
        async with within(60):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if swallows == "fails":
                    raise OSError("lost") from None

    task = asyncio.create_task(work())
    await turns()
    await asyncio.wait_for(cancel(task), 10)
    assert task.cancelled()


async def test_what_takes_too_long_or_fails() -> None:
    """Without a cancellation, a time limit and a failure are what they are."""
    with pytest.raises(TimeoutError):
        async with within(0):
            await asyncio.Event().wait()
    with pytest.raises(OSError, match="lost"):
        async with within(60):
            raise OSError("lost")
