"""Clients that take their time, on purpose or not, and clients that do not speak HTTP, byte by byte."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from tests.cases import every_case
from tests.clock import Clock
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.scrape import Scrape
from tests.tls_fixture import Authority
from triton_openai.app import create_app
from triton_openai.config.tls import server_context
from triton_openai.config.tree import AccessSettings, LimitSettings, Settings, TlsSettings, TritonSettings
from triton_openai.serving import request_body
from triton_openai.serving import server as http_server
from triton_openai.serving.connections import Connection
from triton_openai.serving.server import HttpServer

# The clock passes the first two in the tests; the last only where a test replaces it.
LIMITS = LimitSettings(header_timeout=30, body_timeout=30, keepalive_timeout=10**6)
BODY = json.dumps({"model": "m", "prompt": "a"}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
SLOW = b"GET /health/live HTTP/1.1\r\n" + b"X-A: b\r\n" * 1000
# In seconds of the clock.
WAIT = 10**5


@asynccontextmanager
async def listening(
    limits: LimitSettings,
    *responses: dict[str, Any],
    certificate: Path | None = None,
    access: AccessSettings | None = None,
) -> AsyncIterator[int]:
    """Run the service as the command does, and yield its port."""
    inputs = ("text_input BYTES 1", "sampling_parameters? BYTES 1", "stream? BOOL 1", "exclude_input_in_output? BOOL 1")
    async with FakeTriton(config_of("m", inputs)) as triton:
        triton.responses = list(responses) or [{"text_output": "one"}]
        access = access or AccessSettings()
        app = create_app(Settings(triton=TritonSettings(url=(triton.url,)), limits=limits, access=access))
        server = HttpServer(app, limits, tls=server_context(TlsSettings(certificate=certificate)))
        await server.start()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            await server.listen(sock)
            try:
                yield sock.getsockname()[1]
            finally:
                await server.close()


class Client:
    """A connection that sends what it is told to, when it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def dribble(self, data: bytes, clock: Clock, *, seconds: float = 1) -> None:
        """Send a byte every few *seconds* of the clock, until all is sent."""
        for number in range(len(data)):
            self.writer.write(data[number : number + 1])
            await clock.elapse(seconds)

    @asynccontextmanager
    async def dribbling(self, data: bytes, clock: Clock) -> AsyncIterator[None]:
        """Send byte by byte meanwhile, as long as a head or the beginning of a body may take, and not much longer."""
        began = clock.moved
        sending = asyncio.create_task(self.dribble(data, clock))
        yield
        assert not sending.done(), "all of it was taken"
        sending.cancel()
        assert LIMITS.header_timeout <= clock.moved - began < 2 * LIMITS.header_timeout

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
async def connected(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """Connect."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


async def answers_another(port: int, tls: ssl.SSLContext | None = None) -> None:
    """
    Have the service answer another client.

    It has then accepted those before, and read what they have sent: a socket of another side gets nothing at once.
    """
    async with connected(port, tls) as other:
        other.writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert 200 == (await other.answer())[0]


async def test_a_head_that_dribbles(clock: Clock) -> None:
    """A connection whose head does not come to its end (Slowloris) is closed."""
    async with listening(LIMITS) as port, connected(port) as client, client.dribbling(SLOW, clock):
        assert b"" == await client.rest()


async def test_a_client_that_says_nothing(clock: Clock) -> None:
    """A client that says nothing is kept as long as an idle connection, and gets no answer to no question."""
    limits = msgspec.structs.replace(LIMITS, keepalive_timeout=60)
    async with listening(limits) as port, connected(port) as client:
        await answers_another(port)
        await clock.elapse(59, 10)
        assert not client.reader.at_eof()
        await clock.elapse(2)
        assert b"" == await client.rest()


async def test_a_second_head_that_dribbles(clock: Clock) -> None:
    """A connection that has been used has the same time again, from the first byte of the next head."""
    async with listening(LIMITS) as port, connected(port) as client:
        for _ in range(2):
            client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert 200 == (await client.answer())[0]
            # To be idle for longer than a head may take is well.
            await clock.elapse(2 * LIMITS.header_timeout)
        async with client.dribbling(SLOW, clock):
            assert b"" == await client.rest()


async def test_an_idle_connection(clock: Clock) -> None:
    """An idle connection is closed after its own time."""
    limits = msgspec.structs.replace(LIMITS, keepalive_timeout=60)
    async with listening(limits) as port, connected(port) as client:
        client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert 200 == (await client.answer())[0]
        await clock.elapse(59, 10)
        assert not client.reader.at_eof()
        await clock.elapse(2)
        assert b"" == await client.rest()


@every_case("chunked", [False, True])
async def test_a_body_that_dribbles(chunked: bool, clock: Clock) -> None:
    """The request of a body that dribbles is refused in time, while others are served."""
    head = HEAD % 10_000
    if chunked:
        head = head.replace(b"Content-Length: 10000", b"Transfer-Encoding: chunked")
    async with listening(LIMITS) as port, connected(port) as client:
        client.writer.write(head + (b"1\r\nx\r\n" if chunked else b"x"))
        await answers_another(port)
        async with connected(port) as other:
            other.writer.write(HEAD % len(BODY) + BODY)
            assert 200 == (await other.answer())[0]
        async with client.dribbling(b"1\r\nx\r\n" * 1000 if chunked else b"x" * 9998, clock):
            status, headers, body = await client.answer()

        assert (408, "request_timeout", "close") == (status, body["error"]["code"], headers["connection"])


async def test_a_long_body_at_a_fair_rate(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """A long body at a fair rate may take longer than the time for its beginning."""
    monkeypatch.setattr(request_body, "MIN_BODY_RATE", 1)
    body = BODY[:-1] + b" " * 60 + b"}"
    async with listening(LIMITS) as port, connected(port) as client:
        client.writer.write(HEAD % len(body))
        # A leap of a second or more looks as if the event loop were overloaded.
        await client.dribble(body, clock, seconds=0.9)
        assert clock.moved > 2 * LIMITS.body_timeout
        assert 200 == (await client.answer())[0]


async def test_an_answer_that_takes_longer(clock: Clock) -> None:
    """The time for a head is not that of an answer: a request that waits for its body is not cut by it."""
    limits = msgspec.structs.replace(LIMITS, body_timeout=300)
    async with listening(limits) as port, connected(port) as client:
        client.writer.write(HEAD % len(BODY))
        await answers_another(port)
        await clock.elapse(2 * limits.header_timeout)
        client.writer.write(BODY)
        assert 200 == (await client.answer())[0]


@pytest.mark.parametrize(
    "data, status, code",
    [
        (b"GET / HTTP/9.9\r\n\r\n", 400, "invalid_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_http"),
        (b"GET /secret path HTTP/1.1\r\nHost: localhost\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nBad Header\x00: secret\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "invalid_http"),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431, "headers_too_large"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431, "headers_too_large"),
    ],
)
async def test_what_is_no_http(data: bytes, status: int, code: str) -> None:
    """What is no HTTP is refused in OpenAI's form, without an echo of what was sent, and the connection ends."""
    async with listening(LimitSettings()) as port, connected(port) as client:
        client.writer.write(data)
        got, headers, body = await client.answer()

        assert (status, code) == (got, body["error"]["code"])
        assert ("application/json", "triton-openai") == (headers["content-type"], headers["server"])
        assert headers["x-request-id"]
        assert "close" == headers["connection"]
        assert "secret" not in str(body)
        assert b"" == await client.rest()


async def test_what_is_no_request_is_seen() -> None:
    """What is no request is counted and has a line in the log, under the id that its sender got."""
    async with listening(LIMITS) as port:
        with structlog.testing.capture_logs() as captured:
            async with connected(port) as client:
                client.writer.write(b"\x16\x03\x01 secret\r\n\r\n")
                _, headers, _ = await client.answer()
        async with connected(port) as other:
            other.writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            found = Scrape((await other.rest()).partition(b"\r\n\r\n")[2].decode())

    (line,) = [line for line in captured if line["event"] == "request"]
    assert ("info", 400, "invalid_http", headers["x-request-id"]) == tuple(
        line[name] for name in ("log_level", "status", "error", "request_id")
    )
    assert "secret" not in str(line)
    assert 1 == found.sum("triton_openai_requests_total", status="400", outcome="invalid", operation="other")
    assert 1 == found.sum("triton_openai_errors_total", code="invalid_http", model="")


async def test_a_body_that_is_announced_too_large() -> None:
    """A body that is announced too large is refused before any of it is read."""
    async with listening(LimitSettings()) as port, connected(port) as client:
        client.writer.write(HEAD % 10**12)
        status, _, body = await client.answer()
        assert (413, "request_too_large") == (status, body["error"]["code"])


async def test_many_headers() -> None:
    """The number of headers and the size of each are limited, so that all together are; a body is no part of a head."""
    async with listening(LimitSettings()) as port:
        async with connected(port) as client:
            client.writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 200 + b"\r\n")
            status, _, refusal = await client.answer()
            assert (431, "headers_too_large") == (status, refusal["error"]["code"])
        async with connected(port) as client:
            # Without an end: it is refused while it comes.
            client.writer.write(b"GET /health/live HTTP/1.1\r\nX: " + b"a" * 20_000)
            assert 431 == (await client.answer())[0]
        async with connected(port) as client:
            body = BODY[:-1] + b" " * 1_000_000 + b"}"
            for _ in range(2):
                client.writer.write(HEAD % len(body) + body)
                assert 200 == (await client.answer())[0]


@asynccontextmanager
async def reading_little(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    """Connect with the smallest of buffers."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(
            sock=sock, limit=1024, ssl=tls, server_hostname=None if tls is None else "127.0.0.1"
        )
        try:
            yield Client(reader, writer)
        finally:
            # Not closed: the farewell of TLS would be waited for.
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.mark.parametrize("stream, encrypted", [(False, False), (True, False), (True, True)])
@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="there is none but on Linux")
async def test_a_client_that_takes_nothing(
    stream: bool, encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who does not read its answer is disconnected, and not before some time; who reads slowly is served."""
    disconnected = asyncio.Event()
    connection_lost = Connection.connection_lost

    def notice(connection: Connection, error: BaseException | None) -> None:
        connection_lost(connection, error)
        # The client does not hear of it before it sends something.
        if isinstance(error, TimeoutError):
            disconnected.set()

    monkeypatch.setattr(Connection, "connection_lost", notice)
    pieces = [{"text_output": f"{number}" + "b" * 100_000} for number in range(200)]
    ask = json.dumps({"model": "m", "prompt": "a", "max_tokens": 10**6, "stream": stream}).encode()
    authority = Authority(tmp_path)
    certificate, tls = (authority.issue("service"), authority.client()) if encrypted else (None, None)
    # A busy machine may stand still for a second, and the kernel does not wait.
    monkeypatch.setattr(http_server, "WRITE_TIMEOUT", 30)
    async with (
        listening(LimitSettings(), *pieces, certificate=certificate) as port,
        reading_little(port, tls) as slow,
    ):
        slow.writer.write(HEAD % len(ask) + ask)
        received = b""
        while not received.endswith((b"}", b"0\r\n\r\n")):
            part = await asyncio.wait_for(slow.reader.read(2_000_000), WAIT)
            assert part
            received = received[-10:] + part
    monkeypatch.setattr(http_server, "WRITE_TIMEOUT", 1)
    async with (
        listening(LimitSettings(), *pieces, certificate=certificate) as port,
        reading_little(port, tls) as client,
    ):
        client.writer.write(HEAD % len(ask) + ask)
        async with asyncio.timeout(WAIT):
            await disconnected.wait()


async def test_a_handshake_that_does_not_come(tmp_path: Path, clock: Clock) -> None:
    """A handshake that does not come has the time that the head of a request has."""
    authority = Authority(tmp_path)
    async with listening(LIMITS, certificate=authority.issue("service")) as port, connected(port) as client:
        await answers_another(port, authority.client())
        await clock.elapse(LIMITS.header_timeout - 1, 10)
        assert not client.reader.at_eof()
        await clock.elapse(2)
        assert b"" == await client.rest()
