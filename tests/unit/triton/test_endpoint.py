"""Addresses at which something else than the Triton that was meant listens: each is told what to write instead."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cases import every_case
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.ports import free_port
from tests.tls_fixture import Authority
from triton_openai.app import create_app
from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.errors import ServiceError
from triton_openai.triton.endpoint import Endpoint, listener_hint
from triton_openai.triton.tensors import InferRequest


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's gRPC service, of which nothing is implemented."""


@asynccontextmanager
async def grpc_port(pem: bytes | None = None, servicer: Servicer | None = None) -> AsyncIterator[str]:
    """Yield host and port of a gRPC server."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer or Servicer(), server)
    if pem is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(pem, pem)]))
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@asynccontextmanager
async def http_port(app: web.Application | None = None, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Yield host and port of a web server."""
    async with TestServer(app or web.Application(), skip_url_asserts=True) as server:
        if tls is None:
            yield f"127.0.0.1:{server.port}"
            return
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


@asynccontextmanager
async def another_of_us(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of another triton-openai, which finds no Triton."""
    settings = Settings(triton=TritonSettings(url=("http://127.0.0.1:1",)))
    async with http_port(create_app(settings)) as address:
        yield address


@asynccontextmanager
async def plain_grpc(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of a gRPC server without TLS."""
    async with grpc_port() as address:
        yield address


@asynccontextmanager
async def plain_http(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of a web server without TLS."""
    async with http_port() as address:
        yield address


@asynccontextmanager
async def triton_http(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of a server that closes, as Triton's HTTP server does, what begins in another protocol."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            head = await reader.readline()
            if head.endswith(b"HTTP/1.1\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def tls_grpc(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of a gRPC server with TLS."""
    async with grpc_port(Authority(tmp_path).issue("server").read_bytes()) as address:
        yield address


@asynccontextmanager
async def tls_http(tmp_path: Path) -> AsyncIterator[str]:
    """Yield host and port of a web server with TLS."""
    authority = Authority(tmp_path)
    async with http_port(tls=authority.server(authority.issue("server"))) as address:
        yield address


@pytest.mark.parametrize(
    "scheme, listening, looks, write",
    [
        ("http", plain_grpc, "looks like a gRPC port", "grpc://"),
        ("http", tls_http, "perhaps wants TLS", "https://"),
        ("http", another_of_us, "looks like another triton-openai", "8000 by default"),
        ("http", plain_http, "answers HTTP, but does not look like a Triton", "8000 by default"),
        ("https", plain_http, "does not use TLS", "http://"),
        ("https", plain_grpc, "does not use TLS", "http://"),
        ("grpc", plain_http, "looks like an HTTP port", "http://"),
        ("grpc", tls_grpc, "perhaps wants TLS", "grpcs://"),
        ("grpc", another_of_us, "looks like an HTTP port", "http://"),
        ("grpcs", plain_grpc, "does not use TLS", "grpc://"),
        ("grpcs", plain_http, "looks like an HTTP port", "http://"),
        ("grpc", triton_http, "looks like an HTTP port", "http://"),
        ("grpcs", triton_http, "looks like an HTTP port", "http://"),
        ("https", triton_http, "looks like an HTTP port", "http://"),
    ],
)
async def test_each_mistake_is_named(
    tmp_path: Path, scheme: str, listening: Callable[[Path], AbstractAsyncContextManager[str]], looks: str, write: str
) -> None:
    """Discovery fails with what the address looks like, and what to write instead."""
    async with listening(tmp_path) as address:
        said = await reason_at(f"{scheme}://{address}")

    assert f"{scheme}://{address} {looks}" in said
    assert (f"write {write}{address}" if write.endswith("//") else write) in said


@pytest.mark.parametrize("scheme, listening", [("grpc", plain_grpc), ("grpcs", tls_grpc), ("https", tls_http)])
async def test_what_is_right_is_not_named(
    tmp_path: Path, scheme: str, listening: Callable[[Path], AbstractAsyncContextManager[str]]
) -> None:
    """A server of the right kind may fail for other reasons."""
    async with listening(tmp_path) as address:
        assert "write " not in await reason_at(f"{scheme}://{address}")


@every_case("answer", [b"\x00", b"HTTP/1.1", b"HTTP/1.1 401 No\r\n\r\n", b"\xff" * 100_000])
async def test_servers_of_other_kinds(answer: bytes) -> None:
    """Nothing is said of what is not known, whatever it sends; and of nobody."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert "write " not in await reason_at(f"http://127.0.0.1:{port}")
    # That of the server may belong to another one by now.
    assert "Connection refused" == await reason_at(f"http://127.0.0.1:{free_port()}")


async def reason_at(url: str) -> str:
    """Return why the models at *url* cannot be listed."""
    endpoint = Endpoint([url])
    try:
        with pytest.raises(ServiceError) as caught:
            await endpoint.repository_index()
    finally:
        await endpoint.close()
    return caught.value.reason


@every_case(
    "text, looks",
    [
        ("HTTP status 400: <center>The plain HTTP request was sent to HTTPS port</center>", "wants TLS"),
        ("HTTP status 400: Client sent an HTTP request to an HTTPS server.", "wants TLS"),
        ("HTTP status 404: <html>", "does not look like a Triton"),
    ],
)
def test_servers_that_say_it_themselves(text: str, looks: str) -> None:
    """nginx and servers in Go answer plain HTTP at a TLS port with a page."""
    assert looks in (listener_hint("http://triton:443", text) or "")


async def test_a_grpc_address_beside_a_good_one() -> None:
    """Discovery needs HTTP only; the log says at once that streams will fail."""
    async with FakeTriton(config_of("m")) as triton:
        triton.version = "2.51.0"
        url = triton.url.replace("http://", "grpc://")
        endpoint = Endpoint([triton.url, url])
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                await endpoint.server_info()
                assert endpoint._checking is not None
                await asyncio.wait({endpoint._checking})
        await endpoint.close()

    assert ["Triton does not answer at its gRPC address"] == [line["event"] for line in lines]
    assert f"{url} looks like an HTTP port" in lines[0]["reason"]


async def test_models_are_loaded_over_grpc() -> None:
    """Over HTTP, one of Triton's threads would serve no streams meanwhile; it is used where gRPC does not answer."""
    asked: list[str] = []

    class Triton(Servicer):
        async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
            return service_pb2.ServerMetadataResponse(name="triton")

        async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
            asked.append(request.model_name)
            return service_pb2.RepositoryModelLoadResponse()

    async with FakeTriton(config_of("m")) as triton, grpc_port(servicer=Triton()) as address:
        triton.version = "2.51.0"
        for url in (f"grpc://{address}", "grpc://127.0.0.1:1"):
            endpoint = Endpoint([triton.url, url])
            await endpoint.server_info()
            assert endpoint._checking is not None
            await asyncio.wait({endpoint._checking})
            try:
                await endpoint.load_model("m")
            except ServiceError as error:
                # The fake knows no loads over HTTP.
                asked.append(error.reason)
            await endpoint.close()

    assert ["m", "HTTP status 404: 404: Not Found"] == asked


async def test_the_address_of_a_request() -> None:
    """Streams go over HTTP unless they prefer gRPC; single answers go over gRPC where there is an address."""
    http, grpc_url = "http://127.0.0.1:1", "grpc://127.0.0.1:2"
    for urls, stream, prefers, expected in (
        ((http, grpc_url), True, False, http),
        ((http, grpc_url), True, True, grpc_url),
        ((http, grpc_url), False, False, grpc_url),
        ((http,), False, True, http),
    ):
        endpoint = Endpoint(urls)
        request = InferRequest(model="m", id="", inputs=(), outputs=(), stream=stream, prefers_grpc=prefers)
        assert expected == endpoint.address_of(request)
        await endpoint.close()
