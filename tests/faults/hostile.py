"""
``python -m tests.faults.hostile``: hostile requests over every endpoint, in front of a real Triton.

It prints what became of them. The exit status is 1 if one was answered with an error of the service or in another form
than the description has, if one held the event loop, if memory grew too much, or if something is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import itertools
import json
import math
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.forms import FORM_TYPE, form_with_file
from tests import described
from tests.clients.service import serving, steered, until
from tests.faults import probed
from tests.faults.hostile_requests import (
    GENERATING,
    KEYS,
    MANAGED,
    MODELS,
    Known,
    Request,
    check_complete,
    make,
    make_batch,
)
from tests.faults.surroundings import MEBIBYTE, Watched
from tests.standins.repository import build_repository
from tests.triton_fixture import embedded
from triton_openai.demo.repository import DemoRepository
from triton_openai.tritonserver.embedded import EmbeddedTriton

TEMPLATE = Path(__file__).parents[1] / "fixtures" / "tools.jinja"
_LONGEST_TURN = 0.05
_ANSWER_SECONDS = 120.0
_SETTLE_SECONDS = 120.0
_EXAMPLES = 3
_MOST_TURNS = 20
# One batch of so many lines for so many requests, and how long it may take.
_LINES, _REQUESTS_OF_BATCH, _BATCH_SECONDS = 50, 1000, 300.0
# Files of the key whose lists are read.
_FILES = 120
# A turn of the garbage collector in so many requests is no defect.
_REQUESTS_OF_COLLECTION = 100_000
# What eight clients may have in work at once: bodies of megabytes, and the texts of the store.
_MOST_GROWTH = 1024 * MEBIBYTE
_RECENT = 500
# Several times what a request has, which answers may repeat.
_LARGEST = 256 * MEBIBYTE
# Answers of the service that are not 500 and yet no client's fault: it says why, and that trying again may help.
_EXCUSED = {501, 503, 504, 529}
# What answers with what clients sent, in which these clients have kinds and fields of their own.
_ECHOES = {"add_items", "list_items", "retrieve_item", "list_input_items"}
_ECHOED_TOOL = re.compile(rb'"tools":\[[^\]]*"type":"namespace"')
_ENDS = (
    "[DONE]", "message_stop", "error", "response.completed", "response.failed", "response.incomplete",
    "speech.audio.done", "transcript.text.done",
)  # fmt: skip


@dataclass
class Figures:
    """What became of the requests."""

    requests: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    # The numbers of the requests, by what went wrong
    failures: dict[str, list[int]] = field(default_factory=dict)
    # Turns of the loop: seconds, callback, and the requests that hold it as long when they are sent alone
    turns: list[tuple[float, str, dict[int, float]]] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    long_turns: int = 0
    # Turns that are long by what the collector does in them, in seconds
    collector: list[float] = field(default_factory=list)
    # Lines of batches, by what became of them
    lines: Counter[str] = field(default_factory=Counter)
    # Before, at most, and in the end
    memory: tuple[int, int, int] = (0, 0, 0)
    endings: int = 0

    @property
    def held(self) -> dict[int, float]:
        """The requests that hold the loop too long, with the seconds."""
        found: dict[int, float] = {}
        for _, _, alone in self.turns:
            found |= alone
        return found

    @property
    def passed(self) -> bool:
        """Whether nothing went wrong."""
        if self.failures or self.held or self.left or not self.collector_is_rare:
            return False
        return self.memory[1] - self.memory[0] <= _MOST_GROWTH

    @property
    def collector_is_rare(self) -> bool:
        """Whether long turns of the collector are as seldom as they may be."""
        return len(self.collector) <= max(1, self.requests // _REQUESTS_OF_COLLECTION)


@dataclass
class _Sent:
    number: int
    request: Request
    began: float
    over: float = math.inf


class Hostile:
    """*count* requests of *clients* clients at once."""

    def __init__(self, service: Watched, triton: EmbeddedTriton, turns: Path, seed: int, clients: int) -> None:
        self._service = service
        self._triton = triton
        self._turns = turns
        self._seed = seed
        self._clients = clients
        self._known = Known()
        self._lock = threading.Lock()
        # In the order in which they were begun
        self._recent: deque[_Sent] = deque(maxlen=_RECENT)
        # Turns that took long, each with what was on its way
        self._long: list[tuple[float, str, list[_Sent]]] = []
        self._over = threading.Event()
        self.figures = Figures()

    def run(self, numbers: Sequence[int]) -> Figures:
        """Send the requests with these *numbers*, look into what held the loop, wait until all is quiet."""
        figures = self.figures
        self._settle_in()
        before = self._service.usual_level()
        self._slow_turns()
        with ThreadPoolExecutor(self._clients + 2) as threads:
            watching = threads.submit(self._watch)
            batches = threads.submit(self._batches, max(1, len(numbers) // _REQUESTS_OF_BATCH))
            began = time.monotonic()
            remaining = iter(numbers)
            try:
                for done in [threads.submit(self._client, remaining) for _ in range(self._clients)]:
                    done.result()
                batches.result()
            finally:
                self._over.set()
            figures.seconds = time.monotonic() - began
            figures.requests = figures.statuses.total()
            most = watching.result()
        self._look_at_turns()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while (left := (after := self._service.level()).above(before)) and time.monotonic() < deadline:
            time.sleep(0.2)
        figures.left = left
        figures.memory = (before.memory, max(most, before.memory), after.memory)
        self._check_alive()
        return figures

    def show(self) -> None:
        """Print the requests that were sent last, without the middle of long ones."""
        for each in self._recent:
            number, sent = each.number, each.request.parts
            print(
                f"{number}: {sent if len(sent) < 6000 else sent[:3000] + b' ... ' + sent[-1000:]!r} ({len(sent)} bytes)"
            )

    def _settle_in(self) -> None:
        """Use all models once, and have something of each key's that requests can refer to."""
        for key in KEYS:
            for model in dict.fromkeys(GENERATING):
                stored = {"model": model, "input": steered(text="one"), "max_output_tokens": 5}
                self._note(key, "/v1/responses", stored)
            items = [{"role": "user", "content": size * "x"} for size in (1, 1000, 1_000_000)]
            self._note(key, "/v1/conversations", {"items": items})
        # The first batch opens files that then stay open.
        message = {"model": GENERATING[0], "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
        self._note(KEYS[0], "/v1/messages/batches", {"requests": [{"custom_id": "a", "params": message}]})
        self._check_alive()

        # Lists that are long.
        for number in range(_FILES):
            self._upload(b"{}", "user_data", f"{number}.json")

    def _upload(self, content: bytes, purpose: str, name: str) -> str:
        """Upload a file and return its id."""
        body = form_with_file({"purpose": purpose}, content, name)
        headers = {"Content-Type": FORM_TYPE, "Authorization": f"Bearer {KEYS[0]}"}
        answer = self._service.send("POST", "/v1/files", body, headers)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    def _batches(self, count: int) -> None:
        """Run *count* batches of hostile lines."""
        for number in range(count):
            if self._over.is_set():
                return
            try:
                self._batch(number)
            except AssertionError as error:
                self._fail(-1, f"batch {number}: {str(error)[:300]}")

    def _batch(self, number: int) -> None:
        """Run a batch, and look at the answer to each line."""
        batch = make_batch(self._seed, number, self._known, lines=_LINES)
        key = {"Authorization": f"Bearer {KEYS[0]}"}
        made = {"endpoint": batch.endpoint, "completion_window": "24h"}
        file = self._upload(batch.content, "batch", "lines.jsonl")
        answer = self._service.post("/v1/batches", {**made, "input_file_id": file}, **key)
        assert answer.status == 200, answer.body
        path = f"/v1/batches/{answer.json['id']}"
        deadline = time.monotonic() + _BATCH_SECONDS
        while (state := self._service.send("GET", path, headers=key).json)["status"] in (
            "validating",
            "in_progress",
            "finalizing",
        ):
            assert time.monotonic() < deadline, f"it does not end: {state}"
            time.sleep(0.2)
        if state["status"] == "failed":
            assert state["errors"]["data"], "it failed without a reason"
            self.figures.lines["refused with their batch"] += len(batch.names)
            assert not batch.whole, state["errors"]["data"][0]
            return
        assert state["status"] == "completed", state
        seen: Counter[str] = Counter()
        for name in filter(None, (state["output_file_id"], state["error_file_id"])):
            content = self._service.send("GET", f"/v1/files/{name}/content", headers=key)
            assert content.status == 200, content.body
            for line in content.body.splitlines():
                told = json.loads(line)
                seen[told["custom_id"]] += 1
                status = told["response"]["status_code"]
                self.figures.lines[str(status)] += 1
                failed = status == 502 and b"steer" in batch.content
                if status >= 500 and status not in _EXCUSED and not failed:
                    self._fail(-1, f"batch {number}, {told['custom_id']}: {status} {line[:300]!r}")
        assert seen == Counter(batch.names), f"lines that are missing, or twice: {seen - Counter(batch.names)}"

    def _note(self, key: str, path: str, body: dict[str, Any]) -> None:
        answer = self._service.post(path, body, Authorization=f"Bearer {key}")
        assert answer.status == 200, answer.body
        self._known.note(answer.body, foreign=key != KEYS[0])

    def _check_alive(self) -> None:
        for model in dict.fromkeys(GENERATING):
            chat = {"model": model, "messages": [{"role": "user", "content": steered(text="one two")}], "max_tokens": 9}
            answer = self._service.post("/v1/chat/completions", chat, Authorization=f"Bearer {KEYS[0]}")
            deadline = time.monotonic() + _SETTLE_SECONDS
            # To look into the process holds its loop, which then counts as overloaded for a moment.
            while answer.status == 503 and time.monotonic() < deadline:
                time.sleep(1)
                answer = self._service.post("/v1/chat/completions", chat, Authorization=f"Bearer {KEYS[0]}")
            if answer.status != 200 or "one two" not in str(answer.json["choices"][0]["message"]["content"]):
                self._fail(-1, f"a chat with {model} afterwards: {answer.status} {answer.body[:300]!r}")

    # What clients do

    def _client(self, numbers: Iterator[int]) -> None:
        with contextlib.closing(_Connection(self._service)) as connection:
            while (number := self._next(numbers)) is not None:
                if self._triton.poll() is not None:
                    self._start_triton()
                request = make(self._seed, number, self._known)
                sent = _Sent(number, request, time.monotonic())
                self._recent.append(sent)
                outcome = self._exchange(connection, request, number)
                sent.over = time.monotonic()
                with self._lock:
                    self.figures.statuses[outcome] += 1

    def _next(self, numbers: Iterator[int]) -> int | None:
        with self._lock:
            return next(numbers, None)

    def _exchange(self, connection: _Connection, request: Request, number: int) -> str:
        outcome = ""
        try:
            connection.send(request)
            if request.leaves:
                connection.close()
                return "left"
            for _ in range(request.count):
                answer = connection.answer(request.method)
                outcome = str(answer.status)
                # What was asked before it can be told is not known.
                if not request.whole and answer.status < 400:
                    connection.close()
                    return f"{outcome} to what is no request"
                if trouble := _trouble(request, answer):
                    self._fail(number, trouble)
                self._known.note(answer.body, foreign=request.key != KEYS[0])
                if answer.closes:
                    connection.close()
                    break
        except TimeoutError:
            connection.close()
            if request.whole:
                self._fail(number, f"{request.operation}: no answer in {_ANSWER_SECONDS:.0f} s")
            outcome = "no answer"
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            if request.whole and not outcome and self._triton.poll() is None:
                self._fail(number, f"{request.operation}: broken: {error!r}")
            outcome = outcome or "broken"
        if not request.whole:
            connection.close()
        return outcome

    def _fail(self, number: int, what: str) -> None:
        with self._lock:
            self.figures.failures.setdefault(what, []).append(number)

    def _start_triton(self) -> None:
        with self._lock:
            if self._triton.poll() is not None:
                self.figures.endings += 1
                self._triton.start()
                until(lambda: self._service.status("/health/ready") == 200)

    # What the process does

    def _watch(self) -> int:
        """Note long turns of the loop while their requests are known, and return the most memory, until it is over."""
        most = 0
        while not self._over.wait(0.1):
            most = max(most, self._service.memory())
            self._note_turns()
        self._note_turns()
        return most

    def _note_turns(self) -> None:
        for began, ended, took, collected, what in self._slow_turns():
            if took - collected < _LONGEST_TURN:
                self.figures.collector.append(took)
                continue
            suspects = [sent for sent in list(self._recent) if sent.began < ended and began < sent.over]
            self._long = sorted([*self._long, (took, what, suspects)], key=lambda turn: -turn[0])[:_MOST_TURNS]
            self.figures.long_turns += 1

    def _slow_turns(self) -> list[tuple[float, float, float, float, str]]:
        """
        Return the turns since the last call.

        Each has its beginning, its end, its seconds, those of the garbage collector in it, and its callback.
        """
        lines = self._turns.read_text().splitlines() if self._turns.exists() else []
        self._turns.unlink(missing_ok=True)
        split = (line.split(" ", 4) for line in lines)
        return [(*map(float, numbers), what) for *numbers, what in split]  # type: ignore[misc]

    def _look_at_turns(self) -> None:
        """Send what was on its way in the longest turns of the loop again, each request alone."""
        alone: dict[int, float] = {}
        slowness = _slowness()
        for took, what, suspects in self._long:
            for sent in suspects:
                if sent.number not in alone:
                    alone[sent.number] = self._alone(sent.request)
            numbers = [sent.number for sent in suspects if alone[sent.number] >= _LONGEST_TURN * slowness]
            self.figures.turns.append((took, what, {number: alone[number] for number in numbers}))

    def _alone(self, request: Request) -> float:
        """Return the longest turn, in seconds, that a request takes by itself, the shortest of three attempts."""
        found = []
        for _ in range(3):
            until(lambda: not self._service.level().running)
            self._service.status("/health/live")
            self._slow_turns()
            connection = _Connection(self._service)
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection.send(request)
                for _ in range(1 if request.leaves else request.count):
                    connection.answer(request.method)
            connection.close()
            # What it began may go on for some turns.
            for _ in range(5):
                self._service.status("/health/live")
            found.append(max((took - collected for _, _, took, collected, _ in self._slow_turns()), default=0.0))
            if found[-1] < _LONGEST_TURN:
                break
        return min(found)


@dataclass
class _Answer:
    status: int
    headers: Any
    body: bytes
    closes: bool


class _Connection:
    """A connection that is opened when something is sent, and stays."""

    def __init__(self, service: Watched) -> None:
        self._place = service.host, service.port
        self._socket: socket.socket | None = None
        self._file: io.BufferedReader | None = None

    def send(self, request: Request) -> None:
        """Send a request; the answer to one that is not complete may come, and close the connection, meanwhile."""
        if self._socket is None:
            self._socket = socket.create_connection(self._place, 120)
            self._socket.settimeout(_ANSWER_SECONDS)
            self._file = _Kept(socket.SocketIO(self._socket, "r"))
        # What is refused by its head is answered before its body is read.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._socket.sendall(request.parts)
        if not request.whole:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str) -> _Answer:
        """Read an answer to *method*."""
        response = http.client.HTTPResponse(cast(socket.socket, self), method=method)
        response.begin()
        body = response.read(_LARGEST + 1)
        return _Answer(response.status, response.headers, body, response.will_close or len(body) > _LARGEST)

    def makefile(self, mode: str) -> io.BufferedReader:
        """Return what is read, for answers one after the other."""
        assert self._file is not None
        return self._file

    def close(self) -> None:
        """Leave."""
        if self._socket is not None:
            self._socket.close()
            if self._file is not None:
                self._file.raw.close()
        self._socket = self._file = None


class _Kept(io.BufferedReader):
    def close(self) -> None:
        """Stay open: there are more answers in it."""


def _trouble(request: Request, answer: _Answer) -> str | None:
    """Return what is wrong with an answer."""
    name = f"{request.operation}: {answer.status}"
    if request.method in ("HEAD", "OPTIONS"):
        return name if answer.status >= 500 and answer.status not in _EXCUSED else None
    if len(answer.body) > _LARGEST:
        return f"{name} with more than {_LARGEST} bytes"
    if answer.status == 416 and not answer.body:
        # A range that a file does not have: the answer is its Content-Range.
        return None
    text = answer.body.decode("utf-8", "replace")
    if answer.status >= 400 and not text.startswith('{"status":'):
        try:
            error = json.loads(text)["error"]
            said = error["message"]
        except (ValueError, LookupError, TypeError):
            return f"{name} in another form: {text[:100]}"
        if not isinstance(said, str) or not said or "Traceback" in said:
            return f"{name} without a message"
        # A changed order makes the scripted model fail, and these words the one that speaks.
        failing = (b"<die>", b"<nan>") if request.operation == "create_speech" else (b"steer",)
        failed = answer.status == 502 and any(word in request.parts for word in failing)
        # What a changed recording can sound like, too.
        failed = failed or said.endswith("the recognizer has failed")
        if answer.status >= 500 and answer.status not in _EXCUSED and not failed:
            return f"{name} {error.get('code') or error.get('type')}"
    # The description says of these that every request may have them.
    if request.plain and request.whole and answer.status != 431 and "invalid_http" not in text:
        try:
            typed = request.operation not in _ECHOES and not _ECHOED_TOOL.search(answer.body)
            described.check(request.method, request.path, answer.status, answer.headers, answer.body, typed=typed)
        except Exception as error:  # noqa: BLE001 - whatever cannot be read is no answer
            return f"{name} is not as described: {str(error)[:200]}"
    if answer.status == 200 and answer.headers.get_content_type() == "text/event-stream" and not _ends(text):
        return f"{name} ends without its end: {text[-100:]}"
    return None


def _ends(text: str) -> bool:
    last = text.rstrip("\n").rpartition("\n\n")[2].rpartition("data: ")[2]
    return last == "[DONE]" or any(f'"{end}"' in last for end in (*_ENDS, "response.cancelled"))


def _slowness() -> float:
    """Return how much longer this machine takes than the one for which the limit is; at least 1."""
    began = time.thread_time()
    json.loads(json.dumps([1000] * 262_144))
    return max(1.0, (time.thread_time() - began) / (_LONGEST_TURN / 1.5))


def render(figures: Figures, seed: int) -> str:
    """Return the figures as a table for people."""
    lines = [f"{figures.seconds:.0f} seconds, {figures.requests} requests, seed {seed}"]
    lines += [f"  {count:>8}  {status}" for status, count in figures.statuses.most_common()]
    if figures.endings:
        lines.append(f"Triton ended by itself {figures.endings} times")
    lines.append(f"turns of the loop longer than {_LONGEST_TURN * 1000:.0f} ms: {figures.long_turns}")
    for took, what, alone in figures.turns:
        told = ", ".join(f"--only {number}: {seconds * 1000:.0f} ms" for number, seconds in alone.items())
        lines.append(f"  {took * 1000:.0f} ms  {told or 'no request by itself'}  {what[:150]}")
    if figures.collector:
        most_seconds = max(figures.collector) * 1000
        lines.append(f"turns of the garbage collector: {len(figures.collector)}, {most_seconds:.0f} ms at most")
    lines += [f"  {count:>8}  lines of batches: {what}" for what, count in figures.lines.most_common()]
    first, most, last = (memory / MEBIBYTE for memory in figures.memory)
    lines.append(f"memory: {first:.0f} MiB before, {most:.0f} MiB at most, {last:.0f} MiB at the end")
    lines.append(f"left behind: {', '.join(figures.left) or 'nothing'}")
    lines.append(f"failures: {sum(map(len, figures.failures.values())) or 'none'}")
    for what, numbers in figures.failures.items():
        lines.append(f"  {len(numbers)} x {what}   --only {' '.join(map(str, numbers[:_EXAMPLES]))}")
    return "\n".join(lines)


@contextlib.contextmanager
def _started(repository: DemoRepository) -> Iterator[EmbeddedTriton]:
    server = embedded(repository, model_control_mode="explicit", load_models=[*MODELS, MANAGED])
    server.start()
    try:
        yield server
    finally:
        server.stop(timeout=1.0)


def attack(
    folder: Path, triton: EmbeddedTriton, tokenizer: Path, numbers: Sequence[int], *, seed: int, clients: int
) -> tuple[Figures, list[str]]:
    """Send the requests with these *numbers* to a service; return what was seen, and complaints of the service."""
    check_complete()
    probe, turns = folder / "probe.json", folder / "turns"
    flags = ["--triton-url", triton.http_url, "--triton-url", triton.grpc_url, "--model-control-mode", "explicit"]
    flags += ["--tokenizer", str(tokenizer), "--chat-template", str(TEMPLATE)]
    flags += ["--responses-store", f"sqlite:{folder / 'responses'}"]
    flags += itertools.chain(*(("--api-key", f"key{number}:{key}") for number, key in enumerate(KEYS)))
    settings = {
        "models": {"tensorrt_llm": {"adapter": "trtllm"}},
        "defaults": {"tool_call_parser": "hermes", "image_placeholder": "<image {n}>"},
    }
    with serving(folder, *flags, settings=settings, first=partial(_watched, probe, turns)) as running:
        service = Watched(running.process, running.banner, running.log, probe)
        until(lambda: service.status("/health/ready") == 200)
        hostile = Hostile(service, triton, turns, seed, clients)
        figures = hostile.run(numbers)
        if clients == 1:
            hostile.show()
        return figures, service.complaints()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hostile", description="Hostile requests.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--only", type=int, nargs="+", help="send the requests with these numbers, and print them")
    options = parser.parse_args(arguments)
    # What was started ends with it, however it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    numbers = options.only or range(options.first, options.first + options.requests)
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="triton-openai-hostile-")))
        repository = build_repository(folder / "models", models=[*MODELS, MANAGED])
        triton = opened.enter_context(_started(repository))
        clients = 1 if options.only else options.clients
        figures, complaints = attack(folder, triton, repository.tokenizer, numbers, seed=options.seed, clients=clients)
    print(render(figures, options.seed))
    for line in complaints[:50]:
        print(line[:3000], file=sys.stderr)
    return 0 if figures.passed and not complaints else 1


def _watched(probe: Path, turns: Path) -> None:
    probed.watch(probe, strict=False)
    probed.time_turns(turns, _LONGEST_TURN)


if __name__ == "__main__":
    sys.exit(main())
