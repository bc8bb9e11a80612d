"""
One Triton with an HTTP address, a gRPC address, or both, behind the same protocol as a single transport.

Text streams use HTTP if it can express the request, because it costs a fraction of gRPC's CPU time per token. They use
gRPC otherwise, where the model prefers it, and when only gRPC is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Sequence
from typing import Literal
from urllib.parse import SplitResult, urlsplit

import structlog

from triton_openai.config.tree import TritonAccess
from triton_openai.errors import ConfigurationError, ServiceError, UnsupportedParameter
from triton_openai.tasks import cancel
from triton_openai.triton.client import IndexEntry, Receiver, ResponseStream, ServerInfo, TritonClient
from triton_openai.triton.connection import OPEN_ACCESS, ConnectionSettings
from triton_openai.triton.http import HttpClient
from triton_openai.triton.tensors import InferRequest, InferResponse

_log = structlog.get_logger(__name__)

# Longest time in seconds that is spent to find out what listens at an address that is not Triton's.
_EXPLAIN_SECONDS = 2.0


class Endpoint:
    """See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        connect_timeout: float = 5.0,
        access: TritonAccess = OPEN_ACCESS,
        grpc_client: Literal["own", "grpcio"] = "own",
    ) -> None:
        self.urls = tuple(urls)
        connection = ConnectionSettings(connect_timeout=connect_timeout, access=access, grpc_client=grpc_client)
        connection.check(self.urls)
        self._http: TritonClient | None = None
        self._grpc: TritonClient | None = None
        self._addresses: dict[TritonClient, str] = {}
        for url in urls:
            client: TritonClient
            if urlsplit(url).scheme.startswith("http"):
                self._http = client = HttpClient(url, connection)
            else:
                # Imported here: grpc costs a tenth of a second and threads, which an HTTP-only service does not need.
                from triton_openai.triton.grpc import GrpcClient

                self._grpc = client = GrpcClient(url, connection)
            self._addresses[client] = url
        control = self._http or self._grpc
        assert control is not None, "there is an address"
        self._control: TritonClient = control
        self.model_config, self.unload_model = control.model_config, control.unload_model
        self._explain_timeout = min(connect_timeout, _EXPLAIN_SECONDS)
        # Whether the gRPC address answered last time. With an HTTP address, discovery does not use it.
        self._grpc_answers: bool | None = None
        self._checking: asyncio.Task[None] | None = None

    def _for(self, request: InferRequest) -> TritonClient:
        preferred = request.prefers_grpc and self._grpc_answers is not False
        if self._grpc is not None and (preferred or self._http is None or not request.json_expressible):
            return self._grpc
        if request.json_expressible:
            return self._control
        lacking = "needs Triton's gRPC address, and only its HTTP address is configured"
        if request.needed_for is None:
            raise ConfigurationError(f"This model {lacking} (--triton-url).")
        raise UnsupportedParameter(f"'{request.needed_for}' on this model {lacking}.", param=request.needed_for)

    def address_of(self, request: InferRequest) -> str:
        """Return the address to which *request* goes."""
        return self._addresses[self._for(request) if request.stream else self._grpc or self._control]

    async def server_info(self) -> ServerInfo:
        """Return the server's name and version. Logs a gRPC address that does not answer."""
        info = await self._control.server_info()
        grpc = self._grpc
        if grpc is not None and grpc is not self._control and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_grpc(grpc))
        return info

    async def _check_grpc(self, client: TritonClient) -> None:
        try:
            await client.server_info()
        except ServiceError as error:
            if self._grpc_answers is not False:
                reason = (await self._explained(client, error)).reason
                _log.warning("Triton does not answer at its gRPC address", reason=reason)
            self._grpc_answers = False
        else:
            self._grpc_answers = True

    async def _explained(self, client: TritonClient, error: ServiceError) -> ServiceError:
        """Return *error*. If no Triton listens at the address of *client*, its detail says what does."""
        explanation = await explain(self._addresses[client], timeout=self._explain_timeout)
        if explanation is not None:
            error.detail = f"{explanation} ({error.reason})"
        return error

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index. If another server listens at the address, the error's detail says which."""
        try:
            return await self._control.repository_index()
        except ServiceError as error:
            raise await self._explained(self._control, error) from error.__cause__

    async def load_model(self, model: str) -> None:
        """Load a model: over gRPC if that answers. Over HTTP, one of Triton's threads serves no streams meanwhile."""
        await (self._grpc if self._grpc is not None and self._grpc_answers else self._control).load_model(model)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model that answers once: over gRPC if configured, because it can be cancelled there, else over HTTP."""
        return await (self._grpc or self._control).infer(request)

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        return self._for(request).stream(request, receiver)

    async def close(self) -> None:
        if self._checking is not None:
            await cancel(self._checking)
        for client in self._addresses:
            await client.close()


# Longest answer that is read: the head and a short body are enough.
_MOST = 16 * 1024


async def explain(url: str, *, timeout: float) -> str | None:
    """
    Return what seems to listen at *url*, an address of Triton, and what to write instead; ``None`` if nothing is wrong.

    Mixed-up ports are the most common mistake, and one plain connection of at most *timeout* seconds shows them. A gRPC
    server begins with its HTTP/2 settings; a TLS server sends an alert, or closes the connection; an HTTP server
    answers a request. No credentials are sent.
    """
    parts = urlsplit(url)
    tls, grpc = parts.scheme in ("https", "grpcs"), parts.scheme.startswith("grpc")
    host, port = parts.hostname or "localhost", parts.port or (8001 if grpc else 443 if tls else 8000)
    place = parts.netloc if parts.port else f"{parts.netloc}:{port}"
    answer, speaks_tls = b"", False
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(timeout):
            answer = await _ask(host, port, parts)
            speaks_tls = not tls and await _speaks_tls(host, port, answer)
    if speaks_tls:
        return f"{url} wants TLS: write {'grpcs' if grpc else 'https'}://{place}."
    if answer[3:9] in (b"\x04\x00" + bytes(4), b"\x04\x01" + bytes(4)):
        # A frame of settings on stream 0 (RFC 9113, 6.5).
        if grpc:
            return f"{url} does not use TLS: write grpc://{place}." if tls else None
        return f"{url} looks like a gRPC port: write grpc://{place}, or use Triton's HTTP port (8000 by default)."
    if not answer.startswith(b"HTTP/"):
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    # Triton's own errors, and those of a relay, are texts.
    if b"\r\nserver: triton-openai" in head.lower() and b'{"error":{' in body:
        return (
            f"{url} looks like another triton-openai, not like a Triton: write the address of the Triton behind it "
            "(http://HOST:8000 or grpc://HOST:8001 by default)."
        )
    if grpc:
        return f"{url} looks like an HTTP port: write http://{place}, or use Triton's gRPC port (8001 by default)."
    if tls:
        return f"{url} does not use TLS: write http://{place}."
    if head.split(b" ", 2)[1:2] == [b"404"]:
        return (
            f"{url} answers HTTP, but does not look like a Triton: there is nothing at /v2. Triton's HTTP port is 8000 "
            "by default; 8001 is for gRPC, and 8002 for metrics only."
        )
    return None


async def _ask(host: str, port: int, parts: SplitResult) -> bytes:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        path = "" if parts.scheme.startswith("grpc") else parts.path.rstrip("/")
        writer.write(f"GET {path}/v2 HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < _MOST and (more := await reader.read(_MOST)):
            answer += more
            if not answer.startswith(b"HTTP/"):
                # The first bytes of anything else are enough, and gRPC servers may keep the connection.
                break
        return answer
    finally:
        writer.close()


async def _speaks_tls(host: str, port: int, answer: bytes) -> bool:
    """Return whether the server that gave *answer* to plain HTTP takes TLS."""
    if answer.startswith(b"\x15\x03") or b"plain HTTP request was sent to HTTPS port" in answer:
        return True
    if answer:
        return False
    # Some TLS servers close the connection without an alert.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as error:
        # A server that requires a client certificate takes TLS, too.
        return "ALERT" in (error.reason or "")
    writer.close()
    return True
