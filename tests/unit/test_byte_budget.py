"""The budget of bytes: who gets a part of it, who waits, and who does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tests.clock import turns
from triton_openai.byte_budget import ByteBudget, Reservation
from triton_openai.errors import ServiceOverloaded
from triton_openai.tasks import cancel

MAX = 80


class Holder:
    """Reserves bytes of *budget* until it ends; its name is noted in *order* when it has them."""

    def __init__(self, budget: ByteBudget, name: str, size: int, order: list[str], max_wait: float = 60) -> None:
        self.owner = name[0]
        self.name = name
        self.end = asyncio.Event()
        self.reservation = budget.open(self.owner, max_total=MAX, max_wait=max_wait)
        self.task = asyncio.create_task(self._reserve(self.reservation, size, order))

    async def _reserve(self, reservation: Reservation, size: int, order: list[str]) -> None:
        with reservation:
            await reservation.grow(size)
            order.append(self.name)
            await self.end.wait()


async def begin(budget: ByteBudget, wanted: Sequence[tuple[str, int]], order: list[str]) -> list[Holder]:
    """Return who reserves or waits, in this order. The first letter of a name is the owner's."""
    holders = []
    for name, size in wanted:
        holders.append(Holder(budget, name, size, order))
        await turns()
    return holders


async def test_an_owner_leaves_as_much_as_it_takes() -> None:
    """One owner gets half at most, two get a third each; each gets one reservation, if it is free."""
    budget, order = ByteBudget(), list[str]()
    first = await begin(budget, [(f"a{number}", 10) for number in range(8)], order)
    assert ["a0", "a1", "a2", "a3"] == order
    second = await begin(budget, [(f"b{number}", 5) for number in range(8)], order)
    assert ["b0", "b1", "b2", "b3"] == order[4:]
    assert 40 + 20 == budget.reserved
    for holder in (*first, *second):
        holder.end.set()
    await asyncio.gather(*(holder.task for holder in (*first, *second)))
    assert 16 == len(order)
    assert 0 == budget.reserved


async def test_without_an_owner_there_is_nobody_to_share_with() -> None:
    """All but what is needed to end may be taken."""
    budget = ByteBudget()
    for _ in range(7):
        await budget.open(None, max_total=MAX, max_wait=0.001).grow(10)
    with pytest.raises(ServiceOverloaded):
        await budget.open(None, max_total=MAX, max_wait=0.001).grow(1)
    assert 70 == budget.reserved


async def test_what_fits_passes_what_waits() -> None:
    """A large reservation that waits keeps no small one waiting, of its owner or of another."""
    budget, order = ByteBudget(), list[str]()
    holders = await begin(budget, [("a0", 30), ("a-large", 30), ("a-small", 5), ("b-large", 60), ("b-small", 5)], order)
    assert ["a0", "a-small", "b-small"] == order
    for holder in (holders[0], holders[2], holders[4]):
        holder.end.set()
    await turns()
    assert ["a-large"] == order[3:]
    holders[1].end.set()
    await turns()
    assert ["b-large"] == order[4:]
    holders[3].end.set()
    await holders[3].task
    assert 0 == budget.reserved


async def test_what_is_larger_than_the_budget() -> None:
    """It has all of it, alone."""
    budget, order = ByteBudget(), list[str]()
    first, large, last = await begin(budget, [("a0", 1), ("b-large", 500), ("c0", 2)], order)
    assert ["a0", "c0"] == order
    first.end.set()
    last.end.set()
    await turns()
    assert (["b-large"], 500) == (order[2:], budget.reserved)
    (later,) = await begin(budget, [("c1", 2)], order)
    large.end.set()
    await turns()
    assert ["c1"] == order[3:]
    later.end.set()
    await later.task


async def test_what_has_begun_comes_before_what_is_new() -> None:
    """A reservation that grows goes before new ones that came earlier, but waits as they do."""
    budget, order = ByteBudget(), list[str]()
    growing, other, new = await begin(budget, [("a0", 10), ("a1", 30), ("a2", 10)], order)
    growth = asyncio.create_task(growing.reservation.grow(20))
    await turns()
    assert not growth.done()
    other.end.set()
    await turns()
    assert (True, 20) == (growth.done(), growing.reservation.size)
    assert ["a0", "a1", "a2"] == order
    growing.reservation.shrink(3)
    assert 13 == budget.reserved
    for holder in (growing, new):
        holder.end.set()
    await asyncio.gather(growing.task, new.task)
    assert 0 == budget.reserved


async def test_what_is_needed_to_end_is_there() -> None:
    """However full the budget is of what began, a part is left with which it can end, one after the other."""
    budget, order = ByteBudget(), list[str]()
    holders = await begin(budget, [(f"{letter}0", 10) for letter in "abcdefghij"], order)
    assert (7, 70) == (len(order), budget.reserved)
    first = asyncio.create_task(holders[0].reservation.finish(1_000))
    second = asyncio.create_task(holders[1].reservation.finish(5))
    await turns()
    assert (True, False, MAX) == (first.done(), second.done(), budget.reserved)
    holders[0].end.set()
    await turns()
    assert second.done()
    await holders[1].reservation.finish(5)
    assert 15 == holders[1].reservation.size, "a second time adds nothing"
    for holder in holders:
        holder.end.set()
    await asyncio.gather(*(holder.task for holder in holders))
    assert 0 == budget.reserved


async def test_who_gives_up() -> None:
    """Who leaves, or has waited too long, holds up nobody and keeps nothing, also while it grows."""
    budget, order = ByteBudget(), list[str]()
    first, leaving = await begin(budget, [("a0", 40), ("a1", 30)], order)
    impatient = Holder(budget, "a2", 4, order, max_wait=0.001)
    with pytest.raises(ServiceOverloaded):
        await impatient.task
    await cancel(leaving.task)
    growing = Holder(budget, "b0", 10, order, max_wait=0.001)
    await turns()
    with pytest.raises(ServiceOverloaded):
        await growing.reservation.grow(60)
    assert 50 == budget.reserved
    (last,) = await begin(budget, [("a3", 35)], order)
    first.end.set()
    await turns()
    assert (["a0", "b0", "a3"], 45) == (order, budget.reserved)
    growing.end.set()
    last.end.set()
    await asyncio.gather(growing.task, last.task)
    assert 0 == budget.reserved


async def test_who_leaves_as_it_gets_its_part() -> None:
    """What was granted in the same turn of the loop is given back."""
    budget, order = ByteBudget(), list[str]()
    first, waiting = await begin(budget, [("a0", 40), ("a1", 30)], order)
    first.reservation.shrink(0)
    waiting.task.cancel()
    first.end.set()
    await asyncio.gather(first.task, waiting.task, return_exceptions=True)
    assert (["a0"], 0) == (order, budget.reserved)
