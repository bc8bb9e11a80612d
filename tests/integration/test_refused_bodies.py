"""Bodies that the service does not want, or not as they are coded, and when it asks for one; byte by byte."""

from __future__ import annotations

import asyncio
import functools
import gzip
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.clock import Clock
from tests.integration.test_slow_clients import BODY, WAIT, Client, connected, listening
from tests.tls_fixture import Authority
from triton_openai.config.tree import AccessSettings, LimitSettings, ServerSettings
from triton_openai.errors import InvalidRequest, PayloadTooLarge
from triton_openai.serving.request_body import decompress
from triton_openai.telemetry.request_record import RequestRecord

KEYS = AccessSettings(api_key=("team:sk-right",))
PATH = "/v1/completions"
ROOM = ServerSettings().max_body_size
MEBIBYTE = bytes(1024 * 1024)


@functools.cache
def bomb(coding: str) -> bytes:
    """Return much that becomes far more: one GiB of zeros in brotli, else as much as a body may have, and a byte."""
    if coding == "br":
        brotli = pytest.importorskip("brotli")
        packing = brotli.Compressor(quality=5, lgwin=24)
        return b"".join([packing.process(MEBIBYTE) for _ in range(1024)]) + bytes(packing.finish())
    packer = zlib.compressobj(1, wbits=31 if coding == "gzip" else 15)
    return (
        b"".join([packer.compress(MEBIBYTE) for _ in range(ROOM // len(MEBIBYTE))])
        + packer.compress(b"x")
        + packer.flush()
    )


def request(
    *headers: str, method: str = "POST", path: str = PATH, body: bytes = b"", length: int | None = None
) -> bytes:
    """Return a request; *length* is what it announces, if it is not that of *body*."""
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {len(body) if length is None else length}",
    )
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


@asynccontextmanager
async def guarded() -> AsyncIterator[int]:
    """Run the service with a key, and yield its port."""
    async with listening(LimitSettings(), access=KEYS) as port:
        yield port


async def assert_ends(client: Client) -> None:
    """Assert that the service has closed its side, and does not wait for more."""
    assert b"" == await client.rest()


async def assert_cannot_send(client: Client) -> None:
    """Assert that the connection is gone, sooner or later."""

    async def send() -> None:
        while True:
            client.writer.write(b"x")
            await client.writer.drain()
            await asyncio.sleep(0)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send(), WAIT)


async def leave_unread(client: Client, body: bytes) -> tuple[int, str]:
    """Send a request that is refused with *body*, all of it; return status and what is said about the connection."""
    client.writer.write(request(body=body))
    await client.writer.drain()
    status, headers, _ = await client.answer()
    return status, headers["connection"]


# The end of the connection


@pytest.mark.parametrize("encrypted", [False, True])
async def test_a_refused_body_is_not_read(encrypted: bool, tmp_path: Path, clock: Clock) -> None:
    """A client that sends all of it before it reads gets its answer, and no other one; then the connection ends."""
    authority = Authority(tmp_path)
    certificate, tls = (authority.issue("service"), authority.client()) if encrypted else (None, None)
    next_request = request(method="GET", path="/health/live")
    async with listening(LimitSettings(), access=KEYS, certificate=certificate) as port, connected(port, tls) as client:
        assert (401, "close") == await leave_unread(client, bytes(20_000_000))
        client.writer.write(next_request)
        await assert_ends(client)
        # A client that does not close its side does not keep the connection.
        await assert_cannot_send(client)


async def test_the_end_of_the_service_does_not_wait_for_a_refused_body() -> None:
    """A connection that is ending is closed with the others."""
    async with guarded() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        client = Client(reader, writer)
        assert (401, "close") == await leave_unread(client, bytes(5_000_000))
    await assert_cannot_send(client)
    writer.close()


@pytest.mark.parametrize("path", [PATH, "/v1/audio/transcriptions", "/v1/files"])
async def test_a_client_that_sends_for_long_before_it_reads(path: str, clock: Clock) -> None:
    """The answer to what is too large reaches a client that sends for many seconds before it reads."""
    form = "Content-Type: multipart/form-data; boundary=x"
    kind = "Content-Type: application/json" if path == PATH else form
    size = 2_000_000_000
    async with guarded() as port, connected(port) as client:
        client.writer.write(request(kind, "api-key: sk-right", path=path, length=size))
        for _ in range(20):
            client.writer.write(MEBIBYTE)
            await client.writer.drain()
            await clock.elapse(0.9)
        status, headers, body = await client.answer()
        assert (413, "request_too_large", "close") == (status, body["error"]["code"], headers["connection"])
        # It does not go on for ever.
        for _ in range(20):
            await clock.elapse(0.9)
            client.writer.write(b"x")
        await assert_ends(client)


async def test_a_body_that_has_arrived() -> None:
    """The connection goes on behind a body that has arrived, though nobody has read it."""
    async with guarded() as port, connected(port) as client:
        for _ in range(2):
            client.writer.write(request(body=BODY))
            status, headers, _ = await client.answer()
            assert (401, None) == (status, headers.get("connection"))


# Codings


@pytest.mark.parametrize("coding", ["br", "gzip", "deflate"])
@pytest.mark.parametrize("method, path", [("POST", "/nope"), ("GET", "/health/live"), ("POST", PATH)])
async def test_nothing_is_decompressed_for_who_is_not_let_in(coding: str, method: str, path: str) -> None:
    """
    Nothing is decompressed for a client without a key, nor for a path that reads no body: it costs no more than
    others.
    """
    packed = bomb(coding)
    assert coding != "br" or 809 == len(packed)

    async def ask(port: int, *headers: str) -> int:
        async with connected(port) as client:
            client.writer.write(request(*headers, method=method, path=path, body=packed))
            return (await client.answer())[0]

    async with guarded() as port:
        spent: dict[str, list[float]] = {"": [], f"Content-Encoding: {coding}": []}
        for _ in range(3):
            for header, times in spent.items():
                began = time.thread_time()
                statuses = await asyncio.gather(*[ask(port, *filter(None, [header])) for _ in range(4)])
                times.append(time.thread_time() - began)
                assert {200 if method == "GET" else 401} == set(statuses)

    # Other programs on the machine only ever make a measurement longer. One of them alone took 100 times as long.
    plain, encoded = map(min, spent.values())
    assert encoded < 10 * plain


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP", "deflate", "identity", ""])
async def test_codings(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may come in those that are documented. It is as large as what is in it, where a key pays for that."""
    sizes: list[int | None] = []
    monkeypatch.setattr(RequestRecord, "release", lambda record: sizes.append(record.body_size))
    body = zlib.compress(BODY) if coding == "deflate" else gzip.compress(BODY) if "gzip" in coding.lower() else BODY
    async with guarded() as port, connected(port) as client:
        for _ in range(2):
            client.writer.write(request(f"Content-Encoding: {coding}", "api-key: sk-right", body=body))
            assert 200 == (await client.answer())[0]
    assert [len(BODY)] * 2 == sizes


@pytest.mark.parametrize(
    "coding", ["br", "compress", "x-secret", "gzip, gzip", "gzip, x-secret", "gzip\r\nContent-Encoding: gzip"]
)
async def test_other_codings(coding: str) -> None:
    """Other codings are refused before anything of the body is read, or asked for."""
    async with guarded() as port, connected(port) as client:
        client.writer.write(
            request(f"Content-Encoding: {coding}", "api-key: sk-right", "Expect: 100-continue", length=1000)
        )
        status, headers, body = await client.answer()
        assert (415, "unsupported_media_type") == (status, body["error"]["code"])
        assert "Content-Encoding" in body["error"]["message"]
        assert "secret" not in str(body)
        assert "close" == headers["connection"]
        await assert_ends(client)


async def test_transfer_codings() -> None:
    """Nothing but chunks is undone, so nothing else is taken for JSON."""
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    for coding, status in (("chunked", 200), ("gzip, chunked", 415), ("gzip", 400), ("chunked, chunked", 400)):
        async with guarded() as port, connected(port) as client:
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\napi-key: sk-right\r\nTransfer-Encoding: {coding}\r\n\r\n"
            )
            client.writer.write(head.encode() + chunks)
            assert status == (await client.answer())[0]


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_body_that_becomes_too_large(coding: str) -> None:
    """
    A body that becomes too large is a 413, costs the event loop nothing, and is read, so that the connection goes
    on.
    """
    packed = bomb(coding)
    async with guarded() as port, connected(port) as client:
        spent = []
        decompressed = []
        for _ in range(3):
            began = time.thread_time()
            zlib.decompressobj(wbits=47 if coding == "gzip" else 15).decompress(packed)
            decompressed.append(time.thread_time() - began)
            began = time.thread_time()
            client.writer.write(request(f"Content-Encoding: {coding}", "api-key: sk-right", body=packed))
            status, headers, body = await client.answer()
            spent.append(time.thread_time() - began)
            assert (413, "request_too_large") == (status, body["error"]["code"])
            assert str(ROOM) in body["error"]["message"]
            assert "connection" not in headers
        # To decompress it in the event loop would be a part of what is spent there. It is done in another thread.
        assert 2 * min(spent) < min(decompressed)


GZIPPED = gzip.compress(BODY)


@pytest.mark.parametrize(
    "coding, body",
    [
        ("gzip", BODY),
        ("deflate", BODY),
        ("gzip", zlib.compress(BODY)),
        ("gzip", GZIPPED[:-1]),
        ("gzip", GZIPPED + b"x"),
        ("gzip", GZIPPED + GZIPPED),
        ("gzip", GZIPPED + bytes(1000_000)),
        ("deflate", zlib.compress(BODY)[:-1]),
    ],
    ids=range(8),
)
async def test_what_is_not_what_it_says(coding: str, body: bytes) -> None:
    """
    What is not what it says is refused; the connection goes on, as the next request can be told from what was sent.
    """
    async with guarded() as port, connected(port) as client:
        for _ in range(2):
            client.writer.write(request(f"Content-Encoding: {coding}", "api-key: sk-right", body=body))
            status, headers, error = await client.answer()
            assert (400, "invalid_encoding") == (status, error["error"]["code"])
            assert "connection" not in headers


@given(st.binary(max_size=5000), st.sampled_from(["gzip", "deflate"]), st.integers(0, 100), st.integers(0, 6000))
def test_decompressing(data: bytes, coding: str, damage: int, limit: int) -> None:
    """What was compressed comes back; what is larger than it may be does not, and damage is noticed or none."""
    packed = gzip.compress(data) if coding == "gzip" else zlib.compress(data)

    def run(body: bytes) -> bytes | None:
        try:
            return asyncio.run(decompress(body, coding, limit))
        except PayloadTooLarge:
            return None
        except InvalidRequest:
            return b""

    assert (data if len(data) <= limit else None) == run(packed)
    place = damage % len(packed)
    assert run(packed[:place]) in (b"", None)
    assert run(packed + b"x") in (b"", None)


# Expectations


@pytest.mark.parametrize(
    "target, headers, status",
    [
        ("POST /nope", (), 401),
        ("POST /nope", ("api-key: sk-right",), 404),
        ("PUT /v1/models", ("api-key: sk-right",), 405),
        ("GET /health/live", (), 200),
        (f"POST {PATH}", (), 401),
        ("OPTIONS *", (), 401),
    ],
)
@pytest.mark.parametrize("expected", ["a miracle", "100-continue", "100-continue, a miracle"])
async def test_expectations(target: str, headers: tuple[str, ...], status: int, expected: str) -> None:
    """No body is asked for where none is read. What is expected changes neither the answer nor the log."""
    method, path = target.split()
    with capture_logs() as lines:
        async with guarded() as port, connected(port) as client:
            client.writer.write(request(f"Expect: {expected}", *headers, method=method, path=path, length=9))
            got, told, body = await client.answer()
            await assert_ends(client)

    assert (status, "application/json", "close") == (got, told["content-type"].partition(";")[0], told["connection"])
    assert status == 200 or body["error"]["code"]
    (line,) = [line for line in lines if line["event"] == "request" and line["status"] == status]
    assert told["x-request-id"] == line["request_id"]


async def test_a_body_is_asked_for_when_it_is_wanted() -> None:
    """``100 Continue`` comes for a request that is let in, and not for one that is refused whatever its body is."""
    async with guarded() as port:
        async with connected(port) as client:
            client.writer.write(request("Expect: 100-continue", "api-key: sk-right", length=len(BODY)))
            first = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), WAIT)
            assert b"HTTP/1.1 100 Continue\r\n\r\n" == first
            client.writer.write(BODY)
            assert 200 == (await client.answer())[0]
        async with connected(port) as client:
            client.writer.write(request("Expect: 100-continue", "api-key: sk-right", length=10**12))
            assert 413 == (await client.answer())[0]
        async with connected(port) as client:
            # It has come already.
            client.writer.write(request("Expect: 100-continue", "api-key: sk-right", body=BODY))
            assert 200 == (await client.answer())[0]
