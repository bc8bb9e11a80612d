"""Discovery's clockwork, against a Triton that is a few dictionaries."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref
from collections.abc import Sequence

import pytest
import structlog

from bench.fleet import Instant
from tests.clock import Clock
from triton_openai.errors import UpstreamUnavailable
from triton_openai.triton.catalog import Catalog, Snapshot
from triton_openai.triton.client import IndexEntry, ServerInfo
from triton_openai.triton.tensors import ModelConfig


class FakeClient(Instant):
    """Answers the control calls out of what a test has put into it."""

    def __init__(self, *names: str) -> None:
        self.index = [IndexEntry(name=name, version="1", state="READY") for name in names]
        self.configs = {name: ModelConfig(name=name) for name in names}
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.asked = asyncio.Event()
        self.version: str | None = None
        self.index_calls = 0
        self.config_calls = 0
        self.parallel = self.most_parallel = 0

    async def server_info(self) -> ServerInfo:
        if self.version is None:
            raise UpstreamUnavailable("It does not say.")
        return ServerInfo(name="triton", version=self.version)

    async def repository_index(self) -> Sequence[IndexEntry]:
        self.index_calls += 1
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return list(self.index)

    async def model_config(self, model: str) -> ModelConfig:
        self.config_calls += 1
        self.parallel += 1
        self.most_parallel = max(self.parallel, self.most_parallel)
        await asyncio.sleep(0)
        self.parallel -= 1
        if model not in self.configs:
            raise UpstreamUnavailable(f"no config of {model}")
        return self.configs[model]


class Changes:
    """Remembers the snapshots that were told."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    async def __call__(self, snapshot: Snapshot) -> None:
        self.seen.append(snapshot)


def catalog_of(client: FakeClient) -> tuple[Catalog, Changes]:
    """Return a catalog and what it tells."""
    changes = Changes()
    return Catalog(client, interval=0.01, changed=changes), changes


async def test_a_triton_that_starts_with_the_service() -> None:
    """A Triton that starts with the service is reported as silent only once it has answered."""
    for starts, told in ((True, []), (False, ["Triton does not answer"])):
        client = FakeClient("a")
        client.error = UpstreamUnavailable("down")
        catalog = Catalog(client, interval=0.01, changed=Changes(), starts=starts)
        with structlog.testing.capture_logs() as lines:
            await catalog.refresh()
            assert told == [line["event"] for line in lines]
            client.error = None
            await catalog.refresh()
            client.error = UpstreamUnavailable("down")
            await catalog.refresh()
        assert [*told, "Triton answers", "Triton does not answer"] == [line["event"] for line in lines]


async def test_the_first_look():
    """Before anybody has looked Triton counts as unreachable; then what is ready is there, with its config."""
    client = FakeClient("a", "b/c")
    catalog, changes = catalog_of(client)
    assert "Triton has not been asked yet." == str(catalog.snapshot.error)
    assert not catalog.first.is_set()

    await catalog.refresh()

    assert catalog.first.is_set()
    assert None is catalog.snapshot.error
    assert ["a", "b/c"] == list(catalog.snapshot.configs)
    assert [catalog.snapshot] == changes.seen


async def test_an_empty_triton_is_reachable():
    """No models are an answer, too, and it is told once."""
    catalog, changes = catalog_of(FakeClient())
    await catalog.refresh()
    await catalog.refresh()

    assert catalog.snapshot.reachable
    assert 1 == len(changes.seen)


async def test_what_triton_says_of_itself():
    """Triton's version is looked at together with the configs, and a Triton that does not tell it serves as well."""
    client = FakeClient("a")
    catalog, _ = catalog_of(client)
    await catalog.refresh()
    assert (None, ["a"]) == (catalog.snapshot.server, list(catalog.snapshot.configs))

    client.version = "2.60.0"
    await catalog.reload()
    assert ServerInfo(name="triton", version="2.60.0") == catalog.snapshot.server

    client.error = UpstreamUnavailable("gone")
    await catalog.refresh()
    assert None is catalog.snapshot.server


async def test_models_that_are_not_ready():
    """Models that are not ready wait, with the server's reason; a model of which one version is ready is ready."""
    client = FakeClient("a")
    client.index += [
        IndexEntry(name="a", version="2", state="UNAVAILABLE", reason="broken"),
        IndexEntry(name="b", state="UNAVAILABLE", reason="unloaded"),
        IndexEntry(name="c", state="LOADING"),
        IndexEntry(name="d", version="1", state="READY"),
    ]
    catalog, _ = catalog_of(client)
    await catalog.refresh()

    assert ["a"] == list(catalog.snapshot.configs)
    assert {"b": "unloaded", "c": "LOADING", "d": "no config of d"} == catalog.snapshot.waiting


async def test_changes_are_told_and_nothing_else(clock: Clock):
    """A model that comes or goes is told once; an unchanged index costs no config calls."""
    client = FakeClient("a")
    catalog, changes = catalog_of(client)
    await catalog.refresh()
    await catalog.refresh()
    assert (1, 1) == (client.config_calls, len(changes.seen))

    client.index.append(IndexEntry(name="b", version="1", state="READY"))
    client.configs["b"] = ModelConfig(name="b")
    await catalog.refresh()
    assert ["a", "b"] == list(changes.seen[-1].configs)

    del client.index[0]
    await catalog.refresh()
    assert ["b"] == list(changes.seen[-1].configs)
    assert 3 == len(changes.seen)


async def test_a_config_that_could_not_be_read_is_read_again():
    """A model that failed for a moment is not lost until the index changes."""
    client = FakeClient("a")
    config = client.configs.pop("a")
    catalog, _ = catalog_of(client)
    await catalog.refresh()
    assert {} == catalog.snapshot.configs

    client.configs["a"] = config
    await catalog.refresh()

    assert {"a": config} == catalog.snapshot.configs


async def test_a_triton_that_goes_and_comes_back():
    """A Triton that goes is known by the reason, and its return brings back what it has."""
    client = FakeClient("a")
    catalog, changes = catalog_of(client)
    await catalog.refresh()

    client.error = UpstreamUnavailable("gone")
    await catalog.refresh()
    assert client.error is catalog.snapshot.error

    client.error = None
    await catalog.refresh()
    assert ["a"] == list(catalog.snapshot.configs)
    assert ["a"] == list(changes.seen[-1].configs)


async def test_an_outage_keeps_one_snapshot():
    """However long it takes: a failed look does not keep the one before it alive."""
    client = FakeClient()
    catalog, changes = catalog_of(client)
    errors = []
    for _ in range(5):
        client.error = UpstreamUnavailable("away")
        errors.append(weakref.ref(client.error))
        await catalog.refresh()
        changes.seen.clear()
    gc.collect()

    assert 1 == sum(error() is not None for error in errors)


async def test_one_look_at_a_time():
    """Whoever wants to know while somebody looks already waits for that look."""
    client = FakeClient("a")
    client.gate = asyncio.Event()
    catalog, _ = catalog_of(client)
    waiting = [asyncio.create_task(catalog.refresh()) for _ in range(10)]
    await asyncio.sleep(0)
    client.gate.set()
    await asyncio.gather(*waiting)

    assert 1 == client.index_calls


async def test_misses_are_looked_up_seldom(clock: Clock):
    """Made-up names cost Triton at most two looks a second."""
    client = FakeClient("a")
    catalog, _ = catalog_of(client)
    for _ in range(20):
        await catalog.refresh_on_miss()

    assert 1 == client.index_calls
    clock.advance(0.5)
    await catalog.refresh_on_miss()
    assert 2 == client.index_calls


async def test_a_miss_waits_for_the_look_that_is_being_taken():
    """Two that miss the same model at the same moment learn the same, also right after the start."""
    client = FakeClient("a")
    client.gate = asyncio.Event()
    catalog, _ = catalog_of(client)
    waiting = [asyncio.create_task(catalog.refresh_on_miss()) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    client.gate.set()
    await asyncio.gather(*waiting)

    assert 1 == client.index_calls
    assert ["a"] == list(catalog.snapshot.configs)


async def test_one_that_leaves_takes_nothing_from_the_others():
    """A request that is cancelled while it waits leaves the look going for everybody else."""
    client = FakeClient("a")
    client.gate = asyncio.Event()
    catalog, _ = catalog_of(client)
    first, second = asyncio.create_task(catalog.refresh()), asyncio.create_task(catalog.refresh())
    await asyncio.sleep(0)
    first.cancel()
    client.gate.set()
    await second

    assert first.cancelled()
    assert ["a"] == list(catalog.snapshot.configs)


async def test_many_configs_are_not_all_asked_for_at_once():
    """A repository of hundreds of models does not open hundreds of connections."""
    client = FakeClient(*(f"m{number}" for number in range(200)))
    catalog, _ = catalog_of(client)
    await catalog.refresh()

    assert 200 == len(catalog.snapshot.configs)
    assert client.most_parallel <= 16


async def test_a_mistake_about_a_model_does_not_end_discovery():
    """Whatever the listener or the client raises, the next look is taken."""
    client = FakeClient("a")
    calls = 0
    twice = asyncio.Event()

    async def changed(snapshot: Snapshot) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            twice.set()
        raise KeyError("an adapter's mistake")

    catalog = Catalog(client, interval=0.001, changed=changed)
    running = asyncio.create_task(catalog.run())
    await asyncio.wait_for(catalog.first.wait(), 120)
    client.error = ValueError("a mistake of our own")
    for _ in range(2):
        client.asked.clear()
        await asyncio.wait_for(client.asked.wait(), 120)
    client.error = None
    client.index.clear()
    await asyncio.wait_for(twice.wait(), 120)
    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


async def test_closing_stops_a_look():
    """A look that hangs does not keep the service from ending."""
    client = FakeClient("a")
    client.gate = asyncio.Event()
    catalog, _ = catalog_of(client)
    waiting = asyncio.create_task(catalog.refresh())
    await asyncio.sleep(0)

    await catalog.close()

    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_another_kind_is_a_change():
    """What distinguishes two configs of a model grows with what adapters read: a listener learns of it."""
    client = FakeClient("a")
    client.configs["a"] = ModelConfig(name="a", parameters={"read_later": "x"})
    catalog, changes = catalog_of(client)
    await catalog.refresh()
    client.configs["a"].parameter("read_later")
    catalog._configs_read = -math.inf

    await catalog.refresh()

    assert 2 == len(changes.seen)
    assert changes.seen[0].digests != changes.seen[1].digests
