"""
One Triton with an HTTP address, a gRPC address, or both, behind the same protocol as a single transport.

Text streams use HTTP if it can express the request, because it costs a fraction of gRPC's CPU time per token. They use
gRPC otherwise, where the model prefers it, and when only gRPC is given.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec
import structlog

from triton_openai.config.tree import TritonAccess
from triton_openai.errors import ConfigurationError, ServiceError, UnsupportedParameter
from triton_openai.tasks import cancel
from triton_openai.triton.carrier import Carriers
from triton_openai.triton.client import IndexEntry, Receiver, ResponseStream, ServerInfo, TritonClient
from triton_openai.triton.connection import OPEN_ACCESS, ConnectionSettings
from triton_openai.triton.engine_capacity import EngineCapacity
from triton_openai.triton.http import HttpClient
from triton_openai.triton.tensors import InferRequest, InferResponse

_log = structlog.get_logger(__name__)


class Endpoint:
    """See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(
        self, urls: Sequence[str], *, access: TritonAccess = OPEN_ACCESS, capacity: EngineCapacity | None = None
    ) -> None:
        connection = ConnectionSettings(access=access)
        connection.check(urls)
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
        self.model_config = control.model_config
        self.unload_model = control.unload_model
        #: Whether the gRPC address answered last time. With an HTTP address, discovery does not use it.
        self.grpc_answers: bool | None = None
        self._checking: asyncio.Task[None] | None = None
        self._carriers = Carriers(capacity or EngineCapacity())

    def _for(self, request: InferRequest) -> TritonClient:
        preferred = (request.prefers_grpc or request.priority) and self.grpc_answers is not False
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
        if request.stream:
            client = self._for(request)
        else:
            client = self._grpc or self._control
        return self._addresses[client]

    async def server_info(self) -> ServerInfo:
        """Return the server's name and version. Logs a gRPC address that does not answer."""
        info = await self._control.server_info()
        grpc = self._grpc
        if grpc is not None and grpc is not self._control and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_grpc(grpc))
        return msgspec.structs.replace(info, grpc_answers=self.grpc_answers)

    async def _check_grpc(self, client: TritonClient) -> None:
        try:
            await client.server_info()
        except ServiceError as error:
            if self.grpc_answers is not False:
                reason = (await self._explained(client, error)).reason
                _log.warning("Triton does not answer at its gRPC address", reason=reason)
            self.grpc_answers = False
        else:
            self.grpc_answers = True

    async def _explained(self, client: TritonClient, error: ServiceError) -> ServiceError:
        """Return *error*. If no Triton seems to listen at the address of *client*, its detail says what does."""
        url = self._addresses[client]
        reason = error.reason
        explanation = listener_hint(url, reason)
        if not url.startswith("http://") and _UNCLEAR.search(reason) and await _answers_http(url):
            explanation = _advice(url, *_HTTP_PORT)
        if explanation is not None:
            error.detail = f"{explanation} ({reason})"
        return error

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index. If another server listens at the address, the error's detail says which."""
        try:
            return await self._control.repository_index()
        except ServiceError as error:
            raise await self._explained(self._control, error) from error.__cause__

    async def load_model(self, model: str) -> None:
        """Load a model: over gRPC if that answers. Over HTTP, one of Triton's threads serves no streams meanwhile."""
        client = self._control
        if self._grpc is not None and self.grpc_answers:
            client = self._grpc
        await client.load_model(model)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model that answers once: over gRPC if configured, because it can be cancelled there, else over HTTP."""
        return await (self._grpc or self._control).infer(request)

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        client = self._for(request)
        if request.carried:
            return self._carriers.stream(client, request, receiver)
        return client.stream(request, receiver)

    async def close(self) -> None:
        if self._checking is not None:
            await cancel(self._checking)
        self._carriers.close()
        for client in self._addresses:
            await client.close()


# The hint for an address where something else than a Triton listens.
_PORTS = "Triton's HTTP port is 8000 by default; 8001 is for gRPC, and 8002 for metrics only."
# Mixed-up ports are the most common mistake: the scheme of an address, what the reason of a failed call has in it then,
# what that looks like, and the scheme to write.
_HTTP_PORT = ("looks like an HTTP port", "http")
_MISTAKES = (
    ("https?", r"speaks HTTP/2", "looks like a gRPC port", "grpc"),
    ("http", r"speaks TLS|to (an )?HTTPS (port|server)", "wants TLS", "https"),
    ("http", r"connection without an answer", "perhaps wants TLS", "https"),
    ("https", r"wrong version number", "does not use TLS", "http"),
    # The words of gRPC's library.
    ("grpc", r"http1\.x server", *_HTTP_PORT),
    ("grpc", r"Socket closed", "perhaps wants TLS", "grpcs"),
    ("grpcs", r"WRONG_VERSION_NUMBER", "does not use TLS", "grpc"),
    # Triton's own errors are texts.
    ("https?", r'^\{"message": ', "looks like another triton-openai, not like a Triton", None),
    ("https?", r"HTTP status ([23]|40[1345])", "answers HTTP, but does not look like a Triton", None),
)


def listener_hint(url: str, reason: str) -> str | None:
    """Return what seems to listen at *url*, where a call failed for this *reason*; ``None`` if nothing seems wrong."""
    parts = urlsplit(url)
    for scheme, pattern, looks, right in _MISTAKES:
        if re.fullmatch(scheme, parts.scheme) and re.search(pattern, reason):
            return _advice(url, looks, right)
    return None


def _advice(url: str, looks: str, right: str | None) -> str:
    """Return the sentence that *url* *looks* like something else, and what to write: the scheme *right*, if known."""
    if right is None:
        return f"{url} {looks}: write the address of the Triton. {_PORTS}"
    parts = urlsplit(url)
    address = parts.netloc
    if parts.port is None:
        address += ":443" if parts.scheme == "https" else ":8000"
    return f"{url} {looks}: write {right}://{address}."


# A connection that ends at once: Triton's HTTP server closes one that begins with HTTP/2 or TLS without a word.
_UNCLEAR = re.compile(r"Socket closed|Handshake|WRONG_VERSION_NUMBER|ConnectionResetError|Connection reset|EOF")
_LOOK_SECONDS = 1.0
_HTTP_ANSWER = b"HTTP/1."


async def _answers_http(url: str) -> bool:
    """Return whether what listens at *url* answers plain HTTP; it is sent no credentials."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or 443
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                head = f"GET /v2/health/live HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
                writer.write(head.encode())
                return (await reader.readexactly(len(_HTTP_ANSWER))) == _HTTP_ANSWER
            finally:
                writer.close()
    except (OSError, EOFError, TimeoutError):
        return False
