"""What workers share: one parent counts for all of them, and nothing stays of one that ends or does not answer."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triton_openai.access.rate_limits import Decision, RateLimit
from triton_openai.errors import ServiceOverloaded
from triton_openai.serving.workers import shared as module
from triton_openai.serving.workers.channel import Answer, ChangeGates, FromWorker, Listening, Message
from triton_openai.serving.workers.shared import SharedClient, SharedState


class Workers:
    """The parent and the workers of a service in one process; messages arrive one after the other, in later turns."""

    def __init__(self) -> None:
        self.state = SharedState()
        self.clients: dict[int, SharedClient] = {}
        self._stopped: set[int] = set()
        self._parent_hangs = False
        self._for_parent: deque[tuple[int, SharedClient, FromWorker]] = deque()

    def start(self, index: int) -> SharedClient:
        """Start the worker *index* and return its client."""
        client = SharedClient(lambda message: self._to_parent(index, client, message))
        self.clients[index] = client
        self._to_parent(index, client, Listening())
        return client

    def kill(self, index: int) -> None:
        """End a worker; what it has sent has arrived."""
        del self.clients[index]
        self.state.forget(index)

    def hang(self, index: int) -> None:
        """Let a worker hear nothing from now on."""
        self._stopped.add(index)

    def stop_parent(self) -> None:
        """Let the parent hear nothing until :meth:`go_on`."""
        self._parent_hangs = True

    def go_on(self) -> None:
        """Let the parent hear what came meanwhile."""
        self._parent_hangs = False
        while self._for_parent:
            self._parent_hears(*self._for_parent.popleft())

    def _to_parent(self, index: int, client: SharedClient, message: Message) -> None:
        assert isinstance(message, FromWorker)
        asyncio.get_running_loop().call_soon(self._arrive, index, client, message)

    def _arrive(self, index: int, client: SharedClient, message: FromWorker) -> None:
        if self._parent_hangs:
            self._for_parent.append((index, client, message))
        else:
            self._parent_hears(index, client, message)

    def _parent_hears(self, index: int, client: SharedClient, message: FromWorker) -> None:
        if self.clients.get(index) is client:
            self.state.heard(index, message, lambda answer: self._to_worker(index, client, answer))

    def _to_worker(self, index: int, client: SharedClient, message: Message) -> None:
        assert isinstance(message, Answer | ChangeGates)
        if self.clients.get(index) is client and index not in self._stopped:
            asyncio.get_running_loop().call_soon(client.heard, message)


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
            for _ in range(5):
                await asyncio.sleep(0)
            # It was answered before it was cancelled.
            running[index] += not task.cancelled() and task.result().refusal is None
        elif what == "leave" and running[index]:
            client.leave("a", 0)
            running[index] -= 1
        elif what == "die":
            service.kill(index)
            service.start(index)
            running[index] = 0
        await asyncio.sleep(0)
    for index in range(3):
        service.kill(index)
        service.start(index)
    decisions = [await service.clients[number % 3].admit("a", limit) for number in range(most + 1)]
    assert most == admitted(decisions)


async def test_a_parent_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with limits are refused after a while, which counts nothing once it goes on."""
    monkeypatch.setattr(module, "_ANSWER_SECONDS", 0.01)
    service = Workers()
    client = service.start(0)
    limit = RateLimit(concurrent_requests=1)
    service.stop_parent()
    with pytest.raises(ServiceOverloaded) as caught:
        await client.admit("a", limit)
    assert (503, "1") == (caught.value.status, caught.value.headers()["Retry-After"])
    service.go_on()
    for _ in range(5):
        await asyncio.sleep(0)
    assert [1, 0] == [admitted([await client.admit("a", limit)]) for _ in range(2)]
