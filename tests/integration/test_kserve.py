"""Triton's own protocol through the relays, as `tritonclient` speaks it."""

from __future__ import annotations

import asyncio
import io
import json
import queue
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc as sync_grpc
import tritonclient.grpc.aio as aio_grpc
import tritonclient.http as sync_http
import tritonclient.http.aio as aio_http
from aiohttp import web
from aiohttp.test_utils import TestServer
from tritonclient.utils import InferenceServerException
from yarl import URL

from tests.integration.test_discovery import until
from tests.relays import SERVER, Relays, Upstream, relay_guard, relayed
from tests.triton_fixture import TestTriton
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.errors import ConfigurationError
from triton_openai.triton.relay.frontends import start_frontends

NAMES_THE_FLAG = "the service allows it with --model-control-mode explicit"
NOT_RELAYED = "or it is not relayed"


@pytest_asyncio.fixture
async def relays(triton: TestTriton) -> AsyncIterator[Relays]:
    """Both frontends in front of the session's Triton."""
    async with relayed(triton.http_url, triton.grpc_url) as relays:
        yield relays


def text(kind: Any, name: str, *values: str) -> Any:
    """Return an input of texts."""
    tensor = kind.InferInput(name, [len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode() for value in values], dtype=object))
    return tensor


def asked(kind: Any, *, steer: dict[str, Any], stream: bool = True) -> list[Any]:
    """Return the inputs of a request to vLLM's stand-in."""
    flag = kind.InferInput("stream", [1], "BOOL")
    flag.set_data_from_numpy(np.array([stream]))
    return [
        text(kind, "text_input", f"<<steer {json.dumps(steer)}>>"),
        flag,
        text(kind, "sampling_parameters", json.dumps({"max_tokens": "2000"})),
    ]


# tritonclient


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
async def test_tritonclient_over_http(relays, compression):
    """Health, metadata, configuration, statistics, index and binary tensors, also compressed."""

    def use() -> Any:
        with sync_http.InferenceServerClient(relays.http) as client:
            assert client.is_server_live()
            assert client.is_server_ready()
            assert client.is_model_ready("text_embedding")
            assert not client.is_model_ready("nobody")
            assert "triton" == client.get_server_metadata()["name"]
            assert "text_embedding" == client.get_model_metadata("text_embedding")["name"]
            assert "text_embedding" == client.get_model_config("text_embedding")["name"]
            assert client.get_inference_statistics("text_embedding")["model_stats"]
            assert client.get_model_repository_index()
            answer = client.infer(
                "text_embedding",
                [embedding_input(sync_http, "one")],
                headers={"X-Mine": "yes"},
                request_compression_algorithm=compression,
                response_compression_algorithm=compression,
            )
            return answer.as_numpy(answer.get_response()["outputs"][0]["name"])

    assert np.any(await asyncio.to_thread(use))


def embedding_input(kind: Any, *values: str) -> Any:
    """Return what the model of embeddings takes."""
    tensor = kind.InferInput("text", [len(values), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[value.encode()] for value in values], dtype=object))
    return tensor


async def test_tritonclient_over_aio_http(relays):
    """The variant on asyncio."""
    async with aio_http.InferenceServerClient(relays.http) as client:
        assert await client.is_server_ready()
        answers = await asyncio.gather(
            *(client.infer("text_embedding", [embedding_input(aio_http, str(number))]) for number in range(20))
        )
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
            await client.infer("nobody", [embedding_input(aio_http, "one")])

    assert 20 == len(answers)


async def test_tritonclient_over_grpc(relays):
    """The same over gRPC, with compression and with errors as Triton words them."""

    def use() -> None:
        with sync_grpc.InferenceServerClient(relays.grpc) as client:
            assert client.is_server_live()
            assert client.is_model_ready("text_embedding")
            assert "triton" == client.get_server_metadata().name
            assert "text_embedding" == client.get_model_config("text_embedding").config.name
            assert client.get_inference_statistics("text_embedding").model_stats
            assert client.get_model_repository_index().models
            inputs = [embedding_input(sync_grpc, "one")]
            for compression in (None, "gzip", "deflate"):
                answer = client.infer("text_embedding", inputs, compression_algorithm=compression)
                assert answer.get_response().outputs
            with pytest.raises(InferenceServerException, match="unknown model") as caught:
                client.infer("nobody", inputs)
            assert "StatusCode.NOT_FOUND" == caught.value.status()

    await asyncio.to_thread(use)


async def test_decoupled_streams_of_tritonclient(relays):
    """A decoupled stream over gRPC's own thread: all answers in order, and several requests in one stream."""

    def use() -> list[str]:
        found: queue.Queue[Any] = queue.Queue()
        with sync_grpc.InferenceServerClient(relays.grpc) as client:
            client.start_stream(lambda result, error: found.put(error or result))
            for words in ("one two three", "three two"):
                client.async_stream_infer("vllm_model", asked(sync_grpc, steer={"text": words}))
                client.async_stream_infer("nobody", asked(sync_grpc, steer={"text": words}))
            client.stop_stream()
        answers = []
        while not found.empty():
            answers.append(found.get())
        assert 2 == sum(isinstance(answer, Exception) for answer in answers)
        return [answer.as_numpy("text_output")[0].decode() for answer in answers if not isinstance(answer, Exception)]

    pieces = await asyncio.to_thread(use)
    first, second = (words.replace(" ", "") for words in ("one two three", "three two"))
    assert sorted(first + second) == sorted("".join(pieces).replace(" ", ""))


async def test_decoupled_streams_of_aio_tritonclient(relays):
    """Tokens pass when they come, not when the stream ends."""
    async with aio_grpc.InferenceServerClient(relays.grpc) as client:
        proceed = asyncio.Event()

        async def requests() -> AsyncIterator[dict[str, Any]]:
            yield {"model_name": "vllm_model", "inputs": asked(aio_grpc, steer={"text": "one"})}
            await proceed.wait()
            yield {"model_name": "vllm_model", "inputs": asked(aio_grpc, steer={"text": "two"})}

        texts = []
        async for result, error in client.stream_infer(requests()):
            assert error is None
            texts.append(result.as_numpy("text_output")[0].decode())
            # The second request is sent only after the first answer has come: neither side waits for the other's end.
            proceed.set()

    assert "onetwo" == "".join(texts)


# Streams


async def test_cancellation_over_grpc(relays, triton):
    """A client that cancels a stream stops the work in Triton."""
    async with aio_grpc.InferenceServerClient(relays.grpc) as client:

        async def requests() -> AsyncIterator[dict[str, Any]]:
            # Triton 24.10 crashes now and then when it is cancelled while it writes: there is time in between.
            steer = {"text": "one two three", "repeat": 500, "delay_ms": 300}
            yield {"model_name": "vllm_model", "request_id": "leaves-grpc", "inputs": asked(aio_grpc, steer=steer)}
            await asyncio.Event().wait()

        iterator = client.stream_infer(requests())
        await iterator.__anext__()
        iterator.cancel()
        await until(lambda: was_cancelled(triton, "leaves-grpc"))


async def was_cancelled(triton: TestTriton, request_id: str) -> bool:
    """Return whether the model saw that the request was cancelled."""
    return bool(triton.record.events(id=request_id, event="cancelled"))


def generate(request_id: str = "", **steer: Any) -> dict[str, Any]:
    """Return the body of a generate call."""
    return {
        "id": request_id,
        "text_input": f"<<steer {json.dumps(steer)}>>",
        "stream": True,
        "sampling_parameters": json.dumps({"max_tokens": "2000"}),
    }


async def test_streams_over_http(relays):
    """Events pass one by one."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://{relays.http}/v2/models/vllm_model/generate_stream", json=generate(text="one two three")
        ) as response,
    ):
        events = (await response.read()).decode().split("\n\n")

    assert "text/event-stream" in response.headers["Content-Type"]
    assert ["one", " two", " three"] == [
        json.loads(event.removeprefix("data: "))["text_output"] for event in events if event
    ][:3]


@pytest.mark.parametrize("path", ["/v2/health/ready", "/v2/models/vllm_model"])
async def test_only_heads(relays, path):
    """Triton refuses HEAD with a body, which no answer to it has: that is no Triton that is away."""
    async with aiohttp.ClientSession() as session, session.head(f"http://{relays.http}{path}") as response:
        assert 405 == response.status
        assert b"" == await response.read()


async def test_cancellation_over_http(relays, triton):
    """A client that leaves stops the work in Triton."""
    body = generate("leaves-http", text="one two three", repeat=500, delay_ms=20)
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://{relays.http}/v2/models/vllm_model/generate_stream", json=body) as response,
    ):
        await response.content.readany()
        response.close()
    await until(lambda: was_cancelled(triton, "leaves-http"))


# What manages the server


@pytest.mark.parametrize(
    "method, path, status",
    [
        ("POST", "/v2/repository/models/text_embedding/load", 403),
        ("POST", "/v2/repository/models/text_embedding/unload", 403),
        ("GET", "/v2/systemsharedmemory/status", 404),
        ("POST", "/v2/systemsharedmemory/region/mine/register", 404),
        ("POST", "/v2/cudasharedmemory/region/mine/unregister", 404),
        ("GET", "/v2/trace/setting", 404),
        ("POST", "/v2/models/text_embedding/trace/setting", 404),
        ("POST", "/v2/logging", 404),
    ],
)
async def test_management_is_off_over_http(relays, method, path, status):
    """It is refused in the form of Triton's errors; where a flag allows it, the sentence names the flag."""
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://{relays.http}{path}", json={}) as response,
    ):
        assert status == response.status
        assert (NAMES_THE_FLAG if status == 403 else NOT_RELAYED) in (await response.json())["error"]


@pytest.mark.parametrize(
    "path",
    [
        "//v2/repository/models/text_embedding/unload",
        "/v2//repository/models/text_embedding/unload",
        "/v2/./repository/models/text_embedding/unload",
        "/v2/models/../repository/models/text_embedding/unload",
        "/v2/%72epository/models/text_embedding/unload",
        "/V2/repository/models/text_embedding/unload",
        "/v2/repository/models/text_embedding/unload/",
        "/v2/repository/models/text_embedding/%75nload",
        "/v2/models/x%2Ftrace%2Fsetting%3F/infer",
        "/v2/models/x%252Ftrace%252Fsetting%2523/infer",
        "/v2/models/..%2Frepository%2Fmodels%2Ftext_embedding%2Funload%23/infer",
        "http://127.0.0.1/v2/repository/models/text_embedding/unload",
        "/v2/repository/models/text_embedding/unload;x",
        "*",
        "/",
        "/metrics",
    ],
)
async def test_no_way_around(relays, path):
    """What is not exactly an operation that is known is not relayed."""
    reader, writer = await asyncio.open_connection(*relays.http.split(":"))
    writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: 0\r\n\r\n".encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()

    assert answer.split()[1] in (b"400", b"404"), answer


@pytest.mark.parametrize(
    "framing",
    [
        "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        "Content-Length: 5\r\nContent-Length: 0\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Content-Length: +0\r\n",
    ],
)
async def test_no_request_inside_another(relays, triton, framing):
    """A body that another parser would take for a further request reaches Triton as a body, or not at all."""
    hidden = b"POST /v2/repository/models/text_embedding/unload HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    reader, writer = await asyncio.open_connection(*relays.http.split(":"))
    writer.write(b"POST /v2/repository/index HTTP/1.1\r\nHost: x\r\n" + framing.encode() + b"\r\n0\r\n\r\n" + hidden)
    writer.write_eof()
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()

    # Triton would say that this is not its mode; the relay says that it is off, or that this is no request.
    assert b"polling is enabled" not in answer
    assert b" 200 " not in answer.split(b"\r\n")[0] or b" 403 " in answer


async def test_management_is_off_over_grpc(relays):
    """The same over gRPC, and what is not known is not there."""
    async with aio_grpc.InferenceServerClient(relays.grpc) as client:
        for call, status, message in (
            (client.load_model("text_embedding"), "PERMISSION_DENIED", NAMES_THE_FLAG),
            (client.unload_model("text_embedding"), "PERMISSION_DENIED", NAMES_THE_FLAG),
            (client.get_system_shared_memory_status(), "UNIMPLEMENTED", NOT_RELAYED),
            (client.register_system_shared_memory("mine", "/mine", 8), "UNIMPLEMENTED", NOT_RELAYED),
            (client.get_trace_settings(), "UNIMPLEMENTED", NOT_RELAYED),
            (client.get_log_settings(), "UNIMPLEMENTED", NOT_RELAYED),
        ):
            with pytest.raises(InferenceServerException, match=message) as caught:
                await call
            assert f"StatusCode.{status}" == caught.value.status()
    async with grpc.aio.insecure_channel(relays.grpc) as channel:
        for method in ("/inference.GRPCInferenceService/Nothing", "/inference.grpcinferenceservice/ServerLive", "/x/y"):
            with pytest.raises(grpc.aio.AioRpcError) as failed:
                await one_call(channel, method, b"")
            assert grpc.StatusCode.UNIMPLEMENTED == failed.value.code()


async def one_call(channel: grpc.aio.Channel, method: str, message: bytes) -> bytes:
    """Return the answer to a call with one message."""
    multi_callable: Any = channel.unary_unary(method)
    return bytes(await multi_callable(message))


async def test_model_control(triton):
    """In explicit mode loading passes; Triton's answer, here that it is in another mode, comes back as it is."""
    mode = {"model_control_mode": "explicit"}
    async with relayed(triton.http_url, triton.grpc_url, triton=mode) as relays:
        async with aio_grpc.InferenceServerClient(relays.grpc) as client:
            with pytest.raises(InferenceServerException, match="not allowed if polling") as caught:
                await client.load_model("text_embedding")
            assert "StatusCode.UNAVAILABLE" == caught.value.status()
            for name in ("..", "../x", "/etc", "a\0b"):
                with pytest.raises(InferenceServerException, match="is not a valid folder name") as refused:
                    await client.load_model(name)
                assert "StatusCode.INVALID_ARGUMENT" == refused.value.status()
        async with aiohttp.ClientSession() as session:
            for name, status in (("text_embedding", 503), ("%2e%2e", 400), ("%252e%252e", 404), ("a%2Fb", 400)):
                address = f"http://{relays.http}/v2/repository/models/{name}/load"
                async with session.post(URL(address, encoded=True)) as response:
                    assert status == response.status, name
        assert [] == relays.changes


# Metadata, trailers, back pressure, faults


@asynccontextmanager
async def in_front_of(answer: Callable[[Any], Any]) -> AsyncIterator[Any]:
    """Yield a channel to the relay in front of such a server."""
    server = grpc.aio.server(handlers=(Upstream(answer),), options=(("grpc.max_receive_message_length", -1),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            relayed("http://127.0.0.1:1", f"grpc://127.0.0.1:{port}") as relays,
            grpc.aio.insecure_channel(relays.grpc, options=(("grpc.max_receive_message_length", -1),)) as channel,
        ):
            yield channel
    finally:
        await server.stop(0)


_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


async def test_metadata_and_trailers():
    """Both ways, texts and bytes, repeated keys; with a failure too."""
    seen: list[Any] = []

    async def answer(context: Any) -> None:
        seen.extend(context.invocation_metadata())
        await context.send_initial_metadata((("mine", "1"), ("mine", "2")))
        async for message in reading(context):
            await context.write(message[::-1])
        await context.abort(grpc.StatusCode.DATA_LOSS, "gone wrong", (("end-bin", b"\0\xff"),))

    async with in_front_of(answer) as channel:
        call = channel.stream_stream(_STREAM)(metadata=(("to", "a"), ("to", "b"), ("to-bin", b"\0\1")))
        await call.write(b"ab")
        assert b"ba" == await call.read()
        assert ["1", "2"] == [value for key, value in await call.initial_metadata() if key == "mine"]
        # Half-closed: the upstream sees the end and says how it went.
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError):
            assert grpc.aio.EOF is not await call.read()
        trailers = dict(await call.trailing_metadata())
        assert (grpc.StatusCode.DATA_LOSS, "gone wrong") == (await call.code(), await call.details())

    assert b"\0\xff" == trailers["end-bin"]
    assert [("to", "a"), ("to", "b"), ("to-bin", b"\0\1")] == [tuple(pair) for pair in seen if pair[0].startswith("to")]


async def reading(context: Any) -> AsyncIterator[bytes]:
    """Yield what the client sends."""
    while (message := await context.read()) is not grpc.aio.EOF:
        yield message


async def test_big_messages():
    """Tens of megabytes pass both relays in both directions: nothing has gRPC's default limit of 4 MiB."""
    big = random.Random(1).randbytes(24 << 20)

    async def answer(context: Any) -> None:
        await context.write(await context.read())

    async with in_front_of(answer) as channel:
        assert big == await one_call(channel, "/inference.GRPCInferenceService/ModelInfer", big)

    async def echo(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for piece in request.content.iter_any():
            await response.write(piece)
        return response

    app = web.Application()
    app.router.add_post("/v2/models/m/infer", echo)
    async with (
        TestServer(app) as server,
        relayed(str(server.make_url("")), "grpc://127.0.0.1:1") as relays,
        aiohttp.ClientSession() as session,
    ):
        for data in (io.BytesIO(big), in_pieces(big)):
            async with session.post(f"http://{relays.http}/v2/models/m/infer", data=data) as response:
                assert big == await response.read()


async def in_pieces(data: bytes) -> AsyncIterator[bytes]:
    """Yield *data* in pieces, which are sent without telling their length before."""
    for begin in range(0, len(data), 1 << 20):
        yield data[begin : begin + (1 << 20)]


async def test_deadlines_are_passed_on():
    """Triton learns how long the client will wait, and that it waits no longer."""
    left: list[float] = []
    ended = asyncio.Event()

    async def answer(context: Any) -> None:
        left.append(context.time_remaining())
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with in_front_of(answer) as channel:
        call = channel.stream_stream(_STREAM)(timeout=2)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError):
            await call.read()
        assert grpc.StatusCode.DEADLINE_EXCEEDED == await call.code()
        await asyncio.wait_for(ended.wait(), 10)

    assert 0 < left[0] < 5


async def test_a_slow_reader_holds_the_server_back():
    """A client that does not read stops the reading from Triton: what lies in between stays small."""
    sent: list[int] = []
    written = asyncio.Event()

    async def answer(context: Any) -> None:
        for number in range(400):
            await context.write(bytes(1 << 20))
            sent.append(number)
            written.set()

    async with in_front_of(answer) as channel:
        call = channel.stream_stream(_STREAM)()
        await call.done_writing()
        await call.read()
        # It goes on until the buffers are full, and then no further.
        while written.is_set():
            written.clear()
            try:
                await asyncio.wait_for(written.wait(), 1.0)
            except TimeoutError:
                break
        held = len(sent)
        rest = 0
        while await call.read() is not grpc.aio.EOF:
            rest += 1

    assert held < 100
    assert (399, 400) == (rest, len(sent))


async def test_a_triton_that_is_away():
    """Each relay says so in the form of its protocol."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        async with relayed(f"http://127.0.0.1:{port}", f"grpc://127.0.0.1:{port}") as relays:
            async with aiohttp.ClientSession() as session, session.get(f"http://{relays.http}/v2") as response:
                assert 503 == response.status
                assert {"error": "Triton cannot be reached at the moment."} == await response.json()
            async with aio_grpc.InferenceServerClient(relays.grpc) as client:
                with pytest.raises(InferenceServerException) as caught:
                    await client.is_server_live()
                assert "StatusCode.UNAVAILABLE" == caught.value.status()


async def test_an_answer_that_is_cut_off():
    """It does not look complete to the client either."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with (
        server,
        relayed(url, "grpc://127.0.0.1:1") as relays,
        aiohttp.ClientSession() as session,
        session.get(f"http://{relays.http}/v2") as response,
    ):
        with pytest.raises(aiohttp.ClientError):
            await response.read()


# Starting


async def test_ports_that_are_taken(triton):
    """Another program's port is not shared, and the message names the flag."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for field, flag in (("kserve_http_port", "--kserve-http-port"), ("kserve_grpc_port", "--kserve-grpc-port")):
            with pytest.raises(ConfigurationError, match=flag):
                async with relayed(triton.http_url, triton.grpc_url, server={field: port}):
                    pass


async def test_both_addresses_are_needed(triton):
    """One protocol cannot be turned into the other here."""
    for url, missing in ((triton.http_url, "grpc"), (triton.grpc_url, "http")):
        settings = Settings(server=SERVER, triton=TritonSettings(url=(url,)))
        with pytest.raises(ConfigurationError, match=missing):
            await start_frontends(settings, guard=relay_guard(settings), changed=lambda: None)


async def test_they_are_off_unless_enabled(triton):
    """Without the flag there are none."""
    settings = Settings(triton=TritonSettings(url=(triton.http_url,)))

    assert [] == await start_frontends(settings, guard=relay_guard(settings), changed=lambda: None)
