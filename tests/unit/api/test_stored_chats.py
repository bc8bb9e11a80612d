"""Chat completions that are kept (``store: true``)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from structlog.testing import capture_logs

from tests.proxy_fixture import Proxy
from tests.store_fixture import Server
from tests.unit.api.responses.test_stored import send, service
from triton_openai.config.tree import AccessSettings, ServerSettings
from triton_openai.config.tree import LimitSettings as Limits

CHATS = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


async def made(proxy: Proxy, **fields: Any) -> Any:
    """Make a chat completion that is kept."""
    answer = await proxy.post(CHATS, {**CHAT, "store": True, **fields})
    assert 200 == answer.status, answer.body
    return answer.json


async def ids(proxy: Proxy, query: str = "") -> list[str]:
    """Return the ids of a list."""
    page = (await proxy.get(f"{CHATS}{query}")).json
    found = [each["id"] for each in page["data"]]
    assert (found[:1] or [None], found[-1:] or [None]) == ([page["first_id"]], [page["last_id"]])
    return found


async def test_a_kept_completion(store_url: str) -> None:
    """A kept completion is what the client got; metadata can be replaced, messages read, and all of it deleted."""
    async with service(store_url) as proxy:
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "me"},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "user", "content": "Please"},
        ]
        answer = await made(proxy, messages=messages, metadata={"a": "b"})
        path = f"{CHATS}/{answer['id']}"
        kept = (await proxy.get(path)).json
        assert {**answer, "metadata": {"a": "b"}} == kept
        ChatCompletion.model_validate(kept, strict=True)
        listed = (await proxy.get(f"{path}/messages")).json
        assert [f"{answer['id']}-{number}" for number in range(4)] == [each["id"] for each in listed["data"]]
        assert ["Be brief.", None, None, "Please"] == [each["content"] for each in listed["data"]]
        assert [{"type": "text", "text": "Hi"}] == listed["data"][1]["content_parts"]
        assert ("me", "No.") == (listed["data"][1]["name"], listed["data"][2]["refusal"])
        page = (await proxy.get(f"{path}/messages?order=desc&limit=2&after={answer['id']}-3")).json
        assert (["assistant", "user"], True) == ([each["role"] for each in page["data"]], page["has_more"])
        for metadata in ({"c": "d"}, None):
            changed = (await proxy.post(path, {"metadata": metadata})).json
            assert {**kept, "metadata": metadata or {}} == changed == (await proxy.get(path)).json
        wrong = await proxy.post(path, {"metadata": {"a": "b" * 513}})
        assert (400, "metadata") == (wrong.status, wrong.error["param"].partition(".")[0])
        gone = await send(proxy, "DELETE", path, None)
        assert {"id": answer["id"], "object": "chat.completion.deleted", "deleted": True} == gone.json
        for method, place in (("GET", path), ("GET", f"{path}/messages"), ("DELETE", path), ("GET", f"{CHATS}/x")):
            assert 404 == (await send(proxy, method, place, None)).status
        assert 404 == (await proxy.post(path, {"metadata": {}})).status


async def test_the_list(store_url: str) -> None:
    """The list has an order, pages, and filters by model and metadata, and only what was to be kept."""
    async with service(store_url) as proxy:
        assert [] == await ids(proxy)
        await proxy.post(CHATS, CHAT)
        await proxy.post(CHATS, {**CHAT, "store": False})
        await proxy.post("/v1/responses", {"model": "m", "input": "Hi"})
        found = [(await made(proxy, metadata={"n": str(n % 3), "all": "x"}))["id"] for n in range(7)]
        assert found == await ids(proxy)
        assert found[::-1] == await ids(proxy, "?order=desc")
        assert found[2:4] == await ids(proxy, f"?after={found[1]}&limit=2")
        assert found[1::-1] == await ids(proxy, f"?after={found[2]}&order=desc&limit=5")
        assert found[1::3] == await ids(proxy, "?metadata[n]=1&metadata[all]=x")
        assert [] == await ids(proxy, "?metadata[n]=1&metadata[all]=y")
        assert found == await ids(proxy, "?model=m")
        assert [] == await ids(proxy, "?model=n")
        pages = [(await proxy.get(f"{CHATS}?limit={limit}")).json["has_more"] for limit in (6, 7)]
        assert [True, False] == pages
        for query, param in (("limit=0", "limit"), ("order=up", "order"), ("after=x", "after")):
            refused = await proxy.get(f"{CHATS}?{query}")
            assert (400, param) == (refused.status, refused.error["param"])


async def test_many_that_do_not_match() -> None:
    """A filter finds the one that matches, however many others there are; large ones fill a page early."""
    async with service("memory", limits=Limits(max_text_size=3000), server=ServerSettings()) as proxy:
        first = await made(proxy, metadata={"a": "b"})
        found = [(await made(proxy))["id"] for _ in range(70)]
        assert [first["id"]] == await ids(proxy, "?metadata[a]=b&order=desc&limit=1")
        page = (await proxy.get(f"{CHATS}?limit=100")).json
        assert 1 < len(page["data"]) < 20
        assert page["has_more"]
        assert found[-1] == (await ids(proxy, "?order=desc"))[0]


@pytest.mark.parametrize("more", [{}, {"logprobs": False}, {"n": 2}], ids=["plain", "logprobs", "n"])
async def test_a_kept_stream(more: dict[str, Any]) -> None:
    """What was streamed is kept as it would have been answered at once."""
    async with service("memory") as proxy:
        whole = await made(proxy, **more)
        stream = await proxy.post(CHATS, {**CHAT, "store": True, "stream": True, **more})
        kept = (await proxy.get(f"{CHATS}/{stream.chunks[0]['id']}")).json
        assert {**whole, "id": kept["id"], "created": kept["created"], "metadata": {}} == kept
        assert 2 == len(await ids(proxy))


async def test_keys_have_their_own() -> None:
    """Another key's completions do not exist."""
    async with service("memory", access=AccessSettings(api_key=("a:key-of-a", "b:key-of-b"))) as proxy:
        mine, yours = ({"Authorization": f"Bearer key-of-{name}"} for name in "ab")
        answer = (await proxy.post(CHATS, {**CHAT, "store": True}, **mine)).json
        for headers, status, count in ((mine, 200, 1), (yours, 404, 0)):
            async with proxy.client.get(f"{CHATS}/{answer['id']}", headers=headers) as one:
                assert status == one.status
            async with proxy.client.get(CHATS, headers=headers) as listed:
                assert count == len((await listed.json())["data"])


async def test_without_a_store(file: Server) -> None:
    """An answer says that it is not kept, whether there is no store or it does not work; others are errors."""
    async with service("none") as proxy:
        answer = await proxy.post(CHATS, {**CHAT, "store": True, "metadata": 5})
        assert (200, "store") == (answer.status, answer.headers["x-triton-openai-ignored"])
        assert 400 == (await proxy.get(CHATS)).status
    async with service(file.url()) as proxy:
        answer = await made(proxy)
        wrong = await proxy.post(CHATS, {**CHAT, "store": True, "metadata": {"a": 5}})
        assert (400, "metadata") == (wrong.status, wrong.error["param"].partition(".")[0])
        file.stop()
        try:
            with capture_logs() as logs:
                unkept = await proxy.post(CHATS, {**CHAT, "store": True})
                stream = await proxy.post(CHATS, {**CHAT, "store": True, "stream": True})
            assert (200, "store") == (unkept.status, unkept.headers["x-triton-openai-ignored"])
            assert "stop" == json.loads(stream.events[-2])["choices"][0]["finish_reason"]
            assert "response is not kept" in {line["event"] for line in logs}
            assert 503 == (await proxy.get(f"{CHATS}/{answer['id']}")).status
        finally:
            file.start()
