"""
Both transports against servers that do exactly what a test says: one suite for what they share, then what is peculiar.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any
from unittest.mock import Mock

import grpc
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cases import every_case
from tests.ports import free_port
from tests.reading import Reading
from tests.tls_fixture import Authority, relaying
from triton_openai.config.tree import TritonAccess
from triton_openai.errors import (
    ContextLengthExceeded,
    InvalidAnswer,
    ModelNotFound,
    NotImplementedUpstream,
    ProxyFailed,
    RequestRefused,
    ServiceError,
    UpstreamError,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnavailable,
)
from triton_openai.triton import grpc as grpc_module
from triton_openai.triton import http2_frames, http_stream
from triton_openai.triton.client import ResponseStream, TritonClient, all_responses
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.grpc import GrpcClient, GrpcStream, call_error
from triton_openai.triton.http import HttpClient
from triton_openai.triton.http2_frames import varint
from triton_openai.triton.http_stream import HttpStream
from triton_openai.triton.tensors import InferRequest, InferResponse, Tensor

MIB = 1024 * 1024
REQUEST = InferRequest(
    model="team/m",
    id="id-1",
    inputs=(Tensor("text_input", "BYTES", (1, 1), ("é",)), Tensor("max_tokens", "INT32", (1, 1), (9,))),
    outputs=("text_output",),
    stream=True,
)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a server does with one streamed request: *texts* as responses, then perhaps an *error*, then the *end*:
    ``"end"`` in good order, ``"cut"`` the connection, ``"hang"`` until the client goes.
    """

    texts: Sequence[str] = ()
    error: str | None = None
    end: str = "end"


class FakeTriton:
    """What both fakes have in common."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.requests: list[dict[str, Any]] = []
        self.left = asyncio.Event()
        self.sent = 0

    url: str
    client: TritonClient

    async def start(self) -> None:
        """Listen on a free port."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Close everything."""
        raise NotImplementedError


def chunk(data: bytes) -> bytes:
    """Return *data* as one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """Return a response as an event of ``generate_stream``."""
    values = {"id": "id-1", "model_name": "team/m", "model_version": "1", "text_output": text, "number": [1, 2]}
    return b"data: " + json.dumps(values, ensure_ascii=False).encode() + b"\n\n"


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"


def plain(body: bytes, status: bytes = b"200 OK", extra: bytes = b"", kind: bytes = b"application/json") -> bytes:
    """Return a whole HTTP answer."""
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n" % (status, kind, len(body), extra)
    return head + body


Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


class FakeHttp(FakeTriton):
    """An HTTP server on bare sockets, so that bytes can be cut anywhere and connections can be dropped."""

    def __init__(self) -> None:
        super().__init__()
        # Instead of `reply`: raw bytes, or a script that writes.
        self.raw: bytes | Script | None = None
        self.connections = 0
        self.close_after = False
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self.client = HttpClient(self.url, ConnectionSettings(connect_timeout=60))

    async def stop(self) -> None:
        await self.client.close()
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                self.requests.append({"line": lines[0], "headers": headers, "body": body})
                gone = asyncio.create_task(reader.read(1)) if self.reply.end == "hang" else None
                await self._answer(writer)
                if gone is not None:
                    await gone
                    self.left.set()
                    return
                if self.close_after or self.reply.end == "cut":
                    writer.close()
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter) -> None:
        if isinstance(self.raw, bytes):
            writer.write(self.raw)
        elif self.raw is not None:
            await self.raw(writer)
        else:
            reply = self.reply
            if reply.error is not None and not reply.texts:
                # A failure before the first response: the status is not to be relied on.
                writer.write(plain(json.dumps({"error": reply.error}).encode(), b"400 Bad Request"))
                return
            writer.write(HEAD)
            for text in reply.texts:
                data = event(text)
                writer.write(chunk(data))
                await writer.drain()
                self.sent += len(data)
            if reply.error is not None:
                writer.write(chunk(b"data: " + json.dumps({"error": reply.error}).encode() + b"\n\n"))
            if reply.end == "end":
                writer.write(LAST)
        await writer.drain()


class FakeGrpc(FakeTriton, service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's gRPC service in this process, made by grpcio: an implementation of HTTP/2 that is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        # Instead of `reply`.
        self.script: Callable[[Any, Any], AsyncIterator[Any]] | None = None
        self.status: tuple[grpc.StatusCode, str] | None = None
        # Of a single call; without a text it has no outputs.
        self.answer: str | None = "one"

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        )
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        self.url = f"grpc://127.0.0.1:{port}"
        self.client = GrpcClient(self.url, ConnectionSettings(connect_timeout=60))

    async def stop(self) -> None:
        await self.client.close()
        await self._server.stop(None)

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.calls += 1
        async for request in requests:
            self.requests.append(
                {"id": request.id, "model": request.model_name, "raw": list(request.raw_input_contents)}
            )
            try:
                async for answer in (self.script or self._replies)(request, context):
                    yield answer
            except (asyncio.CancelledError, GeneratorExit):
                # The latter where grpcio had not seen yet that the last answer was sent.
                self.left.set()
                raise
        if self.status is not None:
            await context.abort(*self.status)

    async def _replies(self, request: Any, context: Any) -> AsyncIterator[Any]:
        reply = self.reply
        for text in reply.texts:
            yield stream_response(text)
            self.sent += len(text.encode())
        if reply.error is not None:
            yield service_pb2.ModelStreamInferResponse(error_message=reply.error)
        if reply.end == "hang":
            await asyncio.Event().wait()
        if reply.end == "cut":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append({"id": request.id, "model": request.model_name, "raw": list(request.raw_input_contents)})
        if self.status is not None:
            await context.abort(*self.status)
        return stream_response(self.answer).infer_response

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.status is not None:
            await context.abort(*self.status)
        answer = service_pb2.RepositoryIndexResponse()
        answer.models.add(name="a", version="1", state="READY")
        answer.models.add(name="b", state="UNAVAILABLE", reason="unloaded")
        return answer

    async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return service_pb2.ServerMetadataResponse(name="triton", version="2.51.0")


def stream_response(text: str | None) -> Any:
    """Return a response with one text, or with none at all, as a final flag comes alone."""
    answer = service_pb2.ModelStreamInferResponse()
    answer.infer_response.model_name = "team/m"
    answer.infer_response.parameters["triton_final_response"].bool_param = text is None
    if text is not None:
        output = answer.infer_response.outputs.add()
        output.name, output.datatype = "text_output", "BYTES"
        output.shape.append(1)
        answer.infer_response.raw_output_contents.append(Tensor("t", "BYTES", (1,), (text,)).raw())
    return answer


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take each kept connection that breaks for a stale one, also where the machine stood still meanwhile."""
    monkeypatch.setattr(http_stream, "STALE_SECONDS", 1000.0)


@pytest.fixture
async def http() -> AsyncIterator[FakeHttp]:
    server = FakeHttp()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def grpc_server() -> AsyncIterator[FakeGrpc]:
    server = FakeGrpc()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture(params=[FakeHttp, FakeGrpc], ids=["http", "grpc"])
async def triton(request: pytest.FixtureRequest) -> AsyncIterator[FakeTriton]:
    server = request.param()
    await server.start()
    yield server
    await server.stop()


async def others(triton: FakeTriton) -> None:
    """Wait for as long as a dozen other streams take, of which none has a text."""
    triton.reply = Reply()
    for _ in range(12):
        await outcome(triton.client)


async def texts_of(stream: Reading) -> list[str]:
    """Read a stream to its end."""
    found: list[str] = []
    while responses := await stream.read():
        found += [text for response in responses for text in response.texts("text_output")]
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - what happens elsewhere sets no event here
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 120)


async def outcome(client: TritonClient, request: InferRequest = REQUEST) -> tuple[list[str], ServiceError | None]:
    """Return the texts of a stream and the error that ended it, if one did."""
    stream = Reading(client, request)
    found: list[str] = []
    try:
        while responses := await stream.read():
            found += [text for response in responses for text in response.texts("text_output")]
    except ServiceError as error:
        return found, error
    finally:
        stream.close()
    return found, None


# What both transports do.


@pytest.mark.parametrize(
    "texts", [["one"], ["one", " two", "", "é😀\n\n"], ["x" * 5_000_000, "y"], [str(n) for n in range(500)]]
)
async def test_responses_come_in_order(triton, texts):
    """Every response arrives once, whole and in order; then reads are empty for good."""
    triton.reply = Reply(texts=texts)
    stream = Reading(triton.client, REQUEST)

    assert texts == await texts_of(stream)
    assert () == tuple(await stream.read())
    stream.close()
    stream.close()


async def test_no_response_at_all(triton):
    """A stream that ends without a response is empty and no error: what that means is for others to say."""
    assert [] == await texts_of(Reading(triton.client, REQUEST))


@pytest.mark.parametrize(
    "text, kind",
    [
        ("Request for unknown model: 'team/m' is not found", ModelNotFound),
        ("[request id: id-1] Prompt length (5) exceeds maximum input length (4).", ContextLengthExceeded),
        ("Error generating stream: no prompt", RequestRefused),
        ("Error generating stream: ", UpstreamError),
        ("something", UpstreamError),
    ],
)
async def test_a_failure_before_the_first_response(triton, text, kind):
    """A failure before the first response is classified by its text, whatever the status says."""
    triton.reply = Reply(error=text)
    found, error = await outcome(triton.client)

    assert ([], kind) == (found, type(error))


async def test_a_failure_after_responses(triton):
    """The responses before it are returned first."""
    triton.reply = Reply(texts=["one", "two"], error="something")
    found, error = await outcome(triton.client)

    assert (["one", "two"], UpstreamError) == (found, type(error))
    assert "The model failed: something" == str(error)


@pytest.mark.parametrize("texts", [[], ["one"], ["one", "two"]])
async def test_a_connection_that_breaks(triton, texts):
    """An answer that stops in the middle is an error, never a short answer."""
    triton.reply = Reply(texts=texts, end="cut")
    found, error = await outcome(triton.client)

    assert (texts, "upstream_disconnected") == (found, error.code if error else None)


async def test_closing_tells_the_server(triton):
    """Closing a stream that goes on cancels the work, and reading it afterwards gives nothing."""
    triton.reply = Reply(texts=["one"], end="hang")
    stream = Reading(triton.client, REQUEST)
    await stream.read()

    stream.close()

    await asyncio.wait_for(triton.left.wait(), 120)
    assert () == tuple(await stream.read())
    stream.close()


@pytest.mark.parametrize("texts", [[], ["one"]])
async def test_closing_a_silent_stream(triton, texts):
    """The server is told, and nothing is received any more."""
    triton.reply = Reply(texts=texts, end="hang")
    stream = Reading(triton.client, REQUEST)
    if texts:
        await stream.read()
    await until(lambda: bool(triton.requests))

    stream.stream.close(silent=True)

    await asyncio.wait_for(triton.left.wait(), 120)
    assert (["one"], None) == await outcome_of(triton, Reply(texts=["one"]))


async def outcome_of(triton: FakeTriton, reply: Reply) -> tuple[list[str], ServiceError | None]:
    """Return the outcome of another stream, answered with *reply*."""
    triton.reply = reply
    return await outcome(triton.client)


class Impatient:
    """A receiver that pauses its stream, or closes it, while it receives."""

    def __init__(self, client: TritonClient, act: Callable[[ResponseStream], None]) -> None:
        self.texts: list[str] = []
        self.ended = asyncio.Event()
        self.error: Exception | None = None
        self._act = act
        self.stream = client.stream(REQUEST, self)

    def receive(self, responses: Sequence[InferResponse]) -> None:
        self.texts += [text for response in responses for text in response.texts("text_output")]
        self._act(self.stream)

    def end(self, error: Exception | None) -> None:
        assert not self.ended.is_set()
        self.error = error
        self.ended.set()


@pytest.mark.parametrize("end", ["end", "cut"])
async def test_a_receiver_that_closes(triton, end):
    """A receiver that closes receives nothing after that, not even the end."""
    triton.reply = Reply(texts=["one"] * 100, end=end)
    receiver = Impatient(triton.client, lambda stream: stream.close())
    await until(lambda: bool(receiver.texts))
    received = list(receiver.texts)
    assert (["two"], None) == await outcome_of(triton, Reply(texts=["two"]))

    assert received == receiver.texts
    assert not receiver.ended.is_set()


async def test_a_receiver_that_pauses_each_time(triton):
    """Everything comes all the same, in order, as often as it resumes; the end is the last call."""
    triton.reply = Reply(texts=[f"{number} " + "x" * 50_000 for number in range(50)])
    loop = asyncio.get_running_loop()

    def breathe(stream: ResponseStream) -> None:
        stream.pause()
        stream.pause()
        loop.call_soon(stream.resume)

    receiver = Impatient(triton.client, breathe)
    await asyncio.wait_for(receiver.ended.wait(), 120)

    assert (triton.reply.texts, None) == (receiver.texts, receiver.error)


async def test_paused_before_anything_came(triton):
    """A pause before anything came holds, also for a connection that is still to be made."""
    triton.reply = Reply(texts=["one"])
    receiver = Impatient(triton.client, lambda stream: None)
    receiver.stream.pause()
    await until(lambda: bool(triton.requests))
    await others(triton)
    assert not receiver.texts

    receiver.stream.resume()

    await asyncio.wait_for(receiver.ended.wait(), 120)
    assert ["one"] == receiver.texts


async def test_a_reader_that_is_cancelled(triton):
    """Cancelling the reading task is a cancellation, and closing then tells the server."""
    triton.reply = Reply(texts=["one"], end="hang")
    stream = Reading(triton.client, REQUEST)
    await stream.read()
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    reading.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reading
    stream.close()
    await asyncio.wait_for(triton.left.wait(), 120)


def _unused(url: str) -> str:
    """Return *url* with a port at which nobody listens, and which the kernel gives to nobody."""
    return f"{url.rpartition(':')[0]}:{free_port()}"


async def test_nobody_listens(triton):
    """A Triton that cannot be connected to is unavailable for every call, with a hint when to try again."""
    client = type(triton.client)(_unused(triton.url), ConnectionSettings(connect_timeout=0.5))
    calls = [
        client.server_info(),
        client.repository_index(),
        client.model_config("m"),
        client.infer(REQUEST),
        outcome(client),
    ]

    for call in calls:
        try:
            result = await call
            error = result[1]
        except ServiceError as raised:
            error = raised
        assert UpstreamUnavailable is type(error)
        assert error.retry_after
        assert "127.0.0.1" not in error.message
    await client.close()


async def test_no_failure_waits_for_the_collector(triton):
    """A call that fails, or that is closed while it connects, leaves no reference cycle."""
    failures = [Reply(error="something"), Reply(texts=["one"], error="something"), Reply(end="cut")]
    streams = (HttpStream, GrpcStream, ServiceError)
    tasks = asyncio.all_tasks()
    gc.collect()
    # What other tests have left says nothing about this one.
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for reply in (*failures, None):
            triton.reply = reply or Reply()
            url = triton.url
            if reply is None:
                await triton.stop()
                url = _unused(url)
            client = type(triton.client)(url, ConnectionSettings(connect_timeout=0.5))
            client.stream(REQUEST, Mock()).close()
            with pytest.raises(ServiceError):
                await all_responses(client, REQUEST)
            await client.close()
        # A task that was cancelled holds its stream until it has ended, and on a busy machine that takes many turns.
        while ending := asyncio.all_tasks() - tasks:
            await asyncio.wait(ending)
        gc.collect()
        assert [] == [each for each in gc.garbage if isinstance(each, streams)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    await triton.start()


async def test_a_slow_reader_holds_the_server_back(triton):
    """What nobody reads is not collected here: the server has to wait."""
    texts = ["x" * 100_000] * 500
    triton.reply = Reply(texts=texts)
    stream = Reading(triton.client, REQUEST)
    await stream.read()
    before = -1
    while triton.sent != before:
        before = triton.sent
        await others(triton)

    assert before < 30_000_000
    rest = await texts_of(stream)
    assert set(texts) == set(rest)
    assert triton.sent >= 50_000_000


async def test_many_streams_at_once(triton):
    """Many streams at once do not mix."""
    triton.reply = Reply(texts=["one", "two"])

    found = await asyncio.gather(*(outcome(triton.client) for _ in range(50)))

    assert [(["one", "two"], None)] * 50 == found


# HTTP alone.


async def test_the_request_over_http(http):
    """The body is what generate wants, the path has the name quoted, and the connection is used again."""
    http.reply = Reply(texts=["one"])
    for _ in range(3):
        await outcome(http.client)

    request = http.requests[0]
    assert "POST /v2/models/team%2Fm/generate_stream HTTP/1.1" == request["line"]
    assert {"id": "id-1", "text_input": "é", "max_tokens": 9} == json.loads(request["body"])
    assert http.url.removeprefix("http://") == request["headers"]["host"]
    assert (3, 1) == (len(http.requests), http.connections)


BODY = HEAD + chunk(event("one")) + chunk(event("é\n") + event("")) + chunk(b'data: {"a":1}\n\n') + LAST


async def test_bytes_cut_anywhere(http):
    """However the answer falls into packets, it is the same answer, and the connection stays usable."""
    cut = 0

    async def halves(writer: asyncio.StreamWriter) -> None:
        writer.write(BODY[:cut])
        for _ in range(4):
            await asyncio.sleep(0)
        writer.write(BODY[cut:])

    http.raw = halves
    for cut in range(1, len(BODY)):  # noqa: B007 - the script reads it
        assert (["one", "é\n", ""], None) == await outcome(http.client)
    assert 1 == http.connections


async def test_single_bytes(http):
    """An answer that comes byte by byte is the same answer."""

    async def singly(writer: asyncio.StreamWriter) -> None:
        for index in range(len(BODY)):
            writer.write(BODY[index : index + 1])
            await asyncio.sleep(0)

    http.raw = singly
    assert (["one", "é\n", ""], None) == await outcome(http.client)


async def test_a_body_cut_at_every_byte(http):
    """Wherever the connection breaks, it is an error: no short answer is taken for a whole one."""
    http.close_after = True
    for cut in range(len(BODY)):
        http.raw = BODY[:cut]
        found, error = await outcome(http.client)

        assert error is not None, BODY[:cut]
        assert "upstream_disconnected" == error.code
        assert found == ["one", "é\n", ""][: len(found)]


async def test_an_answer_too_many(http):
    """What nobody has asked for becomes part of no answer, neither of the one before it nor of the one after it."""
    stray = HEAD + chunk(event("stray")) + LAST
    for cut in range(len(stray) + 1):
        http.raw = BODY + stray[:cut]
        assert (["one", "é\n", ""], None) == await outcome(http.client)
        http.raw = BODY
        found, error = await outcome(http.client)
        assert "stray" not in found
        assert error is not None or found == ["one", "é\n", ""]


@pytest.mark.parametrize(
    "data, expected",
    [
        (b'data: {"text_output":"a","p":NaN}\n\n', ["a"]),
        (b'data: {"text_output":"a","p":[NaN,Infinity,-Infinity]}\n\n', ["a"]),
        (b'data: {"text_output":"a\xff\xf0"}\n\n', ["a\ufffd\ufffd"]),
        (b'data:{"text_output":"a"}\n\n', ["a"]),
        (b': comment\n\ndata: {"text_output":"a"}\n\n', ["a"]),
        (b'data: {"text_output":[]}\n\n', []),
        (b'data: {"text_output":["a","b"]}\n\n', ["a", "b"]),
        (b'data: {"text_output":"a\\u0000\\u2028"}\n\n', ["a\0\u2028"]),
        (b'data: {"model_name":"m","error":"a field of that name","text_output":"a"}\n\n', ["a"]),
        (b'data: {"model_name":"m","error":"a field of that name","text_output":"a","p":NaN}\n\n', ["a"]),
    ],
)
async def test_what_triton_writes_unchecked(http, data, expected):
    """NaN, bytes that are no text and other liberties of its JSON are read."""
    http.raw = HEAD + chunk(data) + LAST

    assert (expected, None) == await outcome(http.client)


async def test_numbers_that_are_none(http):
    """NaN stays NaN."""
    http.raw = HEAD + chunk(b'data: {"p":[NaN,1.5]}\n\n') + LAST
    stream = Reading(http.client, msgspec.structs.replace(REQUEST, outputs=("p",)))
    (response,) = await stream.read()

    values = response.numbers("p")
    assert math.isnan(values[0])
    assert 1.5 == values[1]
    stream.close()


async def test_the_first_value_of_each_output(http):
    """An absent output has none, and neither has an empty one."""
    http.raw = HEAD + chunk(b'data: {"text_output":["a","b"],"p":[],"q":0}\n\n') + LAST
    stream = Reading(http.client, msgspec.structs.replace(REQUEST, outputs=("text_output", "p", "q", "r")))
    (response,) = await stream.read()

    assert ["a", None, 0, None] == list(response.first(("text_output", "p", "q", "r")))
    stream.close()


@pytest.mark.parametrize("data", [b"data: {\n\n", b"data: {]}\n\n", b'data: {"a" 1}\n\n'])
async def test_an_event_that_is_no_json(http, data):
    """An event that is no JSON is the upstream's fault, and no traceback."""
    http.raw = HEAD + chunk(event("one")) + chunk(data) + LAST
    found, error = await outcome(http.client)

    assert InvalidAnswer is type(error)
    assert found in ([], ["one"])


@pytest.mark.parametrize(
    "raw, kind",
    [
        # A refusal before inference: JSON with a status.
        (plain(b'{"error":"Request for unknown model: \'m\' is not found"}', b"404 Not Found"), ModelNotFound),
        (plain(b'{"error":"unknown"}', b"503 Service Unavailable"), UpstreamUnavailable),
        (plain(b'{"error":"unknown"}', b"501 Not Implemented"), NotImplementedUpstream),
        (plain(b'{"error":"unknown"}', b"500 Internal Server Error"), UpstreamError),
        # An error under a good status, as a body or as the first event.
        (plain(b'{"error":"Error generating stream: no prompt"}'), RequestRefused),
        (
            HEAD.replace(b"200 OK", b"400 Bad Request")
            + chunk(b'data: {"error":"Error generating stream: no prompt"}\n\n')
            + LAST,
            RequestRefused,
        ),
        # What is no Triton: a balancer's page, an empty body, something else altogether.
        (plain(b"<html>Bad Gateway</html>", b"502 Bad Gateway", kind=b"text/html"), ProxyFailed),
        (plain(b"", b"503 Service Unavailable"), UpstreamUnavailable),
        (plain(b"[1]", b"500 Internal Server Error"), ProxyFailed),
        (plain(b'{"error":{"code":1}}', b"500 Internal Server Error"), UpstreamError),
        (b"SSH-2.0-OpenSSH_9.6\r\n", UpstreamLost),
        (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            UpstreamLost,
        ),
    ],
)
async def test_answers_that_are_errors(http, raw, kind):
    """Whatever form an error has, it is an error of ours."""
    http.close_after = True
    http.raw = raw
    found, error = await outcome(http.client)

    assert error is not None
    assert ([], kind) == (found, type(error))
    assert "\n" not in error.message
    assert len(error.message) < 600


_PAGE = b"<!DOCTYPE html><html><body>Please log in</body></html>"
# What a proxy, an ingress or a login answers in place of a Triton, and whether the connection may have been lost.
_PAGES = [
    (plain(_PAGE, kind=b"text/html"), "upstream_unavailable"),
    (plain(b"", kind=b"text/plain"), "upstream_unavailable"),
    (plain(b"OK", kind=b"text/plain"), "upstream_unavailable"),
    (plain(b'{"message": "who are you?"}'), "upstream_unavailable"),
    (plain(b"\xff\xfe<\x00", kind=b"application/octet-stream"), "upstream_unavailable"),
    (plain(_PAGE, b"302 Found", b"Location: /login\r\n", b"text/html"), "upstream_unavailable"),
    (plain(_PAGE, b"401 Unauthorized", kind=b"text/html"), "upstream_unavailable"),
    (plain(b"RBAC: access denied", b"403 Forbidden", kind=b"text/plain"), "upstream_unavailable"),
    (plain(b"", b"404 Not Found", kind=b"text/plain"), "upstream_unavailable"),
    (plain(b'{"message":"no Route matched"}', b"404 Not Found"), "upstream_unavailable"),
    (plain(b"no healthy upstream", b"503 Service Unavailable", kind=b"text/plain"), "upstream_unavailable"),
    (plain(_PAGE, b"429 Too Many Requests", kind=b"text/html"), "rate_limit_exceeded"),
    (plain(_PAGE, b"500 Internal Server Error", kind=b"text/html"), "upstream_disconnected"),
    (plain(_PAGE, b"502 Bad Gateway", kind=b"text/html"), "upstream_disconnected"),
    (plain(_PAGE, b"520 Unknown", kind=b"text/html"), "upstream_disconnected"),
    # No other Triton would do better.
    (plain(_PAGE, b"413 Content Too Large", kind=b"text/html"), "upstream_error"),
    (plain(_PAGE, b"504 Gateway Timeout", kind=b"text/html"), "upstream_timeout"),
]


@every_case("raw, code", _PAGES)
async def test_what_answers_in_place_of_a_triton(http, raw, code):
    """Whatever is asked, an answer that no Triton gives is an error by which the request may go elsewhere."""
    http.raw, client = raw, http.client
    _, error = await outcome(client)
    assert error is not None
    assert (code, "log in" in str(error)) == (error.code, False)
    calls = [client.infer, client.model_config, client.unload_model, lambda _: client.repository_index()]
    # An empty body is what Triton itself answers when it has begun to unload a model.
    for call in calls if not raw.startswith(b"HTTP/1.1 200") or b"html" in raw else calls[:2]:
        with pytest.raises(ServiceError) as caught:
            await call(REQUEST if call == client.infer else "m")
        assert code == caught.value.code


async def test_an_error_body_in_pieces(http):
    """An error is read to its end before it is classified."""
    body = b'{"error":"Prompt length (9) exceeds maximum input length (4)."}'

    async def slowly(writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        for byte in body:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)

    http.raw = slowly
    _, error = await outcome(http.client)

    assert ContextLengthExceeded is type(error)


async def test_an_error_body_without_end(http, monkeypatch):
    """Of an error's body without an end, as much is read as an error can need."""
    monkeypatch.setattr(http_stream, "MAX_ERROR_BYTES", 100)
    http.raw = plain(b"no" * 100, b"500 Internal Server Error").replace(b"Length: 200", b"Length: 900")
    _, error = await asyncio.wait_for(outcome(http.client), 120)

    assert ProxyFailed is type(error)
    assert "HTTP status 500" in error.reason


@pytest.mark.parametrize(
    "raw, what",
    [
        (b"HTTP/1.1 200 OK\r\nX: %b\r\nContent-Length: 0\r\n\r\n" % bytes(b"a" * 2**20), "head"),
        (b"HTTP/1.1 200 %b\r\nContent-Length: 0\r\n\r\n" % bytes(b"a" * 2**20), "head"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000 + b"Content-Length: 0\r\n\r\n", "head"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000, "head"),
        (HEAD + b"0\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", "head"),
        (HEAD + b"5;%b\r\nhello\r\n0\r\n\r\n" % bytes(b"a" * 2**20), "head"),
        (HEAD + chunk(b"data: " + b"a" * 70_000) * 20 + b"0\r\n\r\n", "event"),
    ],
    ids=["line", "status", "lines", "interim", "trailers", "extension", "event"],
)
async def test_an_answer_is_not_read_without_end(http, monkeypatch, raw, what):
    """Whoever answers in Triton's place cannot fill the memory with what is no answer yet."""
    monkeypatch.setattr(http_stream, "MAX_EVENT_BYTES", 2**20)
    http.raw = raw
    found, error = await asyncio.wait_for(outcome(http.client), 120)

    assert ([], InvalidAnswer) == (found, type(error))
    assert error is not None
    assert error.message.endswith(f"is invalid: its {what} is too long.")
    if what == "head":
        with pytest.raises(InvalidAnswer, match="too long"):
            await asyncio.wait_for(http.client.server_info(), 120)


async def test_an_error_of_a_call_without_end(http):
    """Of a call's error without an end, as much is read as an error can need."""
    http.raw = plain(b"no" * 200_000, b"500 Internal Server Error")
    with pytest.raises(InvalidAnswer, match="too long"):
        await asyncio.wait_for(http.client.server_info(), 120)


async def test_a_stale_connection_is_replaced(http):
    """A kept connection that the server has closed costs nobody anything: the request goes over a new one."""
    http.reply = Reply(texts=["one"])
    http.close_after = True

    for _ in range(5):
        assert (["one"], None) == await outcome(http.client)
    assert (5, 5) == (len(http.requests), http.connections)


async def test_a_connection_that_dies_with_the_request(http):
    """A kept connection that breaks before a byte of the answer has come is tried once more, on a new one."""
    http.reply = Reply(texts=["one"])
    # The other one that is kept may be dead too.
    for found in await asyncio.gather(outcome(http.client), outcome(http.client)):
        assert (["one"], None) == found
    http.raw = b""
    http.close_after = True
    _, error = await outcome(http.client)

    assert "upstream_disconnected" == (error.code if error else None)
    assert (4, 3) == (len(http.requests), http.connections)


async def test_connections_that_the_server_wants_closed(http):
    """``Connection: close`` is obeyed."""
    http.raw = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + chunk(event("one")) + LAST
    # Also if the server itself takes its time.
    for http.close_after in (True, True, False, False):
        assert (["one"], None) == await outcome(http.client)

    assert (4, 4) == (len(http.requests), http.connections)


async def test_a_request_that_may_have_begun(http, monkeypatch):
    """
    A request that may have begun is not sent again: the head of its answer has come, or the connection was no stale
    one.
    """
    http.reply = Reply(texts=["one"])
    for begun, limit in ((HEAD, http_stream.STALE_SECONDS), (b"", 0.0)):
        monkeypatch.setattr(http_stream, "STALE_SECONDS", limit)
        http.raw, http.close_after = None, False
        assert (["one"], None) == await outcome(http.client)
        http.requests.clear()
        http.raw, http.close_after = begun, True
        _, error = await outcome(http.client)

        assert ("upstream_disconnected", 1) == (error.code if error else None, len(http.requests))


async def test_a_body_that_ends_within_an_event(http):
    """The answer was cut off, although its body is whole."""
    http.raw = HEAD + chunk(event("one")) + chunk(event("two")[:-5]) + LAST
    found, error = await outcome(http.client)

    assert (["one"], "upstream_disconnected") == (found, error.code if error else None)


async def test_closed_while_it_connects(http):
    """A stream that is closed while it connects sends no request."""
    http.client.stream(REQUEST, Mock()).close()
    await all_responses(http.client, REQUEST)

    assert 1 == len(http.requests)


async def test_a_stream_without_a_length(http):
    """A body that ends with its connection is whole where nothing else tells its length."""
    http.raw = HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n") + event("one") + event("two")
    http.close_after = True
    found, _ = await outcome(http.client)

    assert ["one", "two"] == found


async def test_events_without_the_outputs_asked_for_are_no_responses(http):
    """Over gRPC such a response has no outputs and is passed over; alone it is no answer."""
    flag = b'data: {"model_name":"team/m","model_version":"1","sequence_end":false}\n\n'
    for texts in (["one", "two"], []):
        http.raw = HEAD + chunk(flag + b"".join(event(text) + flag for text in texts)) + LAST
        stream = Reading(http.client, REQUEST)
        responses = await stream.read()
        assert texts == [text for response in responses for text in response.texts("text_output") or ["absent"]]
        assert [] == list(await stream.read())


async def test_closing_early_does_not_spoil_the_pool(http):
    """A stream that was closed before its end leaves no half-read answer to the next one."""
    http.reply = Reply(texts=["one", "two"])
    stream = Reading(http.client, REQUEST)
    await stream.read()
    stream.close()

    assert (["one", "two"], None) == await outcome(http.client)


@pytest.mark.parametrize(
    "raw, kind",
    [
        (plain(b'{"error":"Request for unknown model: \'m\' is not found"}', b"404 Not Found"), ModelNotFound),
        (plain(b"<html></html>", b"502 Bad Gateway"), ProxyFailed),
        (plain(b"[]", b"302 Found", b"Location: http://127.0.0.1:1/\r\n"), UpstreamUnavailable),
        (plain(b"{}"), UpstreamUnavailable),
        (plain(b"\xff\xfe"), UpstreamUnavailable),
        (plain(b""), UpstreamUnavailable),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", UpstreamLost),
        (b"garbage\r\n\r\n", UpstreamLost),
    ],
)
async def test_control_calls_that_fail(http, raw, kind):
    """An index or a config that is none is an error of ours."""
    http.close_after = True
    http.raw = raw
    for call in (http.client.repository_index(), http.client.model_config("m"), http.client.server_info()):
        with pytest.raises(ServiceError) as caught:
            await call
        assert kind is type(caught.value)


async def test_calls_share_the_connections_of_streams(http):
    """A call goes over a kept connection; one that has died meanwhile is replaced once."""
    http.reply = Reply(texts=["one"])
    assert (["one"], None) == await outcome(http.client)
    http.raw = plain(b"[]")
    assert [] == list(await http.client.repository_index())
    assert 1 == http.connections
    http.close_after = True
    for _ in range(3):
        assert [] == list(await http.client.repository_index())
    assert (5, 3) == (len(http.requests), http.connections)
    http.close_after = False
    assert [] == list(await http.client.repository_index())
    http.raw, http.close_after = b"", True
    with pytest.raises(UpstreamError) as caught:
        await http.client.infer(REQUEST)

    assert "upstream_disconnected" == caught.value.code
    assert (8, 5) == (len(http.requests), http.connections)


async def test_a_call_that_is_cancelled_leaves_no_connection(http):
    """What comes after it would be read as the answer to the next call."""
    http.reply = Reply(texts=[], end="hang")
    call = asyncio.create_task(http.client.server_info())
    async with asyncio.timeout(120):
        while not http.requests:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0)
        call.cancel()
        await http.left.wait()


async def test_a_large_infer_request(http):
    """A large infer request is made in a thread, and arrives whole."""
    texts = ("x" * (1 << 21),)
    http.raw = plain(b'{"outputs":[]}')
    with pytest.raises(UpstreamError, match="without an answer"):
        await http.client.infer(msgspec.structs.replace(REQUEST, inputs=(Tensor("t", "BYTES", (1,), texts),)))

    assert http.requests[0]["body"].endswith(texts[0].encode())


async def test_infer_over_http(http):
    """Binary tensors go and come."""
    raw = Tensor("t", "BYTES", (1,), ("é",)).raw()
    header = (
        b'{"outputs":[{"name":"text_output","datatype":"BYTES","shape":[1],"parameters":{"binary_data_size":%d}}]}'
        % len(raw)
    )
    http.raw = plain(header + raw, extra=b"Inference-Header-Content-Length: %d\r\n" % len(header))
    response = await http.client.infer(REQUEST)

    assert ["é"] == list(response.texts("text_output"))
    assert "POST /v2/models/team%2Fm/infer HTTP/1.1" == http.requests[0]["line"]
    http.raw = plain(header + raw[:-1], extra=b"Inference-Header-Content-Length: %d\r\n" % len(header))
    with pytest.raises(InvalidAnswer, match="fewer bytes"):
        await http.client.infer(REQUEST)
    http.raw = plain(header + raw, extra=b"Inference-Header-Content-Length: nonsense\r\n")
    with pytest.raises(UpstreamError):
        await http.client.infer(REQUEST)


async def test_responses_without_end(triton):
    """All responses of a stream together, where they are wanted together, have no more bytes than an answer."""
    triton.reply = Reply(texts=["x" * 1000] * 2000)
    assert 2000 == len(await all_responses(triton.client, msgspec.structs.replace(REQUEST, max_answer=4 * MIB)))
    triton.sent = 0
    with pytest.raises(InvalidAnswer, match="too long together"):
        await all_responses(triton.client, msgspec.structs.replace(REQUEST, max_answer=100_000))


async def test_an_infer_answer_without_end_over_http(http):
    """No more is read of an answer than the model can return, however much comes."""
    sent = 0

    async def endless(writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4000000000\r\n\r\n")
        while not writer.transport.is_closing():
            writer.write(bytes(MIB))
            sent += MIB
            await writer.drain()

    http.raw = endless
    with pytest.raises(InvalidAnswer, match="its body is too long"):
        await http.client.infer(msgspec.structs.replace(REQUEST, max_answer=4 * MIB))
    # What the sockets hold beside that.
    assert sent < 64 * MIB


# gRPC alone.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_grpc_answer_that_is_too_long(grpc_server, monkeypatch, stream):
    """The same, of streams by their requests, and of single calls by the limit of their channel."""
    monkeypatch.setattr(grpc_module, "_MAX_ANSWER", 4 * MIB)
    text = "x" * (5 * MIB)
    grpc_server.reply, grpc_server.answer = Reply(texts=[text]), text
    request = msgspec.structs.replace(REQUEST, stream=stream, max_answer=4 * MIB - 70_000)
    for _ in range(2):
        with pytest.raises(InvalidAnswer, match="its body is too long"):
            await all_responses(grpc_server.client, request)
    larger = msgspec.structs.replace(request, max_answer=8 * MIB)
    (response,) = await all_responses(grpc_server.client, larger)
    assert [text] == response.texts("text_output")


async def test_the_request_over_grpc(grpc_server):
    """Id, model and raw contents arrive."""
    grpc_server.reply = Reply(texts=["one"])
    await outcome(grpc_server.client)

    raw = [tensor.raw() for tensor in REQUEST.inputs]
    assert [{"id": "id-1", "model": "team/m", "raw": raw}] == grpc_server.requests


async def test_flags_alone_are_no_responses(grpc_server):
    """A final flag without outputs is passed over, in the middle and at the end."""

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        for text in (None, "one", None, "two", None):
            yield stream_response(text)

    grpc_server.script = script
    assert (["one", "two"], None) == await outcome(grpc_server.client)


async def test_an_error_is_the_end(grpc_server):
    """What comes after an error (a BLS model sends its flag there) is not waited for."""

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        yield stream_response("one")
        yield service_pb2.ModelStreamInferResponse(error_message="something")
        await asyncio.Event().wait()

    grpc_server.script = script
    found, error = await outcome(grpc_server.client)

    assert (["one"], "The model failed: something") == (found, str(error))
    await asyncio.wait_for(grpc_server.left.wait(), 120)


@pytest.mark.parametrize(
    "code, details, kind",
    [
        (grpc.StatusCode.INTERNAL, "Error generating stream: no prompt", RequestRefused),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'm' is not found", ModelNotFound),
        (
            grpc.StatusCode.UNAVAILABLE,
            "GRPC server is shutting down and has stopped accepting new requests.",
            UpstreamUnavailable,
        ),
        (grpc.StatusCode.UNAVAILABLE, "who knows", UpstreamUnavailable),
        (grpc.StatusCode.CANCELLED, "", UpstreamError),
        (grpc.StatusCode.UNIMPLEMENTED, "", NotImplementedUpstream),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", InvalidAnswer),
        (grpc.StatusCode.UNKNOWN, "", UpstreamError),
    ],
)
@pytest.mark.parametrize("texts", [[], ["one"]])
async def test_a_call_that_ends_with_a_status(grpc_server, code, details, kind, texts):
    """A status at the end of a call is an error, after the responses before it, in streams and in single calls."""
    grpc_server.reply = Reply(texts=texts)
    grpc_server.status = (code, details)
    found, error = await outcome(grpc_server.client)

    assert (texts, kind) == (found, type(error))
    with pytest.raises(kind):
        await grpc_server.client.infer(REQUEST)
    with pytest.raises(kind):
        await grpc_server.client.repository_index()


@every_case(
    "status, code",
    [
        ("200", {"upstream_unavailable", "upstream_disconnected"}),
        ("302", {"upstream_unavailable"}),
        ("401", {"upstream_unavailable"}),
        ("404", {"upstream_unavailable"}),
        ("502", {"upstream_disconnected"}),
        ("503", {"upstream_unavailable"}),
    ],
)
async def test_what_answers_in_place_of_a_triton_over_grpc(status, code):
    """A page over HTTP/2 is no answer of gRPC, in a stream or in a call."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            await reader.readexactly(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
            writer.write(http2_frames.frame(http2_frames.SETTINGS, 0, 0))
            while True:
                head = await reader.readexactly(9)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                stream_id = int.from_bytes(head[5:], "big")
                if head[3] == http2_frames.DATA and head[4] & http2_frames.END_STREAM:
                    page = http2_frames.header_block(((":status", status), ("content-type", "text/html")))
                    writer.write(http2_frames.frame(http2_frames.HEADERS, http2_frames.END_HEADERS, stream_id, page))
                    writer.write(http2_frames.frame(http2_frames.DATA, http2_frames.END_STREAM, stream_id, _PAGE))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = GrpcClient(
        f"grpc://127.0.0.1:{server.sockets[0].getsockname()[1]}", ConnectionSettings(connect_timeout=60)
    )
    try:
        _, error = await outcome(client)
        assert error is not None
        assert error.code in code
        for call in (client.infer(REQUEST), client.model_config("m"), client.repository_index()):
            with pytest.raises(ServiceError) as caught:
                await call
            assert caught.value.code in code
    finally:
        await client.close()
        server.close()


async def test_control_calls_over_grpc(grpc_server):
    """The server's version and the index are read."""
    assert "2.51.0" == (await grpc_server.client.server_info()).version
    index = await grpc_server.client.repository_index()

    assert [("a", True, ""), ("b", False, "unloaded")] == [(entry.name, entry.ready, entry.reason) for entry in index]
    response = await grpc_server.client.infer(REQUEST)
    assert ["one"] == list(response.texts("text_output"))


async def test_an_answer_without_outputs(http, grpc_server):
    """Triton says OK for a model that ended without a response: that is no empty answer."""
    header = b'{"model_name":"m","model_version":"1","outputs":[]}'
    http.raw = plain(header, extra=b"Inference-Header-Content-Length: %d\r\n" % len(header))
    grpc_server.answer = None

    for client in (http.client, grpc_server.client):
        with pytest.raises(UpstreamError, match="ended without an answer"):
            await client.infer(REQUEST)


async def test_a_call_that_cannot_be_stopped_is_read_out(grpc_server):
    """Where cancelling would end nothing (and could crash Triton 24.10) the rest is read and dropped."""
    go_on = asyncio.Event()

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        yield stream_response("one")
        await go_on.wait()
        for _ in range(100):
            # More than a stream's window.
            yield stream_response("more" * 5_000)
            grpc_server.sent += 1

    grpc_server.script = script
    stream = Reading(grpc_server.client, msgspec.structs.replace(REQUEST, cancellable=False))
    await stream.read()
    stream.stream.pause()
    stream.close()
    stream.close()
    go_on.set()

    await until(lambda: grpc_server.sent == 100)
    assert not grpc_server.left.is_set()
    assert () == tuple(await stream.read())


@pytest.mark.parametrize("how", ["client", "time"])
async def test_the_end_of_what_is_read_out(grpc_server, monkeypatch, how):
    """Nothing keeps the service from ending, and no call goes on for ever."""
    grpc_server.reply = Reply(texts=["one"], end="hang")
    stream = Reading(grpc_server.client, msgspec.structs.replace(REQUEST, cancellable=False))
    await stream.read()
    if how == "time":
        monkeypatch.setattr("triton_openai.triton.grpc._READ_OUT_SECONDS", 0.0)
    stream.close()

    if how == "client":
        await grpc_server.client.close()

    await asyncio.wait_for(grpc_server.left.wait(), 120)


async def test_a_large_request(grpc_server):
    """
    A large request arrives whole, whatever the windows of the connection are; its encoding does not hold the loop.
    """
    grpc_server.reply = Reply(texts=["one"])
    image = Tensor("image", "UINT8", (5_000_000,), bytes(range(256)) * 20_000)
    request = msgspec.structs.replace(REQUEST, inputs=(*REQUEST.inputs, image))

    assert (["one"], None) == await outcome(grpc_server.client, request)
    assert image.values == grpc_server.requests[0]["raw"][-1]


async def test_closing_while_a_large_request_is_encoded(grpc_server):
    """
    A large request that is closed while it is encoded is not sent, not even where a running call is read to its
    end.
    """
    image = Tensor("image", "UINT8", (5_000_000,), bytes(5_000_000))
    large = msgspec.structs.replace(REQUEST, inputs=(image,))
    for request in (large, msgspec.structs.replace(large, cancellable=False)):
        before = asyncio.all_tasks()
        reading = Reading(grpc_server.client, request)
        tasks = asyncio.all_tasks() - before
        reading.close()
        await asyncio.wait(tasks, timeout=120)

    assert ([], None) == await outcome(grpc_server.client)
    assert (1, [len(REQUEST.inputs)]) == (grpc_server.calls, [len(request["raw"]) for request in grpc_server.requests])


async def test_a_server_that_shuts_down(grpc_server):
    """A server that shuts down finishes the streams that run; who comes then does not reach it."""
    go_on = asyncio.Event()

    async def script(request: Any, context: Any) -> AsyncIterator[Any]:
        yield stream_response("one")
        await go_on.wait()
        yield stream_response("two")

    grpc_server.script = script
    reading = Reading(grpc_server.client, REQUEST)
    assert ["one"] == list((await reading.read())[0].texts("text_output"))
    stopping = asyncio.create_task(grpc_server._server.stop(600))
    # What reaches the server before its farewell reaches us is never answered.
    await until(lambda: not grpc_server.client._streams._current.has_capacity)
    _, error = await outcome(grpc_server.client)
    assert UpstreamUnavailable is type(error)
    go_on.set()
    assert ["two"] == await texts_of(reading)
    await stopping


async def test_a_large_request_that_cannot_be_encoded(grpc_server):
    """The receiver hears of it."""
    numbers = Tensor("numbers", "INT8", (2_000_000,), [1000] * 2_000_000)
    reading = Reading(grpc_server.client, msgspec.structs.replace(REQUEST, inputs=(numbers,)))

    with pytest.raises(OverflowError):
        await reading.read()


@every_case("protocol, kind", [("h2", NoneType), ("http/1.1", UpstreamUnavailable)])
async def test_streams_over_tls(tmp_path: Path, protocol: str, kind: type[object]) -> None:
    """Client and server agree on HTTP/2 (ALPN); what speaks something else is not Triton."""
    authority = Authority(tmp_path)
    server = FakeGrpc()
    await server.start()
    server.reply = Reply(texts=["one", "x" * 1_000_000])
    port = int(server.url.rpartition(":")[2])
    settings = ConnectionSettings(connect_timeout=60, access=TritonAccess(ca=authority.file))
    async with relaying(port, authority.server(authority.issue("triton"), protocol=protocol)) as relay:
        client = GrpcClient(f"grpcs://127.0.0.1:{relay.port}", settings)
        found, error = await outcome(client)
        await client.close()
    await server.stop()

    assert (server.reply.texts if kind is NoneType else [], kind) == (found, type(error))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "id", "i" * 120]),
            st.lists(st.sampled_from([b"", b"\x01\x00\x00\x00a", bytes(130), bytes(17_000)]), max_size=3),
            st.booleans(),
            st.booleans(),
        ),
        max_size=6,
    )
)
@example([("i" * 120, [b""], True, True)] * 2)
def test_a_stream_reads_what_protobuf_reads(answers: list[tuple[str, list[bytes], bool, bool]]) -> None:
    """
    Whatever the responses of a stream have in common, and also where a response differs from those before it.

    Contents may come before the other fields.
    """
    received: list[Any] = []
    stream = GrpcStream(Mock(), REQUEST, Mock(receive=received.extend), Mock())
    for number, contents, last, early in answers:
        answer = service_pb2.ModelInferResponse()
        answer.model_name, answer.id = "m", number
        answer.parameters["triton_final_response"].bool_param = last
        for place in range(len(contents)):
            answer.outputs.add(name=f"t{place}", datatype="BYTES", shape=[1])
        parts = [answer, service_pb2.ModelInferResponse(raw_output_contents=contents)]
        data = b"".join(part.SerializeToString() for part in (reversed(parts) if early else parts))
        stream.messages_received([b"\x12" + varint(len(data)) + data])

    found = [[response.tensor(f"t{place}") for place in range(3)] for response in received]
    assert [contents for _, contents, *_ in answers if contents] == [
        [tensor.data for tensor in tensors if tensor is not None] for tensors in found
    ]


async def test_an_answer_that_cannot_be_read() -> None:
    """
    An answer that cannot be read is the upstream's fault; responses before it are received, and the call is
    cancelled.
    """
    whole, incomplete = stream_response("one"), stream_response("two")
    whole.infer_response.id = incomplete.infer_response.id = "i" * 120
    incomplete.infer_response.ClearField("raw_output_contents")
    for bad in (b"\xff", incomplete.SerializeToString()):
        ended: list[Exception | None] = []
        received: list[Any] = []
        receiver = Mock(receive=received.extend, end=ended.append)
        stream = GrpcStream(Mock(), REQUEST, receiver, Mock())
        stream.connection = connection = Mock()
        stream.messages_received([whole.SerializeToString(), bad])
        stream.messages_received([stream_response("two").SerializeToString()])

        assert [["one"]] == [response.texts("text_output") for response in received]
        assert [InvalidAnswer] == [type(error) for error in ended]
        assert connection.reset.called


def test_doubts_about_a_connection() -> None:
    """A stream that was silent is the last on its connection, a stream that was closed for another reason is not."""
    for silent in (True, False):
        distrust = Mock()
        GrpcStream(Mock(), REQUEST, Mock(), distrust).close(silent=silent)
        assert silent is distrust.called


@every_case("limit", [0.05, None])
async def test_calls_that_are_not_answered(limit: float | None) -> None:
    """Further calls get a new connection after one that took too long, or that its caller gave up on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"grpc://127.0.0.1:{listening.getsockname()[1]}"
        settings = ConnectionSettings(connect_timeout=60, control_timeout=limit or 60)
        client = GrpcClient(url, settings)
        # The channel is made now: with the shorter timeout, it would fail before the call takes too long.
        before = client.channel(0)
        settings.connect_timeout = 0
        with pytest.raises(UpstreamTimeout if limit else TimeoutError):
            async with asyncio.timeout(None if limit else 0.05):
                await client.server_info()

        assert before is not client.channel(0)
        await client.close()


def test_connections_that_break() -> None:
    """Connections that break have grpc.aio's texts: of an answer cut off, or of a Triton that was not reached."""
    for text, kind in (
        ("Socket closed", UpstreamLost),
        ("Connection reset by peer", UpstreamLost),
        ("GOAWAY received", UpstreamLost),
        ("failed to connect to all addresses; last error: Connection reset by peer", UpstreamUnavailable),
        ("DNS resolution failed", UpstreamUnavailable),
    ):
        assert kind is type(call_error("UNAVAILABLE", text, "m"))
