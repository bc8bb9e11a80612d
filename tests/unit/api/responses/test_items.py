"""What a request goes on from and refers to, and the bounds of conversations."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.cases import every_case
from tests.proxy_fixture import Answer, Proxy
from tests.store_fixture import Server
from tests.unit.api.responses.test_stored import service
from triton_openai.api.responses.items import normalize_items
from triton_openai.app import SERVICE
from triton_openai.config.tree import LimitSettings, ResponsesSettings, ServerSettings
from triton_openai.errors import InvalidValue
from triton_openai.storage.sqlite import SqliteStore
from triton_openai.storage.store import Store

SMALL = {"server": ServerSettings(max_body_size=100_000), "limits": LimitSettings(max_text_size=50_000)}
LONG = "long " * 4000


def message(text: str, **more: Any) -> dict[str, Any]:
    """Return an item."""
    return {"role": "user", "content": text, **more}


def refused(answer: Answer, param: str, status: int = 400) -> str:
    """Return the message of a request that is too long."""
    error = answer.json["error"]
    assert (status, "context_length_exceeded", param) == (answer.status, error["code"], error["param"]), answer.body
    return str(error["message"])


async def test_what_is_referred_to_counts_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored item that is given five times is as long as five items, before it is loaded."""
    fetch, chain = SqliteStore.fetch, SqliteStore.chain
    loaded: list[int] = []

    async def forbidden(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was loaded")

    async def read(*given: Any, **options: Any) -> Any:
        found = await chain(*given, **options)
        loaded.append(len(found.rows))
        return found

    async with service("memory", **SMALL) as proxy:
        made = (await proxy.post("/v1/responses", {"model": "m", "input": LONG})).json
        (item,) = (await proxy.get(f"/v1/responses/{made['id']}/input_items")).json["data"]
        reference = {"type": "item_reference", "id": item["id"]}
        asked = {"model": "m", "input": [reference] * 5}
        two = (await proxy.post("/v1/responses", {"model": "m", "input": [reference] * 2})).json
        kept = (await proxy.get(f"/v1/responses/{two['id']}/input_items")).json["data"]
        assert 2 == len({each["id"] for each in kept})
        assert [item["content"]] * 2 == [each["content"] for each in kept]
        # More text than a body may have is found out when it is read, more bytes before.
        assert "50000 bytes" in refused(
            await proxy.post("/v1/responses", {"model": "m", "input": [reference] * 3}), "input"
        )
        monkeypatch.setattr(SqliteStore, "fetch", forbidden)
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
            assert "server.max_body_size" in refused(await proxy.post(path, asked), "input[4]")
        monkeypatch.setattr(SqliteStore, "fetch", fetch)
        # So it is with what comes in by its conversation or its chain.
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        previous = None
        for _ in range(3):
            added = await proxy.post(f"/v1/conversations/{conversation}/items", {"items": [message(LONG)] * 2})
            assert 200 == added.status
        for param, source in (("previous_response_id", two["id"]), ("conversation", conversation)):
            monkeypatch.setattr(SqliteStore, "chain", read)
            body = {"model": "m", "input": [message(LONG)], param: source}
            refused(await proxy.post("/v1/responses", body), param)
        # More bytes than a request may have are not loaded.
        assert [3, 0] == loaded
        previous = two["id"]
        few = (await proxy.post("/v1/responses", {"model": "m", "input": "x", "previous_response_id": previous})).json
        assert "completed" == few["status"]


async def test_values_and_items_that_are_brought_in() -> None:
    """Many small ones are too many, too, wherever they come from."""
    async with service("memory") as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        path = f"/v1/conversations/{conversation}/items"
        for _ in range(3):
            assert 200 == (await proxy.post(path, {"items": [message("x", extra=[[0]] * 9000)]})).status
        said = refused(await proxy.post("/v1/responses", {"model": "m", "conversation": conversation}), "conversation")
        assert "50000 values" in said
        # So it is with JSON in texts, which templates read.
        call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps([[0]] * 9000)}
        conversation = (await proxy.post("/v1/conversations", {"items": [call] * 2})).json["id"]
        body = {"model": "m", "conversation": conversation, "input": "x"}
        assert "values" not in (await proxy.post("/v1/responses", body)).body.decode()
        assert 200 == (await proxy.post(f"/v1/conversations/{conversation}/items", {"items": [call]})).status
        assert "50000 values" in refused(await proxy.post("/v1/responses", body), "conversation")
        made = (await proxy.post("/v1/responses", {"model": "m", "input": "x"})).json
        references = [{"id": made["output"][0]["id"]}] * 4096
        body = {"model": "m", "input": references, "previous_response_id": made["id"]}
        assert "4096 items" in refused(await proxy.post("/v1/responses", body), "input[4094]")


@every_case(
    "limits, param",
    [({"max_conversation_items": 3}, "conversation"), ({"max_conversation_size": 1100}, "conversation")],
)
async def test_a_conversation_that_is_full(limits: dict[str, Any], param: str) -> None:
    """Nothing more is added; a response that is made in it is not made, or answered and not added."""
    responses = ResponsesSettings(store="memory", **limits)
    async with service("memory", responses=responses) as proxy:
        many = {"items": [message("x" * 300)] * 4}
        over = await proxy.post("/v1/conversations", many)
        assert (400, "conversation_full") == (over.status, over.json["error"]["code"])
        assert "compact" in over.json["error"]["message"]
        made = await proxy.post("/v1/conversations", {"items": many["items"][:2]})
        conversation = made.json["id"]
        items = f"/v1/conversations/{conversation}/items"
        over = await proxy.post(items, {"items": many["items"][:2]})
        assert (400, "conversation_full", param) == (
            *(over.status, over.json["error"]["code"]),
            over.json["error"]["param"],
        )
        # There is room for the question, and not for the answer.
        with capture_logs() as logs:
            answer = (
                await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "conversation": conversation})
            ).json
        assert ("completed", None, True) == (answer["status"], answer["conversation"], answer["store"])
        assert ["response is not kept"] == [line["event"] for line in logs if line["log_level"] == "warning"]
        assert 2 == len((await proxy.get(items)).json["data"])
        assert 200 == (await proxy.get(f"/v1/responses/{answer['id']}")).status
        # There is none for the question.
        asked = {"model": "m", "input": [message("x" * 300)] * 2, "conversation": conversation}
        over = await proxy.post("/v1/responses", asked)
        assert (400, "conversation_full") == (over.status, over.json["error"]["code"])
        async with proxy.client.delete(f"{items}/{(await proxy.get(items)).json['data'][0]['id']}") as deleted:
            assert 200 == deleted.status
        answer = (await proxy.post("/v1/responses", {"model": "m", "input": "Hi", "conversation": conversation})).json
        assert {"id": conversation} == answer["conversation"]


async def test_pages_of_large_items() -> None:
    """A page ends before it is too large; whoever follows the pages gets all items."""
    async with service("memory", **SMALL) as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        path = f"/v1/conversations/{conversation}/items"
        added = [(await proxy.post(path, {"items": [message(LONG)]})).json["last_id"] for _ in range(5)]
        found: list[str] = []
        query = "?order=asc&limit=100"
        while True:
            page = (await proxy.get(path + query)).json
            assert 1 <= len(page["data"]) <= 2
            found += [each["id"] for each in page["data"]]
            if not page["has_more"]:
                break
            query = f"?order=asc&limit=100&after={page['last_id']}"
        assert added == found


async def test_ids_of_items() -> None:
    """One that is given twice gets another id; in a conversation, what is there already is not added, nor replaced."""
    async with service("memory") as proxy:
        conversation = (await proxy.post("/v1/conversations", {"items": [message("a", id="mine")]})).json["id"]
        items = f"/v1/conversations/{conversation}/items"
        assert 200 == (await proxy.post(items, {"items": [message("a", id="mine")]})).status
        other = await proxy.post(items, {"items": [message("x"), message("b", id="mine")]})
        assert (400, "items[1].id") == (other.status, other.json["error"]["param"])
        assert 1 == len((await proxy.get(items)).json["data"])
        body = {"input": [message("b", id="mine"), {"id": "mine"}], "conversation": conversation, "model": "m"}
        assert "completed" == (await proxy.post("/v1/responses", body)).json["status"]
        kept = (await proxy.get(f"{items}?order=asc")).json["data"]
        assert ["a", "b", "a"] == [each["content"][0]["text"] for each in kept[:3]]
        assert 4 == len({each["id"] for each in kept})
    for wrong in (5, ["a"], "a\0", "a" * 513):
        with pytest.raises(InvalidValue) as refused:
            normalize_items([message("x"), message("x", id=wrong)], "suffix", "input")
        assert "input[1].id" == refused.value.param


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**39), 10**39) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)  # fmt: skip


def test_any_json_is_stored_unharmed() -> None:
    """Whatever JSON a request has comes back as it was, in items and in the parameters of tools."""
    running, large = service("memory"), {"n": [2**64, -(2**63) - 1, 10**39]}

    async def there_and_back(proxy: Proxy, value: Any, parameter: Any) -> None:
        tool = {"type": "function", "name": "t", "parameters": {"type": "object", "maximum": parameter}}
        body = {"model": "m", "input": [message("x", extra=value)], "tools": [tool], "tool_choice": "none"}
        made = await proxy.post("/v1/responses", body)
        assert 200 == made.status, made.body
        assert made.json["store"]
        found = (await proxy.get(f"/v1/responses/{made.json['id']}")).json
        assert parameter == found["tools"][0]["parameters"]["maximum"]
        (item,) = (await proxy.get(f"/v1/responses/{made.json['id']}/input_items")).json["data"]
        assert value == item["extra"]
        more = {
            **body,
            "previous_response_id": made.json["id"],
            "input": [{"type": "item_reference", "id": item["id"]}],
        }
        assert 200 == (await proxy.post("/v1/responses", more)).status
        conversation = (await proxy.post("/v1/conversations", {"items": body["input"]})).json["id"]
        (item,) = (await proxy.get(f"/v1/conversations/{conversation}/items")).json["data"]
        assert json.dumps(value) == json.dumps(item["extra"])

    with asyncio.Runner() as runner:
        proxy = runner.run(running.__aenter__())

        @settings(max_examples=20)
        @given(JSON, JSON)
        @example(large, large)
        def check(value: Any, parameter: Any) -> None:
            runner.run(there_and_back(proxy, value, parameter))

        try:
            check()
        finally:
            runner.run(running.__aexit__(None, None, None))


async def test_a_store_that_hangs(postgresql: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request waits once; those after it are answered at once without being kept, until it answers again."""
    async with service(postgresql.url()) as proxy:
        ask = {"model": "m", "input": "Hi"}
        made = (await proxy.post("/v1/responses", ask)).json
        # A sweep that is still running would fail as well, and say so.
        store = proxy.client.app[SERVICE].responses._store
        assert store is not None
        await store.sweep()
        monkeypatch.setattr(Store, "timeout", 0.2)
        with postgresql.frozen():
            with capture_logs() as logs:
                for stream in (False, True, False):
                    answer = await proxy.post("/v1/responses", {**ask, "stream": stream})
                    assert b'"store":false' in answer.body
                gone = await proxy.get(f"/v1/responses/{made['id']}")
            assert (503, "store_unavailable") == (gone.status, gone.error["code"])
            assert "Retry-After" in gone.headers
            assert b"triton_openai_store_up 0.0" in (await proxy.get("/metrics")).body
    warnings = [line["event"] for line in logs if line["log_level"] == "warning"]
    warnings.remove("request refused")
    assert ["response store unavailable"] == warnings


@pytest.mark.parametrize("kind", ["file", "postgresql"])
async def test_ids_that_nothing_has(kind: str, request: pytest.FixtureRequest) -> None:
    """Whatever a client calls an item, a response or a conversation, no store stumbles over it."""
    server: Server = request.getfixturevalue(kind)
    async with service(server.url()) as proxy:
        conversation = (await proxy.post("/v1/conversations", {})).json["id"]
        for wrong in (
            "\0",
            "a\0b",
            "\ud7ff\uffff",
            "x" * 5000,
            "'; --",
            "%00",
            "é",
            ":",
            "msg_" + "\0" * 32,
            "resp_%s",
        ):
            quoted = quote(wrong, safe="")
            for path in (
                f"conversations/{conversation}/items/{quoted}",
                f"conversations/conv_{quoted}",
                f"responses/resp_{quoted}",
                f"conversations/conv_{quoted}/items",
            ):
                assert 404 == (await proxy.get(f"/v1/{path}")).status, path
            async with proxy.client.delete(f"/v1/conversations/{conversation}/items/{quoted}") as deleted:
                assert 404 == deleted.status
            page = await proxy.get(f"/v1/conversations/{conversation}/items?after={quoted}")
            assert (400, "after") == (page.status, page.json["error"]["param"])
            for field, more in (("previous_response_id", "resp_"), ("conversation", "conv_")):
                answer = await proxy.post("/v1/responses", {"model": "m", "input": "x", field: more + wrong})
                assert answer.status in (400, 404), answer.body
            answer = await proxy.post(
                "/v1/responses", {"model": "m", "input": [{"type": "item_reference", "id": wrong}]}
            )
            assert (404, "input[0].id") == (answer.status, answer.json["error"]["param"])
