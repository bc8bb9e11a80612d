"""Batches as wide as the fleet: several processes run lines of one batch, as many as the fleet has capacity for."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from tests.cases import every_case
from tests.clock import Clock
from tests.extended import sample
from tests.store_fixture import Place, Server, local
from tests.unit.batches.test_batch_runner import NAMES, OWNER, Host, Process, process
from triton_openai.access.rate_limits import Reservation
from triton_openai.batches import batch_runner, engine_queues, timing
from triton_openai.batches.changes import Changes
from triton_openai.batches.congestion import CongestionMonitor
from triton_openai.batches.engine_queues import EngineQueue, EngineQueues
from triton_openai.batches.first_tokens import FirstTokens, Waits
from triton_openai.batches.host import Outcome
from triton_openai.batches.line_limits import Limit, ModelLimits
from triton_openai.storage import open_batch_store
from triton_openai.storage.batch_records import Batch, StoredFile
from triton_openai.storage.batch_tables import ROW_SIZE, bytes_of_owner
from triton_openai.storage.slot_table import fair_share
from triton_openai.telemetry.triton_metrics import TritonMetrics, parse


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing."""
    for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS", "GROUP", "FAILURE_PAUSE", "RETRY", "FIRST_PAUSE"):
        monkeypatch.setattr(timing, name, 0.005)


class Sharing(Host):
    """A host that counts the lines of all hosts with the same *running*, and those at each Triton."""

    def __init__(self, running: set[str], names: Sequence[str] = ()) -> None:
        super().__init__()
        self.running = running
        self.names = names
        self.at: dict[str, int] = {}
        self.most_at: dict[str, int] = {}

    def endpoints(self, target: str) -> Sequence[str]:
        return self.names

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        self.at[endpoint] = self.at.get(endpoint, 0) + 1
        self.most_at[endpoint] = max(self.most_at.get(endpoint, 0), self.at[endpoint])
        try:
            return await super().answer(batch, custom_id, body, reservation, endpoint)
        finally:
            self.at[endpoint] -= 1


class Considerate(Sharing):
    """A host that answers so many lines, and others when the host of another process has some, too."""

    other: Host

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        while self.calls.total() >= 100 and not self.other.calls:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        return await super().answer(batch, custom_id, body, reservation, endpoint)


def _wants_slots(one: Process) -> bool:
    return "M" in one.runner._slots._taken


async def test_two_processes_run_one_batch(place: Place) -> None:
    """Lines of one batch run in two processes at the same time, no more than allowed over both, and each line once."""
    names = [f"id-{number}" for number in range(300)]
    running: set[str] = set()
    hosts = [Considerate(running) for _ in range(2)]
    for host, other_host in zip(hosts, reversed(hosts), strict=True):
        host.max_running = 6
        host.other = other_host
        host.may_answer.clear()
    async with process(place, hosts[0]) as one, process(place, hosts[1]) as other:
        batch = await one.batch(names)
        # One of them has all slots. Those of lines that have ended go to the other one.
        await one.until(batch, lambda _: _wants_slots(one) and _wants_slots(other))
        for host in hosts:
            host.may_answer.set()
        done = await one.ended(batch)
        assert {name: [200] for name in names} == one.results(done)
    assert all(host.calls for host in hosts)
    assert dict.fromkeys(names, 1) == dict(hosts[0].calls + hosts[1].calls)
    assert 6 >= max(host.most_seen for host in hosts)


async def test_results_stand_in_the_order_of_the_input(place: Place) -> None:
    """Whoever ran a line, and whenever: the output has the order of the input."""
    hosts = [Host(), Host()]
    async with process(place, hosts[0]) as one, process(place, hosts[1]):
        done = await one.ended(await one.batch(NAMES))
        assert NAMES == list(one.results(done))


async def test_one_of_two_processes_dies(place: Place) -> None:
    """The other one goes on with its lines, and only what ran when it died runs again."""
    names = [f"id-{number}" for number in range(60)]
    hosts = [Host(), Host()]
    for host in hosts:
        host.max_running = 64
        host.may_answer.clear()
    dying = Process(place, hosts[0])
    dying.start()
    async with process(place, hosts[1]) as other:
        batch = await other.batch(names)
        await other.until(batch, lambda _: hosts[0].running and hosts[1].running)
        ran = set(hosts[0].running)
        await dying.die()
        hosts[1].may_answer.set()
        done = await other.ended(batch)
        assert {name: [200] for name in names} == other.results(done)
    assert ran == {name for name in names if hosts[0].calls[name] and hosts[1].calls[name]}
    assert all(count == 1 for count in hosts[1].calls.values())


async def test_a_process_ends_a_batch_that_others_run(place: Place) -> None:
    """A cancelled batch ends when all processes that ran lines of it have stored their results."""
    hosts = [Host(), Host()]
    for host in hosts:
        host.max_running = 64
        host.may_answer.clear()
    async with process(place, hosts[0]) as one, process(place, hosts[1]) as other:
        batch = await one.batch([f"id-{number}" for number in range(60)])
        await one.until(batch, lambda _: hosts[0].running and hosts[1].running)
        await one.files.store.batches.change(batch.id, lambda found: found.set_status("cancelling"))
        one.runner.wake()
        for each in (one, other):
            await one.until(batch, lambda _: each.runner._batches[batch.id].batch.status == "cancelling")  # noqa: B023
        running = hosts[0].running | hosts[1].running
        hosts[0].may_answer.set()
        assert (await one.seen(batch)).open
        hosts[1].may_answer.set()
        done = await one.ended(batch)
        assert "cancelled" == done.status
        assert running == {name for name, result in one.results(done).items() if result == [200]}
        assert 60 == len(one.results(done))


async def test_each_triton_has_a_limit(tmp_path: Path) -> None:
    """Lines go to the Triton with the fewest lines, and no Triton has more than allowed."""
    host = Sharing(set(), ("a", "b", "c"))
    host.max_running = 2
    host.may_answer.clear()
    async with process(tmp_path, host) as one:
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: len(host.running) == 6)
        host.may_answer.set()
        assert 20 == (await one.ended(batch)).succeeded
    assert {"a": 2, "b": 2, "c": 2} == host.most_at


async def test_a_refusal_of_one_triton_shrinks_its_limit_alone() -> None:
    """A Triton that refuses lines gets fewer, and the others as many as before."""
    host = Sharing(set(), ("a", "b"))
    host.max_running = 64
    limits = ModelLimits(host)
    limits.slots = {"M": 64}
    first, second = limits.of("M")
    first.overloaded(time.monotonic())
    assert (4, 8) == (first.allowed, second.allowed)
    taken = [limits.take("m") for _ in range(13)]
    assert [("a", 4), ("b", 8)] == [(limit.endpoint, limit.running) for limit in (first, second)]
    assert taken[12] is None


@every_case("wanted, others, total, expected", [
    (10, [], 8, 8),
    (10, [10], 8, 4),
    (10, [10, 10], 9, 3),
    # What one does not want goes to the others.
    (10, [2], 8, 6),
    (2, [10], 8, 2),
    (10, [1, 10], 9, 4),
    # Each has one at least.
    (5, [5, 5, 5], 2, 1),
])  # fmt: skip
def test_slots_are_shared_fairly(wanted: int, others: list[int], total: int, expected: int) -> None:
    """All processes together have no more slots than there are, and none has more than it wants."""
    assert expected == fair_share(wanted, others, total)


async def test_slots_over_processes(place: Place) -> None:
    """A process that comes later gets its share as the lines of the first one end; a dead one's slots are free."""
    store = Process(place).files.store
    slots = store.slots

    async def take(holder: str, running: int, wanted: int = 20) -> int:
        return await slots.take("m", holder, 60.0, wanted=wanted, running=running, total=12)

    assert 12 == await take("a", 0)
    assert 0 == await take("b", 0)
    assert 6 == await take("a", 12)
    assert 0 == await take("b", 0)
    assert 6 == await take("a", 6)
    assert 6 == await take("b", 0)
    await store.leases.expire_leases("b")
    assert 12 == await take("a", 6)
    await slots.release("a", "m")
    assert 12 == await take("b", 0)
    await store.close()


def test_limits_double_until_the_first_congestion() -> None:
    """A limit grows by one for each success at first, and then by a part of it in each window."""
    limit = Limit(256)
    for _ in range(56):
        limit.running = limit.allowed
        limit.succeeded()
    assert 64 == limit.allowed
    limit.overloaded(time.monotonic())
    assert 32 == limit.allowed
    limit.running = 32
    for _ in range(32):
        limit.succeeded()
    assert 36 == limit.allowed


def test_limits_grow_less_beside_live_requests() -> None:
    """Lines that are too many make live requests wait until they end, so a limit does not double beside them."""
    limit = Limit(256)
    limit.live_lately = True
    limit.live = 20.0
    limit.running = 8
    for _ in range(8):
        limit.succeeded()
    assert 10 == limit.allowed


def test_a_limit_grows_by_what_lines_show(clock: Clock) -> None:
    """A limit of which live requests use the most grows as soon as any other, by one for all lines that run."""
    limit = Limit(256)
    limit.allowed = 64
    limit.overloaded(time.monotonic())
    limit.live_lately = True
    limit.live = 29.0
    limit.reserve = 1.0
    assert (32, 2) == (limit.allowed, limit.lines)
    limit.running = 2
    limit.succeeded()
    assert 32 == limit.allowed
    limit.succeeded()
    assert 33 == limit.allowed


def test_waits_of_requests_that_began_earlier(clock: Clock) -> None:
    """What waited when the number of lines changed shows nothing about the new number."""
    waits = Waits()
    waits.add(5.0)
    waits.clear()
    clock.advance(1.0)
    waits.add(1.5)
    assert 0.0 == waits.slowest()
    waits.add(0.5)
    assert 0.5 == waits.slowest()


def test_a_limit_that_is_not_used_up_does_not_grow() -> None:
    """Where live requests leave less room than the limit allows, successes show nothing about more lines."""
    limit = Limit(256)
    limit.running = 3
    for _ in range(100):
        limit.succeeded()
    assert 8 == limit.allowed


@every_case("waiting, allowed, grows", [(0.0, 200, True), (1.0, 100, False), (4.0, 100, False), (20.0, 80, False),
                                        (90.0, 50, False)])  # fmt: skip
def test_queues_of_engines_shrink_limits(waiting: float, allowed: int, grows: bool) -> None:
    """A short queue keeps the engine busy; a longer one takes its lines away, half of all at most."""
    limit = Limit(256)
    limit.allowed = 100
    limit.running = 100
    for _ in range(3):
        # The queue is the same until lines have ended.
        limit.queue(waiting)
    assert allowed == limit.allowed
    limit.running = allowed
    for _ in range(allowed):
        limit.succeeded()
    assert grows == (limit.allowed > allowed)


def test_lines_leave_room_for_live_requests() -> None:
    """Beside live requests, a queue of any length shows what the engine runs, and lines leave a reserve of it."""
    limit = Limit(256)
    limit.allowed = 80
    limit.running = 80
    limit.live_lately = True
    limit.live = 20.0
    limit.reserve = 4.0
    for _ in range(3):
        limit.queue(1.0)
    assert (99, 75) == (limit.allowed, limit.lines)
    # More live requests leave fewer lines, at once.
    limit.live = 50.0
    assert 45 == limit.lines
    limit.running = 45
    limit.queue(0.0)
    for _ in range(45):
        limit.succeeded()
    assert 100 == limit.allowed
    # When no live requests come any more, lines have all that the engine runs.
    limit.live_lately = False
    limit.live = 0.0
    limit.reserve = 0.0
    assert 100 == limit.lines


def test_lines_double_while_the_engine_has_no_queue() -> None:
    """In slow start, a look at the engine that shows no queue doubles a limit that is used up, beside no live ones."""
    limit = Limit(256)
    limit.running = 7
    limit.queue(0.0)
    assert 8 == limit.allowed
    for expected in (16, 32, 64):
        limit.running = limit.allowed
        limit.queue(0.0)
        assert expected == limit.allowed
    limit.running = 64
    limit.queue(20.0)
    limit.running = limit.allowed
    limit.queue(0.0)
    assert 44 == limit.allowed


def test_a_queue_that_is_not_known_any_more() -> None:
    """A limit grows again when the metrics of a queue are not reached any more."""
    limit = Limit(256)
    limit.running = 8
    limit.queue(1.0)
    limit.succeeded()
    assert 8 == limit.allowed
    limit.queue(None)
    limit.succeeded()
    assert 9 == limit.allowed


def test_lines_begin_with_what_the_settings_allow() -> None:
    """Where the settings say what the engines run, no limit has to grow."""
    host = Sharing(set(), ("a", "b", "c"))
    host.max_running = 256
    assert [8, 8, 8] == [limit.allowed for limit in ModelLimits(host).of("M")]
    host.capacity = lambda target: 96.0  # type: ignore[method-assign]
    assert [32, 32, 32] == [limit.allowed for limit in ModelLimits(host).of("M")]


def test_limits_of_tritons_that_are_gone() -> None:
    """They are dropped when their last line has ended."""
    host = Sharing(set(), ("a", "b"))
    limits = ModelLimits(host)
    first, _ = limits.of("M")
    first.running = 1
    host.names = ("b", "c")
    limits.of("M")
    assert ["a", "b", "c"] == sorted(limits._limits["M"])
    first.leave()
    limits.of("M")
    assert ["b", "c"] == sorted(limits._limits["M"])


_ANSWER_SECONDS = 3.0


class Engines:
    """
    Tritons with so many *places* each in simulated time, two processes that run lines, and live requests.

    An answer takes three seconds, or up to *spread* of them less or more, and a tenth of it until the first token. Live
    requests use *load* of the places, and one process has six of ten. The simulated time is that of *clock*.
    """

    def __init__(
        self, load: float, clock: Clock, *, spread: float = 0.0, seed: int = 43, tritons: int = 3, places: int = 64
    ) -> None:
        self._clock = clock
        self._draw = random.Random(seed)
        self._spread = spread
        self._rate = load * places * tritons / _ANSWER_SECONDS
        self._places = places
        self._names = [str(number) for number in range(tritons)]
        self.hosts = [Sharing(set(), self._names) for _ in range(2)]
        self._limits = [ModelLimits(host) for host in self.hosts]
        self._first_tokens = [FirstTokens() for _ in self.hosts]
        self._monitors = [
            CongestionMonitor(host, first_tokens, limits)
            for host, first_tokens, limits in zip(self.hosts, self._first_tokens, self._limits, strict=True)
        ]
        self._live = [Counter[str](), Counter[str]()]
        for host, live in zip(self.hosts, self._live, strict=True):
            host.max_running = 256
            if load:
                host.live = lambda target, live=live: live.total()  # type: ignore[method-assign,misc]
        self._queues: dict[str, deque[tuple[float, int, Limit | None]]] = {name: deque() for name in self._names}
        self._busy = Counter[str]()
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._now = 0.0
        self.waits: list[float] = []
        self.used = 0.0
        self.free = 0.0
        self._at(1.0, self._look)
        if self._rate:
            self._at(0.0, self._arrive)

    def run(self, seconds: float, *, lines: bool = True) -> None:
        """Let so many *seconds* pass, with or without *lines*, and count from their beginning."""
        self.waits.clear()
        self.used = 0.0
        self.free = 0.0
        for limits in self._limits:
            limits.slots = {"M": 1000 * lines}
        end = self._now + seconds
        while self._events[0][0] < end:
            now, _, event = heapq.heappop(self._events)
            running = sum(limit.running for limits in self._limits for limit in limits.of("M"))
            live = sum(counts.total() for counts in self._live)
            waiting = sum(map(len, self._queues.values()))
            self.used += (now - self._now) * (running - waiting)
            self.free += (now - self._now) * (self._places * len(self._names) - live)
            self._clock.advance(now - self._now)
            self._now = now
            event(now)
            for number, limits in enumerate(self._limits):
                while (limit := limits.take("m")) is not None:
                    self._enter(now, limit.endpoint, number, limit)

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _look(self, now: float) -> None:
        for monitor, limits in zip(self._monitors, self._limits, strict=True):
            monitor.check_first_tokens()
            for limit in limits.of("M"):
                limit.queue(len(self._queues[limit.endpoint]) / 2)
        self._at(now + 1, self._look)

    def _arrive(self, now: float) -> None:
        process = int(self._draw.random() < 0.4)
        running = {limit.endpoint: limit.running for limit in self._limits[process].of("M")}
        name = min(self._names, key=lambda name: running[name] + self._live[process][name])
        self._live[process][name] += 1
        self._enter(now, name, process, None)
        self._at(now + self._draw.expovariate(self._rate), self._arrive)

    def _enter(self, now: float, name: str, process: int, limit: Limit | None) -> None:
        self._queues[name].append((now, process, limit))
        self._begin(now, name)

    def _begin(self, now: float, name: str) -> None:
        while self._queues[name] and self._busy[name] < self._places:
            came, process, limit = self._queues[name].popleft()
            self._busy[name] += 1
            if limit is None:
                self.waits.append(now - came)
                self._at(now + 0.1 * _ANSWER_SECONDS, partial(self._note_first_token, process, came))
            self._at(
                now + _ANSWER_SECONDS * self._draw.uniform(1 - self._spread, 1 + self._spread),
                partial(self._end, name, process, limit),
            )

    def _note_first_token(self, process: int, came: float, now: float) -> None:
        self._first_tokens[process].of("M").add(now - came)

    def _end(self, name: str, process: int, limit: Limit | None, now: float) -> None:
        self._busy[name] -= 1
        if limit is None:
            self._live[process][name] -= 1
        else:
            limit.succeeded()
            limit.leave()
        self._begin(now, name)


@pytest.mark.sampled
@every_case(
    "load, spread, used",
    sample([(0.0, 0.0, 0.9), (0.0, 0.5, 0.9), (0.25, 0.5, 0.8), (0.5, 0.0, 0.8), (0.5, 0.5, 0.8)], few=3),
)
def test_lines_use_what_live_requests_leave(load: float, spread: float, used: float, clock: Clock) -> None:
    """
    Where nobody says what the engines run, lines find it by the queues, and 19 of 20 live requests hardly wait.

    A first token comes after a tenth of an answer, so the wait makes it 1.3 times as long at most.
    """
    engines = Engines(load, clock, spread=spread)
    if load:
        engines.run(20.0, lines=False)
    engines.run(100.0)
    assert engines.used > used * engines.free
    if load:
        assert sorted(engines.waits)[len(engines.waits) * 19 // 20] <= 0.03 * _ANSWER_SECONDS


async def test_the_usual_wait_is_learned_before_lines_run(tmp_path: Path, clock: Clock) -> None:
    """What live requests wait before the first line of all is the usual wait."""
    host = Host()
    first_tokens = FirstTokens()
    monitor = CongestionMonitor(host, first_tokens, ModelLimits(host))
    for _ in range(20):
        first_tokens.of("M").add(0.5)
    clock.advance(5)
    monitor.check()
    assert 0.5 == first_tokens.of("M").usual
    assert {} == monitor._limits.allowed()


def _metrics(pending: int | None, microseconds: int, waiting: int) -> str:
    lines = [f'nv_inference_queue_duration_us{{model="m",version="1"}} {microseconds}']
    if pending is not None:
        lines += [f'nv_inference_pending_request_count{{model="m",version="{version}"}} {pending}' for version in "12"]
    lines.append(f'nv_trt_llm_request_metrics{{model="step",request_type="waiting",version="1"}} {waiting}')
    lines.append('nv_trt_llm_request_metrics{model="step",request_type="active",version="1"} 7')
    return "\n".join(lines) + "\n"


@every_case("pending, waiting, expected", [(3, 0, 6), (3, 5, 11), (None, 5, 13), (None, 0, 8)])
async def test_queues_of_engines(pending: int | None, waiting: int, expected: float, clock: Clock) -> None:
    """The queue is what Triton says that waits, by its time in the queue where it does not, and the engine's own."""
    texts = [_metrics(pending, 1_000_000, waiting), _metrics(pending, 17_000_000, waiting)]

    async def read(self: TritonMetrics) -> Mapping[str, Sequence[str]]:
        return parse(texts.pop(0))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonMetrics, "read", read)
        queue = EngineQueue("http://x/metrics")
        await queue.refresh()
        clock.advance(2)
        await queue.refresh()
    assert expected == queue.waiting(["m", "step"])
    assert 0 == queue.waiting(["other"])


async def test_queues_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Where Triton's metrics are not reached, nothing is known of its queue, and they are tried again after a while."""
    reads = 0

    async def read(self: TritonMetrics) -> None:
        nonlocal reads
        reads += 1

    monkeypatch.setattr(TritonMetrics, "read", read)
    queues = EngineQueues()
    for _ in range(5):
        await queues.refresh(["u"])
    assert (1, None, None) == (reads, queues.waiting("u", ["m"]), queues.waiting("unknown", ["m"]))
    clock.advance(engine_queues._RETRY_SECONDS + 1)
    await queues.refresh(["u"])
    assert 2 == reads


def test_live_requests_that_wait_longer_than_usual(clock: Clock) -> None:
    """Without a setting, waits count as long beside those without lines; with one, by the setting."""
    waits = Waits()
    for _ in range(20):
        waits.add(0.1)
    assert not waits.are_long(few_lines=True, max_wait=None)
    clock.advance(11)
    for wait in (0.1, 0.14, 0.14):
        waits.clear()
        clock.advance(1)
        for _ in range(20):
            waits.add(wait)
        assert not waits.are_long(few_lines=False, max_wait=None)
    assert waits.are_long(few_lines=False, max_wait=0.12)
    waits.clear()
    clock.advance(1)
    for _ in range(20):
        waits.add(0.2)
    assert waits.are_long(few_lines=False, max_wait=None)
    waits.clear()
    clock.advance(10)
    # A few requests show nothing.
    waits.add(9.0)
    assert not waits.are_long(few_lines=False, max_wait=None)


def test_long_waits_halve_limits(clock: Clock) -> None:
    """Fewer lines run for the model that live requests wait for, and no fewer for others."""
    host = Host()
    host.max_running = 64
    limits = ModelLimits(host)
    for target in "MN":
        limits.of(target)[0].running = 8
    first_tokens = FirstTokens()
    monitor = CongestionMonitor(host, first_tokens, limits)
    waits = first_tokens.of("M")
    waits.usual = 0.1
    for _ in range(20):
        waits.add(0.5)
    for _ in range(3):
        # The same waits count once.
        clock.advance(1)
        monitor.check_first_tokens()
    assert {"M": 4, "N": 8} == limits.allowed()


async def test_waits_count_while_live_requests_vary(clock: Clock) -> None:
    """More live requests leave fewer lines, and hide no long waits: nothing was shrunk yet."""
    host = Host()
    host.max_running = 256
    limits = ModelLimits(host)
    (limit,) = limits.of("M")
    limit.running = 40
    limit.allowed = 40
    limit.overloaded(clock())
    clock.advance(1)
    limit.allowed = 64
    host.live = lambda target: 22  # type: ignore[method-assign]
    first_tokens = FirstTokens()
    monitor = CongestionMonitor(host, first_tokens, limits)
    waits = first_tokens.of("M")
    waits.usual = 0.1
    for _ in range(20):
        waits.add(0.5)
    assert limits.allowed_for("M") < 40
    monitor.check()
    assert limit.allowed < 64
    await monitor.close()


def test_one_process_of_a_machine_polls(tmp_path: Path) -> None:
    """One process is the poller, until it ends; each sees what another one announces, once."""
    first, second = Changes(tmp_path), Changes(tmp_path)
    assert (True, False) == (first.look().polls, second.look().polls)
    assert not first.look().changed
    first.announce()
    assert (True, False) == (second.look().changed, second.look().changed)
    for _ in range(5000):
        second.announce()
    assert first.look().changed
    first.close()
    assert second.look().polls
    second.close()


async def test_processes_that_do_not_poll_are_woken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not the poller runs lines that another process has added, claimed, and cannot run."""
    monkeypatch.setattr(batch_runner, "_PATIENCE", 10**9)
    # The first process claims the lines, and has no room for them.
    monkeypatch.setattr(timing, "GIVE_BACK", 0.01)
    hosts = [Host(), Host()]
    hosts[0].busy = True
    async with process(tmp_path, hosts[0]) as one:
        await one.ended(await one.batch([], name="empty"))
        async with process(tmp_path, hosts[1]) as other:
            await asyncio.sleep(0)
            batch = await one.batch(NAMES[:4])
            await one.until(batch, lambda _: hosts[1].calls)
            assert not other.runner._changed.polls
            await one.ended(batch)
            assert not hosts[0].calls


async def test_postgresql_notifies(postgresql: Server) -> None:
    """A store is notified of a batch that another one adds or cancels, also after its connection was lost."""
    url = postgresql.url()
    one, other = (open_batch_store(url)[0] for _ in range(2))
    await one.verify()
    notified = asyncio.Event()
    assert await one.listen(notified.set)

    async def changed(number: int) -> None:
        notified.clear()
        name = f"batch_{number}"
        batch = Batch(
            id=name, owner=OWNER, kind="anthropic", endpoint="/x", input=name, created=1, window="1h", expires=2
        )  # fmt: skip
        await other.batches.add(batch, max_open=9, max_total=10**9)
        async with asyncio.timeout(120):
            await notified.wait()

    await changed(1)
    connection = await asyncpg.connect(url)
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND pid <> pg_backend_pid()"
    )
    async with asyncio.timeout(120):
        while not one._database._listening.is_closed():  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await one.listen(notified.set)
    await changed(2)
    await connection.close()
    await asyncio.gather(one.close(), other.close())


async def test_connections_that_nobody_uses_are_closed(postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many processes of a machine have used the database, they hold none of its connections."""
    from triton_openai import storage

    monkeypatch.setattr(storage, "_IDLE_SECONDS", 0.05)
    url = postgresql.url()
    stores = [open_batch_store(url)[0] for _ in range(6)]
    await asyncio.gather(*(store.batches.open_ids() for store in stores for _ in range(4)))
    connection = await asyncpg.connect(url)
    async with asyncio.timeout(120):
        while await connection.fetchval(  # noqa: ASYNC110 - nothing notifies of it
            "SELECT COUNT(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        ):
            await asyncio.sleep(0.01)
    await connection.close()
    await asyncio.gather(*(store.close() for store in stores))


async def test_the_bytes_of_an_owner_stay_right(place: Place) -> None:
    """Whatever happens to files and batches, the row of an owner has the sum of their bytes."""
    one = Process(place)
    files = one.files.store.files
    batches = one.files.store.batches

    def file(name: str, size: int, **fields: object) -> StoredFile:
        made = {"created": time.time(), "expires": None, **fields}
        return StoredFile(id=name, owner=OWNER, bytes=size, **made)  # type: ignore[arg-type]

    async def used() -> int:
        def steps():
            total = yield from bytes_of_owner(OWNER)
            rows = yield (
                "SELECT (SELECT COALESCE(SUM(bytes), 0) FROM file WHERE owner = $1 AND COALESCE(expires, 1) > 0),"
                " (SELECT COUNT(*) FROM file WHERE owner = $1 AND COALESCE(expires, 1) > 0)"
                " + (SELECT COUNT(*) FROM batch WHERE owner = $1)",
                OWNER,
            )
            size, number = map(int, rows[0])
            assert total == size + ROW_SIZE * number
            return size

        size: int = await one.files.store._database.run(steps(), timeout=120, write=True)
        return size

    assert await files.reserve(file("a", 10, state="uploading", expires=time.time() + 99), 10**9)
    assert 10 == await used()
    await files.complete(file("a", 11))
    assert 11 == await used()
    await files.complete(file("b", 100, expires=time.time() + 99))
    batch = Batch(id="batch_1", owner=OWNER, kind="openai", endpoint="/x", input="a", created=1, window="1h", expires=2)
    assert "added" == await batches.add(batch, max_open=9, max_total=10**9)
    assert not await files.expire("a")
    assert await files.expire("b")
    assert await files.expire("b")
    assert 11 == await used()
    await files.delete(["b", "unknown"])
    leased = await one.files.store.leases.claim("h", 60, now=time.time())
    assert leased is not None
    await batches.end(leased, [file("out", 1000)], lambda found: found.set_status("completed"))
    assert 1011 == await used()
    await files.delete(["a", "out"])
    await batches.delete("batch_1")
    assert 0 == await used()
    await one.files.store.close()


async def test_many_uploads_of_one_owner_at_once(place: Place) -> None:
    """Uploads of many processes exceed no limit together, and other owners do not wait for them."""
    stores = [Process(place).files.store for _ in range(3)]
    await stores[0].batches.open_ids()
    limit = 40 * (ROW_SIZE + 10)
    made = [
        StoredFile(id=f"file-{number}", owner=OWNER, bytes=10, created=1, expires=time.time() + 99, state="uploading")
        for number in range(60)
    ]
    reserved = await asyncio.gather(
        *(stores[number % 3].files.reserve(file, limit - ROW_SIZE) for number, file in enumerate(made))
    )
    assert 40 == sum(reserved)
    for store in stores:
        await store.close()


async def test_only_claimed_bytes_of_an_input_are_fetched(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bucket, a process that runs some lines of a large input fetches those, and not all of it."""
    from triton_openai.batches.bucket import BucketFiles

    fetched: list[tuple[int, int]] = []
    fetch = BucketFiles._fetch

    async def noted(self: BucketFiles, key: str, start: int, end: int) -> bytes:
        if key.startswith("files/file-"):
            fetched.append((start, end))
        return await fetch(self, key, start, end)

    async with process(shared) as one:
        one.host.busy = True
        names = [f"id-{number}-{'x' * 400}" for number in range(600)]
        batch = await one.batch(names)
        await one.until(batch, lambda found: found.status == "in_progress")
        one.host.max_running = 4
        monkeypatch.setattr(BucketFiles, "_fetch", noted)
        one.host.may_answer.clear()
        one.host.busy = False
        await one.until(batch, lambda _: one.host.running)
        size = sum(end - start for start, end in fetched)
        total = os.fstat(await one.files.open_input(batch)).st_size
        assert 0 < size < total / 5
        one.host.may_answer.set()
        done = await one.ended(batch)
        assert 600 == done.succeeded


def test_local_places_are_on_one_machine(tmp_path: Path) -> None:
    """A folder needs no database on a server."""
    assert not Process(local(tmp_path)).files.shared
