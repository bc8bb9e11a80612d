"""One line per request, with what an operator wants to know and nothing that belongs to a client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
import structlog

from tests.conformance.calls import PATHS, ask, in_session_loop, request, steered
from tests.proxy_fixture import Proxy

pytestmark = in_session_loop


def lines(captured: list[Any], **wanted: Any) -> list[Any]:
    """Return the lines about requests with these fields."""
    return [
        line for line in captured if line["event"] == "request" and all(line.get(k) == v for k, v in wanted.items())
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*, which nothing tells of."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("endpoint", PATHS)
async def test_the_line_of_an_answer(proxies: dict[str, Proxy], endpoint: str, stream: bool) -> None:
    """The line of an answer says who answered, how much it was, how long it took, and why it ended."""
    with structlog.testing.capture_logs() as captured:
        answer = await ask(proxies["http"], endpoint, "ensemble", steered("a secret", text="one two"), stream=stream)
        # A stream's line is written when its last byte has left, and the client may have read it by then.
        name = answer.headers["x-request-id"]
        await asyncio.wait_for(until(lambda: bool(lines(captured, request_id=name))), 120)
    assert 200 == answer.status

    (line,) = lines(captured, request_id=answer.headers["x-request-id"])
    assert ("info", 200, "ensemble", "trtllm-ensemble", stream, "stop") == tuple(
        line[name] for name in ("log_level", "status", "model", "adapter", "stream", "finish_reason")
    )
    assert 2 == line["output_tokens"] <= line["input_tokens"]
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert not {"error", "client_left"} & set(line)
    assert "secret" not in str(captured)


async def test_the_id_of_an_answer_that_failed(proxies: dict[str, Proxy]) -> None:
    """The id of an answer that failed is that of the requests to Triton, which has it in its own log."""
    ids = {"model": "text_classification_ids", "input": [10**6]}
    with structlog.testing.capture_logs() as captured:
        answer = await proxies["http"].post("/v1/classify", ids)
    (line,) = lines(captured, request_id=answer.headers["x-request-id"])

    assert (400, "classify-") == (answer.status, line["response_id"][:9])


async def test_the_line_of_a_refusal(proxies: dict[str, Proxy]) -> None:
    """The code says what was wrong; a health check is no line for every day."""
    with structlog.testing.capture_logs() as captured:
        refused = await ask(proxies["http"], "chat", "ensemble", "x", temperature=9)
        nobody = await ask(proxies["http"], "chat", "no-such-model", "x")
        health = await proxies["http"].get("/health/live")
        failed = await ask(
            proxies["http"], "chat", "vllm_model", steered(text="a b c", fail_at=2, delay_ms=50), stream=True
        )
        name = failed.headers["x-request-id"]
        await asyncio.wait_for(until(lambda: bool(lines(captured, request_id=name))), 120)

    def line_of(answer: Any) -> Any:
        (line,) = lines(captured, request_id=answer.headers["x-request-id"])
        return line

    assert (400, "invalid_value") == (line_of(refused)["status"], line_of(refused)["error"])
    assert (404, "model_not_found", "no-such-model", "info") == tuple(
        line_of(nobody)[name] for name in ("status", "error", "model", "log_level")
    )
    assert "debug" == line_of(health)["log_level"]
    # The status had left when it failed.
    assert (200, "upstream_error") == (line_of(failed)["status"], line_of(failed)["error"])


@pytest.mark.parametrize(
    "body, code",
    [
        (b"{", "invalid_json"),
        (b'{"model": "ensemble", "messages": "a secret"}', "invalid_type"),
        (b'{"model": "' + b"x" * 10_000 + b'", "messages": []}', "model_not_found"),
    ],
    ids=["no json", "wrong type", "long name"],
)
async def test_the_line_of_what_cannot_be_read(proxies: dict[str, Proxy], body: bytes, code: str) -> None:
    """A body that cannot be read was a request for work: it has an ordinary line, without what is in it."""
    with structlog.testing.capture_logs() as captured:
        answer = await proxies["http"].post("/v1/chat/completions", body)
        unknown = await proxies["http"].post("/v1/" + "x%0a" * 1000, b"{}")
    (line,) = lines(captured, request_id=answer.headers["x-request-id"])
    (other,) = lines(captured, request_id=unknown.headers["x-request-id"])

    assert ("info", "/v1/chat/completions", code) == (line["log_level"], line["path"], line["error"])
    assert "secret" not in str(line)
    assert len(str(line)) < 1000
    assert ("info", 404, 256) == (other["log_level"], other["status"], len(other["path"]))


@pytest.mark.parametrize(
    "name", ["a\tb", "x" * 7_000, "ünï", "a b", ""], ids=["tab", "long", "umlaut", "blank", "none"]
)
async def test_ids_that_are_none(proxies: dict[str, Proxy], name: str) -> None:
    """A name that cannot go into headers and logs as it is is replaced by one of ours."""
    with structlog.testing.capture_logs() as captured:
        answer = await proxies["http"].post("/v1/chat/completions", b"{", **{"x-request-id": name})
    given = answer.headers["x-request-id"]
    (line,) = lines(captured, request_id=given)

    assert line["error"] == "invalid_json"
    assert given != name
    assert re.fullmatch("[0-9a-f]{32}", given)


async def test_the_line_of_a_client_that_left(proxies: dict[str, Proxy]) -> None:
    """The line of a client that left says that nobody got the answer, and how much of it was made by then."""
    client = proxies["http"].client
    with structlog.testing.capture_logs() as captured:
        body = request("chat", "vllm_model", steered(text="a ", repeat=2000, delay_ms=20), stream=True, max_tokens=2000)
        async with client.post("/v1/chat/completions", json=body) as response:
            await response.content.readany()
            name = response.headers["x-request-id"]
            response.close()
        await asyncio.wait_for(until(lambda: bool(lines(captured, request_id=name))), 120)

    (line,) = lines(captured, request_id=name)
    assert (True, 499, "info") == (line["client_left"], line["status"], line["log_level"])
    assert 1 <= line["output_tokens"] < 2000
    assert line["input_tokens"]
