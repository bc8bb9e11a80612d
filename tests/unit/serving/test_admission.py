"""Who is let in: limits, the queue, and what happens to those that leave it."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.clock import Clock
from triton_openai.config.tree import ServerSettings
from triton_openai.config.worker import Worker
from triton_openai.errors import ServiceOverloaded
from triton_openai.serving.admission import Admission
from triton_openai.telemetry.process import LoopLag
from triton_openai.telemetry.request_record import Observer, RequestRecord
from triton_openai.triton.engine_capacity import EngineCapacity


class Seen(Observer):
    """Counts who waits."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0

    def queued(self, observation: RequestRecord) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)

    def admitted(self, observation: RequestRecord) -> None:
        self.waiting -= 1


def gate(*, lag: float = 0.0, observer: Observer | None = None, **limits: int | float) -> Admission:
    """Return a gate with these limits."""
    measured = LoopLag(lambda _: None)
    measured.sustained = lag
    return Admission(ServerSettings(**limits), measured, observer=observer)  # type: ignore[arg-type]


def observation(batch: str | None = None) -> RequestRecord:
    """Return the record of some request, which may be a line of a *batch*."""
    return RequestRecord(request_id="r", method="POST", path="/", batch=batch)


class Visitor:
    """A request that stays until it is told to leave."""

    def __init__(self, admission: Admission, model: str = "m", batch: str | None = None) -> None:
        self.inside = False
        self.record = observation(batch)
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(admission, model))

    async def _visit(self, admission: Admission, model: str) -> None:
        try:
            task = await admission.enter(model, self.record)
            try:
                self.inside = True
                await self._leave.wait()
            finally:
                admission.leave(model, task)
        finally:
            self.inside = False
            self.at_the_end()

    def at_the_end(self) -> None:
        """Do nothing more; a test may put something here that happens before anybody else gets a turn."""

    async def leave(self) -> None:
        """Leave, and let others see it."""
        self._leave.set()
        await self.task
        await settled()


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def inside(visitors: Sequence[Visitor]) -> list[int]:
    """Return the numbers of those that are in."""
    return [number for number, visitor in enumerate(visitors) if visitor.inside]


class Engine:
    """Has memory for so many of the requests that are inside, and reports how many wait, as over a carrier."""

    def __init__(self, admission: Admission, max_running: int) -> None:
        self.memory = max_running
        self._max_running = max_running
        self._admission = admission
        self._room = EngineCapacity()
        self._room.on_change = admission.set_engine_capacity
        self._room.expect("m", "triton", self)

    async def step(self) -> int:
        """Take what is inside; return how many wait in the engine now."""
        waiting = max(0, len(self._admission.running.get("m", ())) - self.memory)
        self._room.report("m", "triton", self, (waiting, self._max_running))
        await settled()
        return waiting


async def all_leave(visitors: Sequence[Visitor]) -> None:
    """End all requests, those that wait too."""
    for visitor in visitors:
        visitor.task.cancel()
    await asyncio.gather(*[visitor.task for visitor in visitors], return_exceptions=True)


async def test_requests_wait_here_where_an_engine_is_full() -> None:
    """A quarter of what the engine runs waits in it, so that none of its places stays free; all others wait here."""
    admission = gate()
    engine = Engine(admission, 64)
    await engine.step()
    visitors = [Visitor(admission) for _ in range(300)]
    await settled()
    for _ in range(5):
        assert await engine.step() <= 16
    assert 80 == len(inside(visitors))

    for number in inside(visitors)[:40]:
        await visitors[number].leave()
        assert await engine.step() <= 16
        assert 80 == len(inside(visitors))
    # Their prompts are long: the engine's memory is full before its places are.
    engine.memory = 32
    for number in inside(visitors)[:60]:
        await visitors[number].leave()
        await engine.step()
    assert 16 == await engine.step()
    await all_leave(visitors)


async def test_an_engine_that_is_full_can_be_given_more() -> None:
    """The setting takes effect in a running service."""
    admission = gate()
    engine = Engine(admission, 8)
    await engine.step()
    visitors = [Visitor(admission) for _ in range(50)]
    await settled()
    await engine.step()
    assert 16 == len(inside(visitors))
    admission.replace(ServerSettings(follow_engine_queue=False))
    await settled()
    assert 50 == len(inside(visitors))

    await all_leave(visitors)


async def test_before_an_engine_reports() -> None:
    """A burst at the first request does not fill it either."""
    admission = gate()
    Engine(admission, 512)
    visitors = [Visitor(admission) for _ in range(300)]
    await settled()
    assert 256 == len(inside(visitors))

    await all_leave(visitors)


async def test_without_limits_everybody_is_in() -> None:
    """Without limits, which is the default, everybody is in: Triton has queues of its own."""
    admission = gate()
    visitors = [Visitor(admission) for _ in range(100)]
    await settled()
    assert 100 == len(inside(visitors)) == len(admission.running["m"])
    for visitor in visitors:
        await visitor.leave()
    assert {} == admission.running


async def test_the_queue_is_first_come_first_served() -> None:
    """Whoever leaves makes room for the one that has waited longest."""
    seen = Seen()
    admission = gate(max_running_requests=2, observer=seen)
    visitors = [Visitor(admission) for _ in range(4)]
    await settled()
    assert ([0, 1], 2, 2) == (inside(visitors), len(admission.queue), seen.waiting)

    await visitors[1].leave()
    assert [0, 2] == inside(visitors)
    await visitors[0].leave()
    assert ([2, 3], 0, 0) == (inside(visitors), len(admission.queue), seen.waiting)
    assert 0 == visitors[0].record.queued_seconds < visitors[2].record.queued_seconds
    for visitor in visitors[2:]:
        await visitor.leave()


async def test_a_full_model_holds_up_nobody_else() -> None:
    """The queue is one, and who waits for another model is passed by."""
    admission = gate(max_running_requests=3, max_running_requests_per_model=1)
    visitors = [Visitor(admission, model) for model in ("a", "a", "b", "a")]
    await settled()
    assert [0, 2] == inside(visitors)
    late = Visitor(admission, "c")
    await settled()
    assert late.inside
    await visitors[2].leave()
    assert [0] == inside(visitors)
    await visitors[0].leave()
    assert [1] == inside(visitors)
    await visitors[1].leave()
    assert [3] == inside(visitors)


async def test_requests_wait_for_a_triton_with_room() -> None:
    """Several Tritons run so many of a model together; when one more has it, further ones go in."""
    capacity = {"a": 2, "b": 1}
    limits = ServerSettings(max_running_requests=5, max_running_requests_per_endpoint=1)
    admission = Admission(limits, LoopLag(lambda _: None), capacity=capacity.__getitem__)
    visitors = [Visitor(admission, model) for model in ("a", "a", "a", "a", "b")]
    await settled()
    assert [0, 1, 4] == inside(visitors)
    assert not admission.spare("a", 0, 0.5)
    capacity["a"] = 3
    admission.admit()
    await settled()
    assert [0, 1, 2, 4] == inside(visitors)
    await visitors[1].leave()
    assert [0, 2, 3, 4] == inside(visitors)
    for number in (0, 2, 3, 4):
        await visitors[number].leave()
    assert admission.spare("a", 0, 0.5)
    assert not admission.spare("a", 1, 0.5)


async def test_a_full_queue_refuses_at_once() -> None:
    """With the time after which it may be worth to come again."""
    admission = gate(max_running_requests=1, max_queued_requests=1, queue_timeout=7)
    visitors = [Visitor(admission) for _ in range(2)]
    await settled()
    with pytest.raises(ServiceOverloaded) as caught:
        await admission.enter("m", observation())
    assert (503, "7") == (caught.value.status, caught.value.headers()["Retry-After"])
    assert 1 == len(admission.queue)
    for visitor in visitors:
        await visitor.leave()


async def test_who_waits_too_long_is_sent_away() -> None:
    """A request that waits too long frees its place in the queue, and takes none of those inside."""
    admission = gate(max_running_requests=1, queue_timeout=0.01)
    first = Visitor(admission)
    await settled()
    with pytest.raises(ServiceOverloaded):
        await admission.enter("m", observation())
    assert (0, 1) == (len(admission.queue), len(admission.running["m"]))
    await first.leave()
    assert {} == admission.running


async def test_who_has_less_patience_waits_less() -> None:
    """A client that set itself a shorter time is not kept for longer."""
    admission = gate(max_running_requests=1, queue_timeout=600)
    first = Visitor(admission)
    await settled()
    with pytest.raises(ServiceOverloaded) as caught:
        await admission.enter("m", observation(), patience=0.01)
    assert ("1", 0) == (caught.value.headers()["Retry-After"], len(admission.queue))
    await first.leave()


async def test_a_place_is_taken_though_the_queue_is_full() -> None:
    """Who waits for another model is in nobody's way."""
    admission = gate(max_running_requests_per_model=1, max_queued_requests=1)
    visitors = [Visitor(admission, model) for model in ("a", "a", "b")]
    await settled()
    assert [0, 2] == inside(visitors)
    for visitor in visitors:
        await visitor.leave()


async def test_who_gives_up_while_being_let_in_passes_the_place_on() -> None:
    """A client that leaves at the wrong moment must not take a place with it."""
    admission = gate(max_running_requests=1)
    visitors = [Visitor(admission) for _ in range(3)]
    await settled()
    # The first leaves and lets the second in, which is cancelled before it notices.
    visitors[0].at_the_end = visitors[1].task.cancel  # type: ignore[assignment,method-assign]
    await visitors[0].leave()
    assert [2] == inside(visitors)
    await visitors[2].leave()
    assert {} == admission.running


async def test_who_gives_up_is_not_turned_away() -> None:
    """A request that has given up when its model is unloaded is not turned away, though it may not know yet."""
    admission = gate(max_running_requests=1)
    first, second = Visitor(admission), Visitor(admission)
    await settled()
    second.task.cancel()
    admission.reject_queued("m")

    with pytest.raises(asyncio.CancelledError):
        await second.task
    await first.leave()


async def test_a_late_process_takes_nobody_in() -> None:
    """A process whose event loop is late refuses requests before anything else is looked at."""
    with pytest.raises(ServiceOverloaded):
        await gate(lag=2.0).enter("m", observation())
    await gate(lag=0.5).enter("m", observation())


@given(
    total=st.integers(1, 4),
    per_model=st.integers(1, 3),
    steps=st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 2)), max_size=40),
)
async def test_never_more_than_the_limits_and_nobody_is_forgotten(
    total: int, per_model: int, steps: list[tuple[str, int]]
) -> None:
    """Whatever comes and goes: the limits hold, nobody waits beside a free place, and all is free in the end."""
    admission = gate(max_running_requests=total, max_running_requests_per_model=per_model)
    there: list[tuple[Visitor, str]] = []
    for what, number in steps:
        model = "abc"[number]
        if what == "enter":
            there.append((Visitor(admission, model), model))
        elif there:
            visitor, _ = there.pop(number % len(there))
            if what == "cancel" or not visitor.inside:
                visitor.task.cancel()
                await asyncio.gather(visitor.task, return_exceptions=True)
            else:
                await visitor.leave()
        await settled()
        running = [model for visitor, model in there if visitor.inside]
        assert len(running) <= total
        assert all(running.count(model) <= per_model for model in "abc")
        assert {model: len(tasks) for model, tasks in admission.running.items()} == {
            model: running.count(model) for model in set(running)
        }
        waiting = [model for visitor, model in there if not visitor.inside]
        assert len(waiting) == len(admission.queue)
        if len(running) < total:
            assert all(running.count(model) == per_model for model in waiting)
    for visitor, _ in there:
        visitor.task.cancel()
    await asyncio.gather(*(visitor.task for visitor, _ in there), return_exceptions=True)
    assert ({}, 0) == (admission.running, len(admission.queue))


def test_lag_that_stays() -> None:
    """One pause is none; only what is late every time counts, and one good moment is not the end of it."""
    lag = LoopLag(lambda _: None)
    assert 0.0 == lag.sustained
    for measured, sustained in (
        ((5.0, 0.0, 5.0), 0.0),
        ((4.0, 3.0, 5.0, 3.0), 3.0),
        ((0.0, 4.0, 0.0), 3.0),
        ((1.0, 0.5, 1.0, 1.0), 1.0),
    ):
        for late in measured:
            lag.note(late)
        assert sustained == lag.sustained


async def test_lag_is_measured() -> None:
    """A loop that has nothing to do is hardly late."""
    measured: asyncio.Queue[float] = asyncio.Queue()
    task = asyncio.create_task(LoopLag(measured.put_nowait).run())
    assert await asyncio.wait_for(measured.get(), 120) >= 0
    task.cancel()


async def test_new_limits_hold_at_once() -> None:
    """A higher limit lets those in who wait; a lower one sends nobody away."""
    admission = gate(max_running_requests=1)
    visitors = [Visitor(admission) for _ in range(4)]
    await settled()
    assert [0] == inside(visitors)

    admission.replace(ServerSettings(max_running_requests=3))
    await settled()
    assert [0, 1, 2] == inside(visitors)

    admission.replace(ServerSettings(max_running_requests=1))
    for number, left in enumerate(([1, 2], [2], [3], [])):
        await visitors[number].leave()
        assert left == inside(visitors)


@given(total=st.integers(4, 20), per_model=st.integers(4, 20), queued=st.integers(0, 20), count=st.integers(1, 4))
async def test_workers_divide_the_limits(total: int, per_model: int, queued: int, count: int) -> None:
    """However requests are spread, workers together admit and queue no more than the limits, and all of that."""
    limits = ServerSettings(
        max_running_requests=total, max_running_requests_per_model=per_model, max_queued_requests=queued
    )
    workers = [
        Admission(limits, LoopLag(lambda _: None), worker=Worker(index=index, count=count)) for index in range(count)
    ]
    visitors = [Visitor(each) for each in workers for _ in range(45)]
    await settled()
    running = [len(each.running["m"]) for each in workers]
    waiting = [len(each.queue) for each in workers]
    assert (min(total, per_model), queued) == (sum(running), sum(waiting))
    assert max(running) - min(running) <= 1
    assert max(waiting) - min(waiting) <= 1

    for visitor in visitors:
        visitor.task.cancel()
    await asyncio.gather(*(visitor.task for visitor in visitors), return_exceptions=True)
    assert [({}, 0)] * count == [(each.running, len(each.queue)) for each in workers]


def most_lines(admission: Admission, model: str = "m", share: float = 0.8) -> int:
    """Return how many lines may run together."""
    lines = 0
    while lines < 100 and admission.spare(model, lines, share):
        lines += 1
    return lines


@pytest.mark.parametrize(
    "limits, share, live, lines",
    [
        ({}, 0.8, 50, 100),
        # All without live requests; with them, what they leave, without what is kept for further ones.
        ({"max_running_requests_per_model": 10}, 0.8, 0, 10),
        ({"max_running_requests_per_model": 10}, 0.8, 2, 5),
        ({"max_running_requests_per_model": 10}, 0.8, 5, 2),
        ({"max_running_requests_per_model": 10}, 0.8, 8, 1),
        ({"max_running_requests_per_model": 10}, 0.8, 9, 0),
        ({"max_running_requests_per_model": 10}, 1.0, 5, 2),
        ({"max_running_requests_per_model": 10}, 0.2, 2, 2),
        ({"max_running_requests_per_model": 100}, 1.0, 50, 44),
        ({"max_running_requests_per_model": 100}, 1.0, 90, 5),
        ({"max_running_requests_per_model": 4}, 0.8, 0, 4),
        ({"max_running_requests_per_model": 1}, 0.8, 0, 1),
        ({"max_running_requests_per_model": 1}, 0.8, 1, 0),
        ({"max_running_requests": 10}, 0.5, 4, 3),
        ({"max_running_requests": 3, "max_running_requests_per_model": 10}, 0.8, 1, 1),
    ],
)
async def test_lines_have_a_share_of_what_is_free(limits: dict[str, Any], share: float, live: int, lines: int) -> None:
    """Lines of batches have their share, whether they run already or are about to."""
    admission = gate(**limits)
    visitors = [Visitor(admission) for _ in range(live)]
    await settled()
    assert lines == most_lines(admission, share=share)
    running = [Visitor(admission, batch="b") for _ in range(min(lines, 5))]
    await settled()
    assert all(one.inside for one in running)
    assert lines == most_lines(admission, share=share)
    for visitor in [*visitors, *running]:
        await visitor.leave()
    assert not admission._lines


@every_case("more", [-1, -2, -3, -100])
async def test_no_line_begins_where_too_many_wait_in_the_engine(more: int) -> None:
    """An engine in which more requests wait than it should have gets no line, also below zero."""
    admission = gate()
    visitors = [Visitor(admission) for _ in range(2)]
    await settled()
    admission.set_engine_capacity("m", more, 100)
    assert 0 == most_lines(admission)
    await all_leave(visitors)


async def test_no_line_begins_in_a_process_without_a_share(clock: Clock) -> None:
    """A process whose share of the limit is zero has a live request that waits in vain, and begins no line after it."""
    limits = ServerSettings(max_running_requests_per_model=1, queue_timeout=1)
    admission = Admission(limits, LoopLag(lambda _: None), worker=Worker(index=1, count=2))
    live = Visitor(admission)
    await settled()
    await clock.elapse(2)
    with pytest.raises(ServiceOverloaded):
        await live.task
    assert 0 == most_lines(admission)


async def test_room_for_live_requests_is_kept_for_a_while(clock: Clock) -> None:
    """Lines get the share of live requests when none has been there for a minute."""
    admission = gate(max_running_requests_per_model=10)
    visitor = Visitor(admission)
    await settled()
    await visitor.leave()
    clock.advance(59)
    assert 7 == most_lines(admission)
    clock.advance(2)
    assert 10 == most_lines(admission)


async def test_no_line_begins_while_live_requests_wait() -> None:
    """A live request that waits is the next one, and a line that comes too late is refused."""
    admission = gate(max_running_requests_per_model=2)
    line, live = Visitor(admission, batch="b"), Visitor(admission)
    waiting = Visitor(admission)
    await settled()
    assert [0, 1] == inside([line, live, waiting])
    late = Visitor(admission, batch="b")
    with pytest.raises(ServiceOverloaded, match="No capacity for batch"):
        await late.task
    assert 0 == most_lines(admission)
    await line.leave()
    assert [1, 2] == inside([line, live, waiting])
    await live.leave()
    # One place is left, for the next live request.
    assert 0 == most_lines(admission)
    await waiting.leave()
    assert 1 == most_lines(admission)


@pytest.mark.parametrize("places, part", [(32, 4), (96, 2)])
async def test_live_requests_hardly_wait_beside_a_batch(places: int, part: int) -> None:
    """
    Beside a batch without end, 19 of 20 live requests find a free place, and lines have four fifths of what is free.

    Arrivals and durations are drawn once, and time is that of the events. Live requests take a *part* of the places.
    """
    draw, seconds = random.Random(28), 0.5
    admission = gate(max_running_requests_per_model=places)
    numbers = itertools.count()
    #: When something happens; ``None`` is the arrival of a live request.
    events: list[tuple[float, int, Visitor | None]] = [(0.0, next(numbers), None)]
    waiting: dict[Visitor, float] = {}
    live, lines = set[Visitor](), set[Visitor]()
    waits: list[float] = []
    used = free = last = 0.0
    while (event := heapq.heappop(events))[0] < 40:
        now, _, leaving = event
        used, free, last = used + (now - last) * len(lines), free + (now - last) * (places - len(live)), now
        if leaving is None:
            waiting[Visitor(admission)] = now
            heapq.heappush(events, (now + draw.expovariate(places / part / seconds), next(numbers), None))
        else:
            live.discard(leaving)
            lines.discard(leaving)
            await leaving.leave()
        await settled()
        begun = [one for one in waiting if one.inside]
        waits += [now - waiting.pop(one) for one in begun]
        live.update(begun)
        while admission.spare("m", len(lines), 1.0):
            begun.append(Visitor(admission, batch="b"))
            lines.add(begun[-1])
        await settled()
        for one in begun:
            heapq.heappush(events, (now + draw.uniform(0.7, 1.3) * seconds, next(numbers), one))
    for one in [*waiting, *live, *lines]:
        one.task.cancel()
    assert len(waits) > 500
    assert 0 == sorted(waits)[len(waits) * 19 // 20]
    assert used >= 0.8 * free
