"""Streams to real connections, of runs whose moments the test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import uvloop
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import every_case
from tests.clock import Clock, turns
from tests.extended import examples
from tests.tls_fixture import Authority
from triton_openai.answer.limits import TokenLimit
from triton_openai.answer.prepare import GenerationSpec
from triton_openai.answer.run import Push
from triton_openai.api import sse
from triton_openai.api.chat import ChatChunks
from triton_openai.api.conversation import PreparedChat
from triton_openai.api.parameters import StreamOptions
from triton_openai.api.sse import Chunks
from triton_openai.api.tools import ToolPlan
from triton_openai.config.tls import server_context
from triton_openai.config.tree import ApiSettings, LimitSettings, Settings, TlsSettings
from triton_openai.draining import DRAINING, Draining
from triton_openai.errors import ServiceError, UpstreamError, UpstreamTimeout
from triton_openai.generation import Delta, Generation, Sampling
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.serving import http_output
from triton_openai.serving.http_output import HttpOutput
from triton_openai.serving.server import HttpServer
from triton_openai.telemetry.request_record import RECORD, RequestRecord

HEAD = b"POST / HTTP/1.%d\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


class ScriptedRun:
    """Brings what the test says, and keeps what it is told."""

    def __init__(self) -> None:
        self.push: Any = None
        self.tell: Any = None
        self.failure: Exception | None = None
        self.pauses = 0
        self.closed = False
        self.no_answer_cause = ""
        self.changed = asyncio.Event()
        self.generation = self.model = self
        self.token_ids, self.name, self.prompt = False, "m", ""
        self.prompt_ids = (7,)

    def start(self, number: int, push: Push, tell: Callable[[int], None]) -> None:
        self.push, self.tell = partial(push, number), partial(tell, number)
        self.changed.set()

    def end(self, error: Exception | None = None) -> None:
        self.failure = error
        self.tell()

    def check(self, _: float) -> float:
        return 60

    async def finalize(self) -> None:
        await asyncio.sleep(0)

    def pause(self) -> None:
        self.pauses += 1
        self.changed.set()

    def resume(self) -> None:
        self.pauses -= 1
        self.changed.set()

    def close(self) -> None:
        self.closed = True
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until *condition* holds, which is looked at when anything changes here."""
        async with asyncio.timeout(120):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def context_of(*, always_usage: bool = False, **options: bool) -> Any:
    """Return the context of a request with these stream options."""
    body = SimpleNamespace(model="m", stream_options=StreamOptions(**options) if options else None)
    # That of a conversation, and that of other requests.
    body.options = body
    return SimpleNamespace(
        body=body,
        model=SimpleNamespace(fingerprint="f"),
        service=SimpleNamespace(settings=Settings(api=ApiSettings(always_include_usage=always_usage))),
    )


def spec_of(*, n: int = 1, **fields: Any) -> GenerationSpec:
    """Return what asks for *n* answers."""
    template = Generation(id="id", prompt="", sampling=Sampling(max_tokens=1), **fields)
    return GenerationSpec(template=template, limit=TokenLimit(tokens=1), n=n)


def chat_chunks(context: Any, spec: GenerationSpec) -> ChatChunks:
    """Return the chunks of a chat with one answer."""
    runs: Any = [ScriptedRun()]
    return ChatChunks(context, PreparedChat(spec, ToolPlan(), runs, [AnswerParser(None, None)]), ())


class Marks(Chunks):
    """Events that can be told apart."""

    def __init__(self, runs: Sequence[Any]) -> None:
        super().__init__("k", spec_of(n=len(runs)), runs, model="m", fingerprint="f", options=None, always_usage=False)

    def first(self, choice: int) -> bytes:
        return b"data: %d(\n\n" % choice

    def piece(self, choice: int, delta: Delta) -> bytes:
        return b"data: %d%b\n\n" % (choice, delta.text.encode()) if delta.text else b""

    def last(self, choice: int) -> bytes:
        return b"data: %d)\n\n" % choice


def test_token_ids_are_in_each_chunk_of_a_chat() -> None:
    """Each chunk of a chat has its token ids where the client asks for them."""
    for wanted in (False, True):
        chunks = chat_chunks(context_of(), spec_of(token_ids=wanted))
        assert wanted == (b'"prompt_token_ids":[7]' in chunks.first(0))
        assert wanted == (b'"token_ids":[5]' in chunks.piece(0, Delta("a", token_ids=[5])))


@every_case(
    "options, wanted",
    [
        ({}, False),
        ({"include_usage": False}, False),
        ({"include_obfuscation": True}, False),
        ({"include_usage": True, "include_obfuscation": True}, True),
        ({"always_usage": True}, True),
        ({"always_usage": True, "include_usage": False}, True),
    ],
)
def test_a_stream_has_its_usage_where_it_is_asked_for(options: dict[str, bool], wanted: bool) -> None:
    """By the client, or by the operator for every stream."""
    chunks = chat_chunks(context_of(**options), spec_of())

    assert wanted == (b'"usage":null' in chunks.piece(0, Delta("a")))


class Served:
    """A server that streams *runs* to whoever asks."""

    def __init__(
        self, count: int, *, heartbeat: float = 60, timeout: float | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.runs = [ScriptedRun() for _ in range(count)]
        self.record = RequestRecord(request_id="r", method="POST", path="/")
        self.draining = Draining()
        self.port = 0
        self.timeout = timeout
        self._heartbeat, self._tls = heartbeat, tls

    @asynccontextmanager
    async def __call__(self) -> AsyncIterator[Served]:
        app = web.Application()
        app[DRAINING] = self.draining
        app.router.add_post("/", self._handle)
        server = HttpServer(app, LimitSettings(), tls=self._tls)
        await server.start()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            await server.listen(sock)
            self.port = sock.getsockname()[1]
            try:
                yield self
            finally:
                await server.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        request[RECORD] = self.record
        task = self.draining.enter()
        output = HttpOutput(
            request,
            self.record,
            self.draining,
            heartbeat=self._heartbeat,
            comment=sse.HEARTBEAT,
            error_event=sse.error_event,
        )
        try:
            await self.answer(output)
            assert output.sent is not None
            return output.sent.response
        except UpstreamError as error:
            return web.Response(status=error.status)
        finally:
            self.draining.leave(task)

    async def answer(self, output: HttpOutput) -> None:
        runs: Any = self.runs
        await output.stream(runs, Marks(runs), timeout=self.timeout)

    async def started(self) -> None:
        for run in self.runs:
            await run.until(lambda run=run: run.push is not None)  # type: ignore[misc]


@asynccontextmanager
async def connected(port: int, version: int = 1, **options: Any) -> AsyncIterator[asyncio.StreamReader]:
    """Ask, and yield what reads the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    writer.write(HEAD % version)
    try:
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def head_of(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)


async def chunks_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a body, strictly read, up to its end."""
    while size := int(await asyncio.wait_for(reader.readline(), 120), 16):
        yield await asyncio.wait_for(reader.readexactly(size), 120)
        assert b"\r\n" == await reader.readexactly(2)
    assert b"\r\n" == await reader.readexactly(2)


async def broken_chunks_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of a body that the connection ends without a last one, in good order, or the test fails."""
    while line := await asyncio.wait_for(reader.readline(), 120):
        size = int(line, 16)
        assert size, "a whole body"
        yield await asyncio.wait_for(reader.readexactly(size), 120)
        assert b"\r\n" == await reader.readexactly(2)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.sampled_from(["", "a", "bb", "é"]), max_size=3), st.integers(0, 2)),
    max_size=12,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 3), STEPS, st.sampled_from([0, 1]))
def test_everything_comes_in_order(count: int, steps: list[tuple[int, list[str], int]], version: int) -> None:
    """Choices open in their order before anything else; each has its texts, its end, and the last event is the last."""

    async def ask() -> bytes:
        async with Served(count)() as served, connected(served.port, version) as reader:
            await served.started()
            for choice, texts, turns in steps:
                if texts:
                    served.runs[choice % count].push([Delta(text) for text in texts])
                for _ in range(turns):
                    await asyncio.sleep(0)
            for run in reversed(served.runs):
                run.end()
            head = await head_of(reader)
            assert head.startswith(b"HTTP/1.%d 200 " % version)
            if not version:
                return await asyncio.wait_for(reader.read(), 120)
            return b"".join([chunk async for chunk in chunks_of(reader)])

    events = uvloop.run(ask()).decode().removesuffix("\n\n").split("\n\n")

    assert [f"data: {choice}(" for choice in range(count)] == events[:count]
    assert "data: [DONE]" == events[-1]
    for choice in range(count):
        shown = [text for which, texts, _ in steps if which % count == choice for text in texts if text]
        own = [event.removeprefix(f"data: {choice}") for event in events if event.startswith(f"data: {choice}")]
        assert ["(", *shown, ")"] == own


async def test_each_token_leaves_at_once() -> None:
    """One chunk for what arrived together, written by the call that brings it."""
    async with Served(1)() as served, connected(served.port) as reader:
        await served.started()
        (run,) = served.runs
        run.push([Delta("a")])
        assert b"Transfer-Encoding: chunked" in await head_of(reader)
        chunks = chunks_of(reader)
        assert b"data: 0(\n\ndata: 0a\n\n" == await anext(chunks)
        run.push([Delta("b"), Delta("c")])
        run.push([Delta("")])
        run.push([Delta("d")])
        assert b"data: 0b\n\ndata: 0c\n\n" == await anext(chunks)
        assert b"data: 0d\n\n" == await anext(chunks)
        run.end()
        assert b"data: 0)\n\ndata: [DONE]\n\n" == await anext(chunks)
        assert [] == [chunk async for chunk in chunks]
        await run.until(lambda: run.closed)
    assert not served.record.client_left


@every_case("begun", [True, False])
async def test_a_failure_is_told_by_status_or_event(begun: bool) -> None:
    """A failure before anything came has its own status; later it is the last event, behind what came before it."""
    async with Served(2)() as served, connected(served.port) as reader:
        await served.started()
        if begun:
            served.runs[1].push([Delta("a")])
        served.runs[0].end(UpstreamError("no"))
        head = await head_of(reader)
        if not begun:
            assert head.startswith(b"HTTP/1.1 502 ")
            return
        body = b"".join([chunk async for chunk in broken_chunks_of(reader)])

    assert body.startswith(b'data: 0(\n\ndata: 1(\n\ndata: 1a\n\nevent: error\ndata: {"error":{"message":"no",')
    assert body.endswith(b"}\n\n")
    assert isinstance(served.record.error, UpstreamError)
    assert all(run.closed for run in served.runs)


@every_case("version, secure", [(1, False), (0, False), (1, True)])
async def test_a_client_that_reads_late_gets_the_error(version: int, secure: bool) -> None:
    """All that was sent, the error behind it, and then the end: nothing is reset, though the next request has come."""
    text = "x" * 100_000
    with TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        tls = server_context(TlsSettings(certificate=authority.issue("service"))) if secure else None
        async with Served(1, tls=tls)() as served:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.port))
            named: Any = {"ssl": authority.client(), "server_hostname": "127.0.0.1"} if secure else {}
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**16, **named)
            writer.write(HEAD % version * (1 + version))
            await served.started()
            (run,) = served.runs
            pushed = 0
            async with asyncio.timeout(120):
                while not run.pauses:
                    run.push([Delta(text)])
                    pushed += 1
                    await asyncio.sleep(0)
            run.end(UpstreamError("no"))
            head = await head_of(reader)
            assert head.startswith(b"HTTP/1.%d 200 " % version)
            if version:
                body = b"".join([chunk async for chunk in broken_chunks_of(reader)])
            else:
                body = await asyncio.wait_for(reader.read(), 120)
            writer.transport.abort()

    assert pushed == body.count(b"data: 0" + text.encode() + b"\n\n")
    assert b'event: error\ndata: {"error":{"message":"no",' in body.rpartition(text.encode())[2]


@every_case("ends", [True, False])
async def test_a_client_that_reads_after_the_time_limit(
    ends: bool, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body has one end, behind all that was sent: an error, or what an answer that was complete in time has."""
    monkeypatch.setattr(Marks, "has_error_event", True)
    text = "x" * 4_000_000
    async with Served(1, timeout=100)() as served:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
        # The next request has come already, and is not answered on this connection.
        writer.write(HEAD % 1 + HEAD % 1)
        await served.started()
        (run,) = served.runs
        run.push([Delta("first")])
        await turns()
        run.push([Delta(text)])
        if ends:
            run.end()
        await turns()
        await clock.elapse(150, steps=3)
        await head_of(reader)
        body = b"".join([chunk async for chunk in chunks_of(reader)])
        assert b"" == await asyncio.wait_for(reader.read(), 120)
        writer.transport.abort()

    assert 1 == body.count(b"data: 0" + text.encode() + b"\n\n")
    end = body.rpartition(text.encode())[2]
    if ends:
        assert (b"\n\ndata: 0)\n\ndata: [DONE]\n\n", None) == (end, served.record.error)
    else:
        assert end.startswith(b"\n\nevent: error\ndata: ")
        assert isinstance(served.record.error, UpstreamTimeout)


async def test_a_heartbeat(clock: Clock) -> None:
    """A heartbeat begins the answer where nothing came, and fills silence; the choices open with the first answer."""
    async with Served(1, heartbeat=10)() as served, connected(served.port) as reader:
        await served.started()
        chunks = chunks_of(reader)
        for number in range(3):
            clock.advance(10)
            if not number:
                await head_of(reader)
            assert b": keep-alive\n\n" == await anext(chunks)
        served.runs[0].push([Delta("a")])
        assert b"data: 0(\n\ndata: 0a\n\n" == await anext(chunks)
        clock.advance(10)
        assert b": keep-alive\n\n" == await anext(chunks)


class ServedEvents(Served):
    """A server that streams events of a store until it is stopped."""

    def __init__(self) -> None:
        super().__init__(0)
        self.stopped: list[ServiceError] = []
        self.sent = False

    async def answer(self, output: HttpOutput) -> None:
        await output.send_events(self._following, self.stopped.append)
        self.sent = True

    async def _following(self, _: float) -> bytes | None:
        if self.stopped:
            return None
        return b"data: " + b"x" * 1_000_000 + b"\n\n"


async def test_events_of_a_store_for_a_client_that_reads_slowly() -> None:
    """Where the request is cancelled meanwhile, its body ends in order, and nothing follows it."""
    async with ServedEvents()() as made, connected(made.port, limit=2**16) as reader:
        served: Any = made
        await head_of(reader)
        await turns(100)
        (task,) = served.draining._tasks
        served.draining.cancel(task, UpstreamError("no"))
        await turns(20)
        async for chunk in chunks_of(reader):
            assert chunk.startswith(b"data: x")
        assert b"" == await asyncio.wait_for(reader.read(), 120)
    # Whatever it raised would become another answer on this connection.
    assert (["no"], True) == ([error.message for error in served.stopped], served.sent)


class ServedParts(Served):
    """A server that streams parts, of which none comes."""

    def __init__(self) -> None:
        super().__init__(0, heartbeat=10)
        self.waits, self.closed, self.ended = asyncio.Event(), False, asyncio.Event()

    async def answer(self, output: HttpOutput) -> None:
        try:
            await output.send_parts(self._parts(), timeout=self.timeout)
        finally:
            self.ended.set()

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        self.waits.set()
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            self.closed = True


async def test_a_client_that_leaves_while_no_part_comes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat finds out that the client has left: that is no error, and nobody waits for the part any more."""

    async def write(*given: Any) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(http_output._Response, "write", write)
    async with ServedParts()() as made, connected(made.port):
        served: Any = made
        await served.waits.wait()
        with structlog.testing.capture_logs() as lines:
            clock.advance(10)
            await served.ended.wait()
    assert (True, True, None) == (served.closed, served.record.client_left, served.record.error)
    assert "stream failed" not in [line["event"] for line in lines]


class ServedNothing(ServedParts):
    """A server of a file without parts."""

    async def answer(self, output: HttpOutput) -> None:
        await output.send_parts(self._parts(), timeout=self.timeout, media_type="audio/pcm")

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        yield b""


async def test_a_file_without_parts_is_empty() -> None:
    """Speech of a text without words has no samples, which is no error."""
    async with ServedNothing()() as made, connected(made.port) as reader:
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in head
        assert b"audio/pcm" in head
        assert await reader.readuntil(b"0\r\n\r\n") if b"chunked" in head else b"Content-Length: 0" in head


@every_case("begun", [True, False])
async def test_an_answer_that_takes_too_long_is_ended(begun: bool, clock: Clock) -> None:
    """The limit of the whole answer ends it, also while nothing has come."""
    clock.run()
    async with Served(1, timeout=30)() as served, connected(served.port) as reader:
        await served.started()
        if begun:
            served.runs[0].push([Delta("a")])
        clock.advance(30)
        head = await head_of(reader)
        assert head.startswith(b"HTTP/1.1 200 " if begun else b"HTTP/1.1 504 ")
        if begun:
            assert b"upstream_timeout" in [chunk async for chunk in broken_chunks_of(reader)][-1]
        await served.runs[0].until(lambda: served.runs[0].closed)


@every_case("begun", [True, False])
async def test_a_client_that_leaves(begun: bool) -> None:
    """Every run is closed, and what they still bring goes nowhere."""
    async with Served(2)() as served:
        async with connected(served.port) as reader:
            await served.started()
            if begun:
                served.runs[0].push([Delta("a")])
                await head_of(reader)
        for run in served.runs:
            await run.until(lambda run=run: run.closed)  # type: ignore[misc]
        served.runs[1].push([Delta("b")])


async def test_a_client_that_does_not_read(clock: Clock) -> None:
    """The runs are held back while it does not, and let go when it does; nothing is lost, no comment piles up."""
    text = "x" * 100_000
    async with Served(2, heartbeat=10)() as served:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.port))
            reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
            writer.write(HEAD % 1)
            await served.started()
            one, other = served.runs
            pushed = 0
            async with asyncio.timeout(120):
                while not one.pauses:
                    one.push([Delta(text)])
                    pushed += 1
                    await asyncio.sleep(0)
            assert 1 == one.pauses == other.pauses
            # What was on its way already.
            other.push([Delta("late")])
            await clock.elapse(100, 20)
            assert 1 == one.pauses
            await head_of(reader)
            body, ended = b"", False
            async for chunk in chunks_of(reader):
                body += chunk
                if b"late" in body and not one.pauses and not ended:
                    # Once: several chunks may have come in one piece.
                    ended = True
                    one.end()
                    other.end()
            writer.transport.abort()

    assert 0 == one.pauses == other.pauses
    assert body.count(b"0" + text.encode()) == pushed
    before = body.partition(b"late")[0]
    assert before.count(b"keep-alive") <= 1


async def test_the_service_ends() -> None:
    """A stream that has begun is told so; one that has not has a status of its own."""
    async with Served(1)() as served, connected(served.port) as reader:
        await served.started()
        served.runs[0].push([Delta("a")])
        await head_of(reader)
        await served.draining.drain(0.0)
        assert b"service_stopping" in [chunk async for chunk in broken_chunks_of(reader)][-1]
        assert served.runs[0].closed


async def test_the_connection_serves_again() -> None:
    """What is written past aiohttp leaves its state as it was."""
    async with Served(1)() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        for _ in range(3):
            served.runs[0] = run = ScriptedRun()
            writer.write(HEAD % 1)
            await run.until(lambda run=run: run.push is not None)  # type: ignore[misc]
            run.push([Delta("a")])
            await head_of(reader)
            run.push([Delta("b")])
            run.end()
            assert b"0b" in b"".join([chunk async for chunk in chunks_of(reader)])
        writer.transport.abort()


@pytest.mark.parametrize("mistake", [ValueError("x")])
async def test_a_mistake_of_ours(mistake: Exception) -> None:
    """A mistake of ours is told in the answer where that has begun."""
    async with Served(1)() as served, connected(served.port) as reader:
        await served.started()
        served.runs[0].push([Delta("a")])
        served.runs[0].end(mistake)
        await head_of(reader)
        assert b"The service failed" in [chunk async for chunk in broken_chunks_of(reader)][-1]
