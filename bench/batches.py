"""
``python -m bench.batches``: what a line of a batch costs, what batches leave to live requests and use of the rest, and
what a large input takes.

Live requests come at times that are drawn once, whoever is served. Each rate is measured without and with a batch. The
model is the demo's scripted one, which answers as many requests at once as there are, so the service's own limit stands
for what an engine can do. The cost of a line, and a large input, are measured before a Triton that costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from bench.accounting import CpuClock, memory
from bench.figures import ratio, table, written
from bench.path import measure_lines
from bench.processes import HOST, free_port, running, wait_until_answers
from bench.repository import PACED
from triton_openai.app import create_app
from triton_openai.config.tree import BatchesSettings, FilesSettings, ServerSettings, Settings, TritonSettings
from triton_openai.demo.repository import build_repository
from triton_openai.load.tally import percentile
from triton_openai.serving.server import HttpServer
from triton_openai.telemetry.logging import configure_logging
from triton_openai.tritonserver.embedded import EmbeddedTriton

#: What the aims of the issue ask for.
LIVE = 1.3
USED = 0.8
COST = 1.2
MEMORY_MIB = 64.0
TURN_MS = 50.0
CREATE_MS = 200.0
_MODEL = "vllm_model"
_PLACES = 32
_TOKENS = 12
_TOKEN_MS = 40
_SEED = 28
_MIB = 1024 * 1024
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_INPUT_LINES = 50_000
_INPUT_BYTES = 200_000_000


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """
    Live requests at one rate, and the lines that ended beside them in so many seconds.

    *first* and *whole* are the seconds until the first token of each, and until its end.
    """

    first: Sequence[float]
    whole: Sequence[float]
    lines: int
    seconds: float

    @property
    def places(self) -> float:
        """How many of them run at a time."""
        return sum(self.whole) / self.seconds


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A large input: until ``POST /v1/batches`` answers, the validation, the longest turn, and memory beyond before."""

    create_ms: float
    seconds: float
    turn_ms: float
    more_mib: float


class Stopwatch(selectors.DefaultSelector):
    """Notes the CPU seconds of the longest turn of an event loop, whose waits are cut into pieces of a millisecond."""

    def __init__(self) -> None:
        super().__init__()
        self.max_seconds, self._last = 0.0, time.process_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Note how long the turn took, and wait."""
        now = time.process_time()
        self.max_seconds = max(self.max_seconds, now - self._last)
        self._last = now
        return super().select(0.001 if timeout is None else min(timeout, 0.001))


def line(number: int, body: dict[str, Any]) -> bytes:
    """Return a line of an input."""
    request = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


async def start_batch(session: aiohttp.ClientSession, content: Any) -> tuple[str, float]:
    """Upload *content* and make a batch of it; return its id, and the seconds until the service had made it."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="input.jsonl")
    async with session.post("/v1/files", data=form) as response:
        file = (await response.json())["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    began = time.perf_counter()
    async with session.post("/v1/batches", json=asked) as response:
        return (await response.json())["id"], time.perf_counter() - began


async def look(session: aiohttp.ClientSession, batch: str) -> dict[str, Any]:
    """Return the batch as it is now."""
    async with session.get(f"/v1/batches/{batch}") as response:
        return dict(await response.json())


async def left(session: aiohttp.ClientSession, batch: str, *statuses: str, every: float = 0.2) -> dict[str, Any]:
    """Return the batch when it has none of *statuses* any more."""
    while (state := await look(session, batch))["status"] in statuses:  # noqa: ASYNC110 - a client has no other way
        await asyncio.sleep(every)
    return state


# What a line costs


async def _asked(session: aiohttp.ClientSession, count: int, body: dict[str, Any]) -> None:
    """Send *count* live requests, eight at a time."""
    numbers = iter(range(count))

    async def ask() -> None:
        for _ in numbers:
            async with session.post("/v1/chat/completions", json=body) as response:
                await response.read()
                response.raise_for_status()

    await asyncio.gather(*(ask() for _ in range(8)))


async def _costs(port: int, pid: int, count: int, rounds: int) -> list[tuple[float, float]]:
    """Return the microseconds of CPU time of a live request and of a line, in each round."""
    clock = CpuClock([pid])
    costs = []
    body = {"model": PACED, "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 1}
    async with aiohttp.ClientSession(f"http://{HOST}:{port}") as session:
        await _asked(session, 200, body)
        for _ in range(rounds):
            before = clock.read()
            await _asked(session, count, body)
            live = clock.read() - before
            content = b"".join([line(number, body) for number in range(count)])
            before = clock.read()
            batch, _ = await start_batch(session, content)
            done = await left(session, batch, *_OPEN)
            assert count == done["request_counts"]["completed"], done
            costs.append((live / count / 1e3, (clock.read() - before) / count / 1e3))
    return costs


def measure_costs(count: int, rounds: int) -> list[tuple[float, float]]:
    """Return the CPU time of *count* live requests and of as many lines, in turns, each in microseconds."""
    with serving(fake=True) as (port, pid):
        return asyncio.run(_costs(port, pid, count, rounds))


# Beside live requests


async def _ask_live(session: aiohttp.ClientSession, body: dict[str, Any], times: list[tuple[float, float]]) -> None:
    began = time.perf_counter()
    first = 0.0
    async with session.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for event in response.content:
            if not first and b'"content":"' in event and b'"content":""' not in event:
                first = time.perf_counter() - began
    times.append((first, time.perf_counter() - began))


async def _live(session: aiohttp.ClientSession, rate: float, seconds: float) -> list[tuple[float, float]]:
    """Return the seconds until the first token and the end of each request, which come as they would from many."""
    draw = random.Random(_SEED)
    times = list[tuple[float, float]]()
    tasks = list[asyncio.Task[None]]()
    body = {**_body(), "stream": True}
    due = began = time.perf_counter()
    while rate and (due := due + draw.expovariate(rate)) < began + seconds:
        await asyncio.sleep(due - time.perf_counter())
        tasks.append(asyncio.create_task(_ask_live(session, body, times)))
    await asyncio.sleep(began + seconds - time.perf_counter())
    await asyncio.gather(*tasks)
    return times


def _body() -> dict[str, Any]:
    order = json.dumps({"text": " ".join(["word"] * 200), "delay_ms": _TOKEN_MS})
    content = f"Say something. <<steer {order}>>"
    return {"model": _MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": _TOKENS}


async def _beside(port: int, rates: Sequence[float], seconds: float, lines: int) -> list[tuple[Live, Live]]:
    pairs = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector) as session:
        await _live(session, 5.0, 2.0)
        for rate in rates:
            alone = await _live(session, rate, seconds)
            content = b"".join([line(number, _body()) for number in range(lines)])
            batch, _ = await start_batch(session, content)
            await left(session, batch, "validating")
            # Until as many run as may, which takes a window of lines for each.
            await asyncio.sleep(seconds)
            before = (await look(session, batch))["request_counts"]["completed"]
            began = time.perf_counter()
            beside = await _live(session, rate, seconds)
            done = (await look(session, batch))["request_counts"]["completed"] - before
            taken = time.perf_counter() - began
            async with session.post(f"/v1/batches/{batch}/cancel") as response:
                response.raise_for_status()
            await left(session, batch, *_OPEN)
            pairs.append((_live_row(alone, 0, seconds), _live_row(beside, done, taken)))
    return pairs


def measure_beside(places: Sequence[int], seconds: float, lines: int) -> list[tuple[Live, Live]]:
    """Return live requests that take so many *places* on average, without and with a batch of *lines* beside them."""
    whole = _TOKENS * _TOKEN_MS / 1000
    with serving(fake=False) as (port, _):
        return asyncio.run(_beside(port, [count / whole for count in places], seconds, lines))


# A large input


def _live_row(times: Sequence[tuple[float, float]], lines: int, seconds: float) -> Live:
    return Live(first=[first for first, _ in times], whole=[whole for _, whole in times], lines=lines, seconds=seconds)


async def _large(port: int, pid: int) -> tuple[float, float, float]:
    body = {"model": PACED, "messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    body["messages"] = [{"role": "user", "content": "x" * (_INPUT_BYTES // _INPUT_LINES - len(line(10_000, body)))}]

    async def content() -> AsyncIterator[bytes]:
        for first in range(0, _INPUT_LINES, 50):
            yield b"".join([line(number, body) for number in range(first, first + 50)])

    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=aiohttp.ClientTimeout(600)) as session:
        # What the first batch of all brings into memory stays there.
        batch, _ = await start_batch(session, line(0, body))
        await left(session, batch, *_OPEN)
        before = memory([pid]).resident
        began = time.perf_counter()
        batch, created = await start_batch(session, content())
        began = time.perf_counter()
        state = await left(session, batch, "validating", every=0.05)
        seconds = time.perf_counter() - began
        assert state["request_counts"]["total"] == _INPUT_LINES, state
        more = memory([pid]).peak - before
        async with session.post(f"/v1/batches/{batch}/cancel") as response:
            response.raise_for_status()
        await left(session, batch, *_OPEN, every=1.0)
    return created, seconds, more / _MIB


def measure_input() -> Input:
    """Return what an input of as many lines and bytes as a batch may have takes."""
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as name, _fake(Path(name)) as triton:
        port = free_port()
        log = Path(name) / "service.log"
        note = Path(name) / "max_seconds"
        with running([sys.executable, "-m", "bench.batches", "--serve", str(port), triton, name], log) as pid:
            wait_until_answers(port, "/health/ready", log)
            created, seconds, more = asyncio.run(_large(port, pid))
        max_seconds = float(note.read_text())
    return Input(create_ms=created * 1e3, seconds=seconds, turn_ms=max_seconds * 1e3, more_mib=more)


async def _serve(stopwatch: Stopwatch, port: int, triton: str, folder: Path) -> None:
    settings = Settings(
        server=ServerSettings(host=HOST, port=port, log_format="json"),
        triton=TritonSettings(url=(triton,)),
        files=FilesSettings(store=f"dir:{folder / 'files'}"),
        batches=BatchesSettings(store=f"sqlite:{folder / 'batches.sqlite'}", hours=None),
    )
    configure_logging(settings.server)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = HttpServer(create_app(settings), settings.limits)
    await server.start()
    with socket.socket() as sock:
        sock.bind((HOST, port))
        await server.listen(sock)
        # What the start takes is no turn of a request.
        await asyncio.sleep(1)
        stopwatch.max_seconds = 0.0
        await stop.wait()
        (folder / "max_seconds").write_text(str(stopwatch.max_seconds))
        await server.close()


# Processes


@contextlib.contextmanager
def _fake(folder: Path) -> Iterator[str]:
    """Run a Triton that answers at once; yield its URL."""
    port = free_port()
    log = folder / "triton.log"
    with running([sys.executable, "-m", "bench.fake_triton", str(port), "0"], log):
        wait_until_answers(port, "/v2", log)
        yield f"http://{HOST}:{port}"


@contextlib.contextmanager
def serving(*, fake: bool) -> Iterator[tuple[int, int]]:
    """Run the service in front of the fake Triton, or of the demo's scripted models; yield its port and process id."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-bench-")))
        settings = folder / "settings.yaml"
        port = free_port()
        log = folder / "service.log"
        options = ["--host", HOST, "--port", str(port), "--config", str(settings)]
        settings.write_text(f"batches: {{max_running: {_PLACES}}}\n" if not fake else "{}\n")
        if fake:
            options += ["--triton-url", stack.enter_context(_fake(folder)), "--chat-template", "chatml"]
        else:
            repository = build_repository(folder / "demo", models=[_MODEL])
            triton = EmbeddedTriton(
                model_repository=repository.path, backends=repository.backends, environment=os.environ
            )
            stack.callback(triton.stop)
            triton.start()
            options += ["--triton-url", triton.http_url, "--tokenizer", str(repository.tokenizer)]
            options += ["--max-running-requests-per-model", str(_PLACES)]
        environment = {"XDG_STATE_HOME": str(folder / "state")}
        command = [sys.executable, "-m", "triton_openai", "serve", *options]
        pid = stack.enter_context(running(command, log, environment))
        wait_until_answers(port, "/health/ready", log)
        yield port, pid


# The report


def _mark(value: float | None, aim: float, *, upper: bool = True) -> str:
    reached = value is not None and (value <= aim if upper else value >= aim)
    if reached:
        return "yes"
    return "NO"


def render_live(pairs: Sequence[tuple[Live, Live]]) -> str:
    """Return the table of live requests without and with a batch."""
    cells = []
    for alone, beside in pairs:
        if alone.whole:
            usual = sum(alone.whole) / len(alone.whole)
        else:
            usual = _TOKENS * _TOKEN_MS / 1000
        # What lines may have of the limit is the operator's choice.
        free = min(_PLACES - alone.places, BatchesSettings().max_share * _PLACES)
        used = beside.lines / beside.seconds * usual
        first, then = (percentile(live.first, 0.95) for live in (alone, beside))
        slower = ratio(then, first)
        cells.append(
            [
                f"{alone.places:.1f} of {_PLACES}",
                *(written(None if live is None else live * 1e3) for live in (first, then)),
                *(written(slower, 2), "-" if slower is None else _mark(slower, LIVE)),
                *(written(free), written(used), f"{used / free:.0%}", _mark(used / free, USED, upper=False)),
            ]
        )
    header = ["live requests take", "p95 ms", "with a batch", "times", f"<= {LIVE}"]
    return table([*header, "free", "used by lines", "", f">= {USED:.0%}"], cells)


def render_costs(costs: Sequence[tuple[float, float]]) -> str:
    """Return the table of what a line costs beside a live request."""
    live, own = measure_lines()
    cells = [
        ["calls of our functions", str(live.calls), str(own.calls), written(own.calls / live.calls, 2)],
        ["with those of libraries", *(str(cost.calls + cost.library) for cost in (live, own)),
         written((own.calls + own.library) / (live.calls + live.library), 2)],
    ]  # fmt: skip
    for cost, other in costs:
        cells.append(["CPU us, all threads", written(cost, 0), written(other, 0), written(other / cost, 2)])
    return table(["a whole chat of one token", "live", "as a line", f"<= {COST}"], cells)


def render_input(measured: Input) -> str:
    """Return the table of a large input."""
    return table(
        [f"{_INPUT_LINES:,} lines of {_INPUT_BYTES / 1e6:.0f} MB", "", "aim", "reached"],
        [
            ["POST /v1/batches, ms", written(measured.create_ms), written(CREATE_MS),
             _mark(measured.create_ms, CREATE_MS)],
            ["longest turn of the loop, ms of CPU", written(measured.turn_ms), written(TURN_MS),
             _mark(measured.turn_ms, TURN_MS)],
            ["more memory at most, MiB", written(measured.more_mib), written(MEMORY_MIB),
             _mark(measured.more_mib, MEMORY_MIB)],
            ["validation, s", written(measured.seconds), "-", ""],
        ],
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.batches", description="Batches beside live requests.")
    parser.add_argument("--parts", default="costs,live,input", help="some of costs,live,input")
    parser.add_argument("--places", default="0,8,16", help="running live requests on average (0,8,16)")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each window (30)")
    parser.add_argument("--lines", type=int, default=10_000, help="lines of the batch beside live requests (10,000)")
    parser.add_argument("--count", type=int, default=3000, help="requests and lines whose cost is measured (3,000)")
    parser.add_argument("--rounds", type=int, default=3, help="how often, in turns (3)")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        port, triton, folder = options.serve
        stopwatch = Stopwatch()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(stopwatch)) as runner:
            runner.run(_serve(stopwatch, int(port), triton, Path(folder)))
        return
    parts = options.parts.split(",")
    if "costs" in parts:
        print(render_costs(measure_costs(options.count, options.rounds)), flush=True)
    if "live" in parts:
        places = [int(count) for count in options.places.split(",")]
        print(f"\n{render_live(measure_beside(places, options.seconds, options.lines))}", flush=True)
    if "input" in parts:
        print(f"\n{render_input(measure_input())}", flush=True)


if __name__ == "__main__":
    main()
