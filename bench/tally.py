"""What a measurement adds to the load generator: the clocks of the loaded processes, and the end of all streams."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from bench.accounting import CpuClock, memory
from bench.messages import Load, Measured
from bench.wire import http_request
from triton_openai.load.tally import Tally

#: Seconds until every stream must have its first token.
FIRST_TOKEN_SECONDS = 60.0
#: Tokens a second of a single stream, below which no long answer is waited for.
SLOWEST = 500
_DRAIN_SECONDS = 20.0


class BenchTally(Tally):
    """Also reads the clocks of processes at both ends of the window."""

    def __init__(self, load: Load) -> None:
        self.measured = Measured()
        super().__init__(load, self.measured)
        self._load = load
        self._relay = CpuClock(load.relay)
        self._triton = CpuClock(load.triton)
        self._client = CpuClock([os.getpid()])

    def opened(self) -> None:
        """Read the clocks."""
        measured = self.measured
        measured.triton_cpu = -self._triton.read()
        measured.client_cpu = -self._client.read()
        measured.relay_cpu = -self._relay.read()

    def closed(self) -> None:
        """Read the clocks again, and the memory."""
        measured = self.measured
        measured.relay_cpu += self._relay.read()
        measured.client_cpu += self._client.read()
        measured.triton_cpu += self._triton.read()
        seen = memory(self._load.relay)
        measured.resident = seen.resident
        measured.peak = seen.peak

    async def drain(self, ended: Callable[[], bool]) -> None:
        """
        Have the model end all streams, and wait until *ended*.

        Dropping hundreds of gRPC streams at the same moment now and then ends Triton (2.51: "double free or
        corruption"), and leaves behind work that the next measurement would see.
        """
        self.closing = True
        control = self._load.control
        if control is None or self._load.answers is not None or self.outcome.errors:
            return
        deadline = time.perf_counter() + _DRAIN_SECONDS
        _, writer = await asyncio.open_connection(control.host, control.port)
        writer.write(http_request(control, self._load.model, 0))
        while not ended() and time.perf_counter() < deadline:  # noqa: ASYNC110 - a look now and then is enough
            await asyncio.sleep(0.02)
        writer.close()
