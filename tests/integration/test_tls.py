"""TLS on both sides of the service, with a real Triton behind relays that speak it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.reading import Reading
from tests.tls_fixture import Authority, relaying
from tests.triton_fixture import TestTriton
from triton_openai.app import create_app
from triton_openai.cli import main
from triton_openai.config import files as watched_files
from triton_openai.config.tls import server_context
from triton_openai.config.tree import Settings, TlsSettings, TritonAccess, TritonSettings
from triton_openai.errors import ServiceError, UpstreamError, UpstreamUnavailable
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.tensors import InferRequest, Tensor

MODEL = "vllm_model"
TRANSPORTS = ("https", "grpcs")
SLOW = 'Hello <<steer {"text": "' + "word " * 30 + '", "delay_ms": 30}>>'


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    """An authority; changed files are noticed at once."""
    monkeypatch.setattr(watched_files, "LOOK_SECONDS", 0.0)
    return Authority(tmp_path)


def request(tokens: int = 4, prompt: str = "Hello") -> InferRequest:
    """Return a request to the stand-in of vLLM."""
    sampling = json.dumps({"max_tokens": tokens})
    inputs = (
        Tensor("text_input", "BYTES", (1,), (prompt,)),
        Tensor("stream", "BOOL", (1,), (True,)),
        Tensor("sampling_parameters", "BYTES", (1,), (sampling,)),
    )
    return InferRequest(model=MODEL, id="", inputs=inputs, stream=True)


@asynccontextmanager
async def guarded(
    triton: TestTriton, transport: str, authority: Authority, identity: Path, *, clients: bool = False
) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    """Put TLS in front of Triton's port of *transport*; yields the address."""
    http = transport == "https"
    target = urlsplit(triton.http_url if http else triton.grpc_url).port
    assert target is not None
    context = authority.server(identity, clients=clients, protocol="http/1.1" if http else "h2")
    async with relaying(target, context) as relay:
        yield f"{transport}://127.0.0.1:{relay.port}", context


async def failure(url: str, access: TritonAccess) -> ServiceError:
    """Return how a stream from Triton fails, after a look at the other calls."""
    client = Endpoint([url], access=access)
    try:
        with pytest.raises(UpstreamUnavailable) as streamed:
            await begin(client)
        with pytest.raises(UpstreamError) as called:
            await client.repository_index()
    finally:
        await client.close()
    assert "Triton cannot be reached at the moment." == streamed.value.message
    assert called.value.detail is not None
    return streamed.value


async def begin(client: Endpoint) -> None:
    """Begin a stream and wait for its first words."""
    stream = Reading(client, request())
    try:
        assert await stream.read()
        while await stream.read():
            pass
    finally:
        stream.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_call_over_tls(transport: str, triton: TestTriton, authority: Authority) -> None:
    """Control calls and streams pass through, with the authority and the service's own certificate."""
    access = TritonAccess(ca=authority.file, certificate=authority.issue("client", "service.example"))
    async with guarded(triton, transport, authority, authority.issue("triton"), clients=True) as (url, _):
        client = Endpoint([url], access=access)
        assert "triton" == (await client.server_info()).name
        assert MODEL in {entry.name for entry in await client.repository_index()}
        assert (await client.model_config(MODEL)).decoupled
        await begin(client)
        await client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_what_is_wrong_with_a_certificate_is_told(
    transport: str, triton: TestTriton, authority: Authority, tmp_path: Path
) -> None:
    """Clients see that Triton cannot be reached; the log sees why: unknown authority, expired, other name, refused."""
    stranger = Authority(tmp_path, "stranger")
    trusting = TritonAccess(ca=authority.file)
    async with guarded(triton, transport, authority, authority.issue("triton")) as (url, _):
        error = await failure(url, TritonAccess(ca=stranger.file))
        assert "certificate" in (error.detail or "").lower()
        error = await failure(url, TritonAccess())
        assert "certificate" in (error.detail or "").lower()
    async with guarded(triton, transport, authority, authority.issue("old", expired=True)) as (url, _):
        error = await failure(url, trusting)
        assert "certificate" in (error.detail or "").lower()
    async with guarded(triton, transport, authority, authority.issue("other", "triton.example")) as (url, _):
        error = await failure(url, trusting)
        assert "127.0.0.1" in (error.detail or "")
        named = TritonAccess(ca=authority.file, server_name="triton.example")
        client = Endpoint([url], access=named)
        assert "triton" == (await client.server_info()).name
        await begin(client)
        await client.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_triton_wants_a_certificate(transport: str, triton: TestTriton, authority: Authority) -> None:
    """Without one, or with one that it does not take, nothing is reached, and the log has a word about it."""
    async with guarded(triton, transport, authority, authority.issue("triton"), clients=True) as (url, _):
        error = await failure(url, TritonAccess(ca=authority.file))
        assert error.detail
        expired = authority.issue("old", "service.example", expired=True)
        error = await failure(url, TritonAccess(ca=authority.file, certificate=expired))
        assert error.detail


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_own_certificate_renewed_while_a_stream_runs(
    transport: str, triton: TestTriton, authority: Authority, tmp_path: Path
) -> None:
    """The stream goes on; what comes after shows the new certificate, which is all that Triton takes by then."""
    young = Authority(tmp_path, "young")
    trusted, shown = tmp_path / "trusted.pem", tmp_path / "shown.pem"
    trusted.write_bytes(authority.file.read_bytes())
    shown.write_bytes(authority.issue("client", "service.example").read_bytes())
    access = TritonAccess(ca=trusted, certificate=shown)
    async with guarded(triton, transport, authority, authority.issue("one"), clients=True) as (old_url, _):
        client = Endpoint([old_url], access=access)
        stream = Reading(client, request(40, SLOW))
        assert await stream.read()
        trusted.write_bytes(young.file.read_bytes())
        shown.write_bytes(young.issue("client", "service.example").read_bytes())
        # To the old address a new connection is made, and its certificate is trusted no longer.
        with pytest.raises(UpstreamUnavailable):
            await begin(client)
        parts = 0
        while responses := await stream.read():
            # What has come meanwhile comes together.
            parts += len(responses)
        assert parts >= 5
        await client.close()


@asynccontextmanager
async def https_service(settings: Settings) -> AsyncIterator[str]:
    """Run the service with its own TLS on a free port."""
    runner = web.AppRunner(create_app(settings), handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(settings.tls))
    await site.start()
    try:
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_renewed_while_a_client_streams(triton: TestTriton, authority: Authority) -> None:
    """A certificate exchanged under a running stream cuts nothing, and who comes then sees the new one."""
    file = authority.issue("service")
    settings = Settings(triton=TritonSettings(url=(triton.http_url,)), tls=TlsSettings(certificate=file))
    body = {"model": MODEL, "prompt": SLOW, "stream": True, "max_tokens": 40}

    async def serial(url: str) -> str:
        port = urlsplit(url).port
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.client())
        found = str(writer.get_extra_info("peercert")["serialNumber"])
        writer.close()
        await writer.wait_closed()
        return found

    connector = aiohttp.TCPConnector(ssl=authority.client())
    async with https_service(settings) as url, aiohttp.ClientSession(connector=connector) as session:
        before = await serial(url)
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert 200 == response.status
            first = await response.content.readline()
            authority.renew(file)
            assert before != await serial(url)
            rest = await response.content.read()
    assert first.startswith(b"data: ")
    assert rest.endswith(b"data: [DONE]\n\n")


@contextlib.contextmanager
def command(*arguments: str) -> Iterator[dict[str, object]]:
    """Run ``serve`` as a process; yields its banner."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_OPENAI_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "triton_openai", "serve", "--port", "0", "--log-format", "json", *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_the_command_and_the_official_client(triton: TestTriton, authority: Authority) -> None:
    """The banner says https, and the official client works with the authority and its own certificate."""
    identity = authority.issue("client", "client.example")
    with command(
        "--triton-url", triton.http_url, "--tls-certificate", str(authority.issue("service")),
        "--tls-client-ca", str(authority.file),
    ) as banner:  # fmt: skip
        base_url = str(banner["base_url"])
        assert base_url.startswith("https://127.0.0.1:")
        with openai.DefaultHttpxClient(verify=authority.client(identity)) as http:
            client = openai.OpenAI(base_url=base_url, api_key="none", http_client=http, max_retries=0)
            stream = client.completions.create(model=MODEL, prompt="Hello", max_tokens=4, stream=True)
            assert list(stream)
        with openai.DefaultHttpxClient(verify=authority.client()) as http:
            client = openai.OpenAI(base_url=base_url, api_key="none", http_client=http, max_retries=0)
            with pytest.raises(openai.APIConnectionError):
                client.models.list()


def test_files_that_cannot_be_used_end_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence, status 2, before anything else is begun."""
    absent = str(tmp_path / "absent.pem")
    for arguments in (["--tls-certificate", absent], ["--triton-ca", absent, "--triton-url", "https://127.0.0.1:1"]):
        assert 2 == main(["serve", "--port", "0", *arguments])
        err = capsys.readouterr().err
        assert f"The file {absent} given by {arguments[0]} cannot be read: No such file or directory." in err
        assert "Traceback" not in err
