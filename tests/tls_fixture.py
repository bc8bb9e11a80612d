"""Certificates made for a test, and a relay that puts TLS in front of a port."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import trustme


class Authority:
    """An authority of its own, whose files lie in *folder*."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._name = name
        self._made = trustme.CA()
        self.file = folder / f"{name}.pem"
        self._made.cert_pem.write_to_path(self.file)

    def issue(self, name: str, *hosts: str, expired: bool = False) -> Path:
        """Write a certificate for *hosts* (127.0.0.1 where none is given) and its key into one file; return it."""
        past = datetime(2020, 1, 1, tzinfo=UTC) if expired else None
        leaf = self._made.issue_cert(*(hosts or ("127.0.0.1",)), not_after=past)
        path = self._folder / f"{self._name}-{name}.pem"
        self.replace(path, leaf)
        return path

    def renew(self, path: Path, *hosts: str) -> None:
        """Put another certificate for *hosts* into the place of that in *path*."""
        self.replace(path, self._made.issue_cert(*(hosts or ("127.0.0.1",))))

    @staticmethod
    def replace(path: Path, leaf: trustme.LeafCert) -> None:
        """Exchange the file as a tool for certificates does, in one step."""
        fresh = path.with_suffix(".new")
        leaf.private_key_and_cert_chain_pem.write_to_path(fresh)
        fresh.rename(path)

    def client(self, identity: Path | None = None) -> ssl.SSLContext:
        """Return a client's context that trusts this authority alone and shows *identity*."""
        context = ssl.create_default_context(cafile=str(self.file))
        if identity is not None:
            context.load_cert_chain(identity)
        return context

    def server(self, identity: Path, *, clients: bool = False, protocol: str = "http/1.1") -> ssl.SSLContext:
        """Return a server's context; with *clients*, for clients that have a certificate of this authority."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(identity)
        context.set_alpn_protocols([protocol])
        if clients:
            context.load_verify_locations(self.file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Relay:
    """A port with TLS in front of another one without."""

    def __init__(self, target: int, context: ssl.SSLContext) -> None:
        self._target = target
        self._context = context
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay one connection to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        writers = [writer]
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            writers.append(back)
            await asyncio.gather(_pipe(reader, back), _pipe(there, writer))
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for each in writers:
                # Not closed: the farewell of TLS would be waited for.
                each.transport.abort()
            self._tasks.discard(task)

    async def cut(self) -> None:
        """End every connection."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A transport that is aborted is closed in the loop's next rounds.
        for _ in range(3):
            await asyncio.sleep(0)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except (OSError, asyncio.CancelledError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def relaying(target: int, context: ssl.SSLContext) -> AsyncIterator[Relay]:
    """Run a relay to *target* on a free port."""
    relay = Relay(target, context)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0, ssl=context)
    relay.port = server.sockets[0].getsockname()[1]
    try:
        yield relay
    finally:
        server.close()
        await relay.cut()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(server.wait_closed(), 2)
