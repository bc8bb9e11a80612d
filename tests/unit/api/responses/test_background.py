"""Responses that are made in the background, and how their streams end, in front of a Triton that can be held up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import Answer, Proxy, serving
from triton_openai.api.responses import stored
from triton_openai.api.responses.background import ResumedEvents
from triton_openai.api.responses.event_log import EVENTS, EventLog
from triton_openai.api.responses.item_renderer import response_event
from triton_openai.api.responses.objects import ResponseObject
from triton_openai.api.responses.stored import ResponseStore, StoredResponse
from triton_openai.app import SERVICE
from triton_openai.config.tree import ModelDefaults, ResponsesSettings, ServerSettings, Settings, TritonSettings
from triton_openai.draining import DRAINING
from triton_openai.errors import StoreUnavailable
from triton_openai.storage import open_store
from triton_openai.storage.sqlite import SqliteStore
from triton_openai.storage.store import Page, Store

# Of a model that does not repeat the prompt.
INPUTS = tuple(f"{name}? {kind} 1" for name, kind in (
    ("text_input", "BYTES"), ("sampling_parameters", "BYTES"), ("stream", "BOOL"), ("exclude_input_in_output", "BOOL"),
))  # fmt: skip
IGNORED = "x-triton-openai-ignored"
REQUEST = {"model": "m", "input": "Hi", "background": True}


@asynccontextmanager
async def held() -> AsyncIterator[FakeTriton]:
    """Run a Triton whose model says three words, the last two once it may."""
    async with FakeTriton(config_of("m", INPUTS)) as triton:
        triton.responses = [{"text_output": text} for text in ("one", " two", " three", "")]
        triton.may_go_on.clear()
        yield triton
        triton.may_go_on.set()


@asynccontextmanager
async def service(triton: FakeTriton, store: str = "memory", **server: Any) -> AsyncIterator[Proxy]:
    """Run a service in front of *triton*."""
    most = server.pop("max_background", 1000)
    settings = Settings(
        triton=TritonSettings(url=(triton.url,)),
        defaults=ModelDefaults(chat_template="chatml"),
        responses=ResponsesSettings(store=store, max_background=most),
        server=ServerSettings(**server),
    )
    async with serving(settings) as proxy:
        await proxy.ready()
        yield proxy


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, comments left out."""
    blocks = body.decode().split("\n\n")
    assert "" == blocks.pop()
    return [json.loads(block.partition("data: ")[2]) for block in blocks if not block.startswith(":")]


class Stream:
    """A stream that is read as it comes."""

    def __init__(self, proxy: Proxy, method: str, path: str, body: Any = None) -> None:
        self._call = proxy.client.request(method, path, json=body)

    async def __aenter__(self) -> Stream:
        self.response = await self._call.__aenter__()
        assert 200 == self.response.status
        return self

    async def __aexit__(self, *given: Any) -> None:
        await self._call.__aexit__(*given)

    async def until(self, kind: str) -> dict[str, Any]:
        """Return the next event of *kind*."""
        while True:
            block = await asyncio.wait_for(self.response.content.readuntil(b"\n\n"), 120)
            for event in events_of(block):
                if event["type"] == f"response.{kind}":
                    return event

    async def rest(self) -> list[dict[str, Any]]:
        """Return the events up to the end."""
        return events_of(await asyncio.wait_for(self.response.read(), 120))


def made_by(proxy: Proxy) -> Stream:
    """Return the stream of a new response in the background."""
    return Stream(proxy, "POST", "/v1/responses", {**REQUEST, "stream": True})


async def rows_of(store: Store, key: str, least: int, owner: str = "") -> None:
    """Wait until there are at least so many rows of events."""
    while (await store.chain(key, owner, [EVENTS], max_links=1)).length < least:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0)


async def stored_up_to(store: Store, key: str, number: int) -> None:
    """Wait until the event *number* is stored; events that come a while apart may be in one row or in several."""
    stored: list[dict[str, Any]] = []
    while not any(event["sequence_number"] == number for event in stored):
        found = await store.chain(key, "", [EVENTS], max_links=1)
        stored = events_of(b"".join(found.rows))


async def resumed(proxy: Proxy, made: str, after: int | None = None) -> list[dict[str, Any]]:
    """Return all events of a response, or those after one."""
    query = "" if after is None else f"&starting_after={after}"
    answer = await asyncio.wait_for(proxy.get(f"/v1/responses/{made}?stream=true{query}"), 120)
    assert 200 == answer.status
    return events_of(answer.body)


async def assert_ended(proxy: Proxy, made: str, status: str, *texts: str) -> dict[str, Any]:
    """Assert that a response ended with *status* and output of *texts*, and each of its streams with the event."""
    found = (await proxy.get(f"/v1/responses/{made}")).json
    assert (status, list(texts)) == (found["status"], [item["content"][0]["text"] for item in found["output"]])
    events = await resumed(proxy, made)
    assert list(range(len(events))) == [event["sequence_number"] for event in events]
    last = events[-1]
    assert (f"response.{status}", found) == (last["type"], last["response"])
    assert events[-1:] == (await resumed(proxy, made, len(events) - 2))[-1:]
    # Who has seen the end of what its maker ended gets nothing; else it is not certain that it was seen.
    rest = [] if status in ("completed", "incomplete") else [last]
    for after in (len(events) - 1, len(events), 10**12):
        assert rest == (await resumed(proxy, made, after))[-1:]
    # As openai-go asks
    asked = {"stream": True, "starting_after": 0}
    async with proxy.client.get(f"/v1/responses/{made}", json=asked) as answer:
        assert await resumed(proxy, made, 0) == events_of(await answer.read())
    return dict(found)


async def test_a_stream_and_its_resumption() -> None:
    """A stream tells that the response waits before it begins; others read the same from any place, also meanwhile."""
    async with (
        held() as triton,
        service(triton) as proxy,
        made_by(proxy) as stream,
    ):
        made = (await stream.until("created"))["response"]
        assert "queued" == made["status"]
        await stream.until("queued")
        await stream.until("in_progress")
        assert "one" == (await stream.until("output_text.delta"))["delta"]
        async with Stream(proxy, "GET", f"/v1/responses/{made['id']}?stream=true&starting_after=3") as other:
            await other.until("output_text.delta")
            triton.may_go_on.set()
            assert await stream.rest() == await other.rest()
        await assert_ended(proxy, made["id"], "completed", "one two three")


@pytest.mark.parametrize("how", ["cancel", "delete", "stop"])
async def test_the_end_of_what_is_in_progress(how: str, tmp_path: Path) -> None:
    """Whoever reads a response that is cancelled, deleted or stopped learns it, and what there is of it stays."""
    async with (
        held() as triton,
        two(triton, tmp_path) as (proxy, other),
        made_by(proxy) as stream,
    ):
        made = (await stream.until("created"))["response"]["id"]
        await stream.until("output_text.delta")
        if how == "cancel":
            answer = await proxy.post(f"/v1/responses/{made}/cancel", {})
            assert ("cancelled", "one") == (answer.json["status"], answer.json["output"][0]["content"][0]["text"])
        elif how == "delete":
            assert (await proxy.client.delete(f"/v1/responses/{made}")).status == 200
        else:
            await proxy.client.app[DRAINING].drain(0.0)
        last = (await stream.rest())[-1]
        status = "failed" if how == "stop" else "cancelled"
        assert (f"response.{status}", "one") == (last["type"], last["response"]["output"][0]["content"][0]["text"])
        if how == "delete":
            assert 404 == (await other.get(f"/v1/responses/{made}?stream=true")).status
            return
        # One that stops takes no more requests.
        found = await assert_ended(other, made, status, "one")
        code = None if found["error"] is None else found["error"]["code"]
        assert code == ("server_error" if how == "stop" else None)


async def test_the_end_of_what_waits() -> None:
    """A response that is cancelled before its turn never begins, and its stream says so."""
    async with (
        held() as triton,
        service(triton, max_running_requests=1) as proxy,
        made_by(proxy) as first,
    ):
        await first.until("output_text.delta")
        made = (await proxy.post("/v1/responses", REQUEST)).json["id"]
        assert "queued" == (await proxy.get(f"/v1/responses/{made}")).json["status"]
        async with Stream(proxy, "GET", f"/v1/responses/{made}?stream=true") as stream:
            await stream.until("queued")
            # Twice at once, as an impatient client does it.
            answers = await asyncio.gather(*[proxy.post(f"/v1/responses/{made}/cancel", {}) for _ in range(2)])
            assert ["cancelled"] * 2 == [answer.json["status"] for answer in answers]
            assert ["response.cancelled"] == [event["type"] for event in await stream.rest()]
        await assert_ended(proxy, made, "cancelled")
        assert 1 == len(triton.asked)
        triton.may_go_on.set()
        await first.until("completed")


async def test_cancelling_what_waits_in_another_process(tmp_path: Path) -> None:
    """What another process has cancelled while it waits never reaches the model, and its readers learn of it."""
    async with held() as triton, two(triton, tmp_path, max_running_requests=1) as (maker, other):
        async with made_by(maker) as first:
            await first.until("output_text.delta")
            made = (await maker.post("/v1/responses", REQUEST)).json["id"]
            async with Stream(maker, "GET", f"/v1/responses/{made}?stream=true") as stream:
                assert "cancelled" == (await other.post(f"/v1/responses/{made}/cancel", {})).json["status"]
                triton.may_go_on.set()
                assert "response.cancelled" == (await stream.rest())[-1]["type"]
            await first.until("completed")
        assert 1 == len(triton.asked)
        for proxy in (maker, other):
            await assert_ended(proxy, made, "cancelled")


async def test_how_many_there_may_be() -> None:
    """What waits or runs in the background is bounded: more is refused at once, and leaves nothing behind."""
    async with held() as triton, service(triton, max_background=2) as proxy:
        answers = await asyncio.gather(*[proxy.post("/v1/responses", REQUEST) for _ in range(5)])
        assert [200, 200, 503, 503, 503] == sorted(answer.status for answer in answers)
        triton.may_go_on.set()
    limits: tuple[dict[str, Any], ...] = ({"max_background": 1}, {"max_running_requests": 1, "max_queued_requests": 0})
    for limit in limits:
        async with held() as triton, service(triton, **limit) as proxy:
            first = (await proxy.post("/v1/responses", REQUEST)).json["id"]
            async with Stream(proxy, "GET", f"/v1/responses/{first}?stream=true") as stream:
                await stream.until("output_text.delta")
                refused: Answer = await proxy.post("/v1/responses", REQUEST)
                assert (503, "Retry-After" in refused.headers) == (refused.status, True), limit
                triton.may_go_on.set()
                await stream.until("completed")
            assert "queued" == (await proxy.post("/v1/responses", REQUEST)).json["status"]


async def test_a_conversation_is_held_from_the_start() -> None:
    """A response in the background has its conversation before it is announced; a second one is refused at once."""
    async with held() as triton, service(triton) as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        first = await proxy.post("/v1/responses", {**REQUEST, "conversation": conversation})
        second = await proxy.post("/v1/responses", {**REQUEST, "conversation": conversation})
        assert (200, 409) == (first.status, second.status)
        async with Stream(proxy, "GET", f"/v1/responses/{first.json['id']}?stream=true") as stream:
            triton.may_go_on.set()
            await stream.until("completed")
        items = (await proxy.get(f"/v1/conversations/{conversation}/items")).json["data"]
        assert ["assistant", "user"] == [item["role"] for item in items]


@asynccontextmanager
async def two(triton: FakeTriton, folder: Path, **server: Any) -> AsyncIterator[tuple[Proxy, Proxy]]:
    """Run two services on one file, which know nothing else of each other."""
    store = f"sqlite:{folder / 'state'}"
    async with service(triton, store, **server) as first, service(triton, store, **server) as second:
        yield first, second


async def test_reading_what_another_process_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head and the events so far come at once, the rest as it is made, and nothing is read from the store twice."""
    page, rows = SqliteStore.page, Counter[str]()

    async def counted(store: SqliteStore, *given: Any, **options: Any) -> Page | None:
        found = await page(store, *given, **options)
        rows.update(row.id for row in (() if found is None else found.rows))
        return found

    monkeypatch.setattr(SqliteStore, "page", counted)
    async with held() as triton, two(triton, tmp_path, heartbeat_interval=0.1) as (maker, other):
        made = (await maker.post("/v1/responses", REQUEST)).json["id"]
        async with Stream(other, "GET", f"/v1/responses/{made}?stream=true") as stream:
            assert "queued" == (await stream.until("created"))["response"]["status"]
            await stream.until("output_text.delta")
            assert b": keep-alive\n\n" == await asyncio.wait_for(stream.response.content.readuntil(b"\n\n"), 120)
            assert "in_progress" == (await other.get(f"/v1/responses/{made}")).json["status"]
            triton.may_go_on.set()
            last = (await stream.rest())[-1]
        assert ("response.completed", {1}) == (last["type"], set(rows.values()))
        for proxy in (maker, other):
            assert last["response"] == await assert_ended(proxy, made, "completed", "one two three")


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_ending_what_another_process_makes(how: str, tmp_path: Path) -> None:
    """
    A response that another process ends keeps what was stored; its maker adds nothing more, and its streams end
    alike.
    """
    async with held() as triton, two(triton, tmp_path) as (maker, other):
        async with made_by(maker) as stream:
            made = (await stream.until("created"))["response"]["id"]
            async with Stream(other, "GET", f"/v1/responses/{made}?stream=true") as far:
                # It is stored when it is there.
                await far.until("output_text.delta")
                if how == "cancel":
                    answer = (await other.post(f"/v1/responses/{made}/cancel", {})).json
                    assert ("cancelled", "one") == (answer["status"], answer["output"][0]["content"][0]["text"])
                else:
                    assert 200 == (await other.client.delete(f"/v1/responses/{made}")).status
                assert "response.cancelled" == (await far.rest())[-1]["type"]
            triton.may_go_on.set()
            assert "response.cancelled" == (await stream.rest())[-1]["type"]
        for proxy in (maker, other):
            if how == "cancel":
                await assert_ended(proxy, made, "cancelled", "one")
            else:
                assert 404 == (await proxy.get(f"/v1/responses/{made}?stream=true")).status


async def test_a_reader_whose_service_stops(tmp_path: Path) -> None:
    """
    A reader whose service stops learns that it has to go on elsewhere, from where it is: the response itself goes
    on.
    """
    async with held() as triton, two(triton, tmp_path) as (maker, other):
        made = (await maker.post("/v1/responses", REQUEST)).json["id"]
        async with Stream(other, "GET", f"/v1/responses/{made}?stream=true") as stream:
            place = (await stream.until("output_text.delta"))["sequence_number"]
            await other.client.app[DRAINING].drain(0.0)
            (last,) = await stream.rest()
        assert ("error", "service_stopping", place) == (last["type"], last["code"], last["sequence_number"])
        triton.may_go_on.set()
        assert place + 1 == (await resumed(maker, made, place))[0]["sequence_number"]


async def test_a_maker_that_was_killed() -> None:
    """A response whose maker was killed has failed as if it had been stopped, and keeps what was stored of it."""
    async with (
        held() as triton,
        service(triton) as proxy,
        made_by(proxy) as stream,
    ):
        made = (await stream.until("created"))["response"]["id"]
        await stream.until("output_text.delta")
        state = proxy.client.app[SERVICE].responses
        async with Stream(proxy, "GET", f"/v1/responses/{made}?stream=true") as other:
            begun = await other.until("output_text.delta")
            # As much is stored as another process would find.
            await stored_up_to(state.store(), made, begun["sequence_number"])
            await state.live.pop(made).close()
            await state.store().claim(made, "", made, -1.0)
            found = await assert_ended(proxy, made, "failed", "one")
            assert "server_error" == found["error"]["code"]
            events = await resumed(proxy, made)
            assert ["error", "response.failed"] == [event["type"] for event in events[-2:]]
            # Whoever made it comes back too late.
            triton.may_go_on.set()
            assert "response.failed" == (await other.rest())[-1]["type"]
        assert found == (await proxy.get(f"/v1/responses/{made}")).json


@pytest.mark.parametrize("fails", [1, 99])
async def test_a_store_that_fails_at_the_end(fails: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A response is kept a little later; where that is no use, its last event says that it is not kept."""
    put, failing = SqliteStore.put, 0

    async def sometimes(store: SqliteStore, key: str, owner: str, head: bytes, version: int, **more: Any) -> bool:
        nonlocal failing
        if failing:
            failing -= 1
            raise StoreUnavailable("No.")
        return await put(store, key, owner, head, version, **more)

    monkeypatch.setattr(SqliteStore, "put", sometimes)
    monkeypatch.setattr(stored, "_PAUSES", (0.0, 0.0))
    async with (
        held() as triton,
        service(triton) as proxy,
        made_by(proxy) as stream,
    ):
        made = (await stream.until("created"))["response"]["id"]
        await stream.until("output_text.delta")
        failing = fails
        with capture_logs() as logs:
            triton.may_go_on.set()
            last = (await stream.rest())[-1]
        assert ("response.completed", fails == 1) == (last["type"], last["response"]["store"])
        assert {"response is not kept"} == {line["event"] for line in logs if line["log_level"] == "warning"}
        failing = 0
        if fails == 1:
            await assert_ended(proxy, made, "completed", "one two three")


async def test_events_that_cannot_be_stored_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Events that cannot be stored yet are stored later, each once, and the log says so; too many of them end the
    response.
    """
    append, failing = SqliteStore.append, 1

    async def sometimes(store: SqliteStore, *given: Any, **options: Any) -> bool:
        nonlocal failing
        done = await append(store, *given, **options)
        if failing:
            failing -= 1
            raise StoreUnavailable("It was stored, and could not say so.")
        return done

    monkeypatch.setattr(SqliteStore, "append", sometimes)
    store = open_store(ResponsesSettings(store="memory"))
    assert store is not None
    await store.put("k", "me", b"", 0, lease=("k", 600))
    log = EventLog(store, ResponseObject(id="k", created_at=1, model="m", reasoning={}, text={}), "me")
    log.task = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]  # what it returns does not matter
    with capture_logs() as logs:
        log.start()
        for number in range(40):
            log.add(response_event("a", number))
            await asyncio.sleep(0.02)
        await rows_of(store, "k", 2, "me")
    assert ["events of a response are not stored yet"] == [line["event"] for line in logs]
    # Somebody else takes over.
    await store.put("k", "me", b"", 1, lease=("", 0))
    log.add(response_event("a", 40))
    await asyncio.wait({log.task}, timeout=120)
    assert log.task.cancelled()
    await log.close()
    found = b"".join([*(await store.chain("k", "me", [EVENTS], max_links=1)).rows, *(row.data for row in log.rows())])
    assert list(range(41)) == [event["sequence_number"] for event in events_of(found)]
    log.check_room()
    log.add(b"x" * 9_000_000)
    with pytest.raises(StoreUnavailable):
        log.check_room()
    await store.close()


async def test_a_long_stream_and_a_slow_reader() -> None:
    """Only the latest events stay in memory; who is behind reads the others from the store, from any place."""
    settings = ResponsesSettings(store="memory")
    state = ResponseStore(open_store(settings), settings)
    response = ResponseObject(id=f"resp_{1:032x}", created_at=1, model="m", reasoning={}, text={}, background=True)
    made = StoredResponse(state, "me", response)
    await made.save(lease=600)
    log = made.log = EventLog(state.store(), response, "me")
    readers = {after: ResumedEvents(made, after) for after in (-1, 0, 41, 1023, 5000)}
    read: dict[int, list[int]] = {after: [] for after in readers}

    async def read_on(after: int) -> bool:
        found = await asyncio.wait_for(readers[after].next(0.0), 120)
        read[after] += [event["sequence_number"] for event in events_of(found or b"")]
        return found is not None

    await read_on(-1)
    # The test stores the events itself: on a busy machine, the log would store the same rows once more meanwhile.
    for number in range(2048):
        log.add(response_event("a", number, delta="x" * 1024))
        if number % 100 == 0:
            assert await read_on(1023)
            rows = log.rows()
            await state.store().append(response.id, "me", rows)
            log._take_stored(rows)
    assert log.after(0) is None
    log.end(response_event("last", log.count))
    for after in readers:
        while await read_on(after):
            pass
        assert read[after] == list(range(after + 1, 2049))
    await log.close()
    await state.close()


async def test_what_is_ignored() -> None:
    """Ignored fields are named for responses in the background as for others, and alike for chats."""
    async with held() as triton, service(triton) as proxy:
        triton.may_go_on.set()
        tools = [{"type": "web_search"}]
        for more in ({}, {"background": True}, {"background": True, "stream": True}):
            body: dict[str, Any] = {"model": "m", "input": "Hi", "tools": tools, "text": {"verbosity": "high"}, **more}
            answer = await proxy.post("/v1/responses", body)
            assert "text.verbosity, web_search" == ", ".join(sorted(answer.headers[IGNORED].split(", ")))
        chat: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        for path, body, name in (
            ("/v1/responses", {"model": "m", "input": "Hi"}, "text"),
            ("/v1/chat/completions", chat, "verbosity"),
        ):
            for value in ("low", "medium", "high"):
                given = {"verbosity": value} if name == "text" else value
                answer = await proxy.post(path, {**body, name: given})
                assert (200, value != "medium") == (answer.status, IGNORED in answer.headers)
                assert "medium" == answer.json.get("text", {"verbosity": "medium"})["verbosity"]
            wrong = await proxy.post(path, {**body, name: {"verbosity": "most"} if name == "text" else "most"})
            assert 400 == wrong.status
