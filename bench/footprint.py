"""
``make bench ARGS="--cases footprint"``: what the service takes before and while it serves, in front of the fake Triton.

CPU time from its start until it answers, and memory: at first, for each idle connection, and for each open stream.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from bench.accounting import CpuClock, memory
from bench.messages import Target
from bench.processes import HOST, BenchError, free_port, make_room, running, wait_until_answers
from bench.repository import PACED
from bench.subjects import Subject, ours
from bench.wire import AnswerReader, http_request

#: As many as the aim names; fewer where fewer files may be open.
STREAMS = 10_000
_IDLE = 1_000
# Files that are open beside.
_SPARE = 200
_SECONDS_A_TOKEN = 10.0
# So many open at a time: the backlogs are longer.
_AT_A_TIME = 200


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """CPU in seconds, memory in bytes; *total* is all of it with *streams* open."""

    start_cpu: float
    at_first: int
    per_idle: float
    streams: int
    per_stream: float
    total: int


def measure_footprint(streams: int | None = None) -> Footprint:
    """Measure. Raises :class:`BenchError`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # A stream takes two files of the service, an idle connection one.
    if hard == resource.RLIM_INFINITY:
        max_streams = STREAMS
    else:
        max_streams = min(STREAMS, (hard - _IDLE - _SPARE) // 2)
    count = streams or max_streams
    make_room(2 * count + _IDLE + _SPARE)
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as name:
        folder = Path(name)
        port = free_port()
        log = folder / "triton.log"
        with running([sys.executable, "-m", "bench.fake_triton", str(port), str(_SECONDS_A_TOKEN)], log):
            wait_until_answers(port, "/v2", log)
            with ours("ours-http", f"http://{HOST}:{port}", folder) as subject:
                return uvloop.run(_measure(subject, count))


async def _measure(subject: Subject, count: int) -> Footprint:
    start_cpu = CpuClock(subject.relay).read() / 1e9
    # What the first request brings into memory is no connection's.
    opened = await _open(subject.target, 1, tokens=1)
    at_first = memory(subject.relay).resident
    opened += await _open(subject.target, _IDLE, tokens=1)
    idle = memory(subject.relay).resident
    opened += await _open(subject.target, count, tokens=1_000_000)
    total = memory(subject.relay).resident
    for connection in opened:
        connection.close()
    return Footprint(
        start_cpu=start_cpu,
        at_first=at_first,
        per_idle=(idle - at_first) / _IDLE,
        streams=count,
        per_stream=(total - idle) / count,
        total=total,
    )


class _Connection(asyncio.Protocol):
    """Asks once; *ready* when it has its first token, or its whole answer where that is one token."""

    def __init__(self, request: bytes, *, whole: bool) -> None:
        self.ready = asyncio.get_running_loop().create_future()
        self._request = request
        self._whole = whole
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            count = self._reader.feed(data)
        except ValueError as error:
            self._end(BenchError(f"refused: {error}"))
        else:
            if self._reader.ended if self._whole else count:
                self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(BenchError(f"connection lost: {error}"))

    def _end(self, error: BenchError | None) -> None:
        if self.ready.done():
            return
        if error is None:
            self.ready.set_result(None)
        else:
            self.ready.set_exception(error)

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


async def _open(target: Target, count: int, *, tokens: int) -> list[_Connection]:
    """Return *count* connections that have an answer of one token, or the first of more *tokens*."""
    loop = asyncio.get_running_loop()
    request = http_request(target, PACED, tokens)
    opened: list[_Connection] = []
    while len(opened) < count:
        some = [
            loop.create_connection(lambda: _Connection(request, whole=tokens == 1), target.host, target.port)
            for _ in range(min(_AT_A_TIME, count - len(opened)))
        ]
        made = [connection for _, connection in await asyncio.gather(*some)]
        await asyncio.gather(*(connection.ready for connection in made))
        opened += made
    return opened
