"""
``python -m tests.faults.soak``: mixed traffic for a long time, while Triton is killed, frozen, and loses its models.

It prints what became of every request, and in the end what is left behind. The exit status is 1 if anything is, if an
answer was wrong, or if a request failed for no reason that lies in Triton.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tests.clients.service import steered, until
from tests.faults.surroundings import MEBIBYTE, QUICK, WORDS, Level, Watched, watched
from tests.triton_fixture import frozen
from triton_openai.demo.repository import DemoRepository, build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODELS = ["ensemble", "vllm_model", "text_embedding"]
# What a fault broke may be noticed after its end, and that Triton has ended by itself is seen after it did.
_AFTERMATH_SECONDS = 3.0
_NOTICE_SECONDS = 1.0
_SETTLE_SECONDS = 30.0
_WARM_SHARE = 0.1
_READY_SECONDS = 60.0
# What the service may say while something is done to Triton. Whatever else goes wrong is its own fault at any time.
_EXCUSED = (
    *("upstream_unavailable", "upstream_disconnected", "upstream_silent", "upstream_timeout", "upstream_error"),
    "model_not_found",
)
# After the last fault, so that its end is part of it.
_QUIET_SECONDS = 3.0


@dataclass
class Figures:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    # Each with its beginning and its end
    faults: list[tuple[str, float, float]] = field(default_factory=list)
    failures: list[tuple[str, float, float]] = field(default_factory=list)
    # How Triton ended when nobody had ended it, with what it had written last
    endings: list[tuple[str, str]] = field(default_factory=list)
    # What was answered instead, with when it was asked and answered
    wrong: list[tuple[str, float, float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: tuple[int, int] = (0, 0)

    @property
    def unexplained(self) -> Counter[str]:
        """What failed at a time when nothing was done to Triton and it ran, or in a way that no fault explains."""
        times = [(began - _NOTICE_SECONDS, ended + _AFTERMATH_SECONDS) for _, began, ended in self.faults]
        return Counter(
            outcome
            for outcome, began, ended in self.failures
            if not (outcome.endswith(_EXCUSED) and any(began < last and first < ended for first, last in times))
        )

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong that nobody had caused, and nothing was left."""
        return not self.left and not self.unexplained and bool(self.outcomes["answered"])


class Soak:
    """The traffic of *clients* clients and the faults, until *seconds* are over."""

    def __init__(self, service: Watched, triton: EmbeddedTriton, *, clients: int, seconds: float, seed: int) -> None:
        self._service = service
        self._triton = triton
        self._clients = clients
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._ends = 0.0
        self.figures = Figures()

    async def run(self) -> Figures:
        """Run, wait until all is quiet, and return what was seen."""
        figures = self.figures
        before = await self._traffic(self._seconds * _WARM_SHARE, faults=False)
        began = time.monotonic()
        after = await self._traffic(self._seconds * (1 - _WARM_SHARE), faults=True)
        figures.seconds = time.monotonic() - began + self._seconds * _WARM_SHARE
        figures.memory = (before.memory, after.memory)
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (left := after.above(before)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
            after = await asyncio.to_thread(self._service.level)
        figures.left = left
        return figures

    async def _traffic(self, seconds: float, *, faults: bool) -> Level:
        """Load the service for *seconds* and return its level once all clients have gone."""
        self._ends = time.monotonic() + seconds
        async with aiohttp.ClientSession(self._service.address, connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = [asyncio.create_task(self._client(session)) for _ in range(self._clients)]
            await (self._faults() if faults else self._quiet(seconds))
            await asyncio.gather(*clients)
        await asyncio.to_thread(lambda: until(lambda: not self._service.level().running))
        return await asyncio.to_thread(self._service.level)

    # What clients do

    async def _client(self, session: aiohttp.ClientSession) -> None:
        kinds = (self._stream, self._stream, self._chat, self._leave, self._embed, self._mistake)
        while time.monotonic() < self._ends:
            kind = self._chance.choice(kinds)
            began = time.monotonic()
            try:
                outcome = await kind(session)
            except (TimeoutError, aiohttp.ClientError) as error:
                outcome = f"broken: {type(error).__name__}"
            self.figures.outcomes[outcome] += 1
            if outcome == "answered":
                self.figures.whole.append(time.monotonic() - began)
            elif outcome not in ("left", "refused as it should be"):
                self.figures.failures.append((outcome, began, time.monotonic()))

    def _prompt(self, **orders: Any) -> str:
        return steered(text=WORDS, delay_ms=self._chance.choice([0, 2, 10]), **orders)

    async def _stream(self, session: aiohttp.ClientSession) -> str:
        request = {"model": self._chance.choice(MODELS[:2]), "prompt": self._prompt(), "stream": True}
        text, began = "", time.monotonic()
        async with session.post("/v1/completions", json=request) as response:
            if response.status != 200:
                return await _failure(response)
            async for event in _events(response):
                if event == "[DONE]":
                    return self._judged(request, text == WORDS, text, began)
                chunk = json.loads(event)
                if "error" in chunk:
                    return f"event {chunk['error']['code']}"
                if not text:
                    self.figures.first.append(time.monotonic() - began)
                text += chunk["choices"][0]["text"]
        return "broken: no end"

    async def _chat(self, session: aiohttp.ClientSession) -> str:
        message = {"role": "user", "content": self._prompt()}
        count = self._chance.choice([1, 1, 3])
        request = {"model": "ensemble", "messages": [message], "n": count}
        began = time.monotonic()
        async with session.post("/v1/chat/completions", json=request) as response:
            if response.status != 200:
                return await _failure(response)
            choices = (await response.json())["choices"]
            right = [choice["message"]["content"] for choice in choices] == [WORDS] * count
            return self._judged(request, right, choices, began)

    async def _leave(self, session: aiohttp.ClientSession) -> str:
        request = {"model": self._chance.choice(MODELS[:2]), "max_tokens": 1000, "stream": self._chance.random() < 0.7}
        request["prompt"] = steered(text=WORDS, eos=False, delay_ms=20)
        limit = aiohttp.ClientTimeout(total=self._chance.uniform(0.01, 0.5))
        with contextlib.suppress(asyncio.TimeoutError):
            async with session.post("/v1/completions", json=request, timeout=limit) as response:
                if response.status != 200:
                    return await _failure(response)
                async for event in _events(response):
                    if '"error"' in event:
                        return f"event {json.loads(event)['error']['code']}"
        return "left"

    async def _embed(self, session: aiohttp.ClientSession) -> str:
        request = {"model": "text_embedding", "input": ["a"] * self._chance.choice([1, 30])}
        began = time.monotonic()
        async with session.post("/v1/embeddings", json=request) as response:
            if response.status != 200:
                return await _failure(response)
            data = (await response.json())["data"]
            return self._judged(request, len(data) == len(request["input"]), data, began)

    async def _mistake(self, session: aiohttp.ClientSession) -> str:
        mistakes: Sequence[bytes] = (b"{", b"[]", b'{"model": 5}', b'{"model": "ensemble", "prompt": "a", "n": 0}')
        async with session.post("/v1/completions", data=self._chance.choice(mistakes)) as response:
            # Without a content type that says otherwise it is taken for JSON, or refused as something else.
            return "refused as it should be" if response.status in (400, 415) else await _failure(response)

    def _judged(self, request: dict[str, Any], right: bool, answer: Any, began: float) -> str:
        if right:
            return "answered"
        self.figures.wrong.append((f"{request!r:.200} -> {answer!r:.400}", began, time.monotonic()))
        return "WRONG ANSWER"

    # What is done to Triton

    async def _faults(self) -> None:
        faults: dict[str, Callable[[], None]] = {
            "killed": self._kill,
            "frozen": self._freeze,
            "unloaded": self._unload,
            "restarted": self._restart,
        }
        while time.monotonic() < self._ends - _QUIET_SECONDS:
            for name, do in faults.items():
                await self._quiet(self._chance.uniform(1, 2) * min(5.0, self._seconds / 10))
                # However short it is and busy the machine, there is one.
                if self.figures.faults and time.monotonic() >= self._ends - _QUIET_SECONDS:
                    break
                await self._fault(name, do)
        await self._quiet(self._ends - time.monotonic())

    async def _quiet(self, seconds: float) -> None:
        """Do nothing for *seconds*; a Triton that ends by itself is started."""
        ends = min(time.monotonic() + seconds, self._ends)
        while time.monotonic() < ends:
            if self._triton.poll() is not None:
                await self._fault("ended by itself", self._start_again)
            await asyncio.sleep(0.1)

    async def _fault(self, name: str, do: Callable[[], None]) -> None:
        began = time.monotonic()
        await asyncio.to_thread(do)
        await asyncio.to_thread(lambda: until(self._ready, _READY_SECONDS))
        self.figures.faults.append((name, began, time.monotonic()))

    def _ready(self) -> bool:
        """Whether the service is ready; it will not be without a Triton, which may end by itself meanwhile, too."""
        if self._triton.poll() is not None:
            self._start_again()
        return self._service.status("/health/ready") == 200

    def _start_again(self) -> None:
        status = self._triton.poll()
        how = signal.Signals(-status).name if status is not None and status < 0 else f"status {status}"
        if self.figures.faults:
            name, _, over = self.figures.faults[-1]
            how += f" {time.monotonic() - over:.0f} s after it was {name}"
        self.figures.endings.append((how, self._triton.log_tail(30)))
        self._triton.start()

    def _kill(self) -> None:
        self._triton.kill()
        self._triton.start()

    def _restart(self) -> None:
        self._triton.stop()
        self._triton.start()

    def _freeze(self) -> None:
        with frozen(self._triton):
            time.sleep(self._chance.uniform(0.5, 4))

    def _unload(self) -> None:
        for verb in ("unload", "load"):
            url = f"{self._triton.http_url}/v2/repository/models/vllm_model/{verb}"
            # A Triton that has ended meanwhile is started, with the model.
            with contextlib.suppress(ConnectionError, http.client.HTTPException, urllib.error.URLError):
                urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=60).close()
            time.sleep(1)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().strip()


async def _failure(response: aiohttp.ClientResponse) -> str:
    return f"{response.status} {(await response.json())['error']['code']}"


def render(figures: Figures, clients: int) -> str:
    """Return the figures as a table for people."""
    lines = [f"{figures.seconds:.0f} seconds, {clients} clients, {sum(figures.outcomes.values())} requests"]
    lines += [f"  {count:>8}  {name}" for name, count in figures.outcomes.most_common()]
    faults = Counter(name for name, _, _ in figures.faults)
    lines.append(f"Triton: {', '.join(f'{name} {count}' for name, count in faults.items()) or 'left in peace'}")
    if figures.endings:
        lines.append(f"ended by itself: {', '.join(how for how, _ in figures.endings)}")
    for what, began, ended in figures.wrong:
        near = ", ".join(
            f"{name} {began - first:+.1f} to {ended - last:+.1f} s"
            for name, first, last in figures.faults
            if began < last + _AFTERMATH_SECONDS and first - _AFTERMATH_SECONDS < ended
        )
        lines.append(f"wrong: {what} (Triton {near or 'left in peace'})")
    failed = ", ".join(f"{name}: {count}" for name, count in figures.unexplained.items()) or "none"
    lines.append(f"failed for no such reason: {failed}")
    for name, times in (("first token of a stream", figures.first), ("whole answer", figures.whole)):
        ordered = sorted(times)
        p50, p99 = (ordered[int((len(ordered) - 1) * share)] * 1000 if ordered else 0.0 for share in (0.5, 0.99))
        lines.append(f"{name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    start, end = (memory / MEBIBYTE for memory in figures.memory)
    lines.append(f"memory: {start:.0f} MiB after the first tenth, {end:.0f} MiB at the end")
    lines.append(f"left behind: {', '.join(figures.left) or 'nothing'}")
    return "\n".join(lines)


@contextlib.contextmanager
def _started(repository: DemoRepository) -> Any:
    server = EmbeddedTriton(
        model_repository=repository.path,
        backends=repository.backends,
        environment=os.environ,
        model_control_mode="explicit",
        load_models=MODELS,
    )
    server.start()
    try:
        yield server
    finally:
        server.stop(timeout=1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Mixed traffic with faults.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-soak-")))
        repository = build_repository(folder / "models", models=MODELS)
        triton = opened.enter_context(_started(repository))
        flags = ["--triton-url", triton.http_url, "--triton-url", triton.grpc_url]
        flags += ["--tokenizer", str(repository.tokenizer)]
        # What the collector frees in an hour is much, and no leak.
        service = opened.enter_context(watched(folder, *flags, triton={**QUICK, "request_timeout": 10}, strict=False))
        until(lambda: service.status("/health/ready") == 200)
        soak = Soak(service, triton, clients=options.clients, seconds=options.seconds, seed=options.seed)
        figures = asyncio.run(soak.run())
        # While Triton is away, its models do not answer: that is said, and no fault.
        complaints = [line for line in service.complaints() if '"event":"model does not answer"' not in line]
    print(render(figures, options.clients))
    for line in complaints:
        print(line, file=sys.stderr)
    for how, tail in figures.endings:
        print(f"\nTriton ended by itself, {how}. The end of its log:\n{tail}", file=sys.stderr)
    return 0 if figures.passed and not complaints else 1


if __name__ == "__main__":
    sys.exit(main())
