"""The stores of responses, each against a real server where its program is installed, and what is kept in them."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from triton_openai.api.responses.state import Conversation, Record, ResponseState
from triton_openai.api.responses.store import DefaultStore, MemoryStore, SqliteStore, Store, open_store
from triton_openai.api.responses.types import OutputMessage, OutputText, ResponseObject
from triton_openai.config import ResponsesSettings
from triton_openai.errors import ConversationBusy, InvalidRequest, ObjectNotFound, StoreUnavailable


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """A PostgreSQL of its own."""
    pytest.importorskip("asyncpg")
    if shutil.which("pg_ctl") is None or shutil.which("initdb") is None:
        pytest.skip("PostgreSQL is not installed")
    port = _free_port()
    # It does not run as root, who alone can enter pytest's own folders.
    user: dict[str, Any] = {"user": "nobody"} if os.geteuid() == 0 else {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if user:
            shutil.chown(folder, "nobody")
        data = f"{folder}/data"
        subprocess.run(["initdb", "-D", data, "-U", "t", "-A", "trust", "-N"], check=True, capture_output=True, **user)
        control = ["pg_ctl", "-D", data, "-w", "-l", f"{folder}/log"]
        options = f"-p {port} -h 127.0.0.1 -k {folder} -c fsync=off"
        subprocess.run([*control, "-o", options, "start"], check=True, stdout=subprocess.DEVNULL, **user)
        try:
            yield f"postgresql://t@127.0.0.1:{port}/postgres"
        finally:
            subprocess.run([*control, "-m", "immediate", "stop"], check=True, stdout=subprocess.DEVNULL, **user)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Redis of its own."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("Redis is not installed")
    port = _free_port()
    folder = str(tmp_path_factory.mktemp("redis"))
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _until_open(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            continue
        return
    raise AssertionError("the server has ended")


@pytest.fixture(params=["memory", "sqlite", "postgresql", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[Store, Store]]:
    """The same store, as two processes have it."""
    url = request.param
    if url == "sqlite":
        url = f"sqlite:{tmp_path / 'state' / 'file'}"
    elif url in ("postgresql", "redis"):
        url = request.getfixturevalue("postgres" if url == "postgresql" else "redis")
    settings = ResponsesSettings(store=url)
    first = open_store(settings)
    second = first if url == "memory" else open_store(settings)
    assert first is not None
    assert second is not None
    yield first, second
    await first.close()
    await second.close()


async def test_values_and_versions(stores: tuple[Store, Store]) -> None:
    """Only a writer who knows the current version writes; both sides see the same."""
    first, second = stores
    assert await first.get("a") is None
    assert [False, True] == sorted(await asyncio.gather(first.put("a", b"1", 0), second.put("a", b"1", 0)))
    assert (b"1", 1) == await second.get("a")
    assert [False, True] == sorted(await asyncio.gather(first.put("a", b"\0\xff", 1), second.put("a", b"\0\xff", 1)))
    assert (b"\0\xff", 2) == await first.get("a")
    assert not await first.put("b", b"1", 3)
    assert [False, True] == sorted(await asyncio.gather(first.delete("a"), second.delete("a")))
    assert await first.get("a") is None


async def test_bounds(tmp_path: Path) -> None:
    """What was used longest ago goes first, and what is too old is not there."""
    for kind in (MemoryStore, lambda settings: SqliteStore(tmp_path / "sized", settings)):
        store: Any = kind(ResponsesSettings(max_size=2048))
        for key in "abc":
            assert await store.put(key, bytes(1000), 0)
            store._swept = 0.0
        await store.put("d", b"", 0)
        assert [None, True] == [await store.get("a"), await store.get("c") is not None]
        await store.close()
    for kind in (MemoryStore, lambda settings: SqliteStore(tmp_path / "aged", settings)):
        store = kind(ResponsesSettings(max_age=1e-12))
        await store.put("a", b"", 0)
        await asyncio.sleep(0)
        assert await store.get("a") is None
        await store.close()


async def test_a_file_is_kept_and_is_private(tmp_path: Path) -> None:
    """What was written is there after a restart, and nobody else can read it; a newer schema is refused."""
    path = tmp_path / "a" / "b"
    for content in (None, (b"x", 1)):
        store = SqliteStore(path, ResponsesSettings())
        assert content == await store.get("k")
        await store.put("k", b"x", 0)
        await store.close()
    assert 0o600 == path.stat().st_mode & 0o777
    (tmp_path / "folder").mkdir()
    broken = SqliteStore(tmp_path / "folder", ResponsesSettings())
    with pytest.raises(StoreUnavailable):
        await broken.get("k")
    await broken.close()


async def test_the_default_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a file in the state folder, or memory where there can be none."""
    for folder in (tmp_path, Path("/proc/nowhere")):
        monkeypatch.setenv("XDG_STATE_HOME", str(folder))
        store = DefaultStore(ResponsesSettings())
        assert await store.put("k", b"v", 0)
        assert (b"v", 1) == await store.get("k")
        await store.close()
    assert (tmp_path / "triton-openai" / "responses.sqlite").exists()


def record(number: int, previous: int | None = None, **fields: Any) -> Record:
    """Return a finished response with one item each way."""
    digits = f"{number:032x}"
    response = ResponseObject(
        id=f"resp_{digits}",
        created_at=1,
        model="m",
        reasoning={},
        text={},
        previous_response_id=None if previous is None else f"resp_{previous:032x}",
        output=[OutputMessage(id=f"msg_{digits}0000", status="completed", content=[OutputText(text=f"out {number}")])],
        **{"status": "completed", **fields},
    )
    return Record("me", response, [{"type": "message", "id": f"msg_{digits}i000", "role": "user", "content": "in"}])


async def test_what_a_response_goes_on_from() -> None:
    """Items of all responses before it, in order; only the key's own, and only those that have ended."""
    state = ResponseState(MemoryStore(ResponsesSettings()))
    for each in (record(1), record(2, 1), record(3, 9), record(4, status="in_progress")):
        each.lease = 2e10
        assert await state.put(each, 0)
    ids = [f"resp_{number:032x}" for number in range(5)]

    items = await state.history(ids[2], "me", most=10**6)
    assert ["msg_" + f"{n:032x}{end}" for n in (1, 2) for end in ("i000", "0000")] == [item["id"] for item in items]
    for number, owner, most in ((2, "you", 10**6), (3, "me", 10**6), (4, "me", 10**6), (2, "me", 9)):
        with pytest.raises(InvalidRequest):
            await state.history(ids[number], owner, most=most)
    with pytest.raises(ObjectNotFound):
        await state.record(ids[1], "you")
    # An item's id is enough to find it.
    (found,) = await state.resolved([("input[0]", {"id": items[1]["id"]})], (), "me")
    assert "out 1" == found["content"][0]["text"]
    with pytest.raises(ObjectNotFound):
        await state.resolved([("input[0]", {"type": "item_reference", "id": items[1]["id"]})], (), "you")


async def test_a_maker_that_is_gone() -> None:
    """A response whose process has ended is incomplete."""
    state = ResponseState(MemoryStore(ResponsesSettings()))
    running = record(1, status="in_progress")
    await state.put(running, 0)
    found, _ = await state.record(running.response.id, "me")
    assert "incomplete" == found.response.status
    assert found.response.incomplete_details is not None
    assert "interrupted" == found.response.incomplete_details.reason


async def test_one_response_at_a_time_in_a_conversation() -> None:
    """The second one is refused while the first one is made; afterwards its turn has come."""
    state = ResponseState(MemoryStore(ResponsesSettings()))
    await state.put(Conversation(owner="me", id="conv_1", created_at=1), 0)
    async with state.claimed("conv_1", "me", "resp_1"):
        with pytest.raises(ConversationBusy):
            async with state.claimed("conv_1", "me", "resp_2"):
                pass
    async with state.claimed("conv_1", "me", "resp_2"):
        pass
    with pytest.raises(ObjectNotFound):
        async with state.claimed("conv_1", "you", "resp_3"):
            pass
