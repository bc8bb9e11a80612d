"""What is kept of responses and conversations."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Answer, Proxy, serving
from tests.store_fixture import Server
from tests.unit.prompts.test_template_support import save
from triton_openai.api.responses.conversations import ConversationObject, lock_conversation
from triton_openai.api.responses.items import InputResolver
from triton_openai.api.responses.objects import INTERRUPTED, OutputMessage, OutputText, ResponseObject
from triton_openai.api.responses.stored import RecentResponses, ResponseStore, StoredResponse
from triton_openai.app import SERVICE
from triton_openai.config.tree import (
    ModelDefaults,
    ModelSettings,
    ResponsesSettings,
    ServerSettings,
    Settings,
    TritonSettings,
)
from triton_openai.errors import ConversationBusy, InvalidRequest, ObjectNotFound
from triton_openai.storage import open_store
from triton_openai.storage.sqlite import SqliteStore
from triton_openai.storage.store import Row


@pytest.fixture
async def state() -> AsyncIterator[ResponseStore]:
    """What is kept in memory."""
    settings = ResponsesSettings(store="memory")
    state = ResponseStore(open_store(settings), settings)
    yield state
    await state.close()


async def keep(
    state: ResponseStore, number: int, previous: int | None = None, *, lease: float = 0.0, **fields: Any
) -> str:
    """Keep a response with one item each way; return its id."""
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
    item = {"type": "message", "id": f"msg_{digits}i000", "role": "user", "content": "in"}
    rows = [Row("input", item["id"], json.dumps(item).encode())]
    rows += [Row("output", made.id, msgspec.json.encode(made)) for made in response.output]
    assert await StoredResponse(state, "me", response).save(rows, lease=lease)
    return response.id


async def test_what_a_response_goes_on_from(state: ResponseStore) -> None:
    """Items of all responses before it, in order; only the key's own, and only those that have ended."""
    await keep(state, 1)
    await keep(state, 2, 1)
    await keep(state, 3, 9)
    await keep(state, 4, status="in_progress", lease=100)
    await keep(state, 5, conversation={"id": "conv_1"})
    await keep(state, 6, 5)
    ids = [f"resp_{number:032x}" for number in range(7)]

    async def read(source: str | None, owner: str = "me", items: Any = (), **limits: Any) -> InputResolver:
        sources = InputResolver(state, owner, Settings(server=ServerSettings(**limits)))
        await sources.resolve(items, source=source, param="previous_response_id", suffix="x", size=9)
        return sources

    items = (await read(ids[2])).before
    assert ["msg_" + f"{n:032x}{end}" for n in (1, 2) for end in ("i000", "0000")] == [item["id"] for item in items]
    for number, owner, limits in (
        (2, "you", {}), (3, "me", {}), (4, "me", {}), (5, "me", {}), (6, "me", {}), (2, "me", {"max_body_size": 9}),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            await read(ids[number], owner, **limits)
        assert "previous_response_id" == refused.value.param
    with pytest.raises(ObjectNotFound):
        await state.find(ids[1], "you")
    # An item's id is enough to find it.
    (found,) = (await read(None, items=[{"id": items[1]["id"]}])).resolved
    assert "out 1" == found["content"][0]["text"]
    with pytest.raises(ObjectNotFound):
        await read(None, "you", [{"type": "item_reference", "id": items[1]["id"]}])


async def test_a_conversation_is_no_previous_response() -> None:
    """A request that names a conversation as its previous response is refused: it does not hold the conversation."""
    async with service("memory") as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
            body = {"model": "m", "input": "in", "previous_response_id": conversation}
            refused = await proxy.post(path, body)
            assert (400, "previous_response_id") == (refused.status, refused.error["param"]), path
            assert "give 'conversation'" in refused.error["message"], path


async def test_a_deleted_response_in_the_middle() -> None:
    """What follows it can be continued without its items; what is lost is named beside the id that the client sent."""
    async with service("memory") as proxy:
        made = [(await proxy.post("/v1/responses", {"model": "m", "input": "turn 0"})).json["id"]]
        for turn in range(1, 4):
            body = {"model": "m", "input": f"turn {turn}", "previous_response_id": made[-1]}
            made.append((await proxy.post("/v1/responses", body)).json["id"])
        body = {"model": "m", "input": "now", "previous_response_id": made[3]}
        state = proxy.client.app[SERVICE].responses
        for gone, left in ((None, "0123"), (2, "013"), (0, "13")):
            if gone is not None:
                assert 200 == (await send(proxy, "DELETE", f"/v1/responses/{made[gone]}", None)).status
            assert "completed" == (await proxy.post("/v1/responses", body)).json["status"]
            found = await state.history(made[3], "", "previous_response_id", max_items=9, max_size=9999)
            assert [made[int(turn)] for turn in reversed(left)] == [link.key for link in found.links]
            assert 2 * len(left) == found.length == len(found.rows)
            assert made[2] == (await proxy.get(f"/v1/responses/{made[3]}")).json["previous_response_id"]
        # The store's own sweep leaves a gap.
        await state.store().delete(made[1])
        refused = await proxy.post("/v1/responses", body)
        assert (400, "previous_response_not_found") == (refused.status, refused.error["code"])
        assert f"'{made[3]}' goes on from '{made[1]}'" in refused.error["message"]


@pytest.mark.parametrize("background", [False, True], ids=["at once", "background"])
async def test_a_parent_that_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    """A response that is made while the one before it is deleted goes on from what that went on from."""
    keep = StoredResponse.finalize
    async with service("memory") as proxy:
        made: list[str] = []

        async def keep_late(self: StoredResponse) -> None:
            if len(made) == 2:
                assert await self.state.store().delete(made[1], bridged=True)
            await keep(self)

        monkeypatch.setattr(StoredResponse, "finalize", keep_late)
        for turn in range(4):
            more = {"background": True, "stream": True} if background else {}
            body = {"model": "m", "input": f"turn {turn}", "previous_response_id": made[-1] if made else None, **more}
            answer = await proxy.post("/v1/responses", body)
            made.append(re.findall(rb'"(resp_\w+)"', answer.body)[0].decode())
        found = await proxy.client.app[SERVICE].responses.history(
            made[3], "", "previous_response_id", max_items=9, max_size=9999
        )
        assert [made[3], made[2], made[0]] == [link.key for link in found.links]


async def test_a_maker_that_is_gone(state: ResponseStore) -> None:
    """A response whose process has ended has failed."""
    response = (await state.find(await keep(state, 1, status="in_progress"), "me")).response
    assert ("failed", INTERRUPTED) == (response.status, response.error)


async def test_one_response_at_a_time_in_a_conversation(state: ResponseStore) -> None:
    """The second one is refused while the first one is made; afterwards its turn has come."""
    conversation = f"conv_{1:032x}"
    head = msgspec.json.encode(ConversationObject(id=conversation, created_at=1, metadata={}))
    await state.store().put(conversation, "me", head, 0)

    def hold(number: int, owner: str = "me") -> AbstractAsyncContextManager[None]:
        response = ResponseObject(id=f"resp_{number}", created_at=1, model="m", reasoning={}, text={})
        return lock_conversation(StoredResponse(state, owner, response), conversation)

    async with hold(1):
        with pytest.raises(ConversationBusy):
            async with hold(2):
                pass
        # What changes meanwhile leaves the lease as it is.
        assert await state.store().put(conversation, "me", head, 1)
        with pytest.raises(ConversationBusy):
            async with hold(2):
                pass
    async with hold(2):
        await state.extend(conversation, "me", [Row("input", "a", b"{}")], holder="resp_2")
        # Its turn is over, and another response has it.
        async with hold(3):
            with pytest.raises(ConversationBusy):
                await state.extend(conversation, "me", [Row("input", "b", b"{}")], holder="resp_2")
            # Items that a client adds itself need no turn.
            await state.extend(conversation, "me", [Row("items", "c", b"[]")])
    assert [b"{}", b"[]"] == list(
        (await state.history(conversation, "me", "conversation", max_items=9, max_size=99)).rows
    )
    with pytest.raises(ObjectNotFound):
        async with hold(3, "you"):
            pass


async def test_a_turn_of_a_conversation_writes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once to hold the conversation, and once to add what was said and to let it go; the next turn follows."""
    change, changes = SqliteStore._change, list[str]()

    async def changed(self: SqliteStore, key: str, *given: Any) -> bool:
        changes.append(key)
        return await change(self, key, *given)

    async with service("memory") as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        monkeypatch.setattr(SqliteStore, "_change", changed)
        for _ in range(2):
            body = {"model": "m", "input": "Hi", "conversation": conversation, "store": False}
            assert 200 == (await proxy.post("/v1/responses", body)).status
        assert [conversation] * 4 == changes
        assert 4 == len((await proxy.get(f"/v1/conversations/{conversation}/items")).json["data"])


@asynccontextmanager
async def service(store: str, **groups: Any) -> AsyncIterator[Proxy]:
    """Run a service with *store*, and a model that says a word."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": text} for text in ("a", "")]
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)),
            defaults=ModelDefaults(chat_template="chatml"),
            **{"responses": ResponsesSettings(store=store), **groups},
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            yield proxy


async def test_numbers_are_written_alike(tmp_path: Path) -> None:
    """A response has the same bytes when it is made and when it is read, with a fraction in its numbers or without."""
    folder = save(tmp_path, generation_config={"temperature": 1, "top_p": 1})
    model = ModelSettings(tokenizer=folder, generation_config="auto")
    async with service("memory", models={"m": model}) as proxy:
        for numbers in ("", '"presence_penalty": 0, "frequency_penalty": 0.0, "temperature": 2, "top_p": 1.0,'):
            made = await proxy.post("/v1/responses", f'{{"model": "m", {numbers} "input": "Hi"}}'.encode())
            kept = await proxy.get(f"/v1/responses/{made.json['id']}")
            assert made.body == kept.body


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


async def test_metadata_that_several_clients_replace() -> None:
    """Each is answered with its own, the last one stays, and of a deleted conversation there is none."""
    async with service("memory") as proxy:
        path = f"/v1/conversations/{(await proxy.post('/v1/conversations', {})).json['id']}"
        updates = [{"metadata": {"from": str(number)}} for number in range(8)]
        answers = await asyncio.gather(*[proxy.post(path, update) for update in updates])
        assert updates == [{"metadata": answer.json["metadata"]} for answer in answers]
        assert (await proxy.get(path)).json in [answer.json for answer in answers]
        assert 200 == (await send(proxy, "DELETE", path, None)).status
        assert 404 == (await proxy.post(path, updates[0])).status


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
    """
    A background response that is being kept is in progress until it is kept: only then can its output be read. What
    is cancelled by then stays so.
    """
    put, kept, writing = SqliteStore.put, asyncio.Event(), asyncio.Event()

    async def slow_put(store: SqliteStore, key: str, owner: str, head: bytes, version: int, **more: Any) -> bool:
        if b'"status":"completed"' in head:
            writing.set()
            await kept.wait()
        return await put(store, key, owner, head, version, **more)

    monkeypatch.setattr(SqliteStore, "put", slow_put)
    async with service("memory") as proxy:
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True})).json
        await asyncio.wait_for(writing.wait(), 120)
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
        await asyncio.wait_for(writing.wait(), 120)
        # Another process would not find it.
        log = proxy.client.app[SERVICE].responses.live.pop(made["id"])
        await proxy.post(f"/v1/responses/{made['id']}/cancel", {})
        kept.set()
        assert log.task is not None
        await log.task
        assert "cancelled" == (await proxy.get(f"/v1/responses/{made['id']}")).json["status"]


async def test_queries_that_say_nothing_are_refused() -> None:
    """A word that is not understood is no "false"."""
    async with service("memory") as proxy:
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "background": True})).json
        for query, param in (("stream=yes", "stream"), ("stream=true&starting_after=x", "starting_after")):
            refused = await proxy.get(f"/v1/responses/{made['id']}?{query}")
            assert (400, param) == (refused.status, refused.json["error"]["param"])


async def test_a_long_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    A conversation of twice as many turns takes twice as many calls, however it is given.

    What is kept is read at once, and takes at most 1.3 times the calls of what the client sends.
    """
    calls: Counter[str] = Counter()
    operations: list[str] = []
    run = SqliteStore._run

    async def counted(store: SqliteStore, steps: Any, **options: Any) -> Any:
        operations.append(steps.__name__)
        return await run(store, steps, **options)

    monkeypatch.setattr(SqliteStore, "_run", counted)

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
            operations.clear()
            if number % 50:
                made = (await proxy.post("/v1/responses", body)).json["id"]
            else:
                counts.append(await work("/v1/responses", body))
                made = previous[0]
            assert ["chain", "_change"] == operations
        assert counts[1] < 2.2 * counts[0], counts
        kept = (await proxy.get(f"/v1/responses/{made}")).json["output"]
        sent = await work("/v1/responses", {"input": [*[turn[0], *kept] * 100, turn[0]]})
        assert counts[1] < 1.3 * sent, (counts, sent)


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_a_store_that_is_gone(
    kind: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers do not need it and say that they are not kept; the rest is a 503 until it is back."""
    server: Server = request.getfixturevalue(kind)
    # What other tests have left says what went wrong there when it is collected.
    gc.collect()
    caplog.clear()
    async with service(server.url()) as proxy:
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


def test_the_lanes_of_a_connection_follow_the_settings() -> None:
    """The limit holds from the next response on: a smaller one drops the oldest."""
    max_lanes = 3
    recent = RecentResponses(lambda: max_lanes)
    for number in range(3):
        recent.put(f"lane-{number}", f"resp_{number}", [b"{}"])
    assert recent.find("resp_0") is not None
    max_lanes = 2
    recent.put("lane-2", "resp_3", [b"{}"])
    assert [False, True, True] == [recent.find(f"resp_{number}") is not None for number in (0, 1, 3)]
