"""Workers that share limits: as exact as in one process, whoever comes, leaves, dies, or is too busy for its place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_admission import Visitor, inside, observation, settled
from triton_openai.config.tree import ServerSettings
from triton_openai.errors import ServiceOverloaded
from triton_openai.server import admission as module
from triton_openai.server.admission import Admission
from triton_openai.server.places import open_places, vacate
from triton_openai.worker import Worker


@contextlib.asynccontextmanager
async def gates(folder: Path, count: int, **limits: int) -> AsyncIterator[list[Admission]]:
    """Run the gates of *count* workers, all in this process."""
    workers = [Worker(index=index, count=count, directory=folder) for index in range(count)]
    given = ServerSettings(**limits)  # type: ignore[arg-type]
    opened = [Admission(given, lambda: 0.0, places=open_places(worker)) for worker in workers]
    for each in opened:
        each.open()
    yield opened
    for each in opened:
        each.close()


async def until(condition: Callable[[], object]) -> None:
    """Wait for what nobody tells of."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), 10)


async def test_one_worker_may_use_all_places(tmp_path: Path) -> None:
    """Where connections go is chance: nobody waits while there is room anywhere."""
    async with gates(tmp_path, 4, max_running_requests=3) as (one, other, *_):
        visitors = [Visitor(one) for _ in range(3)]
        await settled()
        late = Visitor(other)
        await settled()
        assert ([0, 1, 2], False) == (inside(visitors), late.inside)
        await visitors[0].leave()
        await until(lambda: late.inside)
        for visitor in (*visitors[1:], late):
            await visitor.leave()
        assert ({}, {}) == (dict(one.running), dict(other.running))


async def test_the_queue_is_bounded_in_all(tmp_path: Path) -> None:
    """However the requests are spread."""
    async with gates(tmp_path, 2, max_running_requests=1, max_queued_requests=2) as (one, other):
        visitors = [Visitor(one), Visitor(one), Visitor(other)]
        await settled()
        for each in (one, other):
            with pytest.raises(ServiceOverloaded):
                async with each.enter("m", observation()):
                    pass
        for visitor in visitors:
            visitor.task.cancel()
        await asyncio.gather(*(visitor.task for visitor in visitors), return_exceptions=True)


async def test_the_longest_wait_goes_first(tmp_path: Path) -> None:
    """Though it is in another process than the one in which a place became free."""
    async with gates(tmp_path, 2, max_running_requests=1) as (one, other):
        visitors = [Visitor(one), Visitor(other), Visitor(one), Visitor(other)]
        await settled()
        for number, visitor in enumerate(visitors):
            await until(lambda number=number: inside(visitors) == [number])  # type: ignore[misc]
            newcomer = Visitor(one)
            await settled()
            assert not newcomer.inside
            newcomer.task.cancel()
            await visitor.leave()


async def test_a_model_of_another_worker_holds_up_nobody(tmp_path: Path) -> None:
    """Who waits there for a model that is full is not waited for."""
    async with gates(tmp_path, 2, max_running_requests=3, max_running_requests_per_model=1) as (one, other):
        visitors = [Visitor(one, "a"), Visitor(other, "a"), Visitor(one, "b")]
        await settled()
        assert [0, 2] == inside(visitors)
        await visitors[2].leave()
        assert [0] == inside(visitors)
        await visitors[0].leave()
        await until(lambda: visitors[1].inside)
        await visitors[1].leave()


async def test_the_places_of_a_dead_worker_are_free(tmp_path: Path) -> None:
    """As soon as its parent has noticed."""
    async with gates(tmp_path, 2, max_running_requests=2) as (dead, alive):
        lost = [Visitor(dead) for _ in range(3)]
        waiting = Visitor(alive)
        await settled()
        assert ([0, 1], False) == (inside(lost), waiting.inside)
        vacate(tmp_path, 0, 2)
        await until(lambda: waiting.inside)
        await waiting.leave()
        for visitor in lost:
            visitor.task.cancel()
        await asyncio.gather(*(visitor.task for visitor in lost), return_exceptions=True)


async def test_a_worker_that_hangs_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hear that a place is free; after a moment the next one takes it."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.01)
    async with gates(tmp_path, 2, max_running_requests=1) as (one, hung):
        first, lost, late = Visitor(one), Visitor(hung), Visitor(one)
        await settled()
        monkeypatch.setattr(hung, "_admit", lambda: None)
        await first.leave()
        assert not late.inside
        await until(lambda: late.inside)
        await late.leave()
        lost.task.cancel()
        await asyncio.gather(lost.task, return_exceptions=True)


async def test_new_limits_count_what_ran_before(tmp_path: Path) -> None:
    """Without limits nobody has told the others anything."""
    async with gates(tmp_path, 2) as (one, other):
        visitors = [Visitor(one), Visitor(one), Visitor(other)]
        await settled()
        for each in (one, other):
            each.replace(ServerSettings(max_running_requests=3))
        waiting = Visitor(other)
        await settled()
        assert not waiting.inside
        for each in (one, other):
            each.replace(ServerSettings())
        await until(lambda: waiting.inside)
        await visitors[0].leave()
        for each in (one, other):
            each.replace(ServerSettings(max_running_requests=4))
        last = Visitor(other)
        await settled()
        assert last.inside
        for visitor in (*visitors[1:], waiting, last):
            await visitor.leave()


@settings(deadline=None, max_examples=60)
@given(
    total=st.integers(1, 4),
    per_model=st.integers(1, 3),
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 2), st.integers(0, 2)), max_size=30
    ),
)
async def test_never_more_than_the_limits_and_nobody_is_forgotten(
    tmp_path_factory: pytest.TempPathFactory, total: int, per_model: int, steps: list[tuple[str, int, int]]
) -> None:
    """Whatever comes and goes: the limits hold, nobody waits beside a free place, and all is free in the end."""
    folder = tmp_path_factory.mktemp("places")
    limits = {"max_running_requests": total, "max_running_requests_per_model": per_model}
    there: list[tuple[Visitor, str]] = []

    def running() -> list[str]:
        return [model for visitor, model in there if visitor.inside]

    def nobody_waits_in_vain() -> bool:
        waiting = [model for visitor, model in there if not visitor.inside]
        return len(running()) == total or all(running().count(model) == per_model for model in waiting)

    async with gates(folder, 3, **limits) as workers:
        for what, number, index in steps:
            model = "abc"[number]
            if what == "enter":
                there.append((Visitor(workers[index], model), model))
            elif there:
                visitor, _ = there.pop(number % len(there))
                if what == "cancel" or not visitor.inside:
                    visitor.task.cancel()
                    await asyncio.gather(visitor.task, return_exceptions=True)
                else:
                    await visitor.leave()
            await settled()
            await until(nobody_waits_in_vain)
            assert len(running()) <= total
            assert all(running().count(model) <= per_model for model in "abc")
        for visitor, _ in there:
            visitor.task.cancel()
        await asyncio.gather(*(visitor.task for visitor, _ in there), return_exceptions=True)
        assert [({}, 0)] * 3 == [(dict(each.running), each.queued) for each in workers]
        last = Visitor(workers[0])
        await settled()
        assert last.inside
        await last.leave()
