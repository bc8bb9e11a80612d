"""
``python -m bench.width``: how much of what three Tritons can run one batch uses, without and with live requests.

The Tritons are stand-ins: each runs so many requests at a time, all of the same length, and queues the rest, as an
engine does. It counts the time that its places are used, so the result is a sum of counts and no rate of this machine.
The service has two workers. It either has the number of places in its settings, or learns it from Triton's metrics of
the queue.

``--replicas 2`` measures lines a second of two services on one PostgreSQL and one bucket, each with Tritons of its own,
beside those of one service.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from bench.batches import left, line, look, start_batch
from bench.fake_triton import ANSWERS, CONFIGS, event
from bench.figures import table, written
from bench.processes import HOST, free_port, running, wait_until_answers
from bench.repository import PACED
from triton_openai.load.tally import percentile

#: What the aims of the issue ask for.
USED = 0.9
USED_BESIDE = 0.8
LIVE = 1.3
REPLICAS = 1.9
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_SEED = 43
_MARK = "line-of-a-batch"
# The first token of an answer comes after this part of its time.
_FIRST_TOKEN = 0.1


class Engine:
    """A Triton that runs *places* requests at a time, each for so many *seconds*."""

    def __init__(self, places: int, seconds: float) -> None:
        self._places = places
        self._seconds = seconds
        self.running = {True: 0, False: 0}
        # The seconds in which places were used, by whether a line used them.
        self._used = {True: 0.0, False: 0.0}
        self._counted_at = time.monotonic()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.ended = 0

    def _count(self) -> None:
        now = time.monotonic()
        for kind, number in self.running.items():
            self._used[kind] += number * (now - self._counted_at)
        self._counted_at = now

    def figures(self) -> Mapping[str, float]:
        """Return what the places were used for since the start."""
        self._count()
        return {
            "time": self._counted_at,
            "lines": self._used[True],
            "live": self._used[False],
            "ended": self.ended,
            "waiting": len(self._waiting),
        }

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer one request of two tokens."""
        body = await request.json()
        is_line = _MARK in body["text_input"]
        await self._enter(is_line)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
            await asyncio.sleep(_FIRST_TOKEN * self._seconds)
            await response.prepare(request)
            await response.write(event("one", "None"))
            await asyncio.sleep((1 - _FIRST_TOKEN) * self._seconds)
            await response.write(event(" two", "length"))
            return response
        finally:
            self._leave(is_line)

    async def _enter(self, is_line: bool) -> None:
        if self._waiting or sum(self.running.values()) >= self._places:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(turn)
                raise
        self._count()
        self.running[is_line] += 1

    def _leave(self, is_line: bool) -> None:
        self._count()
        self.running[is_line] -= 1
        self.ended += is_line
        while self._waiting and sum(self.running.values()) < self._places:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break

    async def metrics(self, _: web.Request) -> web.Response:
        """Return the queue as Triton does."""
        text = f'nv_inference_pending_request_count{{model="{PACED}",version="1"}} {len(self._waiting)}\n'
        return web.Response(text="# TYPE nv_inference_pending_request_count gauge\n" + text)


async def _serve(addresses: Sequence[str], places: int, seconds: float) -> None:
    """Run an engine at port 8000 of each of *addresses*, with its metrics at port 8002."""
    for address in addresses:
        engine = Engine(places, seconds)
        app = web.Application()

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(ANSWERS.get(request.path.rstrip("/"), {}))

        async def figures(_: web.Request, engine: Engine = engine) -> web.Response:
            return web.json_response(engine.figures())

        app.router.add_get("/figures", figures)
        app.router.add_get("/v2/health/{what}", answer)
        app.router.add_get("/v2", answer)
        app.router.add_post("/v2/repository/index", answer)
        for config in CONFIGS:
            app.router.add_get(f"/v2/models/{config['name']}/config", answer)
        app.router.add_post(f"/v2/models/{PACED}/generate_stream", engine.generate)
        metrics = web.Application()
        metrics.router.add_get("/metrics", engine.metrics)
        for each, port in ((app, 8000), (metrics, 8002)):
            runner = web.AppRunner(each, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, address, port).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


def _addresses(number: int) -> list[str]:
    """Return addresses of this machine that nobody else uses now."""
    draw = random.SystemRandom()
    return [f"127.{draw.randrange(100, 250)}.{draw.randrange(250)}.{index + 1}" for index in range(number)]


@contextlib.contextmanager
def engines(folder: Path, number: int, places: int, seconds: float) -> Iterator[list[str]]:
    """Run so many engines; yield their addresses."""
    addresses = _addresses(number)
    log = folder / f"engines-{addresses[0]}.log"
    command = [sys.executable, "-m", "bench.width", "--engines", ",".join(addresses)]
    with running([*command, "--places", str(places), "--seconds", str(seconds)], log):
        while "ready" not in log.read_text():
            time.sleep(0.05)
        yield addresses


@contextlib.contextmanager
def service(
    folder: Path,
    addresses: Sequence[str],
    workers: int,
    settings: Mapping[str, Any],
    options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Run the service in front of the engines; yield its port."""
    folder.mkdir(exist_ok=True)
    file = folder / "settings.yaml"
    file.write_text(json.dumps(settings))
    port = free_port()
    log = folder / "service.log"
    command = [sys.executable, "-m", "triton_openai", "serve", "--host", HOST, "--port", str(port)]
    command += ["--config", str(file), "--workers", str(workers), "--chat-template", "chatml", *options]
    for address in addresses:
        command += ["--endpoint", f"http://{address}:8000"]
    with running(command, log, {"XDG_STATE_HOME": str(folder / "state"), **(environment or {})}):
        wait_until_answers(port, "/health/ready", log)
        yield port


async def _figures(session: aiohttp.ClientSession, addresses: Sequence[str]) -> dict[str, float]:
    """Return the sums of the figures of all engines, and their time."""
    sums: dict[str, float] = {}
    for address in addresses:
        async with session.get(f"http://{address}:8000/figures") as response:
            for name, value in (await response.json()).items():
                sums[name] = sums.get(name, 0.0) + value
    sums["time"] /= len(addresses)
    return sums


def _body(text: str) -> dict[str, Any]:
    return {"model": PACED, "messages": [{"role": "user", "content": text}], "max_tokens": 2}


async def _live(session: aiohttp.ClientSession, rate: float, seconds: float) -> list[float]:
    """Send live requests at *rate* a second; return the seconds until the first token of each."""
    draw = random.Random(_SEED)
    waits: list[float] = []
    tasks: list[asyncio.Task[None]] = []

    async def ask() -> None:
        began = time.perf_counter()
        async with session.post("/v1/chat/completions", json={**_body("live"), "stream": True}) as response:
            response.raise_for_status()
            async for event in response.content:
                if b'"content":"one' in event:
                    waits.append(time.perf_counter() - began)  # noqa: PERF401 - the time of each event counts

    due = began = time.perf_counter()
    while (due := due + draw.expovariate(rate)) < began + seconds:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        tasks.append(asyncio.create_task(ask()))
    await asyncio.gather(*tasks)
    return waits


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """How much of the places one batch used."""

    name: str
    places: int
    #: Seconds times places that lines used, and that live requests did, and the seconds.
    lines: float
    live: float
    seconds: float
    ended: int
    #: The 95th percentile of live first tokens, without and with the batch, if there were live requests.
    first_tokens: tuple[float, float] | None = None

    @property
    def share(self) -> float:
        """The part of the places that live requests left free that lines used."""
        return self.lines / (self.places * self.seconds - self.live)


async def _run(
    port: int, addresses: Sequence[str], name: str, places: int, lines: int, seconds: float, live: float
) -> Used:
    total = places * len(addresses)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(None)
    async with (
        aiohttp.ClientSession(f"http://{HOST}:{port}", connector=connector, timeout=timeout) as session,
        aiohttp.ClientSession() as other,
    ):
        rate = live * total / seconds
        alone: list[float] = []
        if live:
            alone = await _live(session, rate, 10 * seconds)
        content = b"".join([line(number, _body(f"{_MARK} {number}")) for number in range(lines)])
        batch, _ = await start_batch(session, content)
        await left(session, batch, "validating")
        before = await _figures(other, addresses)
        if live:
            # Nearly as long as the batch would run if its lines used all that is free: there are lines until the end.
            waits = await _live(session, rate, 0.9 * lines * seconds / ((1 - live) * total))
            after = await _figures(other, addresses)
            async with session.post(f"/v1/batches/{batch}/cancel") as response:
                response.raise_for_status()
        else:
            waits = []
            after = before
            while (state := await look(session, batch))["status"] in _OPEN:
                now = await _figures(other, addresses)
                if now["ended"] < lines:
                    after = now
                await asyncio.sleep(0.2)
            assert state["request_counts"]["completed"] == lines, state
    first_tokens = None
    if live:
        first, then = (percentile(times, 0.95) for times in (alone, waits))
        assert first is not None
        assert then is not None
        first_tokens = (first, then)
    return Used(
        name=name,
        places=total,
        lines=after["lines"] - before["lines"],
        live=after["live"] - before["live"],
        seconds=after["time"] - before["time"],
        ended=int(after["ended"] - before["ended"]),
        first_tokens=first_tokens,
    )


def measure(options: argparse.Namespace) -> list[Used]:
    """Return how much of the places is used in each case."""
    cases: list[Used] = []
    places = options.places
    limited = {"server": {"max_running_requests_per_endpoint": places}}
    kinds: dict[str, dict[str, Any]] = {"in the settings": limited, "learned": {}}
    for kind in options.kinds.split(","):
        settings = kinds[kind]
        for live in (0.0, 0.5):
            if live and "live" not in options.parts:
                continue
            if not live and "alone" not in options.parts:
                continue
            with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as name:
                folder = Path(name)
                with (
                    engines(folder, 3, places, options.seconds) as addresses,
                    service(folder / "one", addresses, 2, settings) as port,
                ):
                    run = _run(port, addresses, kind, places, options.lines, options.seconds, live)
                    cases.append(asyncio.run(run))
                    print(render(cases[-1:]), flush=True)
    return cases


def render(cases: Sequence[Used]) -> str:
    """Return the table of the places."""
    rows = []
    for case in cases:
        aim = USED
        slower = "-"
        if case.first_tokens is not None:
            aim = USED_BESIDE
            slower = written(case.first_tokens[1] / case.first_tokens[0], 2)
        rows.append(
            [
                case.name,
                f"{case.live / case.seconds:.1f} of {case.places}",
                f"{case.lines / case.seconds:.1f}",
                f"{case.share:.1%}",
                f"{aim:.0%}",
                slower,
                written(case.ended / case.seconds, 1),
            ]
        )
    header = ["places are", "live requests use", "lines use", "of the free ones", "aim"]
    return table([*header, f"p95 of first tokens, times (<= {LIVE})", "lines/s"], rows)


# Two replicas


async def _rate(port: int, lines: int) -> float:
    """Return the lines a second of a batch, without its first and its last fifth."""
    timeout = aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(f"http://{HOST}:{port}", timeout=timeout) as session:
        content = b"".join([line(number, _body(f"{_MARK} {number}")) for number in range(lines)])
        batch, _ = await start_batch(session, content)
        await left(session, batch, "validating")
        seen: list[tuple[float, int]] = []
        while (state := await look(session, batch))["status"] in _OPEN:
            seen.append((time.perf_counter(), state["request_counts"]["completed"]))
            await asyncio.sleep(0.1)
        assert state["request_counts"]["completed"] == lines, state
    middle = [entry for entry in seen if lines // 5 <= entry[1] <= lines * 4 // 5]
    return (middle[-1][1] - middle[0][1]) / (middle[-1][0] - middle[0][0])


def measure_replicas(options: argparse.Namespace, url: str, bucket: str, environment: Mapping[str, str]) -> list[float]:
    """Return the lines a second of one replica and of two, on the database *url* of each and on one bucket."""
    rates = []
    for number in (1, 2):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-bench-")))
            port = 0
            store = f"{url}{number - 1}"
            for index in range(number):
                addresses = stack.enter_context(engines(folder, 1, options.places, options.seconds))
                port = stack.enter_context(
                    service(
                        folder / f"replica-{index}",
                        addresses,
                        1,
                        {
                            "server": {"max_running_requests_per_endpoint": options.places},
                            "batches": {"checkpoint": 1},
                        },
                        ["--batches-store", store, "--files-store", f"{bucket}/{number}"],
                        environment,
                    )
                )
            rates.append(asyncio.run(_rate(port, options.lines * number)))
            print(f"{number} replicas: {rates[-1]:.1f} lines/s", flush=True)
    return rates


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m bench.width", description="How wide a batch runs.")
    parser.add_argument("--lines", type=int, default=10_000)
    parser.add_argument("--places", type=int, default=64, help="requests that each Triton runs at a time")
    parser.add_argument("--seconds", type=float, default=3.0, help="the time of a request")
    parser.add_argument("--parts", default="alone,live")
    parser.add_argument("--kinds", default="in the settings,learned", help="how the service learns the places")
    parser.add_argument("--replicas", action="store_true", help="measure two replicas beside one, and nothing else")
    parser.add_argument("--engines", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.engines:
        asyncio.run(_serve(options.engines.split(","), options.places, options.seconds))
        return
    if options.replicas:
        _replicas(options)
    else:
        print(render(measure(options)))
    print(f"load of the machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def _replicas(options: argparse.Namespace) -> None:
    # Only a machine for tests has these servers.
    from tests.programs import found
    from tests.store_fixture import running_postgresql, running_s3

    with running_postgresql(found("PostgreSQL")) as server, running_s3(found("SeaweedFS")) as make_bucket:
        first = server.url()
        second = server.url()
        assert (first[-1], second[-1]) == ("0", "1")
        bucket = make_bucket()
        rates = measure_replicas(options, first[:-1], bucket.url, bucket.environ)
    print(f"two replicas have {rates[1] / rates[0]:.2f} times the lines a second of one (aim {REPLICAS})")


if __name__ == "__main__":
    main()
