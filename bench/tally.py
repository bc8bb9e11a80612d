"""The load generator's bookkeeping: what happens when, inside the measured window."""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Callable

from bench.accounting import CpuClock, memory
from bench.messages import Load, Outcome
from bench.wire import http_request

_FIRST_TOKEN_SECONDS = 60.0
#: Tokens a second of a single stream, below which no long answer is waited for.
SLOWEST = 500
_DRAIN_SECONDS = 20.0


class Tally:
    """Told of every token by the streams; opens and closes the window."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._begun = 0
        self._all_begun = asyncio.Event()
        self._enough = asyncio.Event()
        self._failed = asyncio.Event()
        self._open = False
        self._closing = False
        self._gaps = array("d")
        self.outcome = Outcome()

    def first(self, waited: float, *, of_stream: bool) -> None:
        """Note a request's first token; *of_stream*: it was also the first of its stream."""
        if self._open or not self._load.settled:
            self.outcome.first.append(waited)
        if of_stream:
            self._begun += 1
            if self._begun == self._load.streams:
                self._all_begun.set()

    def tokens(self, count: int, gap: float | None) -> None:
        """Note tokens that came together, *gap* seconds after the stream's last one."""
        if self._open:
            self.outcome.tokens += count
            if gap is not None:
                self._gaps.append(gap)
                # They came at the same moment, as the client sees it.
                self._gaps.extend([0.0] * (count - 1))

    def answered(self) -> bool:
        """Note the end of an answer; return whether the stream is to ask again."""
        if self._open:
            self.outcome.answers += 1
        if self._load.answers is None:
            return not self._closing
        if self.outcome.answers >= self._load.answers:
            self._enough.set()
        return self.outcome.answers + self._load.streams <= self._load.answers

    def failed(self, reason: str) -> None:
        """Note what went wrong; the measurement ends."""
        self.outcome.errors.append(reason)
        self._failed.set()

    async def measure(self) -> None:
        """Wait for the beginning, keep the window open for its time, and read the clocks at both ends."""
        load = self._load
        relay = CpuClock(load.relay)
        triton = CpuClock(load.triton)
        client = CpuClock([os.getpid()])
        if load.answers is None:
            if not await self._wait(self._all_begun, _FIRST_TOKEN_SECONDS):
                self.failed(f"only {self._begun} of {load.streams} streams had a token")
            await self._wait(self._failed, load.warm)
        begin = (triton.read(), client.read(), relay.read())
        started = time.perf_counter()
        self._open = True
        if load.answers is None:
            await self._wait(self._failed, load.seconds)
        elif not await self._wait(self._enough, _FIRST_TOKEN_SECONDS + load.tokens / SLOWEST):
            self.failed(f"only {self.outcome.answers} of {load.answers} answers came")
        self._open = False
        outcome = self.outcome
        outcome.seconds = time.perf_counter() - started
        outcome.relay_cpu = relay.read() - begin[2]
        outcome.client_cpu = client.read() - begin[1]
        outcome.triton_cpu = triton.read() - begin[0]
        seen = memory(load.relay)
        outcome.resident = seen.resident
        outcome.peak = seen.peak
        outcome.gaps = [round(gap * 1e6) for gap in self._gaps]

    async def drain(self, ended: Callable[[], bool]) -> None:
        """
        Let the model end all streams, and wait until *ended*.

        Dropping hundreds of gRPC streams at the same moment now and then ends Triton (2.51: "double free or
        corruption"), and leaves behind work that the next measurement would see.
        """
        self._closing = True
        control = self._load.control
        if control is None or self._load.answers is not None or self.outcome.errors:
            return
        deadline = time.perf_counter() + _DRAIN_SECONDS
        _, writer = await asyncio.open_connection(control.host, control.port)
        writer.write(http_request(control, self._load.model, 0))
        while not ended() and time.perf_counter() < deadline:  # noqa: ASYNC110 - a look now and then is enough
            await asyncio.sleep(0.02)
        writer.close()

    async def _wait(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait for *event* or a failure, at most *seconds*; return whether it was *event*."""
        waiting = [asyncio.ensure_future(waiter.wait()) for waiter in (event, self._failed)]
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiting:
            waiter.cancel()
        return event.is_set()
