"""
Calls between a parent and its workers, over a private pair of sockets.

A message is its length in four bytes and then a pickle: both ends are this program, and one has started the other. A
worker whose parent has gone finds the connection closed.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from triton_openai.tasks import spawn

_LENGTH = struct.Struct(">I")


def encode(number: int, method: str | None, content: Any) -> bytes:
    """Return call *number* of *method* with its arguments, or its answer where *method* is ``None``; 0 wants none."""
    body = pickle.dumps((number, method, content))
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One end of the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        #: What the other end calls by name. They begin in the order of the calls; coroutines go on as tasks.
        self.methods: dict[str, Callable[..., Any]] = {}
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(cls, connection: socket.socket) -> Channel:
        """Return an end over *connection*, which then belongs to it."""
        connection.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=connection))

    def notify(self, method: str, *arguments: Any) -> None:
        """Call *method* of the other end without waiting for an answer."""
        self._send(0, method, arguments)

    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]:
        """Call *method* of the other end. The future has the answer; ``None`` where the other end has gone."""
        number = next(self._numbers)
        answer = self._calls[number] = asyncio.get_running_loop().create_future()
        if not self._send(number, method, arguments):
            answer.set_result(None)
        return answer

    async def run(self) -> None:
        """Handle messages until the other end has gone, and close the connection."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self._take(*pickle.loads(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writer.close()
            for task in self._tasks:
                task.cancel()
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_result(None)

    def _take(self, number: int, method: str | None, content: Any) -> None:
        if method is None:
            answer = self._calls.pop(number)
            # The caller may have stopped waiting.
            if not answer.done():
                answer.set_result(content)
            return
        result = self.methods[method](*content)
        if asyncio.iscoroutine(result):
            spawn(self._answer(number, result), self._tasks)
        elif number:
            self._send(number, None, result)

    async def _answer(self, number: int, work: Awaitable[Any]) -> None:
        result = await work
        if number:
            self._send(number, None, result)

    def _send(self, number: int, method: str | None, content: Any) -> bool:
        """Send a message; return false where the other end has gone."""
        if self._writer.is_closing():
            return False
        self._writer.write(encode(number, method, content))
        return True
