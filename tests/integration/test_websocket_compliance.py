"""
The cases that the suite of Open Responses has for a WebSocket, in front of a real Triton.

Source: github.com/openresponses/openresponses, the templates of its compliance tests with the transport "websocket".
The names are theirs; the calls and the checks are our own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.service import steered
from tests.integration.test_websocket import Socket, connected, text_of
from tests.openai_types import check_events
from tests.proxy_fixture import Proxy

pytestmark = pytest.mark.asyncio(loop_scope="session")
_MODEL = "vllm_model"
_MISSING = "resp_of_nobody"


async def completed(socket: Socket, text: str, **fields: Any) -> dict[str, Any]:
    """Ask, and return the response, which is complete and has that text; its events are OpenAI's."""
    await socket.ask(text, **{"store": False, **fields})
    events = await socket.events()
    check_events(map(_as_sent, events))
    response: dict[str, Any] = events[-1]["response"]
    assert "completed" == response["status"], events[-1]
    assert text == text_of(events[-1])
    assert response["id"]
    return response


def _as_sent(event: dict[str, Any]) -> bytes:
    """Return the JSON of an event, without the field that only those of a WebSocket have."""
    return json.dumps({name: value for name, value in event.items() if name != "headers"}).encode()


async def refused(socket: Socket, code: str, **fields: Any) -> None:
    """Ask for what is refused with *code*."""
    await socket.ask("x", **{"store": False, **fields})
    error = await socket.error()
    assert (400, code) == (error["status"], error["code"])
    assert error["message"]


async def test_websocket_response(proxies: dict[str, Proxy]) -> None:
    """A message is answered."""
    async with connected(proxies["http"]) as socket:
        prompt = steered("Count.", text="one two three")
        message = {"type": "message", "role": "user", "content": prompt}
        await completed(socket, "one two three", input=[message], store=True)


async def test_websocket_sequential_responses(proxies: dict[str, Proxy]) -> None:
    """One connection answers one request after the other."""
    async with connected(proxies["http"]) as socket:
        first = await completed(socket, "first")
        second = await completed(socket, "second")
        assert first["id"] != second["id"]


async def test_websocket_continuation(proxies: dict[str, Proxy]) -> None:
    """A response that is not stored can be gone on from, with new input only."""
    async with connected(proxies["http"]) as socket:
        first = await completed(socket, "OK")
        second = await completed(socket, "cobalt", previous_response_id=first["id"])
        alone = await completed(socket, "cobalt")
        assert first["id"] == second["previous_response_id"]
        assert second["usage"]["input_tokens"] > alone["usage"]["input_tokens"]


async def test_websocket_reconnect_store_false_recovery(proxies: dict[str, Proxy]) -> None:
    """Another connection does not have it, and begins anew."""
    async with connected(proxies["http"]) as socket:
        first = await completed(socket, "OK")
    async with connected(proxies["http"]) as socket:
        await refused(socket, "previous_response_not_found", previous_response_id=first["id"])
        await completed(socket, "recovered")


async def test_websocket_generate_false(proxies: dict[str, Proxy]) -> None:
    """What is only prepared can be gone on from."""
    async with connected(proxies["http"]) as socket:
        await socket.ask("x", generate=False, store=False)
        created, ended = await socket.events()
        assert ("response.created", "response.completed", []) == (
            created["type"],
            ended["type"],
            ended["response"]["output"],
        )
        await completed(socket, "warm", previous_response_id=ended["response"]["id"])


async def test_websocket_previous_response_not_found(proxies: dict[str, Proxy]) -> None:
    """The error names what is missing."""
    async with connected(proxies["http"]) as socket:
        await refused(socket, "previous_response_not_found", previous_response_id=_MISSING)


async def test_websocket_failed_continuation_evicts_cache(proxies: dict[str, Proxy]) -> None:
    """A turn that fails ends the chain, also one with the output of a call that nobody made."""
    async with connected(proxies["http"]) as socket:
        first = await completed(socket, "OK")
        output = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "No such call."}
        await refused(socket, "invalid_value", previous_response_id=first["id"], input=[output])
        await refused(socket, "previous_response_not_found", previous_response_id=first["id"])


async def test_websocket_compact_new_chain(proxies: dict[str, Proxy]) -> None:
    """What a compaction returns begins a new chain."""
    proxy = proxies["http"]
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Remember slate."}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "OK."}]}
    answer = await proxy.post("/v1/responses/compact", {"model": _MODEL, "input": [user, said, user]})
    assert 200 == answer.status, answer.body
    async with connected(proxy) as socket:
        last = {"type": "message", "role": "user", "content": steered("Go on.", text="compacted")}
        await completed(socket, "compacted", input=[*answer.json["output"], last], tools=[])
