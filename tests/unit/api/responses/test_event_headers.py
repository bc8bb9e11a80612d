"""What the headers of an answer say over HTTP, its events say over a WebSocket, in their field ``headers``."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import triton_openai
from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton
from tests.faces import TOKENIZER
from tests.proxy_fixture import Proxy, serving
from tests.syntax_trees import nodes
from tests.unit.api.responses.test_background import held
from triton_openai import errors
from triton_openai.access.cors import EXPOSED
from triton_openai.api.realtime.events import error_event
from triton_openai.config.tree import (
    AccessSettings,
    ModelDefaults,
    ModelSettings,
    ResponsesSettings,
    Settings,
    TritonSettings,
)
from triton_openai.telemetry.request_record import RequestRecord

# Where a client of a WebSocket reads what a header says. Decide it here for a header that is new.
_EVENT = "the field headers of events"
_UPGRADE = "the answer to the upgrade: a connection stays at one service"
_HTTP = "nowhere: it is about the transport of HTTP, or about Anthropic's API, which has no WebSocket"
_REQUEST = "nowhere: clients send it"
_HEADERS: Mapping[str, str] = {
    "openai-processing-ms": _EVENT,
    "retry-after": _EVENT,
    "www-authenticate": _EVENT,
    "x-max-tokens": _EVENT,
    "x-ratelimit-limit-": _EVENT,
    "x-ratelimit-remaining-": _EVENT,
    "x-ratelimit-reset-": _EVENT,
    "x-request-id": _EVENT,
    "x-should-retry": _EVENT,
    "x-triton-openai-ignored": _EVENT,
    "x-triton-openai-repaired": _EVENT,
    "x-session-token": _UPGRADE,
    "endpoint-load-metrics": _HTTP,
    "request-id": _HTTP,
    "x-accel-buffering": _HTTP,
    "x-content-type-options": _HTTP,
    "anthropic-version": _REQUEST,
    "endpoint-load-metrics-format": _REQUEST,
    "openai-beta": _REQUEST,
    "x-api-key": _REQUEST,
    "x-first-token-timeout": _REQUEST,
    "x-forwarded-for": _REQUEST,
    "x-forwarded-host": _REQUEST,
    "x-gateway-inference-": _REQUEST,
    "x-idle-timeout": _REQUEST,
    "x-llm-d-inference-": _REQUEST,
    "x-request-timeout": _REQUEST,
    "x-session-id": _REQUEST,
}
# The form of names of headers, and words of the same form that are none.
_NAME = re.compile(r"(?i)(x|openai|anthropic|retry|request|www|endpoint|ratelimit)-[a-z-]+")
_OTHERS = frozenset({"request-timeout", "x-guidance", "x-gzip", "x-ratelimit-"})
_LIMIT = 100


def test_every_header_is_decided() -> None:
    """The table has each name of a header that stands in the code, and no other."""
    named: set[str] = set()
    for path in Path(triton_openai.__file__).parent.rglob("*.py"):
        source = path.read_text(encoding="utf-8")
        if _NAME.search(source) is None:
            # It takes a hundred times as long to make its syntax tree.
            continue
        for node in nodes(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _NAME.fullmatch(node.value):
                named.add(node.value.lower())
    assert _HEADERS.keys() == named - _OTHERS


def test_pages_can_read_them() -> None:
    """What events say can be read by the pages of browsers over HTTP too; the 401 of a page says how to give a key."""
    for name, where in _HEADERS.items():
        if where is _EVENT and name != "www-authenticate":
            assert any(exposed.startswith(name) for exposed in EXPOSED), name


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with one key."""
    path = tmp_path / "keys.yaml"
    limits = f"requests_per_minute: 3, tokens_per_minute: {_LIMIT}000"
    path.write_text(f"keys: [{{name: few, key: one-key, {limits}}}]")
    return path


def settings_for(triton: FakeTriton, keys: Path) -> Settings:
    """Return settings with limits of the key and of the model's context."""
    return Settings(
        triton=TritonSettings(url=(triton.url,)),
        access=AccessSettings(api_keys_file=keys),
        defaults=ModelDefaults(chat_template="chatml"),
        models={"m": ModelSettings(tokenizer=str(TOKENIZER), max_model_len=200)},
        responses=ResponsesSettings(store="none"),
    )


async def events_of(proxy: Proxy, fields: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a response over a WebSocket, or of the error in its place."""
    async with proxy.client.ws_connect("/v1/responses", headers={"Authorization": "Bearer one-key"}) as socket:
        await socket.send_str(json.dumps({"type": "response.create", "model": "m", "input": "Hi", **fields}))
        events = [json.loads(await socket.receive_str())]
        while events[-1]["type"] not in ("error", "response.completed"):
            events.append(json.loads(await socket.receive_str()))
    return events


_CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": '}
_RESULT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
_FIELDS = {
    "surprise": 1,
    "max_output_tokens": 1_000_000,
    "input": [{"role": "user", "content": "Hi"}, _CALL, _RESULT],
}


async def test_a_response(keys: Path) -> None:
    """The first and the last event have what the headers of a POST have."""
    async with held() as triton, serving(settings_for(triton, keys)) as proxy:
        triton.may_go_on.set()
        await proxy.ready()
        body = {"model": "m", **_FIELDS}
        async with proxy.client.post("/v1/responses", json=body, headers={"Authorization": "Bearer one-key"}) as answer:
            assert 200 == answer.status
            over_http = {name.lower() for name in answer.headers if _NAME.fullmatch(name)}
        first, *others, last = await events_of(proxy, _FIELDS)

    assert over_http == first["headers"].keys() == last["headers"].keys()
    assert {"x-triton-openai-ignored", "x-triton-openai-repaired", "x-max-tokens"} < over_http
    assert {"x-ratelimit-remaining-requests", "x-ratelimit-remaining-tokens", "x-request-id"} < over_http
    assert ("surprise", "f") == (
        last["headers"]["x-triton-openai-ignored"],
        last["headers"]["x-triton-openai-repaired"],
    )
    assert not [event for event in others if "headers" in event]


async def test_a_preparation(keys: Path) -> None:
    """What is only prepared says it too."""
    async with held() as triton, serving(settings_for(triton, keys)) as proxy:
        await proxy.ready()
        first, last = await events_of(proxy, {"generate": False, "surprise": 1})
        again, _ = await events_of(proxy, {"generate": False, "input": "many words " * 10})
        (error,) = await events_of(proxy, {"temperature": 9})
        # What is only prepared costs no tokens.
        for event in (again, error):
            assert first["headers"]["x-ratelimit-remaining-tokens"] == event["headers"]["x-ratelimit-remaining-tokens"]

    assert "surprise" == first["headers"]["x-triton-openai-ignored"] == last["headers"]["x-triton-openai-ignored"]


async def test_errors(keys: Path) -> None:
    """An error says what is left of the key's limits, and when to try again."""
    async with held() as triton, serving(settings_for(triton, keys)) as proxy:
        triton.may_go_on.set()
        await proxy.ready()
        for number in range(3):
            (error,) = await events_of(proxy, {"temperature": 9})
            assert str(2 - number) == error["headers"]["x-ratelimit-remaining-requests"]
        (error,) = await events_of(proxy, {})

    assert 429 == error["status"]
    assert int(error["headers"]["retry-after"]) > 0
    assert error["headers"]["x-request-id"]


@every_case(
    "error, name",
    [
        (errors.InvalidApiKey("no key"), "www-authenticate"),
        (errors.ServiceOverloaded("full", retry_after=7), "retry-after"),
        (errors.NotImplementedUpstream("no such thing"), "x-should-retry"),
        (errors.UpstreamUnavailable("stopping"), "retry-after"),
    ],
)
def test_what_an_error_adds(error: errors.ServiceError, name: str) -> None:
    """The headers of an error are in the events of both APIs with a WebSocket."""
    record = RequestRecord(request_id="r1", method="POST", path="/v1/responses")
    value = {key.lower(): text for key, text in error.headers().items()}[name]

    assert value == record.answer_headers(error)[name]
    assert value == json.loads(error_event(error))["headers"][name]


async def test_the_upgrade(keys: Path) -> None:
    """The answer to the upgrade has the token with which a gateway finds the session's pod again."""
    access = AccessSettings(trust_gateway=True)
    async with held() as triton:
        settings = Settings(
            triton=TritonSettings(url=(triton.url,)), access=access, responses=ResponsesSettings(store="none")
        )
        async with serving(settings) as proxy:
            await proxy.ready()
            async with proxy.client.ws_connect("/v1/responses", headers={"x-session-token": "pod-7"}) as socket:
                assert "pod-7" == socket._response.headers["x-session-token"]
