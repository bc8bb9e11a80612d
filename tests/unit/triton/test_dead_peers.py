"""Connections to Triton whose other end is gone without a word."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest
import uvloop

from tests.cases import every_case
from tests.clock import Clock, turns
from triton_openai.errors import ServiceError, UpstreamUnavailable
from triton_openai.triton.client import TritonClient
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.grpc import GrpcClient
from triton_openai.triton.http import HttpClient
from triton_openai.triton.http_stream import Connection, ConnectionPool, HttpStream
from triton_openai.triton.tensors import InferRequest

ASKED = InferRequest(model="m", id="r", inputs=(), stream=True)
REQUEST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 0\r\n\r\n"


@asynccontextmanager
async def pooled() -> AsyncIterator[tuple[ConnectionPool, asyncio.Queue[asyncio.StreamWriter]]]:
    """Yield a pool of connections to a server that says nothing, and the server's ends of them."""
    accepted: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    gone = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            accepted.put_nowait(writer)
            await gone.wait()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(f"http://127.0.0.1:{port}", ConnectionSettings(connect_timeout=60))
    try:
        yield pool, accepted
    finally:
        pool.close()
        gone.set()
        server.close()
        await server.wait_closed()


@pytest.mark.skipif(sys.platform != "linux", reason="the options are Linux's")
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_the_kernel_watches_each_connection(run):
    """Within half a minute it knows that nobody is there: that of TCP itself is 15 minutes, or never."""

    async def look() -> dict[str, int]:
        async with pooled() as (pool, accepted):
            connection = await pool.connect()
            await accepted.get()
            assert connection._transport is not None
            found = connection._transport.get_extra_info("socket")
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            options = {name: found.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names}
            options["SO_KEEPALIVE"] = found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            connection.close()
            return options

    options = run(look())

    assert 1 == options["SO_KEEPALIVE"]
    assert 30 == options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] * options["TCP_KEEPCNT"]
    assert 30_000 == options["TCP_USER_TIMEOUT"]


@every_case("silent", [True, False])
async def test_silence_on_one_connection_is_held_against_the_idle_ones(silent: bool) -> None:
    """Silence on one connection makes the next request take a fresh one; a request that is merely long does not."""
    async with pooled() as (pool, accepted):
        over = asyncio.Event()
        ended, nobody = Mock(end=lambda error: over.set()), Mock()
        other = HttpStream(pool, ASKED, ended, message=lambda: REQUEST)
        server = await accepted.get()
        one = HttpStream(pool, ASKED, nobody, message=lambda: REQUEST)
        await accepted.get()
        server.write(ANSWER)
        async with asyncio.timeout(120):
            await over.wait()

        one.close(silent=silent)

        assert (pool.idle() is None) is silent
        other.close()
        nobody.end.assert_not_called()


@contextlib.contextmanager
def stopped() -> Iterator[str]:
    """Yield the address of a server that is stopped: the kernel takes connections for it, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@every_case("transport", ["http", "grpc"])
@every_case("silent", [True, False])
async def test_a_stream_to_a_server_that_is_stopped(transport: str, silent: bool) -> None:
    """A stream to a server that is stopped ends when it is closed, also while its request could not even be sent."""
    settings = ConnectionSettings(connect_timeout=60)
    with stopped() as address:
        url = f"{transport}://{address}"
        client: TritonClient = HttpClient(url, settings) if transport == "http" else GrpcClient(url, settings)
        receiver = Mock()
        stream = client.stream(ASKED, receiver)
        await turns()
        stream.close(silent=silent)
        stream.close()
        await turns()
        assert not receiver.mock_calls
        await asyncio.wait_for(client.close(), 120)


async def test_a_server_that_is_stopped_is_connected_to_for_a_while() -> None:
    """Over gRPC too, where a connection is one when the server has greeted."""
    with stopped() as address:
        # grpcio has a clock of its own.
        client = GrpcClient(f"grpc://{address}", ConnectionSettings(connect_timeout=0.2, control_timeout=60))
        with pytest.raises(UpstreamUnavailable):
            await asyncio.wait_for(client.server_info(), 120)
        await client.close()


async def test_a_connection_that_is_lost_at_once(monkeypatch):
    """A server that ends may take a connection and close it before it can be used: there is nobody to ask."""
    loop = asyncio.get_running_loop()
    connect = loop.create_connection

    async def connect_and_lose(*arguments, **options):
        transport, protocol = await connect(*arguments, **options)
        transport.abort()
        return transport, protocol

    monkeypatch.setattr(loop, "create_connection", connect_and_lose)
    async with pooled() as (pool, _):
        with pytest.raises(UpstreamUnavailable):
            await pool.connect()


async def test_a_server_that_speaks_first(monkeypatch):
    """
    A server that speaks first does not speak HTTP: its connection is closed, and nothing tells of a mistake of
    ours.
    """
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    connect = loop.create_connection

    lost = asyncio.Event()
    connection_lost = Connection.connection_lost

    def lose(connection, error):
        connection_lost(connection, error)
        lost.set()

    monkeypatch.setattr(Connection, "connection_lost", lose)

    async def connect_and_wait(*arguments, **options):
        transport, protocol = await connect(*arguments, **options)
        (await accepted.get()).write(b"SSH-2.0\r\n")
        await asyncio.wait_for(lost.wait(), 120)
        return transport, protocol

    monkeypatch.setattr(loop, "create_connection", connect_and_wait)
    async with pooled() as (pool, accepted):
        with pytest.raises(UpstreamUnavailable):
            await pool.connect()

    assert not complaints


@every_case("cancelled", [True, False])
async def test_a_call_that_ends_after_its_client_is_closed(cancelled: bool, clock: Clock) -> None:
    """A call whose client is closed ends as calls do."""
    with stopped() as address:
        client = HttpClient(f"http://{address}", ConnectionSettings(connect_timeout=60, control_timeout=30))
        call = asyncio.ensure_future(client.server_info())
        await turns()
        await client.close()
        if cancelled:
            call.cancel()
        else:
            clock.advance(30)
        (result,) = await asyncio.gather(call, return_exceptions=True)

    assert isinstance(result, asyncio.CancelledError if cancelled else ServiceError)
