"""
A channel of gRPC calls: they share one HTTP/2 connection until it accepts no more, then another one.

Source of the facts: gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import weakref
from collections import deque
from collections.abc import Mapping
from urllib.parse import urlsplit

from triton_openai import __version__
from triton_openai.config.tls import ReloadingContext, failure_reason
from triton_openai.tasks import cancel
from triton_openai.triton.connection import ConnectionSettings, Header, detect_dead_peer
from triton_openai.triton.http2 import LOST, UNREACHABLE, Call, Connection
from triton_openai.triton.http2_frames import MESSAGE, header_block


class Channel:
    """
    Calls of the method *path* of the server at *url*, over one connection until it accepts no more, then over another.

    Running calls keep their connection when the certificates change. Raises
    :class:`ConfigurationError` for files that cannot be used.
    """

    def __init__(self, url: str, path: str, settings: ConnectionSettings) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 8001
        self._settings = settings
        self._tls: ReloadingContext | None = None
        scheme = "http"
        if parts.scheme == "grpcs":
            scheme = "https"
            self._tls = settings.ssl_context("h2")
        self._context: ssl.SSLContext | None = None
        self._fixed = (
            (":method", "POST"),
            (":scheme", scheme),
            (":path", path),
            (":authority", parts.netloc),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
            ("user-agent", f"triton-openai/{__version__}"),
        )
        self._metadata: tuple[Header, ...] | None = None
        self._headers = b""
        # The connection for new calls. Older ones close after their last calls.
        self._current: Connection | None = None
        self._connections: weakref.WeakSet[Connection] = weakref.WeakSet()
        self._waiting: deque[Call] = deque()
        self._connecting: asyncio.Task[None] | None = None

    def start(self, call: Call, message: bytes, own: Mapping[str, str]) -> None:
        """Send *call* with its one *message* and its *own* metadata, as soon as there is a connection."""
        metadata = self._settings.headers()
        if metadata is not self._metadata:
            self._metadata = metadata
            self._headers = header_block((*self._fixed, *metadata))
        if own:
            call.headers = self._headers + header_block(own.items())
        else:
            call.headers = self._headers
        call.request = MESSAGE.pack(0, len(message)) + message
        self.submit(call)

    def submit(self, call: Call) -> None:
        """Send *call*, which the server has not seen."""
        if self._tls is not None and self._tls.current() is not self._context:
            self._context = self._tls.current()
            self.reconnect()
        if self._current is not None and self._current.has_capacity:
            self._current.open(call)
            return
        call.withdraw = self.withdraw
        self._waiting.append(call)
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def withdraw(self, call: Call) -> None:
        """Forget *call*, which waits for a connection."""
        call.withdraw = None
        # While all that wait are ended, it is no longer there.
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def reconnect(self) -> None:
        """Use a new connection for further calls, and ping the server on the old one."""
        if self._current is not None:
            self._current.drain()
            self._current.ping()

    async def close(self) -> None:
        """Close every connection; calls are cut off."""
        if self._connecting is not None:
            await cancel(self._connecting)
        for connection in self._connections:
            connection.close("the service stopped")
        self._fail_waiting(LOST, "the service stopped")

    async def _connect(self) -> None:
        try:
            while self._waiting:
                connection = Connection(self.submit)
                self._connections.add(connection)
                try:
                    async with asyncio.timeout(self._settings.connect_timeout):
                        await self._establish(connection)
                except (TimeoutError, OSError) as error:
                    connection.close()
                    reason = failure_reason(error)
                    if type(error) is ConnectionError:
                        reason = str(error)
                    self._fail_waiting(UNREACHABLE, reason)
                    continue
                if self._current is not None:
                    self._current.drain()
                self._current = connection
                while self._waiting and connection.has_capacity:
                    connection.open(self._waiting.popleft())
        finally:
            self._connecting = None

    async def _establish(self, connection: Connection) -> None:
        """Connect, and wait for the server's settings: accepting a connection alone proves nothing."""
        if self._tls is None:
            name = None
        else:
            name = self._settings.access.server_name
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: connection, *self._address, ssl=self._context, server_hostname=name
        )
        detect_dead_peer(transport)
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            raise ConnectionError("TLS: the server does not speak HTTP/2 (ALPN h2)")
        await connection.ready

    def _fail_waiting(self, code: str, details: str) -> None:
        waiting = self._waiting
        self._waiting = deque()
        for call in waiting:
            if call.withdraw is not None:
                call.end(code, details)
