"""Anthropic's official client, and what Claude Code sends, against the Messages API."""

from __future__ import annotations

import importlib
import json
from typing import TYPE_CHECKING, Any

import httpx2
import pytest

from tests.clients.service import Service, steered
from tests.clients.weather import CALL, SCHEMA

if TYPE_CHECKING:
    import anthropic
    from anthropic import Anthropic

MODEL = "vllm_model"
TOOL: Any = {
    "name": "get_weather",
    "description": "Tell the weather.",
    "input_schema": SCHEMA,
}


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import it where these tests run: each of pytest's processes collects this file, and it takes two seconds."""
    globals()["anthropic"] = importlib.import_module("anthropic")


@pytest.fixture
def client(tooled: Service, connection: httpx2.Client) -> Anthropic:
    """The official client."""
    return anthropic.Anthropic(base_url=tooled.address, api_key="none", max_retries=0, http_client=connection)


def asked(text: str, **fields: Any) -> Any:
    """Return the arguments of a request that is answered *text*."""
    messages = [{"role": "user", "content": steered(text=text)}]
    return {"model": MODEL, "max_tokens": 200, "messages": messages, **fields}


def test_a_message(client: Anthropic) -> None:
    """A whole message, typed, with its counts."""
    message = client.messages.create(**asked("one two three"))
    counted = client.messages.count_tokens(model=MODEL, messages=asked("one two three")["messages"])

    assert ["one two three"] == [block.text for block in message.content if block.type == "text"]
    assert ("end_turn", None) == (message.stop_reason, message.stop_sequence)
    assert message.id.startswith("msg_")
    assert counted.input_tokens == message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    assert message._request_id
    assert counted._request_id


def test_a_streamed_call(client: Anthropic) -> None:
    """The client's own helper puts text and call together; not streamed, they are the same."""
    request = asked("<think>Bonn it is.</think>Sure. " + CALL, tools=[TOOL], thinking={"type": "adaptive"})
    with client.messages.stream(**request) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = client.messages.create(**request)

    assert "content_block_stop" in kinds
    assert ["thinking", "text", "tool_use"] == [block.type for block in streamed.content]
    thinking, text, call = (block.to_dict() for block in streamed.content)
    assert ("Bonn it is.", "Sure.") == (thinking["thinking"], text["text"])
    assert ("get_weather", {"city": "Bonn"}) == (call["name"], call["input"])
    assert "tool_use" == streamed.stop_reason == whole.stop_reason
    assert [block.to_dict() | {"id": ""} for block in streamed.content] == [
        block.to_dict() | {"id": ""} for block in whole.content
    ]
    assert streamed.usage.input_tokens == whole.usage.input_tokens


def test_errors(client: Anthropic, tooled: Service) -> None:
    """Errors are the client's own classes, with the fields' own names."""
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**asked("one", model="nobody"))
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences") as refused:
        client.messages.create(**asked("one", stop_sequences=[""]))
    body: Any = refused.value.body
    assert ("error", "invalid_request_error") == (body["type"], body["error"]["type"])
    assert body["request_id"] == refused.value.request_id
    wrong = tooled.send("GET", "/v1/messages")
    assert (405, "error") == (wrong.status, wrong.json["type"])


def test_a_context_that_is_too_short(client: Anthropic) -> None:
    """An answer ends with the context; a prompt that exceeds it is refused in the words that Claude Code looks for."""
    request = {**asked("one two", model="tensorrt_llm_bls"), "max_tokens": 16000}
    limited = client.messages.with_raw_response.create(**request)
    room = int(limited.headers["x-max-tokens"])
    usage = limited.parse().usage
    assert 400 == room + usage.input_tokens
    endless = client.messages.create(
        **{**request, "messages": [{"role": "user", "content": steered(text="so on ", repeat=1000)}]}
    )
    assert "model_context_window_exceeded" == endless.stop_reason
    long = {**request, "messages": [{"role": "user", "content": "word " * 1000}]}
    count = client.messages.count_tokens(model="tensorrt_llm_bls", messages=long["messages"]).input_tokens
    with pytest.raises(anthropic.BadRequestError, match=f"prompt is too long: {count} tokens > 400 maximum"):
        client.messages.create(**long)


def test_models(client: Anthropic) -> None:
    """The models in Anthropic's form, page by page, and in OpenAI's for its clients."""
    names = [model.id for model in client.models.list(limit=2)]
    assert MODEL in names
    assert len(names) == len(set(names)) > 2
    assert MODEL == client.models.retrieve(MODEL).display_name
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("nobody")


def blocks(events: list[dict[str, Any]]) -> str:
    """Return the text of a stream."""
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def test_claude_code(tooled: Service) -> None:
    """What Claude Code sends, in the forms that change between its calls, is answered."""
    body = {
        "model": MODEL,
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.330; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "system", "content": [{"type": "text", "text": "Env", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm", "signature": ""},
                    {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.txt", "is_error": False},
                    {"type": "text", "text": steered(text="Done."), "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
        "tools": [
            {"name": "Bash", "description": "Run", "input_schema": {"type": "object", "$schema": "x"}},
            {"name": "Later", "description": "Deferred", "input_schema": {"type": "object"}, "defer_loading": True},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive", "display": "omitted"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
    reply = tooled.send("POST", "/v1/messages?beta=true", body, headers)
    whole = tooled.send("POST", "/v1/messages?beta=true", {**body, "stream": False}, headers)

    assert 200 == reply.status, reply.body
    events = [json.loads(block.partition("\ndata: ")[2]) for block in reply.body.decode().split("\n\n")[:-1]]
    assert "Done." == blocks(events) == whole.json["content"][-1]["text"]
    assert ["message_start", "content_block_start"] == [event["type"] for event in events[:2]]
    assert ["content_block_stop", "message_delta", "message_stop"] == [event["type"] for event in events[-3:]]
