"""One look at the lists of models for all processes of a service, and what happens when the one that looks ends."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable

import pytest

from tests.clock import Clock, turns
from tests.unit.serving.test_shared import Workers
from tests.unit.triton.test_catalog import FakeClient
from triton_openai.config.tree import EndpointSettings, TritonSettings
from triton_openai.errors import ModelNotFound, UpstreamUnavailable
from triton_openai.triton.catalog import Snapshot
from triton_openai.triton.client import IndexEntry, ServerInfo
from triton_openai.triton.fleet import Fleet

INTERVAL = 2.0


class Machine:
    """The workers of a service, each with a fleet, in front of the same Tritons."""

    def __init__(self, clock: Clock, *names: str) -> None:
        self.clock = clock
        self.tritons = {name: FakeClient("m") for name in names}
        self.workers = Workers()
        self.fleets: dict[int, Fleet] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    async def start(self, index: int, *names: str) -> Fleet:
        """Start a worker, which knows the Tritons *names*, by default all."""
        listed = [EndpointSettings(name=name, url=(f"http://{name}:8000",)) for name in names or self.tritons]
        settings = TritonSettings(endpoints=tuple(listed), refresh_interval=INTERVAL)
        client = self.workers.start(index)
        fleet = Fleet(settings, connect=lambda each: self.tritons[str(each.name)], lists=client)
        self.fleets[index] = fleet
        self._running[index] = asyncio.create_task(fleet.run())
        await fleet.first.wait()
        return fleet

    async def kill(self, index: int) -> None:
        """End a worker."""
        self.workers.kill(index)
        await self.stop(index)

    async def stop(self, index: int) -> None:
        """End what a worker runs."""
        fleet, running = self.fleets.pop(index), self._running.pop(index)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fleet.close()

    def looks(self) -> int:
        """Return how many lists were asked for since the last call."""
        count = sum(triton.index_calls for triton in self.tritons.values())
        for triton in self.tritons.values():
            triton.index_calls = 0
        return count

    async def pass_time(self, intervals: float = 1.0) -> None:
        """Let time pass, and everything happen that follows."""
        await self.clock.elapse(intervals * INTERVAL, steps=max(1, round(4 * intervals)))
        await turns(60)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what needs no time."""
        for _ in range(2000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("it did not happen")


@pytest.fixture
async def machine(clock: Clock) -> AsyncIterator[Machine]:
    """A machine with three Tritons and no workers yet."""
    machine = Machine(clock, "a", "b", "c")
    yield machine
    for index in list(machine.fleets):
        await machine.stop(index)


async def test_one_look_for_all_processes(machine: Machine) -> None:
    """Each list is read once in an interval, however many processes there are; a change reaches them all."""
    await machine.start(0)
    assert machine.looks() == 3
    for index in (1, 2, 3):
        await machine.start(index)
    assert machine.looks() == 0
    await machine.pass_time(4)
    assert 6 <= machine.looks() <= 15
    machine.tritons["b"].index.append(IndexEntry(name="n", version="1", state="READY"))
    machine.tritons["b"].configs["n"] = machine.tritons["b"].configs["m"]
    machine.tritons["c"].error = UpstreamUnavailable("gone", detail="refused")
    await machine.pass_time(2)
    for fleet in machine.fleets.values():
        assert list(fleet.snapshot.configs) == ["m", "n"]
        assert {name: member.snapshot.reachable for name, member in fleet.members.items()} == {
            "a": True, "b": True, "c": False,
        }  # fmt: skip
        assert fleet.leasing.lease("n").endpoint == "b"
    later = await machine.start(4)
    assert list(later.snapshot.configs) == ["m", "n"]
    error = later.members["c"].snapshot.error
    assert isinstance(error, UpstreamUnavailable)
    assert error.detail == "refused"


async def test_another_process_takes_over(machine: Machine) -> None:
    """When the one that looks ends, another one does, and a process that takes its place follows."""
    for index in range(3):
        await machine.start(index)
    await machine.kill(0)
    machine.tritons["a"].error = UpstreamUnavailable("gone")
    machine.looks()
    await machine.pass_time(2)
    assert 3 <= machine.looks() <= 9
    for fleet in machine.fleets.values():
        assert not fleet.members["a"].snapshot.reachable
    again = await machine.start(0)
    assert machine.looks() == 0
    assert not again.members["a"].snapshot.reachable
    await machine.kill(1)
    machine.tritons["a"].error = None
    await machine.pass_time(2)
    for fleet in machine.fleets.values():
        assert fleet.members["a"].snapshot.reachable


async def test_one_that_hangs_holds_nobody_up(machine: Machine) -> None:
    """While the process that looks is silent, each looks for itself; then they take its word again."""
    for index in range(3):
        await machine.start(index)
    looking = machine.fleets[0]
    assert looking._lists is not None
    # It hears and says nothing, but for what waits.
    up, _ = machine.workers._wires[0]
    up.held = True
    machine.tritons["a"].error = UpstreamUnavailable("gone")
    await machine.pass_time(6)
    for index in (1, 2):
        assert not machine.fleets[index].members["a"].snapshot.reachable
    machine.tritons["a"].error = None
    await machine.pass_time(2)
    up.held = False
    up.arrive()
    await machine.pass_time(2)
    machine.looks()
    await machine.pass_time(2)
    assert 3 <= machine.looks() <= 9
    for fleet in machine.fleets.values():
        assert fleet.members["a"].snapshot.reachable


async def test_looks_that_a_process_needs_now(machine: Machine) -> None:
    """A request that misses its model, and a change of the models, have the other process look at once."""
    for index in range(3):
        await machine.start(index)
    machine.looks()
    triton = machine.tritons["a"]
    triton.index.append(IndexEntry(name="n", version="1", state="READY"))
    triton.configs["n"] = triton.configs["m"]
    await machine.fleets[1].refresh_on_miss()
    assert machine.looks() == 3
    assert "n" in machine.fleets[1].snapshot.configs
    await machine.until(lambda: all("n" in fleet.snapshot.configs for fleet in machine.fleets.values()))
    calls = triton.config_calls
    await machine.fleets[2].reload()
    assert triton.config_calls == calls + 2
    # As after a request that was told that the model is not there.
    lease = machine.fleets[2].leasing.lease("m", at="b")
    lease.close(ModelNotFound("m"))
    assert "m" not in machine.fleets[2].members["b"].targets
    await machine.pass_time(1)
    assert "m" in machine.fleets[2].members["b"].targets


async def test_a_triton_that_only_one_process_knows(machine: Machine) -> None:
    """As when an address of a name is seen here first: whoever knows it looks, until the other process does."""
    await machine.start(0, "a", "b")
    knows = await machine.start(1)
    assert machine.looks() == 3
    assert knows.members["c"].snapshot.reachable
    machine.tritons["c"].error = UpstreamUnavailable("gone")
    await machine.pass_time(2)
    assert not knows.members["c"].snapshot.reachable


async def test_a_parent_that_does_not_answer(machine: Machine) -> None:
    """A process that cannot share looks for itself."""
    await machine.start(0)
    machine.workers.stop_parent()
    starting = asyncio.create_task(machine.start(1))
    await machine.until(lambda: 1 in machine.workers.clients)
    up, _ = machine.workers._wires[1]
    up.held = True
    await machine.pass_time(4)
    assert machine.fleets[1].snapshot.reachable
    await starting


def test_what_is_sent() -> None:
    """A snapshot arrives as it was, with its error and what is known of its addresses."""
    server = ServerInfo(name="triton", version="2.51.0", grpc_answers=False)
    for error in (None, UpstreamUnavailable("Away.", detail="refused", retry_after=2.0), ModelNotFound("m")):
        sent = Snapshot(server=server, error=error, digests={"m": b"1"})
        got = pickle.loads(pickle.dumps(sent))
        assert (got.server, got.digests) == (server, sent.digests)
        assert type(got.error) is type(error)
        assert str(got.error) == str(error) or isinstance(error, ModelNotFound)
        assert getattr(got.error, "reason", None) == getattr(error, "reason", None)
