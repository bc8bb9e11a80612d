"""Clients that take their time, on purpose or not, and clients that do not speak HTTP, byte by byte."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import structlog
from aiohttp import web

from tests.conformance.fake_triton import FakeTriton, config_of
from tests.scrape import Scrape
from triton_openai.app import create_app
from triton_openai.config import LimitSettings, Settings, TritonSettings
from triton_openai.server.connections import Site

QUICK = LimitSettings(header_timeout=0.3, body_timeout=0.3, keepalive_timeout=30, min_body_rate=10**9)
BODY = json.dumps({"model": "m", "prompt": "a"}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
SLOW = b"GET /health/live HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000
WAIT = 20


@asynccontextmanager
async def listening(limits: LimitSettings) -> AsyncIterator[int]:
    """Run the service as the command does, and yield its port."""
    async with FakeTriton(config_of("m")) as triton:
        triton.responses = [{"text_output": "one"}]
        app = create_app(Settings(triton=TritonSettings(url=(triton.url,)), limits=limits))
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.5)
        await runner.setup()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            await Site(runner, sock, limits=limits, backlog=16).start()
            try:
                yield sock.getsockname()[1]
            finally:
                await runner.cleanup()


class Client:
    """A connection that sends what it is told to, when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def dribble(self, data: bytes) -> None:
        """Send byte by byte, until all is sent or nobody takes it any more."""
        for number in range(len(data)):
            self.writer.write(data[number : number + 1])
            await asyncio.sleep(0.01)

    @asynccontextmanager
    async def dribbling(self, data: bytes) -> AsyncIterator[None]:
        """Send byte by byte meanwhile."""
        sending = asyncio.create_task(self.dribble(data))
        yield
        assert not sending.done(), "all of it was taken"
        sending.cancel()

    async def answer(self) -> tuple[int, dict[str, str], dict[str, Any]]:
        """Read one answer."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT)).decode()
        status, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), WAIT)
        return int(status.split()[1]), headers, json.loads(body)

    async def rest(self) -> bytes:
        """Read until the connection ends."""
        try:
            return await asyncio.wait_for(self.reader.read(), WAIT)
        except ConnectionError:
            return b""


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Client]:
    """Connect."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def test_a_head_that_dribbles() -> None:
    """Slowloris: the head does not come to its end, and the connection is told so and ended."""
    async with listening(QUICK) as port, connected(port) as client:
        async with client.dribbling(SLOW):
            status, headers, body = await client.answer()

        assert (408, "request_timeout", "close") == (status, body["error"]["code"], headers["connection"])
        assert headers["x-request-id"]


async def test_a_client_that_says_nothing() -> None:
    """It is not kept, and gets no answer to no question."""
    async with listening(QUICK) as port, connected(port) as client:
        assert b"" == await client.rest()


async def test_a_second_head_that_dribbles() -> None:
    """A connection that has been used has the same time again, from the first byte of the next head."""
    async with listening(QUICK) as port, connected(port) as client:
        for _ in range(2):
            client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert 200 == (await client.answer())[0]
            # To be idle for longer than a head may take is well.
            await asyncio.sleep(2 * QUICK.header_timeout)
        async with client.dribbling(SLOW):
            assert 408 == (await client.answer())[0]


async def test_an_idle_connection() -> None:
    """It is closed after its own time."""
    limits = msgspec.structs.replace(QUICK, keepalive_timeout=0.3)
    async with listening(limits) as port, connected(port) as client:
        client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert 200 == (await client.answer())[0]
        assert b"" == await client.rest()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_dribbles(chunked: bool) -> None:
    """Its request is refused in time, while others are served."""
    head = HEAD % 10_000
    if chunked:
        head = head.replace(b"Content-Length: 10000", b"Transfer-Encoding: chunked")
    async with listening(QUICK) as port, connected(port) as client:
        client.writer.write(head)
        async with client.dribbling(b"1\r\nx\r\n" * 1000 if chunked else b"x" * 9999), connected(port) as other:
            other.writer.write(HEAD % len(BODY) + BODY)
            assert 200 == (await other.answer())[0]
            status, headers, body = await client.answer()

        assert (408, "request_timeout", "close") == (status, body["error"]["code"], headers["connection"])


async def test_a_long_body_at_a_fair_rate() -> None:
    """It may take longer than the time for its beginning."""
    limits = msgspec.structs.replace(QUICK, min_body_rate=10)
    body = BODY[:-1] + b" " * 60 + b"}"
    async with listening(limits) as port, connected(port) as client:
        client.writer.write(HEAD % len(body))
        await client.dribble(body)
        assert 200 == (await client.answer())[0]


async def test_an_answer_that_takes_longer() -> None:
    """The time for a head is not that of an answer: a request that waits for its body is not cut by it."""
    limits = msgspec.structs.replace(QUICK, body_timeout=30)
    async with listening(limits) as port, connected(port) as client:
        client.writer.write(HEAD % len(BODY))
        await asyncio.sleep(2 * limits.header_timeout)
        client.writer.write(BODY)
        assert 200 == (await client.answer())[0]


@pytest.mark.parametrize(
    "data, status, code",
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
        (b"GET /secret path HTTP/1.1\r\nHost: x\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nBad Header\x00: secret\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "headers_too_large"),
    ],
)
async def test_what_is_no_http(data: bytes, status: int, code: str) -> None:
    """It is refused in OpenAI's form, without an echo of what was sent, and the connection ends."""
    async with listening(LimitSettings()) as port, connected(port) as client:
        client.writer.write(data)
        got, headers, body = await client.answer()

        assert (status, code) == (got, body["error"]["code"])
        assert ("application/json", "triton-openai") == (headers["content-type"], headers["server"])
        assert headers["x-request-id"]
        assert "secret" not in str(body)
        assert b"" == await client.rest()


@pytest.mark.parametrize(
    "data, status, code",
    [(b"\x16\x03\x01 secret\r\n\r\n", 400, "invalid_http"), (b"GET /secret HTTP/1.1\r\n", 408, "request_timeout")],
)
async def test_what_is_no_request_is_seen(data: bytes, status: int, code: str) -> None:
    """It has its line in the log, under the id that its sender got, and is counted, though no handler has seen it."""
    async with listening(QUICK) as port:
        with structlog.testing.capture_logs() as captured:
            async with connected(port) as client:
                client.writer.write(data)
                _, headers, _ = await client.answer()
        async with connected(port) as other:
            other.writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            found = Scrape((await other.rest()).partition(b"\r\n\r\n")[2].decode())

    (line,) = [line for line in captured if line["event"] == "request"]
    assert ("info", status, code, headers["x-request-id"]) == tuple(
        line[name] for name in ("log_level", "status", "error", "request_id")
    )
    assert "secret" not in str(line)
    assert 1 == found.sum("triton_openai_requests_total", status=str(status), outcome="invalid", operation="other")
    assert 1 == found.sum("triton_openai_errors_total", code=code, model="")


async def test_a_body_that_is_announced_too_large() -> None:
    """It is refused before any of it is read."""
    async with listening(LimitSettings()) as port, connected(port) as client:
        client.writer.write(HEAD % 10**12)
        status, _, body = await client.answer()
        assert (413, "request_too_large") == (status, body["error"]["code"])
