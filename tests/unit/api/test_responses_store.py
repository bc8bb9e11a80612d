"""The stores of responses, each against a real server where its program is installed, and what is kept in them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Answer, Proxy, serving
from triton_openai.api.responses.state import STATE, Conversation, Record, ResponseState
from triton_openai.api.responses.store import SqliteStore, Store, open_store
from triton_openai.api.responses.types import OutputMessage, OutputText, ResponseObject
from triton_openai.config.tree import ModelDefaults, ResponsesSettings, Settings, TritonSettings
from triton_openai.errors import ConversationBusy, InvalidRequest, ObjectNotFound, StoreUnavailable


class Server:
    """The server of a store, which *start* and *stop* start and stop on its port."""

    def __init__(self, url: str, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.url, self.start, self.stop = url, start, stop


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Server]:
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
        options = f"-p {port} -h 127.0.0.1 -k {folder} -c fsync=off"

        def control(*what: str) -> None:
            command = ["pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", *what]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **user)

        start = partial(control, "-o", options, "start")
        start()
        try:
            stop = partial(control, "-m", "immediate", "stop")
            yield Server(f"postgresql://t@127.0.0.1:{port}/postgres", start, stop)
        finally:
            stop()


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Redis of its own."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("Redis is not installed")
    port = _free_port()
    folder = str(tmp_path_factory.mktemp("redis"))
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        _until_open(port, running[-1])

    def stop() -> None:
        running[-1].kill()
        running.pop().wait()

    start()
    try:
        yield Server(f"redis://127.0.0.1:{port}/0", start, stop)
    finally:
        stop()


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except OSError:
            continue
        return
    raise AssertionError("the server has ended")


@pytest.fixture
def file(tmp_path: Path) -> Server:
    """A file; when it is stopped, a folder stands in its place."""
    path = tmp_path / "state" / "file"

    def stop() -> None:
        path.unlink()
        path.mkdir()

    return Server(f"sqlite:{path}", path.rmdir, stop)


@pytest.fixture(params=["memory", "file", "postgresql", "redis"])
async def stores(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Store, Store]]:
    """The same store, as two processes have it."""
    url = "memory" if request.param == "memory" else request.getfixturevalue(request.param).url
    settings = ResponsesSettings(store=url)
    first = open_store(settings)
    second = first if url == "memory" else open_store(settings)
    assert first is not None
    assert second is not None
    yield first, second
    for store in {first, second}:
        await store.close()


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


async def test_bounds() -> None:
    """What was used longest ago goes first, and what is too old is not there."""
    store = kept(max_size=2048)
    for key in "abc":
        assert await store.put(key, bytes(1000), 0)
    await store.put("d", b"", 0)
    assert [None, True] == [await store.get("a"), await store.get("c") is not None]
    await store.close()
    store = kept(max_age=1e-12)
    await store.put("a", b"", 0)
    assert await store.get("a") is None
    await store.close()


def kept(**settings: Any) -> Store:
    """Return a store in memory."""
    return SqliteStore(None, ResponsesSettings(**settings))


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
        store = open_store(ResponsesSettings())
        assert store is not None
        assert await store.put("k", b"v", 0)
        assert (b"v", 1) == await store.get("k")
        await store.close()
    assert (tmp_path / "triton-openai" / "responses.sqlite").exists()


@pytest.fixture
async def state() -> AsyncIterator[ResponseState]:
    """What is kept in memory."""
    state = ResponseState(kept())
    yield state
    await state.close()


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


async def test_what_a_response_goes_on_from(state: ResponseState) -> None:
    """Items of all responses before it, in order; only the key's own, and only those that have ended."""
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


async def test_a_maker_that_is_gone(state: ResponseState) -> None:
    """A response whose process has ended is incomplete."""
    running = record(1, status="in_progress")
    await state.put(running, 0)
    found, _ = await state.record(running.response.id, "me")
    assert "incomplete" == found.response.status
    assert found.response.incomplete_details is not None
    assert "interrupted" == found.response.incomplete_details.reason


async def test_one_response_at_a_time_in_a_conversation(state: ResponseState) -> None:
    """The second one is refused while the first one is made; afterwards its turn has come."""
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


@asynccontextmanager
async def service(store: str) -> AsyncIterator[Proxy]:
    """Run a service with *store*, and a model that says a word."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            defaults=ModelDefaults(chat_template="chatml"),
            responses=ResponsesSettings(store=store),
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy


async def test_what_is_kept_of_a_request() -> None:
    """References become what they stand for, zero is a value, and an input is needed."""
    async with service("memory") as proxy:
        first = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "temperature": 0})).json
        assert 0 == first["temperature"]
        reference = {"type": "item_reference", "id": first["output"][0]["id"]}
        second = (await proxy.post("/v1/responses", {"model": "m", "input": [reference]})).json
        (kept,) = (await proxy.get(f"/v1/responses/{second['id']}/input_items")).json["data"]
        assert ("message", reference["id"]) == (kept["type"], kept["id"])
        refused = await proxy.post("/v1/responses", {"model": "m", "instructions": "Be brief."})
        assert (400, "input") == (refused.status, refused.json["error"]["param"])


async def test_a_background_response_is_a_request() -> None:
    """Metrics count it beside the request for it, and neither runs any more when it has ended."""
    async with service("memory") as proxy:
        stream = await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True, "stream": True})
        assert b"response.completed" in stream.body
        lines = (await proxy.get("/metrics")).body.decode().splitlines()
    running = [line for line in lines if line.startswith("triton_openai_requests_running{")]
    assert running
    assert all(line.endswith(" 0.0") for line in running), running


async def test_a_store_that_cannot_be_used(tmp_path: Path) -> None:
    """The operator learns of it at the start; the service runs without it."""
    (tmp_path / "file").mkdir()
    with capture_logs() as logs:
        async with service(f"sqlite:{tmp_path / 'file'}") as proxy:
            assert 200 == (await proxy.get("/health/ready")).status
    (line,) = [line for line in logs if line["event"] == "responses cannot be stored"]
    assert "warning" == line["log_level"]
    assert "directory" in line["reason"]


async def test_a_background_response_that_is_being_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in progress until it is kept: only then can its output be read. What is cancelled by then stays so."""
    put, kept, writing = SqliteStore.put, asyncio.Event(), asyncio.Event()

    async def slow_put(store: SqliteStore, key: str, value: bytes, version: int) -> bool:
        if b'"status":"completed"' in value:
            writing.set()
            await kept.wait()
        return await put(store, key, value, version)

    monkeypatch.setattr(SqliteStore, "put", slow_put)
    async with service("memory") as proxy:
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True})).json
        await asyncio.wait_for(writing.wait(), 30)
        found = (await proxy.get(f"/v1/responses/{made['id']}")).json
        kept.set()
        assert ("in_progress", [], None) == (found["status"], found["output"], found["usage"])
        stream = await proxy.get(f"/v1/responses/{made['id']}?stream=true")
        assert b"response.completed" in stream.body
        found = (await proxy.get(f"/v1/responses/{made['id']}")).json
        assert ("completed", 1) == (found["status"], len(found["output"]))

        kept.clear()
        writing.clear()
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True})).json
        await asyncio.wait_for(writing.wait(), 30)
        # Another process would not find it.
        live = proxy.client.app[STATE].live.pop(made["id"])
        await proxy.post(f"/v1/responses/{made['id']}/cancel", {})
        kept.set()
        await live.task
        assert "cancelled" == (await proxy.get(f"/v1/responses/{made['id']}")).json["status"]


async def test_queries_that_say_nothing_are_refused() -> None:
    """A word that is not understood is no "false"."""
    async with service("memory") as proxy:
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True})).json
        for query, param in (("stream=yes", "stream"), ("stream=true&starting_after=x", "starting_after")):
            refused = await proxy.get(f"/v1/responses/{made['id']}?{query}")
            assert (400, param) == (refused.status, refused.json["error"]["param"])


async def test_a_long_conversation() -> None:
    """A conversation of twice as many turns takes twice as many calls, however it is given."""
    calls: Counter[str] = Counter()

    async def work(path: str, body: dict[str, Any]) -> int:
        calls.clear()
        sys.setprofile(lambda frame, event, given: calls.update((event,)))
        try:
            answer = await proxy.post(path, {"model": "m", **body})
        finally:
            sys.setprofile(None)
        assert 200 == answer.status, answer.body
        previous[:] = [answer.json["id"]]
        return calls.total()

    async with service("memory") as proxy:
        turn = [{"role": "user", "content": "in"}, {"role": "assistant", "content": "out"}]
        previous: list[str] = []
        for path, field, more in (("/v1/responses", "input", {}), ("/v1/messages", "messages", {"max_tokens": 9})):
            asked = [{**more, field: [*turn * count, turn[0]]} for count in (1, 50, 100)]
            _, half, whole = [await work(path, body) for body in asked]
            assert whole < 2.2 * half, (path, half, whole)
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "in"})).json["id"]
        counts = []
        for number in range(1, 101):
            body = {"model": "m", "input": "in", "previous_response_id": made}
            if number % 50:
                made = (await proxy.post("/v1/responses", body)).json["id"]
            else:
                counts.append(await work("/v1/responses", body))
                made = previous[0]
        assert counts[1] < 2.2 * counts[0], counts


@pytest.mark.parametrize("kind", ["file", "postgresql", "redis"])
async def test_a_store_that_is_gone(
    kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers do not need it and say that they are not kept; the rest is a 503 until it is back."""
    server: Server = request.getfixturevalue(kind)
    async with service(server.url) as proxy:
        ask = {"model": "m", "input": "Hi"}
        made = (await proxy.post("/v1/responses", ask)).json
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        assert made["store"]
        server.stop()
        try:
            for method, path, body in (
                ("POST", "/v1/responses", {**ask, "previous_response_id": made["id"]}),
                ("POST", "/v1/responses", {**ask, "conversation": conversation}),
                ("POST", "/v1/responses", {**ask, "background": True}),
                ("POST", "/v1/responses", {**ask, "background": True, "stream": True}),
                (
                    "POST",
                    "/v1/responses",
                    {"model": "m", "input": [{"type": "item_reference", "id": made["output"][0]["id"]}]},
                ),
                ("GET", f"/v1/responses/{made['id']}", None),
                ("GET", f"/v1/responses/{made['id']}/input_items", None),
                ("POST", f"/v1/responses/{made['id']}/cancel", {}),
                ("DELETE", f"/v1/responses/{made['id']}", None),
                ("POST", "/v1/conversations", {}),
                ("GET", f"/v1/conversations/{conversation}/items", None),
                ("POST", f"/v1/conversations/{conversation}/items", {"items": []}),
                ("DELETE", f"/v1/conversations/{conversation}", None),
            ):
                answer = await send(proxy, method, path, body)
                assert (503, "store_unavailable") == (answer.status, answer.error["code"]), (path, answer.body)
                assert "The store of responses cannot be used at the moment." == answer.error["message"]
                assert "Retry-After" in answer.headers
            whole = await proxy.post("/v1/responses", ask)
            assert (200, "completed", False) == (whole.status, whole.json["status"], whole.json["store"])
            stream = await proxy.post("/v1/responses", {**ask, "stream": True})
            last = json.loads(stream.body.split(b"data: ")[-1])
            assert ("response.completed", False) == (last["type"], last["response"]["store"])
        finally:
            server.start()
        again = (await proxy.post("/v1/responses", ask)).json
        assert again["store"]
        assert 200 == (await proxy.get(f"/v1/responses/{again['id']}")).status
    assert not [entry for entry in caplog.records if entry.exc_info]


async def send(proxy: Proxy, method: str, path: str, body: Any) -> Answer:
    """Send a request with any method."""
    if method == "DELETE":
        async with proxy.client.delete(path) as response:
            return Answer(response.status, response.headers.copy(), await response.read())
    return await (proxy.get(path) if body is None else proxy.post(path, body))


async def test_a_file_that_is_deleted(tmp_path: Path) -> None:
    """What was in it is gone; what is written from then on is in a new file, which other processes see."""
    settings = ResponsesSettings(store=f"sqlite:{tmp_path / 'file'}")
    first, second = open_store(settings), open_store(settings)
    assert first is not None
    assert second is not None
    await first.put("a", b"1", 0)
    for name in ("file", "file-wal", "file-shm"):
        (tmp_path / name).unlink()
    assert await first.get("a") is None
    assert await first.put("b", b"2", 0)
    assert (b"2", 1) == await second.get("b")
    await first.close()
    await second.close()
