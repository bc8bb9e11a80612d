"""The stores, each against a real server where its program is installed."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing, suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from aiohttp import web
from structlog.testing import capture_logs

from tests.cases import every_case
from tests.clock import Clock, turns
from tests.store_fixture import Server
from triton_openai.app import SERVICE, create_app
from triton_openai.config.tree import BatchesSettings, FilesSettings, ResponsesSettings, Settings, TritonSettings
from triton_openai.errors import ConfigurationError, StoreUnavailable
from triton_openai.storage import ENTRY_POINT_GROUP, batch_tables, open_batch_store, open_store
from triton_openai.storage.batch_records import Batch, Line
from triton_openai.storage.sql import Steps
from triton_openai.storage.sqlite import SqliteStore
from triton_openai.storage.store import Chain, EntryFull, Page, Row, RowKey, Store

# Seconds of the service, before a test changes them.
_LIMIT = batch_tables.TIMEOUT
PAIR = [Row("list", "a", b"1"), Row("list", "b", b"\0\xff")]


def opened(url: str, **settings: Any) -> Store:
    """Return the store at *url*."""
    store = open_store(ResponsesSettings(store=url, **settings))
    assert store is not None
    return store


@pytest.fixture
async def stores(store_url: str) -> AsyncIterator[tuple[Store, Store]]:
    """The same store, as two processes have it."""
    first = opened(store_url)
    second = first if store_url == "memory" else opened(store_url)
    yield first, second
    for store in {first, second}:
        await store.close()


async def page(store: Store, key: str, name: str = "list", **query: Any) -> Page:
    """Return a page."""
    found = await store.page(key, name, **{"limit": 10, "max_size": 1000, **query})
    assert found is not None
    return found


async def chain(store: Store, key: str, *names: str, owner: str = "me", **bounds: int) -> Chain:
    """Return a chain."""
    return await store.chain(key, owner, names, **{"max_links": 10, **bounds})


async def data(store: Store, key: str, *names: str) -> list[bytes]:
    """Return what the lists *names* of an entry hold."""
    return list((await store.chain(key, "me", names, max_links=1)).rows)


async def test_heads_and_versions(stores: tuple[Store, Store]) -> None:
    """Only a writer who knows the current version writes; both sides see the same."""
    first, second = stores
    assert await first.get("k") is None
    made = await asyncio.gather(*(store.put("k", "me", b"1", 0, rows=PAIR, parent="p") for store in stores))
    assert [False, True] == sorted(made)
    found = await second.get("k")
    assert found is not None
    assert ("me", b"1", 1, "p", 4, 2) == (
        *(found.owner, found.head, found.version),
        *(found.parent, found.size, found.rows),
    )
    changed = await asyncio.gather(
        *(store.put("k", "me", b"\0\xff0", 1, rows=[Row("more", "c", b"3")]) for store in stores)
    )
    assert [False, True] == sorted(changed)
    found = await first.get("k")
    assert found is not None
    assert (b"\0\xff0", 2, "p", 7, 3) == (found.head, found.version, found.parent, found.size, found.rows)
    assert not await first.put("none", "me", b"1", 3)
    assert not await first.put("k", "you", b"1", 2)
    assert {"me": 7} == await first.owners()
    assert [False, True] == sorted(await asyncio.gather(first.delete("k"), second.delete("k")))
    assert await first.get("k") is None
    assert [] == await data(first, "k", "list", "more")


async def test_rows(stores: tuple[Store, Store]) -> None:
    """A row is added once, whoever adds it how often; pages have an order, an end and a bound of their bytes."""
    first, second = stores
    await first.put("k", "me", b"h", 0)
    assert not await first.append("none", "me", PAIR)
    assert not await first.append("k", "you", PAIR)
    assert all(await asyncio.gather(*(store.append("k", "me", [*PAIR, *PAIR]) for store in stores)))
    # The name of one list begins with that of another.
    await second.append("k", "me", [Row("lists", "a", b"other"), Row("lists", "z", b"other")])
    await second.append("k", "me", [Row("list", "c:é '", b"333"), Row("list", "d", b"4444")])
    rows = [*PAIR, Row("list", "c:é '", b"333"), Row("list", "d", b"4444")]
    assert Page(rows, False) == await page(first, "k")
    assert Page(rows[::-1], False) == await page(first, "k", reverse=True)
    assert Page(rows[:2], True) == await page(first, "k", limit=2)
    assert Page(rows[2:], False) == await page(first, "k", after="b")
    assert Page(rows[1::-1], False) == await page(first, "k", after="c:é '", reverse=True)
    assert Page(rows[2:3], True) == await page(first, "k", after="b", max_size=6)
    assert Page(rows[3:], False) == await page(first, "k", after="c:é '", max_size=0)
    assert Page([], False) == await page(first, "k", after="d")
    for wrong in ("none", "z"):
        assert await first.page("k", "list", after=wrong, limit=1, max_size=9) is None
    assert Page([], False) == await page(first, "none")

    found = await first.get("k")
    assert found is not None
    assert (16, 5) == (found.size, found.rows)
    assert [True, False] == [await second.delete_row("k", "a"), await second.delete_row("k", "a")]
    assert [b"\0\xff", b"333", b"4444"] == await data(first, "k", "list")
    await first.append("k", "me", PAIR[:1])
    assert [b"\0\xff", b"333", b"4444", b"1", b"other"] == await data(first, "k", "list", "lists")
    assert {"me": 16} == await first.owners()


async def test_the_bounds_of_an_entry(stores: tuple[Store, Store]) -> None:
    """What would exceed one is not added, not in part either; what is there already takes no room."""
    first, second = stores
    await first.put("k", "me", b"", 0, rows=PAIR)
    each: tuple[dict[str, Any], ...] = ({"max_rows": 3}, {"max_size": 9})
    for bounds in each:
        with pytest.raises(EntryFull):
            await second.append("k", "me", [Row("list", "x", b"1234"), Row("list", "y", b"123")], **bounds)
        assert await second.append("k", "me", [*PAIR, PAIR[0]], **bounds)
    assert PAIR == list((await page(first, "k")).rows)
    assert await second.append(
        "k", "me", [Row("list", "x", b"1234"), Row("list", "y", b"123")], max_rows=4, max_size=10
    )
    assert {"me": 10} == await first.owners()


async def test_rows_of_the_holder(stores: tuple[Store, Store]) -> None:
    """Who adds rows under a lease has it for longer; who has lost it adds nothing."""
    first, second = stores
    assert not await first.append("k", "me", PAIR, lease=("one", 100))
    await first.put("k", "me", b"head", 0, lease=("one", 1))
    assert await first.append("k", "me", PAIR[:1], lease=("one", 100))
    before = time.time()
    assert await first.append("k", "me", (), lease=("one", 200))
    found = await second.get("k")
    assert found is not None
    assert before + 190 < found.until < time.time() + 210
    assert await second.put("k", "me", b"other", 1, lease=("", 0))
    found = await second.get("k")
    assert found is not None
    assert found.until < time.time() - 3600
    for holder in ("one", "two"):
        assert not await first.append("k", "me", PAIR[1:], lease=(holder, 100))
    assert ["a"] == [row.id for row in (await page(second, "k")).rows]


async def test_large_rows(stores: tuple[Store, Store]) -> None:
    """Large rows come whole, in their order, however many megabytes they are together."""
    first, second = stores
    rows = [Row("list", f"r{number}", bytes([number]) * 1_500_000) for number in range(8)]
    await first.put("k", "me", b"h", 0, rows=rows[:4])
    await first.put("l", "me", b"h", 0, rows=rows[4:])
    assert [row.data for row in rows] == [*await data(second, "k", "list"), *await data(second, "l", "list")]
    places = [RowKey("kl"[number // 4], f"r{number}") for number in range(8)]
    assert dict(zip(places, (row.data for row in rows), strict=True)) == await second.fetch("me", places)


async def test_leases(stores: tuple[Store, Store]) -> None:
    """One holder at a time; who has lost a lease cannot renew it."""
    first, second = stores
    assert not await first.claim("k", "me", "one", 100)
    await first.put("k", "me", b"head", 0, lease=("one", 100))
    assert not await second.claim("k", "me", "two", 100)
    before = time.time()
    assert await first.claim("k", "me", "one", 100, renew=True)
    assert not await first.claim("k", "you", "one", 100, renew=True)
    found = await second.get("k")
    assert found is not None
    assert before + 50 < found.until < time.time() + 150
    assert not await second.claim("k", "me", "two", 0)
    assert await first.claim("k", "me", "one", 0)
    assert not await first.claim("k", "me", "one", 100, renew=True)
    claimed = await asyncio.gather(first.claim("k", "me", "one", 100), second.claim("k", "me", "two", 100))
    assert [False, True] == sorted(claimed)
    assert await first.put("k", "me", b"other", 1)
    assert await first.claim("k", "me", ("one", "two")[claimed[1]], 100, renew=True)
    assert await first.put("k", "me", b"other", 2, lease=("", 0))
    assert not await first.claim("k", "me", ("one", "two")[claimed[1]], 100, renew=True)
    assert await first.claim("k", "me", "three", 100)


async def test_chains(stores: tuple[Store, Store]) -> None:
    """The rows of all come with one call, or their number and size; what belongs to others is not found."""
    first, second = stores
    for number in range(4):
        rows = [Row("out", "o", b"o%d" % number), Row("in", "i", b"i%d" % number), Row("events", "e", b"event")]
        await first.put(
            f"k{number}", "me", b"h", 0, rows=rows, parent=f"k{number - 1}", lease=("x", 100 * (number == 2))
        )
    found = await chain(second, "k3", "in", "out")
    assert [("k3", True), ("k2", True), ("k1", True), ("k0", True), ("k-1", False)] == [
        (link.key, link.exists) for link in found.links
    ]
    assert [b"%s%d" % (kind, number) for number in range(4) for kind in (b"i", b"o")] == list(found.rows)
    assert (8, 16) == (found.length, found.size)
    assert [False, True, False] == [link.until > time.time() for link in found.links[:3]]
    # By any clock: one that is behind, here or in the store, does not bring back a lease that was ended.
    assert all(link.until < time.time() - 3600 for link in (found.links[0], found.links[2]))
    # What is too much is counted, and not read.
    for max_rows, max_size in ((7, 16), (8, 15)):
        many = await chain(first, "k3", "in", "out", max_rows=max_rows, max_size=max_size)
        assert ([], 8, 16, 5) == (list(many.rows), many.length, many.size, len(many.links))
    assert found.rows == (await chain(first, "k3", "out", "in", max_rows=8, max_size=16)).rows
    found = await chain(first, "k3", "in", max_links=2)
    assert (["k3", "k2"], [b"i2", b"i3"]) == ([link.key for link in found.links], list(found.rows))
    found = await chain(first, "k3", "in", owner="you")
    assert ([("k3", False)], [], 0, 0) == ([link[:2] for link in found.links], list(found.rows), *found[2:])

    # One that is taken out of the middle, the first one, and two that go on from the same.
    await first.put("other", "me", b"h", 0, parent="k2")
    for gone, left in (("k2", ["k3", "k1", "k0", "k-1"]), ("k1", ["k3", "k0", "k-1"])):
        assert await second.delete(gone, bridged=True)
        for key in ("k3", "other"):
            assert [key, *left[1:]] == [link.key for link in (await chain(first, key, "in")).links]
    assert await first.delete("k3")
    await first.put("k3", "me", b"h", 0, parent="k1")
    await first.put("k1", "me", b"h", 0)
    assert await first.delete("k1", bridged=True)
    assert ["k3"] == [link.key for link in (await chain(first, "k3", "in")).links]
    # One that was being made when they were deleted.
    await first.put("late", "me", b"h", 0, parent="k2", ancestors=["k1", "k0", "k-1"])
    assert ["late", "k0", "k-1"] == [link.key for link in (await chain(second, "late", "in")).links]
    await first.put("lost", "me", b"h", 0, parent="k2", ancestors=["k1"])
    assert [("lost", True), ("k2", False)] == [link[:2] for link in (await chain(second, "lost", "in")).links]
    # Without a bridge there is a gap.
    assert await first.delete("k0")
    found = await chain(second, "other", "in")
    assert [("other", True), ("k0", False)] == [(link.key, link.exists) for link in found.links]


async def test_entries_in_order(stores: tuple[Store, Store]) -> None:
    """A store lists entries of an owner with a prefix, in the order of their keys, from any of them on."""
    first, second = stores
    keys = [f"a-{number:04x}" for number in range(9, 21)]
    for number, key in enumerate(reversed(keys)):
        assert await first.put(key, "me", b"%d" % number, 0)
    for key, owner in (("a-0000", "you"), ("b-0000", "me"), ("resp_1", "me"), ("conv_1", "me")):
        assert await first.put(key, owner, b"h", 0)

    async def found(**query: Any) -> list[str]:
        options = {"after": None, "limit": 100, "reverse": False, **query}
        return [key for key, _ in await second.entries("me", "a-", **options)]

    assert keys == await found()
    assert keys[::-1] == await found(reverse=True)
    assert keys[3:5] == await found(after=keys[2], limit=2)
    assert keys[1::-1] == await found(after=keys[2], limit=5, reverse=True)
    await first.delete(keys[2])
    assert keys[3:] == await found(after=keys[2])
    assert [(keys[0], b"11")] == list(await first.entries("me", "a-", after=None, limit=1, reverse=False))


async def test_rows_at_places(stores: tuple[Store, Store]) -> None:
    """Rows are found by their places, and no others'."""
    first, second = stores
    for number in range(2):
        await first.put(f"k{number}", "me", b"h", 0, rows=[Row("in", "i", b"i%d" % number), Row("out", "o", b"o1")])
    places = [RowKey("k0", "i"), RowKey("k1", "o"), RowKey("k1", "none"), RowKey("none", "i"), RowKey("k1", "é '\"")]
    assert {places[0]: 2, places[1]: 2} == await first.sizes("me", places)
    assert {places[0]: b"i0", places[1]: b"o1"} == await second.fetch("me", places)
    assert {} == await first.sizes("you", places)
    assert {} == await first.fetch("me", [])


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_the_share_of_an_owner(kind: str, request: pytest.FixtureRequest) -> None:
    """What an owner used longest ago goes, and nothing of another's: who has most together with all loses first."""
    url = request.getfixturevalue(kind).url()
    store = opened(url)
    for key in ("a", "b", "c", "d"):
        await store.put(key, "me", bytes(1000), 0, rows=[Row("list", "r", bytes(500))])
    await store.put("e", "you", bytes(1000), 0)
    await store.claim("a", "me", "x", 1)
    await store.sweep()
    assert {"me": 6000, "you": 1000} == await store.owners()
    share = opened(url, max_size_per_key=4000)
    await share.sweep()
    assert {"me": 3000, "you": 1000} == await store.owners()
    assert [True, False, False, True, True] == [await store.get(key) is not None for key in "abcde"]
    whole = opened(url, max_size=3000)
    await whole.sweep()
    assert [True, False, True] == [await store.get(key) is not None for key in "ade"]
    assert [] == await data(store, "d", "list")
    for each in (store, share, whole):
        await each.close()


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_age(kind: str, request: pytest.FixtureRequest) -> None:
    """What is too old is not found, and is dropped."""
    url = request.getfixturevalue(kind).url()
    store, later = opened(url), opened(url, max_age=1e-12)
    await store.put("k", "me", b"1", 0, rows=PAIR)
    assert await later.get("k") is None
    assert {} == await later.sizes("me", [RowKey("k", "a")])
    assert [False] == [link.exists for link in (await chain(later, "k", "list")).links]
    await later.sweep()
    assert [] == await data(store, "k", "list")
    assert 0 == sum((await store.owners()).values())
    await store.close()
    await later.close()


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_a_store_that_hangs(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first call that waits, none does until the store answers; what was given up is not done later."""
    server: Server = request.getfixturevalue(kind)
    monkeypatch.setattr(Store, "probe_seconds", 0.01)
    store = opened(server.url())
    await store.put("k", "me", b"head", 0)
    await store.sweep()
    writer: sqlite3.Connection | None = None
    if kind == "file":
        writer = sqlite3.connect(tmp_path / "state" / "file", isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
    else:
        server.freeze()
    try:
        with capture_logs() as logs:
            with monkeypatch.context() as patch:
                patch.setattr(Store, "timeout", 0.2)
                for _ in range(20):
                    with pytest.raises(StoreUnavailable) as refused:
                        await store.append("k", "me", PAIR)
                    assert refused.value.retry_after
            assert not store.available
            if writer is None:
                server.thaw()
            else:
                writer.execute("COMMIT")
                writer.close()
            assert store._probing is not None
            await store._probing
    finally:
        if writer is None:
            server.thaw()
    assert ["warning", "info"] == [line["log_level"] for line in logs]
    assert Page([], False) == await page(store, "k")
    assert await store.append("k", "me", PAIR)
    assert PAIR == list((await page(store, "k")).rows)
    await store.close()


async def test_growth_has_a_bound() -> None:
    """Who writes faster than is dropped is refused for a moment; others are not."""
    store = opened("memory", max_size=40_000, max_size_per_key=10_000)
    with pytest.raises(StoreUnavailable, match="cannot be used"):
        await store.put("k", "me", bytes(5001), 0)
    await store.put("other", "you", bytes(5000), 0)
    await store.sweep()
    assert {"you": 5000} == await store.owners()
    await store.put("k", "me", bytes(1000), 0)
    await store.close()


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_writing_goes_on_after_a_failure(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who only writes, and was refused since nothing could be dropped, is not refused for ever."""
    store = opened(request.getfixturevalue(kind).url(), max_size_per_key=10_000)
    await store.put("k", "me", b"head", 0)
    await store.sweep()

    async def fail(_: Store) -> None:
        raise StoreUnavailable("It cannot be used.")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "owners", fail)
        with suppress(StoreUnavailable):
            for number in range(10):
                await store.put(f"k{number}", "me", bytes(600), 0)
        await store.sweep()
    with pytest.raises(StoreUnavailable):
        await store.put("new", "me", bytes(600), 0)
    assert store._sweeping is not None
    await store._sweeping
    assert await store.put("new", "me", bytes(600), 0)
    await store.close()


async def test_many_more_than_may_be_kept(tmp_path: Path) -> None:
    """The first write does not wait for what is dropped, which goes on while others read and write."""
    path = tmp_path / "file"
    store = opened(f"sqlite:{path}")
    await store.put("k", "me", bytes(100), 0)
    await store.close()
    connection = sqlite3.connect(path)
    connection.executemany(
        "INSERT INTO triton_openai_entry SELECT 'k' || ?, owner, parent, version, used - 10, holder, until, size, rows,"
        " next, head FROM triton_openai_entry WHERE key = 'k'",
        [(number,) for number in range(5000)],
    )
    connection.commit()
    connection.close()
    store = opened(f"sqlite:{path}", max_size=1000)
    await store.get("k")
    assert await store.put("new", "me", b"", 0)
    assert 400_000 < sum((await store.owners()).values())
    await store.sweep()
    assert 1000 >= sum((await store.owners()).values())
    assert None not in (await store.get("k"), await store.get("new"))
    await store.close()


async def test_a_file_is_kept_and_is_private(tmp_path: Path) -> None:
    """What was written is there after a restart, and nobody else can read it; a newer schema is refused."""
    path = tmp_path / "a" / "b"
    for number in range(2):
        store = opened(f"sqlite:{path}")
        assert bool(number) == (await store.get("k") is not None)
        await store.put("k", "me", b"x", number)
        await store.close()
    assert 0o600 == path.stat().st_mode & 0o777
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    store = opened(f"sqlite:{path}")
    with pytest.raises(ConfigurationError):
        await store.get("k")
    await store.close()
    (tmp_path / "folder").mkdir()
    broken = opened(f"sqlite:{tmp_path / 'folder'}")
    with pytest.raises(StoreUnavailable):
        await broken.get("k")
    await broken.close()


def _damage_head(path: Path, **_: str) -> None:
    path.write_bytes(b"This is no database. " * 1000)


def _damage_pages(path: Path, **_: str) -> None:
    data = bytearray(path.read_bytes())
    # All behind the page with the schema.
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(data)


def _cut(path: Path, **_: str) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _run_statement(statement: str) -> Callable[..., None]:
    def run(path: Path, **names: str) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute(statement.format(**names))

    return run


@every_case(
    "change, said",
    [
        (_damage_head, "damaged"),
        (_damage_pages, "damaged"),
        (_cut, "damaged"),
        (_run_statement("PRAGMA user_version = 99"), "newer version"),
        (_run_statement("DROP TABLE {table}"), "no such table"),
        (_run_statement("ALTER TABLE {table} RENAME COLUMN {column} TO other"), "no such column"),
    ],
)
async def test_a_file_that_cannot_be_used(tmp_path_factory: pytest.TempPathFactory, change: Any, said: str) -> None:
    """A database that is damaged, of a newer release, or of something else, ends the start with a sentence."""
    for kind, table, column in (
        ("responses", "triton_openai_row", "data"),
        ("batches", "line", "prefix"),
        ("batches", "line", "running"),
        ("batches", "line", "max_group"),
        ("batches", "line", "triton_deaths"),
        ("batches", "quarantine", "holder"),
    ):
        path = tmp_path_factory.mktemp("store") / "database"
        store = opened(f"sqlite:{path}") if kind == "responses" else open_batch_store(f"sqlite:{path}")[0]
        # No file yet.
        await store.verify()
        assert not path.exists()
        if isinstance(store, Store):
            await store.put("k", "me", bytes(100_000), 0)
        else:
            await store.batches.add(batch_of("batch_1"), max_open=9, max_total=10**9)
        await store.verify()
        await store.close()
        change(path, table=table, column=column)
        again = opened(f"sqlite:{path}") if kind == "responses" else open_batch_store(f"sqlite:{path}")[0]
        with pytest.raises(ConfigurationError, match=said):
            await again.verify()
        await again.close()


@every_case("kind", ["responses", "batches"])
async def test_a_service_does_not_start_with_half_of_its_stores(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    """With either database damaged, the service does not start, and says which file it is."""
    folder = tmp_path_factory.mktemp("state")
    _damage_head(folder / kind)
    settings = Settings(
        triton=TritonSettings(url=("http://127.0.0.1:1",)),
        responses=ResponsesSettings(store=f"sqlite:{folder / 'responses'}"),
        files=FilesSettings(store=f"dir:{folder / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{folder / 'batches'}"),
    )
    app = create_app(settings)
    runner = web.AppRunner(app)
    with pytest.raises(ConfigurationError, match=f"{folder / kind} is damaged"):
        await runner.setup()
    await runner.cleanup()
    # It may look at the store of responses, and would open it again.
    await app[SERVICE].background.close()
    await app[SERVICE].responses.close()
    files = app[SERVICE].files
    assert files is not None
    await files.store.close()


@every_case(
    "statement, said",
    [
        ("INSERT INTO {schema}triton_openai_schema VALUES (99)", "newer version"),
        ("DROP TABLE {schema}{table}", "does not exist"),
        ("ALTER TABLE {schema}{table} RENAME COLUMN {column} TO other", "does not exist"),
    ],
)
async def test_a_postgresql_that_cannot_be_used(postgresql: Server, statement: str, said: str) -> None:
    """The same holds for PostgreSQL."""
    import asyncpg

    for kind, schema, table, column in (
        ("responses", "", "triton_openai_row", "data"),
        ("batches", "openai_batches.", "line", "prefix"),
        ("batches", "openai_batches.", "quarantine", "holder"),
    ):
        url = postgresql.url()
        store = opened(url) if kind == "responses" else open_batch_store(url)[0]
        await store.verify()
        await store.close()
        connection = await asyncpg.connect(url)
        await connection.execute(statement.format(schema=schema, table=table, column=column))
        await connection.close()
        again = opened(url) if kind == "responses" else open_batch_store(url)[0]
        with pytest.raises(ConfigurationError, match=said):
            await again.verify()
        await again.close()


async def test_a_pooler_in_transaction_mode(pgbouncer: Callable[[], str]) -> None:
    """Behind PgBouncer, which gives a session to each transaction, entries and batches are kept as without it."""
    url = pgbouncer()
    stores = [opened(url) for _ in range(2)]
    await asyncio.gather(*(store.put(f"k{place}", "me", b"head", 0) for place, store in enumerate(stores * 10)))
    await asyncio.gather(
        *(store.append("k0", "me", [Row("list", f"{place}", b"x")]) for place, store in enumerate(stores))
    )
    read = await asyncio.gather(*(store.get("k0") for store in stores * 10))
    assert {2} == {entry.rows for entry in read if entry is not None}
    for store in stores:
        await store.verify()
        await store.close()
    batches = [open_batch_store(url)[0] for _ in range(2)]
    made = [batch_of(f"batch_{number}") for number in range(12)]
    added = await asyncio.gather(
        *(batches[place % 2].batches.add(batch, max_open=99, max_total=10**9) for place, batch in enumerate(made))
    )
    assert ["added"] * 12 == added
    now = time.time()
    claimed = await asyncio.gather(
        *(batches[place % 2].leases.claim(f"holder-{place}", 60.0, now=now) for place in range(12))
    )
    assert 12 == len({batch.id for batch in claimed if batch is not None})
    first = claimed[0]
    assert first is not None
    await batches[0].lines.add(first, [Line(number, 0, 1, "m", 0) for number in range(300)])
    assert 300 == len(await batches[1].lines.unfinished(first, -1, 1000))
    for batch_store in batches:
        await batch_store.verify()
        await batch_store.close()


def batch_of(batch_id: str) -> Batch:
    """Return a batch whose input is its own."""
    return Batch(
        id=batch_id, owner="me", kind="openai", endpoint="/v1/completions", input=batch_id, created=1.0, window="24h",
        expires=2.0,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_a_batch_store_that_hangs(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client asks of a frozen database, or of a file that another process has, fails after five seconds."""
    monkeypatch.setattr(batch_tables, "TIMEOUT", _LIMIT)
    server: Server = request.getfixturevalue(kind)
    batches = open_batch_store(server.url())[0]
    assert "added" == await batches.batches.add(batch_of("batch_1"), max_open=9, max_total=10**9)
    writer: sqlite3.Connection | None = None
    if kind == "file":
        writer = sqlite3.connect(tmp_path / "state" / "file", isolation_level=None)
        writer.execute("BEGIN IMMEDIATE")
    else:
        server.freeze()
    try:
        waiting = asyncio.create_task(batches.batches.add(batch_of("batch_2"), max_open=9, max_total=10**9))
        # Its time begins with its first turn.
        await turns()
        await clock.elapse(4.0)
        assert not waiting.done()
        await clock.elapse(2.0)
        with pytest.raises(StoreUnavailable):
            await waiting
    finally:
        if writer is None:
            server.thaw()
        else:
            writer.execute("COMMIT")
            writer.close()
    assert await batches.batches.find("batch_1", "me", "openai") is not None
    assert await batches.batches.find("batch_2", "me", "openai") is None
    await batches.close()


async def test_a_migration_may_take_longer_than_an_operation(postgresql: Server) -> None:
    """Operations fail in their time, the migration continues without them, and it runs once."""
    import asyncpg

    from triton_openai.storage.postgresql import PostgresDatabase

    migrations: list[int] = []

    def lacking(version: int) -> Sequence[tuple[int, Sequence[str]]]:
        migrations.append(version)
        return [(1, ("CREATE TABLE slow (id TEXT)",))]

    def count() -> Steps[int]:
        rows = yield ("SELECT COUNT(*) FROM slow",)
        return int(rows[0][0])

    url = postgresql.url()
    blocking = await asyncpg.connect(url)
    # As another process that migrates.
    await blocking.execute("SELECT pg_advisory_lock(7461834517)")
    database = PostgresDatabase(url, lacking)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await database.run(count(), timeout=0.05)
    assert database._connecting is not None
    assert not database._connecting.done()
    await blocking.close()
    assert 0 == await database.run(count(), timeout=120)
    assert [0] == migrations
    await database.close()


async def test_a_migration_of_a_server_that_hangs(postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up when the server accepts no connection any more, and runs again when it does."""
    import asyncpg

    from triton_openai.storage import postgresql as module

    monkeypatch.setattr(module, "_CHECK_SECONDS", 0.01)
    # A check that has begun before the server hangs keeps this limit.
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 10.0)
    url = postgresql.url()
    blocking = await asyncpg.connect(url)
    await blocking.execute("SELECT pg_advisory_lock(7461834517)")
    database = module.PostgresDatabase(url, lambda version: [])
    migrating = await migrating_of(database, blocking)
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 0.1)
    with postgresql.frozen():
        _, running = await asyncio.wait([migrating], timeout=120)
        assert not running
        assert isinstance(migrating.exception(), asyncpg.InterfaceError)
    await blocking.close()
    monkeypatch.setattr(module, "_CONNECT_SECONDS", 120)
    await database.run(nothing(), timeout=120)
    await database.close()


async def test_a_service_that_ends_during_a_migration(postgresql: Server) -> None:
    """The end of the service stops the migration, which leaves nothing behind."""
    import asyncpg

    from triton_openai.storage.postgresql import PostgresDatabase

    url = postgresql.url()
    blocking = await asyncpg.connect(url)
    await blocking.execute("SELECT pg_advisory_lock(7461834517)")
    database = PostgresDatabase(url, lambda version: [(1, ("CREATE TABLE slow (id TEXT)",))])
    await migrating_of(database, blocking)
    await database.close()
    await blocking.execute("SELECT pg_advisory_unlock(7461834517)")
    assert await blocking.fetchval("SELECT to_regclass('slow')") is None
    await blocking.close()


@pytest.mark.parametrize("migrates", [False, True])
async def test_a_service_that_ends_while_the_server_hangs(
    postgresql: Server, monkeypatch: pytest.MonkeyPatch, migrates: bool
) -> None:
    """Neither an idle connection nor a migration keeps the service from its end."""
    import asyncpg

    from triton_openai.storage import postgresql as module

    url = postgresql.url()
    blocking = await asyncpg.connect(url)
    database = module.PostgresDatabase(url, lambda version: [])
    if migrates:
        await blocking.execute("SELECT pg_advisory_lock(7461834517)")
        await migrating_of(database, blocking)
    else:
        await database.run(nothing(), timeout=120)
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    with postgresql.frozen():
        async with asyncio.timeout(120):
            await database.close()
        assert database._connecting is not None
        assert database._connecting.done()
    await blocking.close()


async def test_a_listener_that_cannot_connect(postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever error of the driver it is, the one who listens gets an error of the database."""
    import asyncpg

    from triton_openai.storage.postgresql import PostgresDatabase

    database = PostgresDatabase(postgresql.url(), lambda version: [])
    await database.run(nothing(), timeout=60)
    for kind in (asyncpg.CannotConnectNowError, asyncpg.InterfaceError, asyncpg.ProtocolError, TimeoutError, OSError):

        async def connect(*_: Any, kind: type[Exception] = kind, **__: Any) -> None:
            raise kind("no")

        with monkeypatch.context() as patch:
            patch.setattr(asyncpg, "connect", connect)
            with pytest.raises(OSError, match="no"):
                await database.listen("changes", lambda: None)
    await database.close()


async def migrating_of(database: Any, blocking: Any) -> asyncio.Task[Any]:
    """Let a call begin the migration and give up; return its task, once it waits for the lock of *blocking*."""
    with pytest.raises(TimeoutError):
        await database.run(nothing(), timeout=0.05)
    waiting = "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    while not await blocking.fetchval(waiting):  # noqa: ASYNC110 - nothing notifies of it
        await asyncio.sleep(0.01)
    migrating: asyncio.Task[Any] = database._connecting
    assert not migrating.done()
    return migrating


def nothing() -> Steps[None]:
    """Ask the database for nothing."""
    yield ("SELECT 1",)


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_a_store_that_was_unavailable(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written takes no room: whoever tried has all of it when the store answers again."""
    server: Server = request.getfixturevalue(kind)
    store = opened(server.url(), max_size=10_000)
    await store.put("k", "me", b"", 0)
    await store.sweep()
    await store.sweep()
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "available", False)
        for _ in range(9):
            with pytest.raises(StoreUnavailable):
                await store.put("new", "me", bytes(1000), 0)
    assert 0 == store._written.total()
    assert await store.put("new", "me", bytes(5000), 0)
    await store.close()


async def test_stores_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheme of the URL names one; what is no store, or cannot be loaded, ends the start with a sentence."""
    values = {"mine": f"{__name__}:Mine", "not": "json:loads", "gone": "nowhere.at.all:Store", "no": "json:Nothing"}
    points = [EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in values.items()]
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Mine.__module__])
    monkeypatch.setattr("triton_openai.storage.entry_points", lambda group: points)
    assert isinstance(opened("mine://somewhere"), Mine)
    for url, said in (
        ("not://x", "json:loads is no subclass of triton_openai.storage.store.Store"),
        ("gone://x", "'gone' cannot be loaded: No module named 'nowhere'"),
        ("no://x", "'no' cannot be loaded: module 'json' has no attribute 'Nothing'"),
        ("mysql://x", "there is no store 'mysql'. Known stores: none, memory, sqlite, gone, mine, no, not"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            opened(url)


class Mine(SqliteStore):
    """A store of another package."""

    def __init__(self, url: str, settings: ResponsesSettings) -> None:
        assert "mine://somewhere" == url
        super().__init__(None, settings)


async def test_a_driver_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says which extra has it."""
    monkeypatch.setitem(sys.modules, "asyncpg", None)
    monkeypatch.delitem(sys.modules, "triton_openai.storage.postgresql", raising=False)
    with pytest.raises(ConfigurationError, match="pip install 'triton-openai\\[postgresql\\]'"):
        opened("postgres://x")


@pytest.mark.parametrize("url", ["redis://:secret@host:6379/0", "rediss://host", "unix:///run/redis.sock"])
def test_a_store_in_redis(url: str) -> None:
    """The error names what to use in place of the store that earlier releases had, and no password."""
    with pytest.raises(ConfigurationError, match="Use sqlite:PATH for one machine, or postgresql://") as raised:
        opened(url)
    assert "secret" not in str(raised.value)


async def test_the_default_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default store is a file in the state folder, or memory where there can be none."""
    for folder in (tmp_path, Path("/proc/nowhere")):
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        store = opened("sqlite")
        assert await store.put("k", "me", b"v", 0)
        assert await store.get("k") is not None
        await store.close()
    assert (tmp_path / "triton-openai" / "responses.sqlite").exists()


async def test_a_file_that_is_deleted(tmp_path: Path) -> None:
    """What was in it is gone; what is written from then on is in a new file, which other processes see."""
    first, second = opened(f"sqlite:{tmp_path / 'file'}"), opened(f"sqlite:{tmp_path / 'file'}")
    await first.put("a", "me", b"1", 0)
    for name in ("file", "file-wal", "file-shm"):
        (tmp_path / name).unlink()
    assert await first.get("a") is None
    assert await first.put("b", "me", b"2", 0)
    assert await second.get("b") is not None
    await first.close()
    await second.close()


@pytest.mark.parametrize("fails", [False, True])
async def test_a_driver_that_takes_a_cancellation_for_its_own(fails: bool) -> None:
    """Whoever asked for it does not wait for ever, as for the renewal of a lease."""
    store = opened("memory")

    async def work() -> None:
        async with store._operation():
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if fails:
                    raise OSError("lost") from None

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=120)
    assert task.cancelled()
    await store.close()


async def test_a_driver_that_loses_its_way(postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is given up in the middle is a failure of the database, also to who knows no driver."""
    import asyncpg

    from triton_openai.storage.postgresql import PostgresDatabase

    database = PostgresDatabase(postgresql.url(), lambda version: [])
    lost = asyncpg.InternalClientError("cannot switch to state 15; another operation (2) is in progress")
    monkeypatch.setattr("triton_openai.storage.postgresql._execute", AsyncMock(side_effect=lost))
    with pytest.raises(OSError, match="another operation"):
        await database.run(Mock(), timeout=120)
    await database.close()
