"""
``python -m bench.path [URL|lines]``: what Python does for a token and for a short chat, counted and not timed.

The service runs in this process, and a profiler (`sys.setprofile`) sees every call that its packages and the libraries
make. Counts do not depend on the machine, so a test can hold them. Without a URL the Triton is that of
`bench.fake_triton`, which sends the next token when the last one has arrived. With `lines`, it is a short chat, and the
same as a line of a batch.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from inspect import CO_COROUTINE
from pathlib import Path
from types import FrameType
from typing import Any, cast

import msgspec
import uvloop
from aiohttp import web

from bench.fake_triton import FakeTriton
from bench.messages import Form, Target
from bench.processes import HOST, BenchError
from bench.repository import PACED
from bench.wire import PROMPT, AnswerReader, http_request
from triton_openai.app import SERVICE, create_app
from triton_openai.config.tree import (
    BatchesSettings,
    FilesSettings,
    ModelDefaults,
    ServerSettings,
    Settings,
    TracesSettings,
    TritonSettings,
)
from triton_openai.serving.server import HttpServer
from triton_openai.storage.batch_records import Batch, StoredFile
from triton_openai.telemetry import tracing
from triton_openai.telemetry.logging import configure_logging

_WARM = 4
_COUNTED = 5
# On a busy machine few of them are as short as they can be: the shortest has to come so often, within so many.
_REPEATED = 2
_MAX_COUNTED = 60
_SECONDS = 120.0
# Lines by which two batches differ.
_LINES = 50
# In place of a URL.
_OF_LINES = "lines"
_LINES_SECONDS = 120.0
# The bench itself, and what the service measures on a timer, which may fall into any request.
_BESIDE = ("bench", "__main__", "triton_openai.telemetry.process")
# What the event loop calls when the work of another thread has ended. What a request calls of it itself is counted.
_ENDS_OF_THREADS = ("asyncio.futures", "concurrent", "threading")
# What runs once a second, whatever requests there are. On a slow machine, each request falls into a second of its own.
_EACH_SECOND = {
    "triton_openai.access.authorizer:Authorizer.watch",
    "triton_openai.batches.batch_runner:BatchRunner.run",
    "triton_openai.batches.batch_runner:BatchRunner._sweep",
    "triton_openai.batches.batch_runner:BatchRunner._watch",
    "triton_openai.batches.notifications:Notifications._check",
    "triton_openai.serving.connections:_date",
    "triton_openai.telemetry.logging:_second",
    "triton_openai.triton.discovery:Discovery.run",
}
_ROOT = Path(__file__).parents[1]
# What a call takes for the profiler: its frame. Before Python 3.14, integers that the profiler frees make up for it.
_FRAME_BLOCKS = int(sys.version_info >= (3, 14))

TOKEN = "token of a stream"
STREAMED = "streamed chat of one token"
WHOLE = "whole chat of one token"
LINE = "line of a batch, a whole chat of one token"
TRACED = "whole chat with traces"
UNSAMPLED = "whole chat with traces, of a parent that is not sampled"
_UNSAMPLED_PARENT = f"traceparent: 00-{'a' * 32}-{'b' * 16}-00\r\n"


class PathRow(msgspec.Struct, frozen=True, kw_only=True):
    """
    The least that one token or one request takes.

    *calls* are calls of our own functions, in so many *modules*; *coroutines* of them start or resume one.
    *library_calls* are those of Python functions of libraries, by package. *blocks* is what our own functions and
    theirs take from the allocator, as seen between two calls: what comes from a free list is not in it.
    """

    what: str
    subject: str = ""
    modules: int
    calls: int
    coroutines: int
    library_calls: dict[str, int]
    blocks: int
    tasks: int
    threads: int
    #: How often each of our functions was called.
    functions: dict[str, int]

    @property
    def library(self) -> int:
        """The number of *library_calls*."""
        return sum(self.library_calls.values())


class _Profiler:
    """Counts what runs in this thread for one *what* after the other; what the bench does itself is left out."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Begin anew."""
        self._functions: Counter[str] = Counter()
        self._library: Counter[str] = Counter()
        self._coroutines = self._blocks = self._tasks = self._threads = 0
        self._stack: list[str] = []
        self._last = sys.getallocatedblocks()

    def row(self, what: str) -> PathRow:
        """Return the counts since the beginning."""
        return PathRow(
            what=what,
            modules=len({name.partition(":")[0] for name in self._functions}),
            calls=sum(self._functions.values()),
            coroutines=self._coroutines,
            library_calls=dict(self._library),
            blocks=self._blocks,
            tasks=self._tasks,
            threads=self._threads,
            functions=dict(self._functions),
        )

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        now = sys.getallocatedblocks() - _FRAME_BLOCKS * (event == "call")
        stack = self._stack
        if stack:
            owner = stack[-1]
        else:
            owner = "bench"
        if owner != "bench" and now > self._last:
            self._blocks += now - self._last
        if event == "call":
            name = frame.f_globals.get("__name__", "")
            code = frame.f_code
            function = f"{name}:{code.co_qualname}"
            if (
                name.startswith(_BESIDE)
                or function in _EACH_SECOND
                or (stack and owner == "bench")
                or (not stack and name.startswith(_ENDS_OF_THREADS))
            ):
                owner = "bench"
            elif name.startswith("triton_openai"):
                owner = "ours"
                self._functions[function] += 1
                self._coroutines += bool(code.co_flags & CO_COROUTINE)
            else:
                owner = "library"
                self._library[name.partition(".")[0]] += 1
                self._tasks += code.co_name == "create_task" and name.startswith("asyncio")
                self._threads += code.co_name == "to_thread"
            stack.append(owner)
        elif event == "return" and stack:
            stack.pop()
        # Without what this function itself has taken.
        self._last = sys.getallocatedblocks()


class _Client(asyncio.Protocol):
    """Asks, and sets an event for each read and at the end."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self.tokens = 0
        self._reader = AnswerReader()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.tokens += self._reader.feed(data)
        self.arrived.set()

    def ask(self, request: bytes) -> None:
        """Send *request*."""
        self._reader = AnswerReader()
        self.tokens = 0
        assert self._transport is not None
        self._transport.write(request)

    async def read(self, tokens: int) -> None:
        """Wait until the answer has *tokens*, or, with none, has ended."""
        while not self._reader.ended and not 0 < tokens <= self.tokens:
            self.arrived.clear()
            await self.arrived.wait()

    def close(self) -> None:
        """Leave."""
        if self._transport is not None:
            self._transport.abort()


async def _count(url: str | None, *, lines: bool) -> list[PathRow]:
    fake = FakeTriton()
    step: Callable[[], None] = fake.step if url is None else lambda: None
    if url is None:
        began = fake.began
    else:
        began = partial(asyncio.sleep, 0.1)
    url = url or f"http://{HOST}:{await fake.listen()}"
    settings = Settings(
        server=ServerSettings(log_format="json"),
        # On a slow machine, a look for models would fall into what is measured.
        triton=TritonSettings(url=(url,), refresh_interval=3600.0),
        defaults=ModelDefaults(chat_template="chatml"),
    )
    configure_logging(settings.server)
    asked = partial(_rows, fake_began=began, step=step)
    if lines:
        rows = [*await asked(settings, ((WHOLE, "whole", ""),)), await _line(settings)]
        fake.close()
        return rows
    rows = await asked(settings, ((TOKEN, "text", ""), (STREAMED, "text", ""), (WHOLE, "whole", "")))
    # A stage that takes time has a span, and under a profiler each would.
    tracing.SHORTEST_STAGE = math.inf
    # Nobody is there, and nothing is sent before the end: that is another thread's work.
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "3600000"
    traced = msgspec.structs.replace(settings, traces=TracesSettings(otlp_endpoint=f"http://{HOST}:9"))
    rows += await asked(traced, ((TRACED, "whole", ""), (UNSAMPLED, "whole", _UNSAMPLED_PARENT)))
    fake.close()
    return rows


async def _rows(
    settings: Settings,
    cases: Sequence[tuple[str, Form, str]],
    *,
    fake_began: Callable[[], Awaitable[None]],
    step: Callable[[], None],
) -> list[PathRow]:
    """Return the rows of *cases*: what is counted, how it is asked for, and more lines of the head."""
    app = create_app(settings)
    server = HttpServer(app, settings.limits)
    await server.start()
    await app[SERVICE].fleet.first.wait()
    rows = []
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        await server.listen(sock)
        port = sock.getsockname()[1]
        for what, form, more in cases:
            _, client = await asyncio.get_running_loop().create_connection(_Client, HOST, port)
            target = Target(protocol="chat", host=HOST, port=port)
            request = http_request(target, PACED, 10_000 if what == TOKEN else 1, form, more)
            counted = await _take(what, client, request, fake_began, step)
            # What runs beside it now and then, such as a look at Triton's models, takes a task or a thread.
            rows.append(min(counted, key=_cost))
            client.close()
        await server.close()
    return rows


async def _line(settings: Settings) -> PathRow:
    """Return the counts of a line: what more lines of a batch add, in equal parts."""
    with tempfile.TemporaryDirectory(prefix="triton-openai-bench-") as folder:
        files = FilesSettings(store=f"dir:{folder}/files")
        batches = BatchesSettings(store=f"sqlite:{folder}/db")
        settings = msgspec.structs.replace(settings, files=files, batches=batches)
        app = create_app(settings)
        server = HttpServer(app, settings.limits)
        await server.start()
        await app[SERVICE].fleet.first.wait()
        few, many = [await _batch(app, count) for count in (_LINES, _LINES, 2 * _LINES)][1:]
        await server.close()
    counts = {name: getattr(many, name) - getattr(few, name) for name in ("calls", "coroutines", "tasks", "threads")}

    def per_line(some: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
        return {function: round((count - some.get(function, 0)) / _LINES) for function, count in more.items()}

    fields = {name: round(count / _LINES) for name, count in counts.items()}
    return msgspec.structs.replace(
        many,
        what=LINE,
        blocks=(many.blocks - few.blocks) // _LINES,
        library_calls=per_line(few.library_calls, many.library_calls),
        functions=per_line(few.functions, many.functions),
        **fields,
    )


async def _batch(app: web.Application, count: int) -> PathRow:
    """Return the counts of a batch of *count* lines."""
    service = app[SERVICE]
    assert service.files is not None
    assert service.batches is not None
    store = service.files.store
    name = f"batch_{os.urandom(8).hex()}"
    body = {"model": PACED, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 1}
    asked = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    content = b"".join([msgspec.json.encode({"custom_id": f"id-{n}", **asked}) + b"\n" for n in range(count)])
    writing = await service.files.write(f"file-{name}")
    await writing.add(content)
    await writing.end()
    now = time.time()
    profiler = _Profiler()
    fields: dict[str, Any] = {"owner": "", "created": now, "expires": now + 3600}
    file = StoredFile(id=f"file-{name}", purpose="batch", filename="a", bytes=len(content), **fields)
    batch = Batch(id=name, kind="openai", endpoint="/v1/chat/completions", input=file.id, window="1h", **fields)
    await store.files.complete(file)
    sys.setprofile(profiler)
    await store.batches.add(batch, max_open=1, max_total=10**12)
    service.batches.wake()
    while (state := await store.batches.find(name, "", "openai")) is None or state.open:  # noqa: ASYNC110 - as a client does
        await asyncio.sleep(0.02)
    sys.setprofile(None)
    if state.succeeded != count:
        raise BenchError(f"Of {count} lines, {state.succeeded} were answered.")
    return profiler.row(LINE)


async def _take(
    what: str, client: _Client, request: bytes, began: Callable[[], Awaitable[None]], step: Callable[[], None]
) -> list[PathRow]:
    """Return the counts of one token or request after the other, when they are warm."""
    profiler = _Profiler()
    rows = []
    if what == TOKEN:
        client.ask(request)
        await began()
    for number in range(_WARM + _MAX_COUNTED):
        profiler.begin()
        sys.setprofile(profiler)
        if what == TOKEN:
            step()
            # The next one: a real Triton may have sent some already.
            await client.read(client.tokens + 1)
        else:
            client.ask(request)
            await client.read(0)
        # What is done after the last byte belongs to it.
        for _ in range(3):
            await asyncio.sleep(0)
        sys.setprofile(None)
        if number < _WARM:
            continue
        rows.append(profiler.row(what))
        costs = [_cost(row) for row in rows]
        if len(rows) >= _COUNTED and costs.count(min(costs)) >= _REPEATED:
            break
    return rows


def _cost(row: PathRow) -> tuple[int, int, int, int]:
    """Return by what rows are compared: the numbers of calls come last because they vary on a busy machine."""
    return row.threads, row.tasks, row.calls, row.library


def measure_path(url: str | None = None, subject: str = "") -> list[PathRow]:
    """Return the rows, counted in a process of their own. Raises :class:`BenchError`."""
    return _counted([url] if url else [], subject, _SECONDS)


def measure_lines() -> list[PathRow]:
    """Return the rows of :data:`WHOLE` and :data:`LINE`. Raises :class:`BenchError`."""
    return _counted([_OF_LINES], "", _LINES_SECONDS)


def _counted(arguments: Sequence[str], subject: str, seconds: float) -> list[PathRow]:
    command = [sys.executable, "-m", "bench.path", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=seconds, cwd=_ROOT)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = (error.stderr or b"").decode(errors="replace")[-2000:]
        raise BenchError(f"Calls were not counted: {error}\n{output}") from error
    rows = msgspec.json.decode(done.stdout, type=list[PathRow])
    return [msgspec.structs.replace(row, subject=subject) for row in rows]


if __name__ == "__main__":
    argument = None
    if len(sys.argv) > 1:
        argument = sys.argv[1]
    of_lines = argument == _OF_LINES
    rows = uvloop.run(_count(None if of_lines else argument, lines=of_lines))
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")
