"""
``python -m tests.faults.soak``: mixed traffic for a long time, while Triton is killed, frozen, and loses its models,
the store of responses hangs and is lost, and nobody reads the log.

It prints what became of every request, and in the end what is left behind. The exit status is 1 if anything is, if an
answer was wrong, or if a request failed for no reason that lies in Triton or in the store. With several Tritons
(``--tritons 3``) these things happen to one after the other, and then only an answer that has begun may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.util
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from tests.clients.service import steered, until
from tests.faults.surroundings import MEBIBYTE, PATIENT, QUICK, WORDS, Level, Watched, watched
from tests.programs import find
from tests.store_fixture import Server, running_postgresql
from tests.triton_fixture import frozen
from triton_openai.demo.repository import DemoRepository, build_repository
from triton_openai.tritonserver.embedded import EmbeddedTriton

MODELS = ["ensemble", "vllm_model", "text_embedding"]
# What a fault broke may be noticed after its end, and that Triton has ended by itself is seen after it did.
_AFTERMATH_SECONDS = 3.0
_NOTICE_SECONDS = 1.0
_SETTLE_SECONDS = 120.0
_WARM_SHARE = 0.1
_READY_SECONDS = 60.0
# What the service may say while something is done to what is named first. Whatever else goes wrong is its own fault at
# any time, and nobody may notice what is done to the log.
_EXCUSED: Mapping[str, tuple[str, ...]] = {
    "Triton": (
        *("upstream_unavailable", "upstream_disconnected", "upstream_silent", "upstream_timeout", "upstream_error"),
        "model_not_found",
    ),
    "store": ("store_unavailable", "not_found", "not_kept"),
    "log": (),
}
# With several Tritons the others answer what has not begun.
_EXCUSED_AMONG_SEVERAL = {**_EXCUSED, "Triton": ("upstream_disconnected",)}
# After the last fault, so that its end is part of it.
_QUIET_SECONDS = 3.0


class Failure(NamedTuple):
    """A request that failed: how, with what was said of it and the request's id, and when it began and ended."""

    outcome: str
    said: str
    began: float
    ended: float


@dataclass
class Figures:
    """What became of the requests."""

    outcomes: Counter[str] = field(default_factory=Counter)
    # Each with its beginning and its end
    faults: list[tuple[str, float, float]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    # How Triton ended when nobody had ended it, with what it had written last
    endings: list[tuple[str, str]] = field(default_factory=list)
    # What was answered instead, with when it was asked and answered
    wrong: list[tuple[str, float, float]] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    excused: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: _EXCUSED)
    seconds: float = 0.0
    memory: tuple[int, int] = (0, 0)

    @property
    def unexplained(self) -> Sequence[Failure]:
        """What failed at a time when nothing was done to Triton and it ran, or in a way that no fault explains."""
        return [failure for failure in self.failures if not self._excused(failure)]

    def _excused(self, failure: Failure) -> bool:
        return any(
            failure.outcome.endswith(self.excused[name.partition(" ")[0]])
            and failure.began < last + _AFTERMATH_SECONDS
            and first - _NOTICE_SECONDS < failure.ended
            for name, first, last in self.faults
        )

    def near(self, began: float, ended: float) -> str:
        """Return the faults about that time."""
        found = ", ".join(
            f"{name} {began - first:+.1f} to {ended - last:+.1f} s"
            for name, first, last in self.faults
            if began < last + _AFTERMATH_SECONDS and first - _AFTERMATH_SECONDS < ended
        )
        return found or "at a quiet time"

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong that nobody had caused, and nothing was left."""
        return not self.left and not self.unexplained and bool(self.outcomes["answered"])


class Soak:
    """The traffic of *clients* clients and the faults, until *seconds* are over."""

    def __init__(
        self,
        service: Watched,
        tritons: Sequence[EmbeddedTriton],
        store: Store,
        log: Log,
        *,
        clients: int,
        seconds: float,
        seed: int,
    ) -> None:
        self._service = service
        self._tritons = tritons
        # Whose turn it is.
        self._triton = tritons[0]
        # One that is being restarted has not ended by itself.
        self._changing = threading.RLock()
        self._store = store
        self._log = log
        self._clients = clients
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._ends = 0.0
        self.figures = Figures(excused=_EXCUSED if len(tritons) == 1 else _EXCUSED_AMONG_SEVERAL)

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
            await (self._all_faults() if faults else self._quiet(seconds))
            await asyncio.gather(*clients)
        await asyncio.to_thread(lambda: until(lambda: not self._service.level().running))
        return await asyncio.to_thread(self._service.usual_level)

    # What clients do

    async def _client(self, session: aiohttp.ClientSession) -> None:
        kinds = (self._stream, self._stream, self._chat, self._leave, self._embed, self._mistake, self._keep)
        while time.monotonic() < self._ends:
            kind = self._chance.choice(kinds)
            began = time.monotonic()
            try:
                outcome = await kind(session)
            except (TimeoutError, aiohttp.ClientError) as error:
                outcome = f"broken: {type(error).__name__}"
            said = outcome.said if isinstance(outcome, _Refusal) else ""
            if said and kind in (self._stream, self._embed):
                outcome = self._lost(outcome)
            self.figures.outcomes[outcome] += 1
            if outcome == "answered":
                self.figures.whole.append(time.monotonic() - began)
            elif outcome not in ("left", "refused as it should be"):
                self.figures.failures.append(Failure(outcome, said, began, time.monotonic()))

    def _lost(self, outcome: str) -> str:
        """Return *outcome* as that of an answer which had not begun, and which another Triton could have given."""
        return f"{outcome} before it had begun" if len(self._tritons) > 1 else outcome

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
                    outcome = f"event {chunk['error']['code']}"
                    return outcome if text else self._lost(outcome)
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

    async def _keep(self, session: aiohttp.ClientSession) -> str:
        """Have an answer kept, in a conversation or alone, go on from it, read it again, and delete it."""
        began = time.monotonic()
        answer: dict[str, Any] = {}
        kept: dict[str, str] = {}
        async with contextlib.AsyncExitStack() as opened:

            async def ask(method: str, path: str, body: dict[str, Any] | None = None) -> aiohttp.ClientResponse:
                return await opened.enter_async_context(session.request(method, path, json=body))

            if self._chance.random() < 0.5:
                made = await ask("POST", "/v1/conversations", {})
                if made.status != 200:
                    return await _failure(made)
                kept = {"conversation": (await made.json())["id"]}
            request: dict[str, Any] = {}
            for _ in range(2):
                request = {"model": self._chance.choice(MODELS[:2]), "input": self._prompt(), **kept}
                response = await ask("POST", "/v1/responses", request)
                if response.status != 200:
                    return await _failure(response)
                answer = await response.json()
                if answer["error"] is not None:
                    return f"failed {answer['error']['code']}"
                if not answer["store"]:
                    return "200 not_kept"
                kept = kept if "conversation" in kept else {"previous_response_id": answer["id"]}
            again = await ask("GET", f"/v1/responses/{answer['id']}")
            if again.status != 200:
                return await _failure(again)
            texts = [part["text"] for item in (await again.json())["output"] for part in item["content"]]
            place = f"conversations/{kept['conversation']}" if "conversation" in kept else f"responses/{answer['id']}"
            gone = await ask("DELETE", f"/v1/{place}")
            return self._judged(request, texts == [WORDS], texts, began) if gone.status == 200 else await _failure(gone)

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

    # What is done to Triton, to the store and to the log, at the same time

    async def _all_faults(self) -> None:
        triton = {"killed": self._kill, "frozen": self._freeze, "unloaded": self._unload, "restarted": self._restart}
        if len(self._tritons) > 1:
            triton["emptied"] = triton.pop("unloaded")
        of_triton = {f"Triton {name}": do for name, do in triton.items()}
        store = {f"store {name}": partial(do, self._chance) for name, do in self._store.faults.items()}
        log = {f"log {name}": partial(do, self._chance) for name, do in self._log.faults.items()}
        await asyncio.gather(self._faults(of_triton), self._faults(store), self._faults(log))

    async def _faults(self, faults: Mapping[str, Callable[[], None]]) -> None:
        done = 0
        while time.monotonic() < self._ends - _QUIET_SECONDS:
            for name, do in faults.items():
                await self._quiet(self._chance.uniform(1, 2) * min(5.0, self._seconds / 10))
                # However short it is and busy the machine, there is one.
                if done and time.monotonic() >= self._ends - _QUIET_SECONDS:
                    break
                await self._fault(name, do)
                done += 1
        await self._quiet(self._ends - time.monotonic())

    async def _quiet(self, seconds: float) -> None:
        """Do nothing for *seconds*; a Triton that ends by itself is started."""
        ends = min(time.monotonic() + seconds, self._ends)
        while time.monotonic() < ends:
            if any(triton.poll() is not None for triton in self._tritons):
                await self._fault("Triton ended by itself", self._start_again)
            await asyncio.sleep(0.1)

    async def _fault(self, name: str, do: Callable[[], None]) -> None:
        began = time.monotonic()
        await asyncio.to_thread(self._do, name, do)
        await asyncio.to_thread(lambda: until(self._ready, _READY_SECONDS))
        self.figures.faults.append((name, began, time.monotonic()))

    def _do(self, name: str, do: Callable[[], None]) -> None:
        if not name.startswith("Triton"):
            do()
            return
        with self._changing:
            do()
            self._triton = self._tritons[(self._tritons.index(self._triton) + 1) % len(self._tritons)]

    def _ready(self) -> bool:
        """Whether the service is ready; it will not be without a Triton, which may end by itself meanwhile, too."""
        if any(triton.poll() is not None for triton in self._tritons):
            self._start_again()
        if len(self._tritons) == 1:
            return self._service.status("/health/ready") == 200
        # Two may not be away at a time.
        lines = self._service.send("GET", "/status").json["endpoints"]
        return all(set(MODELS) <= set(line["models"]) for line in lines)

    def _start_again(self) -> None:
        with self._changing:
            for triton in self._tritons:
                if (status := triton.poll()) is not None:
                    self._tell_and_start(triton, status)

    def _tell_and_start(self, triton: EmbeddedTriton, status: int) -> None:
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if self.figures.faults:
            name, _, over = self.figures.faults[-1]
            how += f" {time.monotonic() - over:.0f} s after it was {name}"
        self.figures.endings.append((how, triton.log_tail(30)))
        triton.start()

    def _kill(self) -> None:
        self._triton.kill()
        self._triton.start()

    def _restart(self) -> None:
        self._triton.stop()
        self._triton.start()

    def _freeze(self) -> None:
        # Several are found to be frozen by the time that their lists take, which is ten seconds.
        longest = 4 if len(self._tritons) == 1 else 16
        with frozen(self._triton):
            time.sleep(self._chance.uniform(0.5, longest))

    def _unload(self) -> None:
        for verb in ("unload", "load"):
            for model in MODELS if len(self._tritons) > 1 else ["vllm_model"]:
                url = f"{self._triton.http_url}/v2/repository/models/{model}/{verb}"
                # A Triton that has ended meanwhile is started, with the model.
                with contextlib.suppress(ConnectionError, http.client.HTTPException, urllib.error.URLError):
                    urllib.request.urlopen(urllib.request.Request(url, b"{}", method="POST"), timeout=60).close()
            time.sleep(1)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[len(b"data: ") :].decode().strip()


class _Refusal(str):
    """A status and a code, with what was said."""

    said: str


async def _failure(response: aiohttp.ClientResponse) -> str:
    error = (await response.json())["error"]
    refusal = _Refusal(f"{response.status} {error['code']}")
    refusal.said = f"{error['message']} [{response.headers['x-request-id']}]"
    return refusal


def render(figures: Figures, clients: int) -> str:
    """Return the figures as a table for people."""
    lines = [f"{figures.seconds:.0f} seconds, {clients} clients, {sum(figures.outcomes.values())} requests"]
    lines += [f"  {count:>8}  {name}" for name, count in figures.outcomes.most_common()]
    faults = Counter(name for name, _, _ in figures.faults)
    lines.append(f"faults: {', '.join(f'{name} {count}' for name, count in faults.items()) or 'none'}")
    if figures.endings:
        lines.append(f"ended by itself: {', '.join(how for how, _ in figures.endings)}")
    for what, began, ended in figures.wrong:
        lines.append(f"wrong: {what} ({figures.near(began, ended)})")
    unexplained = Counter(failure.outcome for failure in figures.unexplained)
    failed = ", ".join(f"{name}: {count}" for name, count in unexplained.items()) or "none"
    lines.append(f"failed for no such reason: {failed}")
    lines += [
        f"  {failure.outcome}: {failure.said} ({figures.near(failure.began, failure.ended)})"
        for failure in figures.unexplained
    ]
    for name, times in (("first token of a stream", figures.first), ("whole answer", figures.whole)):
        ordered = sorted(times)
        p50, p99 = (ordered[int((len(ordered) - 1) * share)] * 1000 if ordered else 0.0 for share in (0.5, 0.99))
        lines.append(f"{name}: p50 {p50:.0f} ms, p99 {p99:.0f} ms")
    start, end = (memory / MEBIBYTE for memory in figures.memory)
    lines.append(f"memory: {start:.0f} MiB after the first tenth, {end:.0f} MiB at the end")
    lines.append(f"left behind: {', '.join(figures.left) or 'nothing'}")
    return "\n".join(lines)


class Store:
    """Where responses are kept, and what can be done to it: PostgreSQL, or a file where it is not installed."""

    def __init__(self, server: Server | None, file: Path) -> None:
        self._server = server
        self._file = file
        self.faults: Mapping[str, Callable[[random.Random], None]]
        if server is None:
            self.url = f"sqlite:{file}"
            self.faults = {"locked": self._lock}
        else:
            self.url = server.url()
            self.faults = {"frozen": self._freeze, "lost": self._lose}

    def _freeze(self, chance: random.Random) -> None:
        assert self._server is not None
        self._server.freeze()
        time.sleep(chance.uniform(0.5, 8))
        self._server.thaw()

    def _lose(self, chance: random.Random) -> None:
        assert self._server is not None
        self._server.stop()
        time.sleep(chance.uniform(0, 4))
        self._server.start()

    def _lock(self, chance: random.Random) -> None:
        with contextlib.closing(sqlite3.connect(self._file, timeout=60, isolation_level=None)) as connection:
            connection.execute("BEGIN EXCLUSIVE")
            time.sleep(chance.uniform(0.5, 8))


class Log:
    """The reader of a service's log, which it copies into a *file*; and what it can do to the service."""

    def __init__(self, folder: Path, file: Path) -> None:
        #: The pipe that the service writes to
        self.pipe = folder / "stderr"
        os.mkfifo(self.pipe)
        self._file = file
        self._reads = threading.Lock()
        self._source = self._opened()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()
        self.faults: Mapping[str, Callable[[random.Random], None]] = {"unread": self._rest, "gone": self._leave}

    def close(self) -> None:
        """End, with what is there."""
        self._over.set()
        self._thread.join()

    def _opened(self) -> int:
        # Else it would wait for the service.
        return os.open(self.pipe, os.O_RDONLY | os.O_NONBLOCK)

    def _copy(self) -> None:
        ended = False
        while not ended:
            ended = self._over.is_set()
            with self._reads, self._file.open("ab") as sink, contextlib.suppress(BlockingIOError):
                while data := os.read(self._source, 65_536):
                    sink.write(data)
            time.sleep(0.02)

    def _rest(self, chance: random.Random) -> None:
        with self._reads:
            time.sleep(chance.uniform(1, 8))

    def _leave(self, chance: random.Random) -> None:
        with self._reads:
            os.close(self._source)
            time.sleep(chance.uniform(0.5, 4))
            self._source = self._opened()


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


def _expected(line: str) -> bool:
    """Whether the log may have *line*: of models while Triton is away, of lost lines, and one that a reader cut."""
    return not line.endswith("}") or any(
        f'"event":"{event}"' in line for event in ("model does not answer", "log lines were lost")
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description="Mixed traffic with faults.")
    parser.add_argument("--seconds", type=float, help="600; with several Tritons 1,800")
    parser.add_argument("--tritons", type=int, default=1)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # What was started ends with it, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-soak-")))
        repository = build_repository(folder / "models", models=MODELS)
        tritons = [opened.enter_context(_started(repository)) for _ in range(options.tritons)]
        if len(tritons) > 1:
            flags = [part for one in tritons for part in ("--endpoint", f"{one.http_url}+{one.grpc_url}")]
        else:
            flags = ["--triton-url", tritons[0].http_url, "--triton-url", tritons[0].grpc_url]
        flags += ["--tokenizer", str(repository.tokenizer)]
        program = find("PostgreSQL") if importlib.util.find_spec("asyncpg") else None
        server = None if program is None else opened.enter_context(running_postgresql(program))
        store = Store(server, folder / "responses")
        flags += ["--responses-store", store.url]
        log = opened.enter_context(contextlib.closing(Log(folder, folder / "service.log")))
        # What the collector frees in an hour is much, and no leak.
        settings = {**QUICK, "request_timeout": 10} if len(tritons) == 1 else PATIENT
        started = watched(folder, *flags, triton=settings, strict=False, stderr=log.pipe)
        service = opened.enter_context(started)
        until(lambda: service.status("/health/ready") == 200)
        seconds = options.seconds or (600.0 if len(tritons) == 1 else 1800.0)
        soak = Soak(service, tritons, store, log, clients=options.clients, seconds=seconds, seed=options.seed)
        figures = asyncio.run(soak.run())
        log.close()
        complaints = [line for line in service.complaints() if not _expected(line)]
        ids = [failure.said.rpartition("[")[2].rstrip("]") for failure in figures.unexplained if failure.said]
        about = [line for line in service.log_lines() if any(id in line for id in ids)]
    print(render(figures, options.clients))
    for line in [*complaints, *about]:
        print(line, file=sys.stderr)
    for how, tail in figures.endings:
        print(f"\nTriton ended by itself, {how}. The end of its log:\n{tail}", file=sys.stderr)
    return 0 if figures.passed and not complaints else 1


if __name__ == "__main__":
    sys.exit(main())
