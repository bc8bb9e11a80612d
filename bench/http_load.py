"""Streams over HTTP, on asyncio's protocols: what a client can do at the least cost in Python."""

from __future__ import annotations

import asyncio
import time
from typing import cast

from bench.messages import Load
from bench.tally import Tally
from bench.wire import AnswerReader, http_request


class HttpStream(asyncio.Protocol):
    """One connection that asks, reads the answer, and asks again."""

    def __init__(self, tally: Tally, request: bytes, begun: float) -> None:
        self._tally = tally
        self._request = request
        self._transport: asyncio.Transport | None = None
        self.finished = False
        self._of_stream = True
        # Per answer
        self._begun = begun
        self._last: float | None = None
        self._reader = AnswerReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        now = time.perf_counter()
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
            self._next()

    def connection_lost(self, error: Exception | None) -> None:
        """Nobody but this side may end it."""
        if not self.finished:
            self._fail(f"connection lost: {error}")

    def close(self) -> None:
        """Drop the connection, as a client that leaves."""
        self.finished = True
        if self._transport is not None:
            self._transport.abort()

    def _next(self) -> None:
        if self._last is None:
            self._fail(f"an answer without a token: {self._reader.head!r}")
        elif not self._tally.answered():
            self.close()
        elif self._transport is not None and not self.finished:
            self._begun, self._last, self._reader = time.perf_counter(), None, AnswerReader()
            self._transport.write(self._request)

    def _fail(self, reason: str) -> None:
        if not self.finished:
            self._tally.failed(reason)
            self.close()


async def run_http(load: Load, tally: Tally) -> None:
    """Start the streams of *load*, let *tally* measure, and drop them."""
    loop = asyncio.get_running_loop()
    request = http_request(load.target, load.model, load.tokens, load.form)
    streams: list[HttpStream] = []

    async def start(delay: float) -> None:
        await asyncio.sleep(delay)
        begun = time.perf_counter()
        stream = HttpStream(tally, request, begun)
        streams.append(stream)
        try:
            await loop.create_connection(lambda: stream, load.target.host, load.target.port)
        except OSError as error:
            tally.failed(f"no connection: {error}")

    starting = [asyncio.create_task(start(load.ramp * index / load.streams)) for index in range(load.streams)]
    try:
        await tally.measure()
        await tally.drain(lambda: all(stream.finished for stream in streams))
    finally:
        for task in starting:
            task.cancel()
        for stream in streams:
            stream.close()
        await asyncio.gather(*starting, return_exceptions=True)
