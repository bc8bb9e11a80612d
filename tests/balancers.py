"""Load balancers that send clients to those replicas which say that they are ready, as one in production would."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Protocol

import aiohttp

from tests.ports import free_port
from tests.programs import found

# As often as a balancer would look, only faster.
_LOOK_SECONDS = 0.1


class Balancer(Protocol):
    """A balancer that runs on *port*."""

    port: int

    async def use(self, ports: Collection[int]) -> None:
        """Send new requests to these ports of this machine from now on."""


class Follower:
    """Keeps *balancer* on those *replicas* (ports) that are ready."""

    def __init__(self, balancer: Balancer) -> None:
        self.replicas: set[int] = set()
        self.ready: set[int] = set()
        self._balancer = balancer
        self._task = asyncio.create_task(self._run())

    async def add(self, port: int) -> None:
        """Look after one more replica from now on; return when it is in use."""
        self.replicas.add(port)
        while port not in self.ready:
            await asyncio.sleep(_LOOK_SECONDS / 10)
            if self._task.done():
                self._task.result()

    async def close(self) -> None:
        """Look after them no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
            while True:
                ports = sorted(self.replicas)
                answers = await asyncio.gather(*(_ready(session, port) for port in ports))
                ready = {port for port, is_ready in zip(ports, answers, strict=True) if is_ready}
                if ready != self.ready:
                    await self._balancer.use(ready)
                    self.ready = ready
                await asyncio.sleep(_LOOK_SECONDS)


async def _ready(session: aiohttp.ClientSession, port: int) -> bool:
    with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
        async with session.get(f"http://127.0.0.1:{port}/health/ready", timeout=aiohttp.ClientTimeout(30)) as response:
            return response.status == 200
    return False


class Nginx:
    """A real nginx, whose upstreams are changed as an ingress controller changes them: a new file and a reload."""

    _CONFIG = """
        daemon off; worker_processes 2; pid {folder}/pid; error_log {folder}/error.log warn;
        events {{ worker_connections 1024; }}
        http {{
            access_log off;
            client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
            uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
            upstream replicas {{ {servers} keepalive 64; }}
            server {{
                listen 127.0.0.1:{port};
                location = /generation {{ return 200 "{generation}"; }}
                location / {{
                    proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
                    proxy_set_header Host $http_host;
                    proxy_buffering {buffering}; proxy_read_timeout 60s;
                }}
            }}
        }}
    """

    def __init__(self, folder: Path, *, buffering: bool = False) -> None:
        folder.mkdir()
        # The service asks for none in its answers.
        self._buffering = "on; proxy_ignore_headers X-Accel-Buffering" if buffering else "off"
        self.port = free_port()
        self._folder = folder
        self._file = folder / "nginx.conf"
        self._generation = 0
        self._process: subprocess.Popen[bytes] | None = None

    async def use(self, ports: Collection[int]) -> None:
        """Write the configuration, and have it read."""
        servers = " ".join(f"server 127.0.0.1:{port};" for port in sorted(ports)) or "server 127.0.0.1:9;"
        self._generation += 1
        parts = {"folder": self._folder, "port": self.port, "servers": servers, "generation": self._generation}
        parts["buffering"] = self._buffering
        self._write(self._CONFIG.format(**parts))
        if self._process is None:
            self._process = self._start()
        else:
            self._process.send_signal(signal.SIGHUP)
        # Its workers answer once it takes signals; it listens before that.
        while await self._generation_served() != self._generation:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)

    async def _generation_served(self) -> int:
        # A worker that is just being replaced may close the connection without an answer.
        with contextlib.suppress(OSError, ValueError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                writer.write(b"GET /generation HTTP/1.0\r\n\r\n")
                return int((await reader.read()).rpartition(b"\r\n")[2])
            finally:
                writer.close()
                await writer.wait_closed()
        return 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [found("nginx"), "-p", str(self._folder), "-e", f"{self._folder}/error.log", "-c", str(self._file)]
        )

    def _write(self, text: str) -> None:
        self._file.write_text(text)

    def complaints(self) -> str:
        """Return what it has logged."""
        return (self._folder / "error.log").read_text()

    async def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.terminate()
            await asyncio.to_thread(self._process.wait, 120)


class Relay:
    """A balancer of connections: each goes to the next replica in turn, byte for byte."""

    def __init__(self) -> None:
        self.port = 0
        self._ports: list[int] = []
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def use(self, ports: Collection[int]) -> None:
        """Send new connections to *ports*."""
        self._ports = sorted(ports)

    async def start(self) -> None:
        """Begin to listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Listen no more, and let connections end."""
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*self._connections)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port = self._ports[0]
        self._ports = [*self._ports[1:], port]
        writers = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(up_writer)
            # Each side closes its connection when it has nothing more to say, and then so does the other.
            copies = {asyncio.create_task(_copy(reader, up_writer)), asyncio.create_task(_copy(up_reader, writer))}
            _, rest = await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
            for task in rest:
                task.cancel()
            await asyncio.gather(*copies, return_exceptions=True)
        except OSError:
            # The client sees its connection closed.
            pass
        finally:
            for one in writers:
                one.close()
            for one in writers:
                with contextlib.suppress(OSError):
                    await one.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


@contextlib.asynccontextmanager
async def balancing(kind: str, folder: Path) -> AsyncIterator[tuple[Balancer, Follower]]:
    """Run a balancer of this *kind* (``nginx`` or ``relay``), and what keeps it on the replicas that are ready."""
    balancer: Nginx | Relay
    if kind == "nginx":
        balancer = Nginx(folder / "nginx")
    else:
        balancer = Relay()
        await balancer.start()
    follower = Follower(balancer)
    try:
        yield balancer, follower
    finally:
        await follower.close()
        await balancer.close()
