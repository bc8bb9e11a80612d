"""What workers share: one parent counts for all of them, and nothing stays of one that ends or does not answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.clock import Clock
from triton_openai.access.rate_limits import Decision, RateLimit
from triton_openai.errors import ServiceOverloaded
from triton_openai.serving.workers import shared as module
from triton_openai.serving.workers.channel import Channel
from triton_openai.serving.workers.shared import SharedClient, SharedState


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the parent longer than the machine may stand still."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 1000.0)


class Wire:
    """One direction of a connection: what is written arrives in a later turn, and waits while it is *held*."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.held = False
        self._closed = False
        self._waiting: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._waiting.append(data)
        asyncio.get_running_loop().call_soon(self.arrive)

    def arrive(self) -> None:
        while self._waiting and not self.held and not self._closed:
            self.reader.feed_data(self._waiting.pop(0))

    def is_closing(self) -> bool:
        return self._closed

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.reader.feed_eof()


class Workers:
    """The parent and the workers of a service in one process."""

    def __init__(self) -> None:
        self.state = SharedState(Path("no metrics"))
        self.clients: dict[int, SharedClient] = {}
        # Each worker's wires to the parent and from it, and what runs at their ends.
        self._wires: dict[int, tuple[Wire, Wire]] = {}
        self._running: set[asyncio.Task[None]] = set()

    def start(self, index: int) -> SharedClient:
        """Start the worker *index* and return its client."""
        up, down = self._wires[index] = Wire(), Wire()
        here, there = Channel(up.reader, down), Channel(down.reader, up)  # type: ignore[arg-type]
        here.methods |= self.state.methods(index, here)
        self._running |= {asyncio.create_task(end.run()) for end in (here, there)}
        self.clients[index] = SharedClient(there)
        self.state.add(index, here)
        return self.clients[index]

    def kill(self, index: int) -> None:
        """End a worker; what it has sent has arrived."""
        del self.clients[index]
        up, down = self._wires.pop(index)
        down.close()
        up.close()
        self.state.release_worker(index)

    def hang(self, index: int) -> None:
        """Let a worker hear nothing from now on."""
        self._wires[index][1].held = True

    def stop_parent(self) -> None:
        """Let the parent hear nothing until :meth:`go_on`."""
        for up, _ in self._wires.values():
            up.held = True

    def go_on(self) -> None:
        """Let the parent hear what came meanwhile."""
        for up, _ in self._wires.values():
            up.held = False
            up.arrive()


async def settled() -> None:
    """Let everything arrive that is on its way."""
    for _ in range(12):
        await asyncio.sleep(0)


def admitted(decisions: list[Decision]) -> int:
    """Return how many requests were let in."""
    return sum(decision.refusal is None for decision in decisions)


async def test_limits_of_a_minute_are_exact() -> None:
    """Whichever workers the requests of a key come to."""
    service = Workers()
    workers = [service.start(index) for index in range(3)]
    limit = RateLimit(requests_per_minute=50, tokens_per_minute=1000)
    decisions = await asyncio.gather(*(workers[number % 3].admit("a", limit) for number in range(100)))
    assert 50 == admitted(decisions)
    other = await workers[0].admit("b", limit)
    assert {"49", "1000"} == {other.headers[f"x-ratelimit-remaining-{kind}"] for kind in ("requests", "tokens")}

    workers[0].leave("b", 400)
    await settled()
    assert "600" == (await workers[2].admit("b", limit)).headers["x-ratelimit-remaining-tokens"]


@given(
    steps=st.lists(st.tuples(st.sampled_from(["admit", "cancel", "leave", "die"]), st.integers(0, 2)), max_size=60),
    most=st.integers(1, 5),
)
async def test_nothing_leaks(steps: list[tuple[str, int]], most: int) -> None:
    """Requests end, give up at any moment, or die with their worker: as many as allowed run, and all is free then."""
    service = Workers()
    for index in range(3):
        service.start(index)
    limit = RateLimit(concurrent_requests=most)
    running = [0, 0, 0]
    for what, index in steps:
        client = service.clients[index]
        if what == "admit":
            decision = await client.admit("a", limit)
            assert (decision.refusal is None) == (sum(running) < most)
            running[index] += decision.refusal is None
        elif what == "cancel":
            task = asyncio.create_task(client.admit("a", limit))
            for _ in range(index):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await settled()
            # It was answered before it was cancelled.
            running[index] += not task.cancelled() and task.result().refusal is None
        elif what == "leave" and running[index]:
            client.leave("a", 0)
            running[index] -= 1
        elif what == "die":
            service.kill(index)
            service.start(index)
            running[index] = 0
        await settled()
    for index in range(3):
        service.kill(index)
        service.start(index)
    decisions = [await service.clients[number % 3].admit("a", limit) for number in range(most + 1)]
    assert most == admitted(decisions)


async def test_a_parent_that_does_not_answer(clock: Clock) -> None:
    """Requests with limits are refused after a while, which counts nothing once it goes on."""
    service = Workers()
    client = service.start(0)
    limit = RateLimit(concurrent_requests=1)
    service.stop_parent()
    asking = asyncio.create_task(client.admit("a", limit))
    await settled()
    clock.advance(module._ANSWER_SECONDS)
    with pytest.raises(ServiceOverloaded) as caught:
        await asking
    assert (503, "1") == (caught.value.status, caught.value.headers()["Retry-After"])
    service.go_on()
    await settled()
    assert [1, 0] == [admitted([await client.admit("a", limit)]) for _ in range(2)]


async def test_a_parent_that_is_gone() -> None:
    """Requests with limits are refused at once."""
    service = Workers()
    client = service.start(0)
    service.kill(0)
    await settled()
    with pytest.raises(ServiceOverloaded):
        await client.admit("a", RateLimit(concurrent_requests=1))
