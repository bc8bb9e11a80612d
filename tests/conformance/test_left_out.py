"""What of a request has no effect is named in a header of its answer; and files of text, in every API for chats."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.cases import every_case
from tests.conformance.calls import in_session_loop
from tests.proxy_fixture import Answer, Proxy

pytestmark = [in_session_loop, pytest.mark.face]
HEADER = "x-triton-openai-ignored"
THREAD = [{"role": "user", "content": "Hello"}]


async def ask(proxy: Proxy, path: str, **fields: Any) -> Answer:
    """Send what *path* needs, and *fields*."""
    limit = "max_output_tokens" if path == "responses" else "max_tokens"
    needed: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": THREAD},
        "completions": {"prompt": "Hello"},
        "responses": {"input": "Hello"},
        "messages": {"messages": THREAD},
        "embeddings": {"input": "Hello"},
    }
    if path == "embeddings":
        return await proxy.post("/v1/embeddings", {"model": "text_embedding", **needed[path], **fields})
    answer = await proxy.post(f"/v1/{path}", {"model": "vllm_model", limit: 8, **needed[path], **fields})
    assert 200 == answer.status, answer.body
    return answer


WEB = {"type": "web_search_20250305", "name": "web_search"}
MCP = [{"type": "url", "url": "https://example.com", "name": "a"}]
LEFT_OUT: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"user": "u", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"}, ""),
    ("chat/completions", {"temprature": 1, "cache_salt": "x", "vllm_xargs": {}}, "temprature, cache_salt"),
    ("completions", {"guided_whitespace_pattern": " *", "kv_transfer_params": None}, "guided_whitespace_pattern"),
    (
        "responses",
        {
            "tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "a"}],
            "input": [{"type": "web_search_call", "id": "ws_1"}, THREAD[0]],
            "reasoning": {"effort": "high"},
        },
        "web_search_call, web_search, mcp, reasoning.effort",
    ),
    ("messages", {"mcp_servers": MCP, "tools": [WEB]}, "mcp_servers, web_search_20250305"),
    ("messages", {"mcp_servers": [], "metadata": {"user_id": "u"}, "speed": "fast"}, ""),
    ("messages", {"output_config": {"effort": "high"}}, "output_config.effort"),
    ("embeddings", {"cache_salt": "x", "user": "u"}, "cache_salt"),
]


@every_case("stream", [False, True])
async def test_what_is_ignored_is_named(proxy, stream):
    """
    Ignored fields are named by parameter and by the types of tools and items, unless an answer never depends on
    them.
    """
    for path, fields, expected in LEFT_OUT:
        streamed = {"stream": True} if stream and path != "embeddings" else {}
        answer = await ask(proxy, path, **fields, **streamed)
        assert expected == answer.headers.get(HEADER, ""), (path, fields)


async def test_the_header_is_bounded(proxy):
    """Whatever names a client has, they are few, short, and end neither their place nor the header."""
    names = ["a\r\nset-cookie: b", "c, d", "ü" * 9, "x-" * 5000, "sk-" + "a1" * 20, *(f"n{each}" for each in range(40))]
    answer = await ask(proxy, "chat/completions", **dict.fromkeys(names, 1))
    told = answer.headers[HEADER]

    assert "set-cookie" not in answer.headers
    assert ["a??set-cookie:?b", "c??d", "?" * 9, "x-" * 32, "<redacted>", "n0"] == told.split(", ")[:6]
    assert len(told) < 1200
    assert told.isascii()
    assert told.isprintable()


async def test_file_search_is_refused(proxy):
    """An answer without the documents would be made up."""
    body = {"model": "vllm_model", "input": "Hello", "tools": [{"type": "file_search", "vector_store_ids": ["vs_1"]}]}
    answer = await proxy.post("/v1/responses", body)

    assert (400, "tools[0].type") == (answer.status, answer.error["param"])
    assert "file_search" in answer.error["message"]


TABLE = "city,people\nKöln,1087000"
SHOWN = f'<file name="cities.csv">\n{TABLE}\n</file>'


def parts(data: str) -> list[tuple[str, dict[str, Any]]]:
    """Return requests with a file of *data*, by their paths."""
    file = {"filename": "cities.csv", "file_data": data}
    return [
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "file", "file": file}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", **file}]}]}),
    ]


async def test_files_of_text(proxy):
    """The model sees the file's text and name: its honest answer quotes the prompt."""
    url = f"data:text/csv;base64,{base64.b64encode(TABLE.encode()).decode()}"
    source = {"type": "text", "media_type": "text/plain", "data": TABLE}
    document = {
        "messages": [{"role": "user", "content": [{"type": "document", "title": "cities.csv", "source": source}]}]
    }
    for path, fields in [*parts(url), ("messages", document)]:
        if path == "responses":
            counted = await proxy.post("/v1/responses/input_tokens", {"model": "vllm_model", **fields})
        elif path == "messages":
            counted = await proxy.post("/v1/messages/count_tokens", {"model": "vllm_model", **fields})
        else:
            counted = await proxy.post("/v1/tokenize", {"model": "vllm_model", **fields})
        plain = await proxy.post(
            "/v1/tokenize", {"model": "vllm_model", "messages": [{"role": "user", "content": SHOWN}]}
        )
        assert plain.json["count"] == counted.json.get("count", counted.json.get("input_tokens")), path
        assert 200 == (await ask(proxy, path, **fields)).status


@every_case("data", ["data:application/pdf;base64,JVBERi0=", "data:text/plain;base64,/w=="])
async def test_files_of_another_kind(proxy, data):
    """Files of another kind are refused, with the place and the file's name."""
    for path, fields in parts(data):
        answer = await proxy.post(f"/v1/{path}", {"model": "vllm_model", **fields})
        place = "messages[0].content[0].file" if path.startswith("chat") else "input[0].content[0]"

        assert (400, f"{place}.file_data") == (answer.status, answer.error["param"])
        assert "cities.csv" in answer.error["message"]


async def test_a_file_counts_as_text(proxy):
    """A file is held to the limit of text; an image of that size is not text."""
    data = "A" * 4_400_000
    for url, status in ((f"data:text/plain;base64,{data}", 413), (f"data:image/png;base64,{data}", 400)):
        for path, fields in parts(url):
            answer = await proxy.post(f"/v1/{path}", {"model": "vllm_model", **fields})
            assert status == answer.status, answer.body


@pytest.mark.parametrize(
    "model, does",
    [
        ("text_embedding", "makes embeddings (/v1/embeddings)"),
        ("text_rerank", "ranks texts (/v1/rerank, /v1/score)"),
        ("text_classification", "classifies texts (/v1/classify"),
    ],
)
async def test_a_model_that_generates_nothing(proxy, model, does):
    """A chat with it says what it does, and where, whatever else the chat lacks."""
    for path, fields in (
        ("chat/completions", {"messages": THREAD}),
        ("completions", {"prompt": "Hello"}),
        ("responses", {"input": "Hello"}),
        ("responses/input_tokens", {"input": "Hello"}),
        ("messages", {"messages": THREAD, "max_tokens": 1}),
        ("messages/count_tokens", {"messages": THREAD}),
    ):
        answer = await proxy.post(f"/v1/{path}", {"model": model, **fields})
        assert 400 == answer.status
        message = answer.json["error"]["message"]
        assert f"The model '{model}' does not generate text. It" in message
        assert does in message
        assert "tokenizer" not in message
