"""Credentials towards Triton: what is sent, how files are followed, and which settings are refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.cases import every_case
from tests.reading import Reading
from tests.tls_fixture import Authority
from triton_openai.config import files as watched_files
from triton_openai.config.sources import load_settings
from triton_openai.config.tree import Settings, TritonAccess
from triton_openai.errors import ConfigurationError
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest, Tensor

REQUEST = InferRequest(model="m", id="1", inputs=(Tensor("text_input", "BYTES", (1,), ("a",)),), stream=True)


@pytest.fixture
def seen() -> list[Mapping[str, str]]:
    """The headers, or metadata, of every call."""
    return []


OUTPUT = b'{"outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}'


@pytest.fixture
async def http_url(seen: list[Mapping[str, str]]) -> AsyncIterator[str]:
    """A server that remembers headers."""

    async def answer(request: web.Request) -> web.Response:
        seen.append({name.lower(): value for name, value in request.headers.items()})
        if request.path.endswith("generate_stream"):
            return web.Response(body=b"data: {}\n\n", content_type="text/event-stream")
        body = b"[]" if request.path.endswith("index") else OUTPUT
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Triton's gRPC service, which remembers metadata."""

    def __init__(self, seen: list[Mapping[str, str]]) -> None:
        self._seen = seen

    def _see(self, context: Any) -> None:
        self._seen.append(dict(context.invocation_metadata()))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._see(context)
        return service_pb2.RepositoryIndexResponse()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self._see(context)
        answer = service_pb2.ModelInferResponse()
        answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
        answer.raw_output_contents.append(b"\x01\x00\x00\x00a")
        return answer

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self._see(context)
        async for _ in requests:
            yield service_pb2.ModelStreamInferResponse()


@pytest.fixture
async def grpc_url(seen: list[Mapping[str, str]]) -> AsyncIterator[str]:
    """A gRPC server that remembers metadata."""
    server = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Servicer(seen), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"grpc://127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize("transport", ["http", "grpc"])
async def test_headers_and_tokens_go_with_every_call(
    transport: str,
    http_url: str,
    grpc_url: str,
    seen: list[Mapping[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Control calls, single answers and streams carry both; a token that was replaced is used from then on."""
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.0)
    token = tmp_path / "token"
    token.write_text("first-token\nsecond line\n")
    access = TritonAccess(headers=("X-Tenant: blue, green", "x-tier:1"), token_file=token)
    client = Endpoint([http_url if transport == "http" else grpc_url], access=access)

    async def call_all() -> None:
        await client.repository_index()
        await client.infer(REQUEST)
        stream = Reading(client, REQUEST)
        await stream.read()
        stream.close()

    await call_all()
    assert 3 == len(seen)
    for headers in seen:
        assert ("blue, green", "1") == (headers["x-tenant"], headers["x-tier"])
        assert "Bearer first-token" == headers["authorization"]
    token.write_text("another-token")
    seen.clear()
    await call_all()
    assert ["Bearer another-token"] * 3 == [headers["authorization"] for headers in seen]
    # One that cannot be sent leaves the one before.
    token.write_text("sécret")
    seen.clear()
    await call_all()
    assert ["Bearer another-token"] * 3 == [headers["authorization"] for headers in seen]
    await client.close()
    said = "".join(capsys.readouterr())
    assert "changed files not used" in said
    for secret in ("first-token", "another-token", "sécret", "blue"):
        assert secret not in said


@every_case(
    "header,message",
    [
        ("no colon secret", "write NAME:VALUE"),
        (": secret", "write NAME:VALUE"),
        ("na me: secret", "write NAME:VALUE"),
        ("Content-Length: 12 secret", "'Content-Length' is set by the connection itself"),
        ("grpc-timeout: secret", "set by the connection itself"),
        ("x-data-bin: secret", "would be binary over gRPC"),
        ("x-a:", "must be printable ASCII, and not empty"),
        ("x-a: secret\r\nx-b: c", "must be printable ASCII"),
        ("x-a: sécret", "must be printable ASCII"),
    ],
)
def test_headers_that_cannot_be_sent(header: str, message: str) -> None:
    """The message says which one and why, and does not repeat its value."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        ConnectionSettings(connect_timeout=1, access=TritonAccess(headers=("x-good: 1", header)))
    assert "--triton-header number 2" in caught.value.message
    assert "secret" not in caught.value.message


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    """Each is refused with the flags that are meant."""
    token = tmp_path / "token"
    for contents, message in ((b"", "nothing in its first line"), (b"\n", "nothing"), (b"\xff\xfe", "is not text")):
        token.write_bytes(contents)
        with pytest.raises(ConfigurationError, match=f"token given by --triton-token-file .*{message}"):
            ConnectionSettings(connect_timeout=1, access=TritonAccess(token_file=token))
    for access, message in (
        (TritonAccess(token_file=token / "absent"), "cannot be read"),
        (TritonAccess(token_file=token, headers=("Authorization: Basic x",)), "not both"),
        (TritonAccess(key=token), "--triton-key needs --triton-certificate"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ConnectionSettings(connect_timeout=1, access=access)


def test_files_for_grpc(tmp_path: Path) -> None:
    """A key without a file of its own is in that of the certificate."""
    authority = Authority(tmp_path)
    both = authority.issue("client")
    for key in (None, both):
        access = TritonAccess(ca=authority.file, certificate=both, key=key)
        files = ConnectionSettings(connect_timeout=1, access=access).grpc_files().current()
        contents = authority.file.read_bytes(), both.read_bytes(), both.read_bytes()
        assert contents == files


def test_headers_from_everywhere(tmp_path: Path) -> None:
    """A comma belongs to a value: flags are repeated, the environment has one per line, and YAML a list."""
    file = tmp_path / "settings.yaml"
    file.write_text("triton_access:\n  headers:\n    - 'a: 1, 2'\n    - 'b: 3'\n")

    def headers(settings: Settings) -> tuple[str, ...]:
        return settings.triton_access.headers

    assert ("a: 1, 2", "b: 3") == headers(load_settings({"triton-header": ["a: 1, 2", "b: 3"]}, {}))
    assert ("a: 1, 2", "b: 3") == headers(load_settings({}, {"TRITON_OPENAI_TRITON_HEADER": "a: 1, 2\nb: 3\n"}))
    assert ("a: 1, 2", "b: 3") == headers(load_settings({"config": str(file)}, {}))


def test_a_token_in_the_clear_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token over a connection that anybody can read is possible, and told."""
    token = tmp_path / "token"
    token.write_text("secret")
    settings = ConnectionSettings(connect_timeout=1, access=TritonAccess(token_file=token))
    settings.check(["http://127.0.0.1:8000", "https://triton:8000", "grpcs://triton:8001"])
    assert "" == capsys.readouterr().out
    settings.check(["http://triton:8000"])
    said = capsys.readouterr().out
    assert "sent without encryption" in said
    assert "secret" not in said
