"""
One Triton with an HTTP address, a gRPC address, or both, behind the same protocol as a single transport.

Text streams take HTTP when the request can be said in it, because it costs a fraction of gRPC's CPU time per token,
and gRPC otherwise or when only gRPC is given.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from triton_openai.config.tls import TritonAccess
from triton_openai.errors import ConfigurationError, ServiceError, UnsupportedParameter
from triton_openai.triton.client import IndexEntry, ResponseStream, ServerInfo, TritonClient
from triton_openai.triton.connection import OPEN_ACCESS, ConnectionSettings
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig
from triton_openai.triton.wrong_port import explain

_log = structlog.get_logger(__name__)

# Longest time in seconds that is spent to find out what listens at an address that is not Triton's.
_EXPLAIN_SECONDS = 2.0


class Endpoint:
    """See :class:`triton_openai.triton.client.TritonClient`."""

    def __init__(self, urls: Sequence[str], *, connect_timeout: float, access: TritonAccess = OPEN_ACCESS) -> None:
        self.urls = tuple(urls)
        connection = ConnectionSettings(connect_timeout=connect_timeout, access=access)
        connection.check(self.urls)
        self._http: TritonClient | None = None
        self._grpc: TritonClient | None = None
        self._addresses: dict[TritonClient | None, str] = {}
        for url in urls:
            scheme = url.partition("://")[0]
            if scheme in ("http", "https"):
                from triton_openai.triton.http import HttpClient

                self._http = HttpClient(url, connection)
            elif scheme in ("grpc", "grpcs"):
                # Imported here: grpc costs a tenth of a second and threads, which an HTTP-only service does not need.
                from triton_openai.triton.grpc import GrpcClient

                self._grpc = GrpcClient(url, connection)
            else:
                raise ConfigurationError(
                    f"'{url}' is not a Triton address: use http://, https://, grpc:// or grpcs://.", param="triton_url"
                )
            self._addresses[self._http if scheme.startswith("http") else self._grpc] = url
        control = self._http or self._grpc
        if control is None:
            raise ConfigurationError("No Triton address is given.", param="triton_url")
        self._control: TritonClient = control
        self._explain_timeout = min(connect_timeout, _EXPLAIN_SECONDS)
        # Whether the gRPC address, which no discovery needs beside an HTTP one, answered when it was last asked.
        self._grpc_answers: bool | None = None
        self._checking: asyncio.Task[None] | None = None

    def _for(self, request: InferRequest) -> TritonClient:
        if request.json_expressible or self._grpc is not None:
            return self._http if self._http is not None and request.json_expressible else (self._grpc or self._control)
        lacking = "needs Triton's gRPC address, and only its HTTP address is configured"
        if request.needed_for is None:
            raise ConfigurationError(f"This model {lacking} (--triton-url).")
        raise UnsupportedParameter(f"'{request.needed_for}' on this model {lacking}.", param=request.needed_for)

    def address_of(self, request: InferRequest) -> str:
        """Return the address to which *request* goes."""
        client = self._for(request) if request.stream else self._grpc or self._control
        return self._addresses[client]

    async def live(self) -> bool:
        """Return whether the server answers."""
        return await self._control.live()

    async def server_info(self) -> ServerInfo:
        """Return what the server says of itself. The log tells if there is a gRPC address and it does not answer."""
        info = await self._control.server_info()
        grpc = self._grpc
        if grpc is not None and grpc is not self._control and (self._checking is None or self._checking.done()):
            self._checking = asyncio.create_task(self._check_grpc(grpc))
        return info

    async def grpc_checked(self) -> None:
        """Wait for the look at the gRPC address that is going on."""
        if self._checking is not None:
            await asyncio.wait({self._checking})

    async def _check_grpc(self, client: TritonClient) -> None:
        try:
            await client.live()
        except ServiceError as error:
            if self._grpc_answers is not False:
                reason = (await self._explained(client, error)).reason
                _log.warning("Triton does not answer at its gRPC address", reason=reason)
            self._grpc_answers = False
        else:
            self._grpc_answers = True

    async def _explained(self, client: TritonClient, error: ServiceError) -> ServiceError:
        """Return *error* with what seems to listen at the address of *client*, if that is no Triton."""
        explanation = await explain(self._addresses[client], timeout=self._explain_timeout)
        if explanation is not None:
            error.detail = f"{explanation} ({error.reason})"
        return error

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index. An error's detail says what listens at the address, if that is no Triton."""
        try:
            return await self._control.repository_index()
        except ServiceError as error:
            raise await self._explained(self._control, error) from error.__cause__

    async def model_config(self, model: str) -> ModelConfig:
        """Return a model's configuration."""
        return await self._control.model_config(model)

    async def load_model(self, model: str) -> None:
        """Load a model."""
        await self._control.load_model(model)

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """Begin to unload a model."""
        await self._control.unload_model(model, dependents=dependents)

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model that answers once: over gRPC where there is one (it can be cancelled there), else over HTTP."""
        return await (self._grpc or self._control).infer(request)

    async def stream(self, request: InferRequest) -> ResponseStream:
        """Start a request whose answers come one by one."""
        return await self._for(request).stream(request)

    async def close(self) -> None:
        """Close both transports."""
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)
        for client in (self._http, self._grpc):
            if client is not None:
                await client.close()
