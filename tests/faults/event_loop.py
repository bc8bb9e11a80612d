"""
Measures how long requests within the default limits hold the event loop, whatever their bodies are made of.

What is measured is the CPU time of this process, all threads included, between two turns of its event loop: what a
thread does while it holds the interpreter lock counts as well. The client is a process of its own.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import logging
import math
import selectors
import sqlite3
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog

from tests.conformance.calls import steered
from tests.form_shapes import CONTENTS, OVERHEAD
from tests.proxy_fixture import Proxy, proxy_settings, serving
from tests.store_fixture import local
from tests.triton_fixture import TestTriton, running_triton
from triton_openai.app import SERVICE
from triton_openai.batches.file_folder import Files
from triton_openai.config.tree import BatchesSettings, FilesSettings, ModelSettings, Settings
from triton_openai.storage.batch_records import Batch, BatchError

# Seconds, on a machine that reads the numbers of the yardstick in a third of it; a slower one has so much more.
LONGEST_TURN = 0.050
YARDSTICK = json.dumps([1000] * 262_144)
# Other programs on the machine only ever make a measurement longer.
ATTEMPTS = 8
MIB = 1024 * 1024

# Sends the file that each line names, and writes the status and the beginning of the answer. What is behind "batch:" is
# where the lines of the file go, and "get:" reads.
_CLIENT = """
import http.client, json, sys, time

def send(port, method, path, body=None, kind="application/json"):
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=120)
    connection.request(method, path, body, {"Content-Type": kind} if body is not None else {})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found

def run(port, endpoint, lines):
    parts = b'name="purpose"\\r\\n\\r\\nbatch', b'name="file"; filename="a"\\r\\n\\r\\n' + lines
    form = b"".join(b"--limit\\r\\nContent-Disposition: form-data; " + part + b"\\r\\n" for part in parts)
    _, file = send(port, "POST", "/v1/files", form + b"--limit--\\r\\n", "multipart/form-data; boundary=limit")
    made = {"input_file_id": json.loads(file)["id"], "endpoint": endpoint, "completion_window": "24h"}
    status, batch = send(port, "POST", "/v1/batches", json.dumps(made).encode())
    while status == 200 and json.loads(batch)["status"] in ("validating", "in_progress", "finalizing"):
        time.sleep(0.05)
        status, batch = send(port, "GET", "/v1/batches/" + json.loads(batch)["id"])
    return (200 if json.loads(batch).get("status") == "completed" else 400), batch

for line in sys.stdin:
    port, path, file = line.split()
    with open(file, "rb") as given:
        body = given.read()
    if path.startswith("batch:"):
        status, answer = run(port, path[6:], body)
    elif path.startswith("get:"):
        status, answer = send(port, "GET", path[4:])
    else:
        form = path.startswith(("/v1/audio/", "/v1/files"))
        kind = "multipart/form-data; boundary=xx" if form else "application/json"
        status, answer = send(port, "POST", path, body, kind)
    print(json.dumps([status, answer[:300].decode("utf-8", "replace")]), flush=True)
"""


#: Makes the path and the body of a request, by what is special about it.
Cases = Mapping[str, Callable[[], tuple[str, bytes]]]


def request(path: str, base: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[str, bytes]:
    """Return *path* and the JSON of *base* with the fields *given*; bytes are JSON as it is written."""
    items = (
        f"{json.dumps(name)}:{value.decode() if isinstance(value, bytes) else json.dumps(value)}"
        for name, value in {**base, **given}.items()
    )
    return path, f"{{{','.join(items)}}}".encode()


def chat(**given: Any) -> tuple[str, bytes]:
    """Return a chat."""
    return request("/v1/chat/completions", {"model": "vllm_model", "max_tokens": 1, "messages": [said("hi")]}, given)


def completion(**given: Any) -> tuple[str, bytes]:
    """Return a completion, of a model that takes token ids."""
    return request("/v1/completions", {"model": "tensorrt_llm", "max_tokens": 1, "prompt": "hi"}, given)


def other(path: str, model: str, **given: Any) -> tuple[str, bytes]:
    """Return a request of another kind."""
    return request(path, {"model": model}, given)


def said(text: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": text, **fields}


def many(item: str, count: int) -> str:
    """Return the JSON of a list with *count* times the JSON *item*."""
    return f"[{','.join([item] * count)}]"


def keys(count: int, value: str = "1") -> str:
    """Return the JSON of an object with *count* keys that are numbers."""
    return "{" + ",".join(f'"{number}":{value}' for number in range(count)) + "}"


def inner(text: str) -> str:
    """Return the JSON of an object that holds the JSON *text*."""
    return '{"a":' + text + "}"


def tool(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


def tools(count: int, properties: int = 20) -> list[dict[str, Any]]:
    """Return *count* tools as an agent has them."""
    schema = {f"p{number}": {"type": "string", "description": "A word. " * 8} for number in range(properties)}
    return [tool(f"tool_{number}", schema) for number in range(count)]


def past_calls(count: int, arguments: str = '{"city": "Paris"}', *, together: bool = False) -> list[dict[str, Any]]:
    """Return a conversation with *count* tool calls, *together* in one message or each with its answer."""
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": "f", "arguments": arguments}}
        for number in range(count)
    ]
    if together:
        return [said("hi"), said(None, "assistant", tool_calls=calls)]
    turns = [[said(None, "assistant", tool_calls=[call]), said("x", "tool", tool_call_id=call["id"])] for call in calls]
    return [said("hi"), *(message for turn in turns for message in turn)]


def image(size: int) -> dict[str, Any]:
    """Return a part with an image of *size* bytes, of which the head is one."""
    data = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * (size // 256)
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def response_format(properties: int) -> dict[str, Any]:
    """Return a response format with a schema of so many properties."""
    return {"type": "json_schema", "json_schema": {"schema": {"properties": json.loads(keys(properties, "{}"))}}}


def response(given: str, **fields: Any) -> tuple[str, bytes]:
    """Return a request for a response, with the JSON of its input."""
    return request("/v1/responses", {"model": "vllm_model", "store": False}, {"input": given.encode(), **fields})


def message(content: Any, *, before: Sequence[Any] = (), path: str = "/v1/messages") -> tuple[str, bytes]:
    """Return a request of Anthropic's API."""
    limit = {} if path.endswith("tokens") else {"max_tokens": 1}
    return request(path, {"model": "vllm_model", **limit}, {"messages": [*before, said(content)]})


def document(size: int) -> dict[str, Any]:
    """Return a document of *size* characters of base64."""
    return {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "A" * size}}


THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "words " * 150}]}
MORE_TOOLS: dict[str, Any] = {
    "type": "additional_tools", "tools": [{"type": "function", "name": "f", "parameters": {}}]
}  # fmt: skip
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": json.dumps({"a": "words " * 140})}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "words " * 150}
ROLES, LATE = ("user", "assistant"), ("user", "system")

WORDS = "The quick brown fox jumps over the lazy dog. "
AGENT = [said(WORDS * 3300, "system"), said("hi")]
IDS = [1000 + number % 2000 for number in range(262_144)]
SLOW = "2.2250738585072014e-308"
LONG = f"4.{'9406564584' * 77}e-324"
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"tools": tools(1, 0) * 5000}}

#: What agents and others really send.
USUAL: Cases = {
    "system prompt of 150 KB, 128 tools": lambda: chat(messages=AGENT, tools=tools(128)),
    "the same, `tool_choice: required`": lambda: chat(messages=AGENT, tools=tools(128), tool_choice="required"),
    "text of 1 MB": lambda: chat(messages=[said(WORDS * 22_000)]),
    "text of 1 MB, tokenized here": lambda: completion(prompt=WORDS * 22_000),
    "text of 1 MB, truncated": lambda: completion(prompt=WORDS * 22_000, truncate_prompt_tokens=100),
    "262,144 prompt ids": lambda: completion(prompt=IDS),
    "1,001 messages": lambda: chat(messages=[said(WORDS * 5, ("user", "assistant")[n % 2]) for n in range(1001)]),
    "2,000 past tool calls": lambda: chat(messages=past_calls(2000)),
    "4 images of 8 MiB": lambda: chat(messages=[said([image(8 * MIB) for _ in range(4)])]),
    "2,048 texts to embed": lambda: other("/v1/embeddings", "text_embedding", input=[WORDS * 5] * 2048),
    "2,048 documents to rank": lambda: other(
        "/v1/rerank", "text_rerank_pairs", query="hi", documents=[WORDS * 5] * 2048
    ),
    "2,048 documents to score": lambda: other(
        "/v1/score", "text_rerank_ids", queries="hi", documents=[WORDS * 5] * 2048
    ),
    "2,048 texts to classify": lambda: other("/v1/classify", "text_classification_ids", input=[WORDS * 5] * 2048),
    "1 MB to tokenize, with texts": lambda: other(
        "/tokenize", "vllm_model", prompt=WORDS * 22_000, return_token_strs=True
    ),
    "262,144 ids to detokenize": lambda: other("/detokenize", "vllm_model", tokens=IDS),
}

#: What is slow to read, or to work on: beyond the limits, and just within them.
HOSTILE: Cases = {
    "`metadata`: 900,000 times 1e308": lambda: chat(metadata=many("1e308", 900_000).encode()),
    "`metadata`: 990,000 keys": lambda: chat(metadata=keys(990_000).encode()),
    "`metadata`: 49,000 keys": lambda: chat(metadata=keys(49_000).encode()),
    "`chat_template_kwargs`: 990,000 keys": lambda: chat(chat_template_kwargs=keys(990_000).encode()),
    "`chat_template_kwargs`: 49,000 keys": lambda: chat(chat_template_kwargs=keys(49_000).encode()),
    f"`chat_template_kwargs`: 49,000 times {SLOW}": lambda: chat(
        chat_template_kwargs=inner(many(SLOW, 49_000)).encode()
    ),
    "`chat_template_kwargs`: 1,200 numbers of 771 digits": lambda: chat(
        chat_template_kwargs=inner(many(LONG, 1200)).encode()
    ),
    "`chat_template_kwargs`: 500,000 whole numbers": lambda: chat(
        chat_template_kwargs=inner(many("1000", 500_000)).encode()
    ),
    "`documents`: 2,000 of 10 empty objects": lambda: chat(documents=many(inner(many("{}", 10)), 2000).encode()),
    "20,000 past tool calls": lambda: chat(messages=past_calls(20_000, together=True)),
    "5,000 past tool calls": lambda: chat(messages=past_calls(5000, together=True)),
    "past tool call: 4,000,000 times {}": lambda: chat(messages=past_calls(1, inner(many("{}", 4_000_000)))),
    "past tool call: 1,000,000 times {}": lambda: chat(messages=past_calls(1, inner(many("{}", 1_000_000)))),
    "past tool calls: 10 with 4,000 times 1e308": lambda: chat(messages=past_calls(10, inner(many("1e308", 4000)))),
    "512 tools, `required`": lambda: chat(tools=tools(512), tool_choice="required"),
    "512 tools, `required`, 128 answers": lambda: chat(tools=tools(512, 10), tool_choice="required", n=128),
    "512 tools, 5,000 allowed": lambda: chat(tools=tools(512, 0), tool_choice=ALLOWED),
    "a tool of 24,000 properties, `required`": lambda: chat(
        tools=[tool("f", json.loads(keys(24_000, "{}")))], tool_choice="required"
    ),
    "schema of 95,000 properties": lambda: chat(response_format=response_format(95_000)),
    "schema of 24,000 properties": lambda: chat(response_format=response_format(24_000)),
    "`guided_json`, a text: 1,000,000 times {}": lambda: chat(guided_json=inner(many("{}", 1_000_000))),
    "990,000 prompt ids": lambda: completion(prompt=many("1000", 990_000).encode()),
    "520,000 prompt ids": lambda: completion(prompt=many("1000", 520_000).encode()),
    "262,144 prompt ids, 128 answers": lambda: completion(prompt=IDS, n=128),
    "2,048 lists of 250 ids to embed": lambda: other("/v1/embeddings", "vllm_model", input=[[1000] * 250] * 2048),
    "2,048 prompts": lambda: completion(prompt=["hi"] * 2048),
    "16 prompts, 128 answers": lambda: completion(prompt=["hi"] * 16, n=128),
    "24,000 bad words": lambda: completion(bad_words=["word"] * 24_000),
    "a bad word of 2 MiB": lambda: completion(bad_words=["word " * (MIB // 2)]),
    "4 stop strings of 900 KB": lambda: chat(stop=["stop " * 180_000] * 4),
    "`logit_bias`: 49,000 tokens": lambda: completion(logit_bias=keys(49_000).encode()),
    "`logit_bias`: 49,000 times 1e-308": lambda: completion(logit_bias=keys(49_000, "1e-308").encode()),
    "500,000 stop token ids": lambda: completion(stop_token_ids=many("5", 500_000).encode()),
    "47 MiB in a data URL that is ignored": lambda: chat(metadata="data:image/png;base64," + "A" * (47 * MIB)),
    "47 MiB of escapes in a data URL": lambda: chat(metadata=b'"data:%b"' % (b"\\/" * (47 * MIB // 2))),
    "47 MiB of text": lambda: chat(metadata="A" * (47 * MIB)),
    "4 MiB of text": lambda: chat(messages=[said("word, " * (MIB * 4 // 6 - 100))]),
    "4 MiB of escapes": lambda: chat(
        messages=b'[{"role":"user","content":"%b"}]' % (b"\\u00e9" * (MIB * 4 // 6 - 100))
    ),
    "4 MiB of quotation marks to tokenize": lambda: other(
        "/tokenize", "vllm_model", prompt=b'"%b"' % (b'\\"' * (2 * MIB - 100))
    ),
    "4 MiB beyond ASCII to tokenize": lambda: other(
        "/tokenize", "vllm_model", prompt='"{}"'.format("\u4e2d" * (MIB * 4 // 3 - 100)).encode()
    ),
    "4 MiB of quotation marks": lambda: chat(metadata=b'"' * (4 * MIB - 200)),
    "4 MiB of beginnings of data URLs": lambda: chat(metadata=many('"data:"', 4 * MIB // 8).encode()),
    "4,095 small images": lambda: chat(messages=[said([image(256)] * 4095)]),
    "4,000 parts of text": lambda: chat(messages=[said([{"type": "text", "text": "hi"}] * 4000)]),
    "4,096 messages": lambda: chat(messages=[said("hi")] * 4096),
    "a model's name of 3 MiB": lambda: other("/tokenize", "a-model_" * (3 * MIB // 8), prompt="hi"),
    "4,090 reasoning items": lambda: response(many(json.dumps(THOUGHT), 4090)),
    "3,500 times a tool, in items": lambda: response(many(json.dumps(MORE_TOOLS), 3500)),
    "an item with 12,000 tools": lambda: response(
        json.dumps([{"type": "additional_tools", "tools": MORE_TOOLS["tools"] * 12_000}])
    ),
    "12,000 hosted tools": lambda: response('"hi"', tools=[{"type": "web_search"}] * 12_000),
    "4,090 calls in a response": lambda: response(many(json.dumps(CALL), 4090)),
    "4,090 messages of a response": lambda: response(many(json.dumps(said("words " * 160)), 4090)),
    "4,090 items of a conversation": lambda: other(
        "/v1/conversations", "vllm_model", items=many(json.dumps(THOUGHT), 4090).encode()
    ),
    "a document of 40 MB": lambda: message([document(40_000_000)]),
    "a document of 40 MB, counted": lambda: message([document(40_000_000)], path="/v1/messages/count_tokens"),
    "an image of 40 MB": lambda: message([{**document(40_000_000), "type": "image"}]),
    "4,096 blocks": lambda: message([{"type": "text", "text": "words " * 160}] * 4096),
    "4,096 results of tools": lambda: message([RESULT] * 4096),
    "4,090 turns of Messages": lambda: message("hi", before=[said("words " * 150, ROLES[n % 2]) for n in range(4090)]),
    "4,096 late system messages": lambda: chat(messages=[said("words " * 150, LATE[n % 2]) for n in range(4096)]),
    "4 MB to tokenize, with texts": lambda: other(
        "/tokenize", "vllm_model", prompt=WORDS * 90_000, return_token_strs=True
    ),
    "900 KB echoed, 128 answers": lambda: completion(prompt=WORDS * 20_000, n=128, echo=True),
    "262,144 prompt ids, 128 answers with ids": lambda: completion(prompt=IDS, n=128, return_token_ids=True),
    "4 MB, truncated": lambda: completion(prompt=WORDS * 90_000, truncate_prompt_tokens=100),
    "4 MB, truncated to 300,000 tokens": lambda: completion(
        prompt=WORDS * 90_000, truncate_prompt_tokens=300_000, truncation_side="right"
    ),
    "4 MB without a space, truncated": lambda: completion(prompt="a" * 4_000_000, truncate_prompt_tokens=100),
    **{
        f"an error of the model that repeats {name}": lambda text=text: completion(  # type: ignore[misc]
            prompt=steered(text="hi", fail_at=0, error=text, repeat=50_000)
        )
        for name, text in {"a digit": "1", "lines": "\n", "a rule": "sum of prompt length (1). "}.items()
    },
    "20,000 unknown fields": lambda: chat(**{f"unknown_{number}": 1 for number in range(20_000)}),
}

LONG_ANSWER = steered(text="one two three ", repeat=600)
SCORED = {"max_tokens": 1800, "messages": [said(LONG_ANSWER)], "logprobs": True, "top_logprobs": 20}
RESPONSE_LOGPROBS = {
    "max_output_tokens": 1800, "top_logprobs": 20, "include": ["message.output_text.logprobs"]
}  # fmt: skip
ECHOED = {"prompt": steered("hi " * 600, text="one two"), "echo": True, "logprobs": 5, "n": 128}

#: Answers with many log probabilities.
LOGPROBS: Cases = {
    "1,800 tokens, 20 alternatives": lambda: chat(**SCORED),
    "the same, streamed": lambda: chat(**SCORED, stream=True),
    "the same, held back by a stop string": lambda: chat(**SCORED, stream=True, stop=["x" * 1000]),
    "the same as a response": lambda: response(json.dumps(LONG_ANSWER), **RESPONSE_LOGPROBS),
    "the same as a streamed response": lambda: response(json.dumps(LONG_ANSWER), **RESPONSE_LOGPROBS, stream=True),
    "the same of an engine": lambda: chat(**SCORED, model="tensorrt_llm"),
    "128 answers of 50 tokens, 5 alternatives": lambda: completion(
        model="vllm_model", prompt=steered(text="one two three ", repeat=50), n=128, max_tokens=50, logprobs=5
    ),
    "a prompt of 1.9 kB echoed with 128 answers": lambda: completion(**ECHOED),
    "the same prompt, streamed": lambda: completion(**ECHOED, stream=True),
    "16 prompts of 60 tokens, streamed with 128 answers": lambda: completion(
        **{**ECHOED, "prompt": [IDS[:60]] * 16}, stream=True
    ),
    "16 prompts of 1,500 ids, 128 answers": lambda: completion(prompt=[IDS[:1500]] * 16, n=128, return_token_ids=True),
    "the same ids, streamed": lambda: completion(prompt=[IDS[:1500]] * 16, n=128, return_token_ids=True, stream=True),
    "1,500 tokens of a prompt, of an engine": lambda: completion(
        model="tensorrt_llm", prompt=IDS[:1500], max_tokens=1, prompt_logprobs=20
    ),
    "400 tokens of a prompt, of an engine, in 16 prompts": lambda: completion(
        model="tensorrt_llm", prompt=[IDS[:400]] * 16, max_tokens=1, prompt_logprobs=5
    ),
    "a prompt's, 20 alternatives": lambda: completion(prompt="hi " * 600, prompt_logprobs=20, n=8),
}


_FORM_FIELD = b'--xx\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_FORM_FILE = b'--xx\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


def form(path: str, size: int, before: bytes, repeated: bytes) -> tuple[str, bytes]:
    """Return a form of about *size* bytes, most of them *repeated*."""
    return path, before + repeated * (size // len(repeated))


#: Forms that are slow to parse, within the limits of their endpoints.
FORMS: Cases = {
    **{
        f"a form of {name}": lambda before=before, repeated=repeated: form(  # type: ignore[misc]
            "/v1/audio/transcriptions", 25 * MIB, before, repeated
        )
        for name, before, repeated in OVERHEAD
    },
    **{
        f"a file of {repeated[:8]!r}": lambda repeated=repeated: form(  # type: ignore[misc]
            "/v1/files", 60 * MIB, _FORM_FIELD % (b"purpose", b"user_data") + _FORM_FILE, repeated
        )
        for repeated in CONTENTS
    },
    "a file in a form, a translation": lambda: (
        "/v1/audio/translations",
        _FORM_FILE + b"\r\n--x" * (5 * MIB) + b"\r\n--xx--",
    ),
    "256 fields of a form": lambda: ("/v1/audio/transcriptions", _FORM_FIELD % (b"include", b"a" * 16_000) * 256),
}


def batch(*bodies: tuple[str, bytes], path: str = "/v1/chat/completions") -> tuple[str, bytes]:
    """Return a batch whose lines have these requests, which go to *path*."""
    lines = (
        b'{"custom_id":"line-%d","method":"POST","url":"%b","body":%b}' % (number, path.encode(), body)
        for number, (_, body) in enumerate(bodies)
    )
    return f"batch:{path}", b"\n".join(lines)


def messages(*params: str) -> tuple[str, bytes]:
    """Return a batch of messages with these parameters, in JSON."""
    made = (f'{{"custom_id":"a-{number}","params":{one}}}' for number, one in enumerate(params))
    return "/v1/messages/batches", f'{{"requests":[{",".join(made)}]}}'.encode()


MESSAGE = json.dumps({"model": "vllm_model", "max_tokens": 1, "messages": [said(WORDS * 20)]})
LARGE = json.dumps({"model": "vllm_model", "max_tokens": 1, "messages": [said(WORDS * 80_000)]})
#: Lines of batches, and lists.
BATCHED: Cases = {
    "a line with 4 images of 8 MiB": lambda: batch(chat(messages=[said([image(8 * MIB) for _ in range(4)])])),
    "4 lines of 4 MB": lambda: batch(*[chat(messages=[said(WORDS * 88_000)])] * 4),
    "a line of 47 MiB of text": lambda: batch(chat(metadata="A" * (47 * MIB))),
    "4 lines of 23,000,000 numbers": lambda: batch(*[chat(metadata=many("1", 23_000_000).encode())] * 4),
    "a line of 15,000,000 empty objects": lambda: batch(chat(metadata=many("{}", 15_000_000).encode())),
    "a line of 15,000,000 empty texts": lambda: batch(chat(metadata=many('""', 15_000_000).encode())),
    "a line of 47 MiB of blanks": lambda: batch(chat(metadata=b" " * (47 * MIB) + b"1")),
    "a line of 47 MiB of escapes": lambda: batch(chat(metadata=b'"%b"' % (b"\\n" * (47 * MIB // 2)))),
    "2,048 texts to embed, in a line": lambda: batch(
        other("/v1/embeddings", "text_embedding", input=[WORDS] * 2048), path="/v1/embeddings"
    ),
    "2,000 lines": lambda: batch(*[chat(messages=[said(WORDS)])] * 2000),
    "40,000 messages": lambda: messages(*[MESSAGE] * 40_000),
    "12 messages of 4 MB": lambda: messages(*[LARGE] * 12),
    "a message of 15,000,000 empty objects": lambda: messages(many("{}", 15_000_000)),
    "15,000,000 empty messages": lambda: ("/v1/messages/batches", f'{{"requests":{many("{}", 15_000_000)}}}'.encode()),
    "a batch of 47 MiB of quotation marks": lambda: messages(f'"{chr(92)}""' + '\\"' * (47 * MIB // 2) + '"'),
    "a batch of 47 MiB of backslashes": lambda: messages('"' + "\\" * (47 * MIB - 100) + '"'),
    "a batch of 47 MiB of line breaks": lambda: messages("\n" * (47 * MIB) + MESSAGE),
    "files": lambda: ("get:/v1/files", b""),
    "10,000 files": lambda: ("get:/v1/files?limit=10000", b""),
    "batches": lambda: ("get:/v1/batches?limit=100", b""),
    "batches of messages": lambda: ("get:/v1/messages/batches?limit=1000", b""),
    "models": lambda: ("get:/v1/models", b""),
}
_FILES = 10_000


def fill(files: Files) -> None:
    """Add files and batches, of which nothing but their rows is there."""
    assert files._path is not None
    with contextlib.closing(sqlite3.connect(files._path)) as database, database:
        rows = [(f"file-{number:032x}", f"{number}.json", number) for number in range(_FILES)]
        database.executemany("INSERT INTO file VALUES (?, '', 'user_data', ?, 1, ?, NULL, 'processed')", rows)
        prefixes: Mapping[Literal["openai", "anthropic"], str] = {"openai": "batch", "anthropic": "msgbatch"}
        for kind, prefix in prefixes.items():
            for number in range(1000):
                problems = [BatchError(code="a", message="b" * 60, param=None, line=line) for line in range(20)]
                made = Batch(
                    id=f"{prefix}_{number:032x}", owner="", kind=kind, endpoint="/v1/messages", input="",
                    created=number, window="24h", expires=number + 1, status="failed", problems=problems,
                )  # fmt: skip
                row = made.id, kind, number, msgspec.json.encode(made)
                database.execute("INSERT INTO batch VALUES (?, '', ?, '', 0, ?, '', 0, 0, ?)", row)


class Stopwatch(selectors.DefaultSelector):
    """
    The selector of an event loop; it measures the CPU time, in seconds, that this process takes for a turn of the loop.

    A turn ends where the loop waits again. Waiting is cut into short pieces, so that a thread that does not hold the
    interpreter lock, and keeps nobody waiting, counts for no more than one of them.
    """

    PIECE = 0.001

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0.0
        self._last = time.process_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Note how long the turn took, and wait."""
        now = time.process_time()
        self.longest, self._last = max(self.longest, now - self._last), now
        return super().select(self.PIECE if timeout is None else min(timeout, self.PIECE))


def yardstick() -> float:
    """Return how many seconds of CPU time this machine takes now for a fixed piece of work."""
    began = time.process_time()
    json.loads(YARDSTICK)
    return time.process_time() - began


class Client:
    """A client in a process of its own, as its CPU time does not count."""

    def __init__(self, process: asyncio.subprocess.Process, proxy: Proxy, stopwatch: Stopwatch) -> None:
        self._process = process
        self._proxy = proxy
        self._stopwatch = stopwatch

    async def measure(self, path: str, body: Path) -> tuple[float, int, str]:
        """
        Send the file *body* to *path*; return the longest turn in seconds, the status and the beginning of the answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # Nothing from before is part of the first turn.
        await asyncio.sleep(0)
        self._stopwatch.longest = 0.0
        self._process.stdin.write(f"{self._proxy.client.port} {path} {body}\n".encode())
        status, told = json.loads(await self._process.stdout.readline())
        return self._stopwatch.longest, status, told


@asynccontextmanager
async def client_of(proxy: Proxy, stopwatch: Stopwatch) -> AsyncIterator[Client]:
    """Run a client of *proxy*, which runs in a loop with *stopwatch*."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-ISc", _CLIENT, stdin=pipe, stdout=pipe)
    try:
        yield Client(process, proxy, stopwatch)
    finally:
        process.kill()
        await process.communicate()


@asynccontextmanager
async def exposed(triton: TestTriton, transport: str = "http", folder: Path | None = None) -> AsyncIterator[Proxy]:
    """
    Run the service for models that take tools, images and long prompts, with its long-lived objects set aside as a
    worker does. It has its files in *folder*, if there is one.
    """
    settings = proxy_settings(triton, transport)
    if folder is not None:
        files = FilesSettings(store=f"dir:{folder / 'files'}")
        batches = BatchesSettings(store=f"sqlite:{folder / 'batches'}")
        settings = msgspec.structs.replace(settings, files=files, batches=batches)
    template = str(Path(__file__).parents[1] / "fixtures" / "tools.jinja")
    models = {
        **settings.models,
        "vllm_model": ModelSettings(
            tokenizer=str(triton.tokenizer),
            chat_template=template,
            tool_call_parser="hermes",
            image_placeholder="<image {n}>",
            # The tokenizer's own limit would keep the service from doing most of the work.
            max_model_len=MIB,
        ),
        "tensorrt_llm": msgspec.structs.replace(settings.models["tensorrt_llm"], max_model_len=MIB),
    }
    with tempfile.TemporaryDirectory(prefix="triton-openai-files-") as name:
        place = local(Path(name))
        settings = msgspec.structs.replace(
            settings,
            models=models,
            files=FilesSettings(store=place.files),
            batches=BatchesSettings(store=place.batches),
        )
        async with _frozen(settings) as proxy:
            yield proxy


@asynccontextmanager
async def _frozen(settings: Settings) -> AsyncIterator[Proxy]:
    async with serving(settings) as proxy:
        await proxy.ready()
        gc.collect()
        gc.freeze()
        try:
            yield proxy
        finally:
            gc.unfreeze()


def written(made: Callable[[], tuple[str, bytes]], file: Path) -> tuple[str, Path]:
    """Write the body of a request to *file*, and return the request's path and the file."""
    path, body = made()
    file.write_bytes(body)
    return path, file


class Turn(msgspec.Struct):
    """The longest turn of the loop, in seconds, that a request took at best, and what became of the request."""

    name: str
    took: float
    status: int
    told: str

    @property
    def problem(self) -> str:
        """What is wrong, if anything."""
        if self.took >= LONGEST_TURN:
            return "it holds the event loop"
        if self.status >= 500 and not self.name.startswith("an error of the model"):
            return f"status {self.status}: {self.told}"
        # The stand-ins have short contexts.
        refused = self.status != 200 and "maximum" not in self.told
        return f"refused: {self.told}" if refused and self.name not in {**HOSTILE, **FORMS, **BATCHED} else ""


async def measured(
    triton: TestTriton, stopwatch: Stopwatch, folder: Path, cases: Cases, transport: str
) -> AsyncIterator[Turn]:
    """Measure each case."""
    async with exposed(triton, transport, folder) as proxy, client_of(proxy, stopwatch) as client:
        if cases is BATCHED:
            path, file = written(lambda: messages(MESSAGE), folder / "body")
            await client.measure(path, file)
            fill(proxy.client.app[SERVICE].files)
        for name, made in cases.items():
            path, file = written(made, folder / "body")
            slower, turn = 1.0, Turn(name, math.inf, 0, "")
            for _ in range(ATTEMPTS):
                took, turn.status, turn.told = await client.measure(path, file)
                if took >= LONGEST_TURN:
                    slower = max(slower, 3 * yardstick() / LONGEST_TURN)
                    took /= slower
                turn.took = min(turn.took, took)
                if took < LONGEST_TURN:
                    break
            yield turn


def main() -> int:
    """Measure all cases; the exit status is 1 if one holds the event loop or is answered as it should not be."""
    failed = 0

    async def show(triton: TestTriton, stopwatch: Stopwatch, folder: Path) -> None:
        nonlocal failed
        for cases, transport in (
            (USUAL, "http"),
            (HOSTILE, "http"),
            (FORMS, "http"),
            (BATCHED, "http"),
            (LOGPROBS, "both"),
        ):
            async for turn in measured(triton, stopwatch, folder, cases, transport):
                failed += bool(turn.problem)
                print(f"{1000 * turn.took:5.1f} ms  {turn.name}  {turn.problem}".rstrip(), flush=True)

    with tempfile.TemporaryDirectory(prefix="triton-openai-event-loop-") as name, running_triton(Path(name)) as triton:
        stopwatch = Stopwatch()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(stopwatch)) as runner:
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
            runner.run(show(triton, stopwatch, Path(name)))
    print(f"Failed: {failed}" if failed else "No request holds the event loop for 50 ms.")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
