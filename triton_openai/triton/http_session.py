"""The aiohttp session for calls that do not stream, and its replacement when its connections may lead nowhere."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from triton_openai.triton.dead_peers import watched_socket


class HttpSession:
    """
    The session of new calls. Those that it had before go on until their last call has ended.

    Made on first use, because a session belongs to the running loop.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None, timeout: aiohttp.ClientTimeout) -> None:
        self._ssl = ssl_context
        self._timeout = timeout
        self._current: aiohttp.ClientSession | None = None
        self._calls: dict[aiohttp.ClientSession, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the session for one call, its answer included."""
        session = self._current
        if session is None:
            connector = aiohttp.TCPConnector(limit=0, ssl=self._ssl or True, socket_factory=watched_socket)
            session = self._current = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
            self._calls[session] = 0
        self._calls[session] += 1
        try:
            yield session
        finally:
            if session in self._calls:
                self._calls[session] -= 1
                self._close_unused()

    def renew(self) -> None:
        """Begin further calls on new connections; idle ones are closed, and those in use when their calls end."""
        self._current = None
        self._close_unused()

    def _close_unused(self) -> None:
        for session, calls in list(self._calls.items()):
            if not calls and session is not self._current:
                del self._calls[session]
                task = asyncio.get_running_loop().create_task(session.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every connection."""
        self._current = None
        sessions = list(self._calls)
        self._calls.clear()
        await asyncio.gather(*self._closing, *(session.close() for session in sessions))
