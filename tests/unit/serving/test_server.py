"""The end of the HTTP server: whoever has connected is answered, however busy the event loop is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.cases import every_case
from tests.loops import on_uvloop
from tests.tls_fixture import Authority
from triton_openai.config.tree import LimitSettings
from triton_openai.draining import Draining
from triton_openai.serving import connections
from triton_openai.serving import server as server_module
from triton_openai.serving.server import HttpServer

_CLIENTS = 40
_REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
# More than the kernel takes from one who does not read.
_LARGE = 32 * 1024 * 1024


class Server:
    """A server on a free port. What is drained are no requests of its own."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        app = web.Application(client_max_size=2 * _LARGE)
        app.router.add_get("/", self._answer)
        app.router.add_get("/large", self._answer_much)
        app.router.add_post("/", self._answer)
        app.router.add_get("/file", self._send_file)
        self.draining = Draining()
        self.http = HttpServer(app, LimitSettings(), tls=tls)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = self.listener.getsockname()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(text="answer")

    async def _answer_much(self, _: web.Request) -> web.Response:
        return web.Response(body=bytes(_LARGE))

    async def _send_file(self, _: web.Request) -> web.FileResponse:
        return web.FileResponse(__file__)

    def connected(self, count: int = _CLIENTS) -> list[socket.socket]:
        """Return connections that the kernel has accepted: the event loop has had no turn to."""
        return [socket.create_connection(self.address, timeout=120) for _ in range(count)]


def _unacknowledged(client: socket.socket) -> int:
    """Return how many segments of what *client* has sent the kernel has not passed on (tcpi_unacked of Linux)."""
    return int(struct.unpack_from("=I", client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64), 24)[0])


def _wait_until_received(clients: Iterable[socket.socket]) -> None:
    """Wait until the kernel has passed on what *clients* have sent. The event loop has no turn."""
    while any(map(_unacknowledged, clients)):
        time.sleep(0.001)


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Run a server."""
    server = Server(tls)
    await server.http.start()
    await server.http.listen(server.listener)
    try:
        yield server
    finally:
        await server.http.close()


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Take a while in each turn of the event loop."""
    loop = asyncio.get_running_loop()
    over = False

    def work() -> None:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        if not over:
            loop.call_soon(work)

    loop.call_soon(work)
    yield
    over = True


async def _head(client: socket.socket, tls: ssl.SSLContext | None = None) -> bytes:
    """Return the head of the answer to *client*, which asks now if it does so over TLS."""
    host = None if tls is None else "127.0.0.1"
    reader, writer = await asyncio.open_connection(sock=client, ssl=tls, server_hostname=host)
    if tls is not None:
        writer.write(_REQUEST)
    head = await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return head


@pytest.mark.parametrize("encrypted", [False, True])
@on_uvloop
async def test_who_has_connected_is_answered(encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, in however few turns of the event loop; then their connections close."""
    # A handshake takes some turns.
    monkeypatch.setattr(server_module, "_LAST_REQUESTS_SECONDS", 600.0)
    authority = Authority(tmp_path) if encrypted else None
    client_tls = None if authority is None else authority.client()
    server_tls = None if authority is None else authority.server(authority.issue("server", "127.0.0.1"))
    async with serving(server_tls) as server:
        clients = server.connected(4 if encrypted else _CLIENTS)
        for client in clients if authority is None else ():
            client.sendall(_REQUEST)
        with busy():
            heads = asyncio.gather(*(_head(client, client_tls) for client in clients))
            await server.http.stop(server.draining, 600, asyncio.Event())
            found = await heads

    assert all(head.startswith(b"HTTP/1.1 200") and b"\r\nConnection: close" in head for head in found)


@on_uvloop
async def test_who_asks_at_the_last_moment_is_answered() -> None:
    """A request on a connection that has idled, or that nobody has used, is read before the connection closes."""
    hurried = asyncio.Event()
    hurried.set()
    async with serving() as server:
        kept, new = server.connected(2)
        kept.sendall(_REQUEST)
        assert b"200" in await asyncio.to_thread(kept.recv, 1024)
        for client in (kept, new):
            client.sendall(_REQUEST)
        heads = asyncio.gather(*map(_head, (kept, new)))
        await server.http.stop(server.draining, 60, hurried)
        assert [b"HTTP/1.1 200"] * 2 == [head[:12] for head in await heads]


@on_uvloop
async def test_who_connects_to_a_busy_service_is_answered() -> None:
    """Clients that connect together are accepted in a few turns of the event loop, however long these are."""
    async with serving() as server:
        clients = server.connected()
        for client in clients:
            client.sendall(_REQUEST)
        _wait_until_received(clients)
        for _ in range(_CLIENTS // 2):
            await asyncio.sleep(0)
        # Nor has it one now: what is read was sent before.
        answers = [client.recv(4096) for client in clients]
        for client in clients:
            client.close()

    assert all(answer.endswith(b"answer") for answer in answers)


@on_uvloop
async def test_a_long_answer_leaves() -> None:
    """
    A long answer leaves after its handler has ended; a client that takes nothing is waited for only as long as
    allowed.
    """
    async with serving() as server:
        (client,) = server.connected(1)
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(_REQUEST.replace(b"/", b"/large", 1))
        head = await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(server.http.stop(server.draining, 600, asyncio.Event()))
        assert len(await reader.readexactly(_LARGE)) == _LARGE
        await asyncio.wait_for(stopping, 120)
        writer.close()

    assert head.startswith(b"HTTP/1.1 200")


@on_uvloop
async def test_a_client_that_still_sends_gets_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that nobody wants is read for a moment: a reset would cost the client its answer."""
    # However long the machine stands still.
    monkeypatch.setattr(connections, "_MAX_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr(connections, "_MAX_REST_SECONDS", 600.0)
    async with serving() as server:
        (client,) = server.connected(1)
        reader, writer = await asyncio.open_connection(sock=client)
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % _LARGE)
        await reader.readuntil(b"\r\n\r\n")
        stopping = asyncio.create_task(server.http.stop(server.draining, 600, asyncio.Event()))
        writer.write(bytes(_LARGE))
        assert b"answer" == await reader.read()
        await asyncio.wait_for(stopping, 120)
        writer.close()


@every_case("asked, status", (("bytes=0-3", 206), ("lines=0-3", 200), ("Bytes=0-3", 200), ("", 200)))
async def test_a_range_in_another_unit_is_ignored(asked: str, status: int) -> None:
    """A range in bytes is a part of the file; for any other unit, the answer is the whole file."""
    async with serving() as server, aiohttp.ClientSession() as client:
        url = f"http://127.0.0.1:{server.address[1]}/file"
        async with client.get(url, headers={"Range": asked}) as answer:
            assert status == answer.status
            assert (len(await answer.read()) == 4) == (status == 206)
