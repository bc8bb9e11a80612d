"""Streams over HTTP/1.1, on asyncio's protocols: what a client can do at the least cost in Python."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from triton_openai.load.tally import Plan, Tally

#: Seconds before a stream goes on after a failure.
PAUSE_SECONDS = 1.0


class Reader(Protocol):
    """Reads one answer."""

    #: Whether the answer is complete.
    ended: bool
    #: Tokens of the complete answer that :meth:`feed` has not counted.
    uncounted: int

    def feed(self, data: bytes) -> int:
        """Return how many tokens are in *data*. Raises `ValueError` when the answer is an error, or unreadable."""
        ...


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and how they are made and their answers read."""

    host: str
    port: int
    request: Callable[[], bytes]
    reader: Callable[[], Reader]
    tls: ssl.SSLContext | None = None
    #: Whether servers may close connections after an answer. Without it, that is a failure.
    reconnects: bool = False
    #: Seconds that a request may take.
    timeout: float | None = None


class HttpStream(asyncio.Protocol):
    """One stream: it asks, reads the answer, and asks again."""

    def __init__(self, target: Target, tally: Tally) -> None:
        self._target = target
        self._tally = tally
        self._transport: asyncio.Transport | None = None
        self.finished = False
        self._of_stream = True
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        # Answers that came over the connection.
        self._answers = 0
        # Per answer
        self._asks = False
        self._begun = 0.0
        self._last: float | None = None
        self._reader: Reader = target.reader()

    def start(self, delay: float) -> None:
        """Connect and ask, after *delay* seconds."""
        self._task = asyncio.create_task(self._connect(delay))

    async def _connect(self, delay: float) -> None:
        if delay:
            await asyncio.sleep(delay)
        target = self._target
        self._expect()
        try:
            await asyncio.get_running_loop().create_connection(lambda: self, target.host, target.port, ssl=target.tls)
        except OSError as error:
            self._fail(f"no connection: {error}")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request of the connection."""
        self._transport = cast(asyncio.Transport, transport)
        self._answers = 0
        if self.finished:
            self._transport.abort()
        else:
            self._transport.write(self._target.request())

    def data_received(self, data: bytes) -> None:
        """Count."""
        now = time.perf_counter()
        if not self._asks:
            return
        try:
            count = self._reader.feed(data)
        except ValueError as error:
            self._fail(f"refused: {error}")
            return
        if count:
            if self._last is None:
                self._tally.first(now - self._begun, of_stream=self._of_stream)
                self._of_stream = False
                self._tally.tokens(count, None)
            else:
                self._tally.tokens(count, now - self._last)
            self._last = now
        if self._reader.ended:
            self._next(now)

    def connection_lost(self, error: Exception | None) -> None:
        """Connect again where that is allowed; else only this side may end a connection."""
        self._transport = None
        if self.finished or not self._asks:
            return
        if self._target.reconnects and self._answers and self._last is None:
            # Closed after the last answer, and before this request was read.
            self.start(0.0)
        else:
            self._fail(f"connection lost: {error or 'the server closed it'}")

    def close(self) -> None:
        """Drop the connection, as a client that leaves."""
        self.finished = True
        self._idle()
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def _expect(self) -> None:
        """Begin to wait for the answer to a request."""
        self._asks = True
        self._begun = time.perf_counter()
        self._last = None
        self._reader = self._target.reader()
        if self._target.timeout is not None and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._target.timeout, self._late)

    def _idle(self) -> None:
        """Stop waiting for an answer."""
        self._asks = False
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _late(self) -> None:
        self._fail(f"no complete answer within {self._target.timeout:g} s")

    def _next(self, now: float) -> None:
        if self._last is None:
            self._fail("an answer without a token")
            return
        if self._reader.uncounted:
            self._tally.tokens(self._reader.uncounted, None)
        self._answers += 1
        self._idle()
        if not self._tally.answered(now - self._begun):
            self.close()
        elif self._transport is not None:
            self._expect()
            self._transport.write(self._target.request())

    def _fail(self, reason: str) -> None:
        if self.finished:
            return
        self._idle()
        if not self._tally.failed(reason):
            self.close()
            return
        if self._transport is not None:
            self._transport.abort()
        self.start(PAUSE_SECONDS)


async def run_streams(target: Target, plan: Plan, tally: Tally) -> None:
    """Start the streams of *plan*, have *tally* measure, and drop them."""
    streams = [HttpStream(target, tally) for _ in range(plan.streams)]
    for index, stream in enumerate(streams):
        stream.start(plan.ramp * index / plan.streams)
    try:
        await tally.measure()
        await tally.drain(lambda: all(stream.finished for stream in streams))
    finally:
        for stream in streams:
            stream.close()
