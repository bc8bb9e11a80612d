"""
One Triton with an HTTP address, a gRPC address, or both, behind the same protocol as a single transport.

Text streams take HTTP when the request can be said in it, because it costs a fraction of gRPC's CPU time per token,
and gRPC otherwise or when only gRPC is given.
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.config.tls import TritonAccess
from triton_openai.errors import ConfigurationError
from triton_openai.triton.client import IndexEntry, ResponseStream, ServerInfo, TritonClient
from triton_openai.triton.connection import OPEN_ACCESS, ConnectionSettings
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig


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

    def _for(self, request: InferRequest) -> TritonClient:
        if request.json_expressible or self._grpc is not None:
            return self._http if self._http is not None and request.json_expressible else (self._grpc or self._control)
        what = "This model" if request.needed_for is None else f"'{request.needed_for}' on this model"
        raise ConfigurationError(
            f"{what} needs Triton's gRPC address, and only its HTTP address is configured.", param=request.needed_for
        )

    def address_of(self, request: InferRequest) -> str:
        """Return the address to which *request* goes."""
        client = self._for(request) if request.stream else self._grpc or self._control
        return self._addresses[client]

    async def live(self) -> bool:
        """Return whether the server answers."""
        return await self._control.live()

    async def server_info(self) -> ServerInfo:
        """Return what the server says of itself."""
        return await self._control.server_info()

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return the repository index."""
        return await self._control.repository_index()

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
        for client in (self._http, self._grpc):
            if client is not None:
                await client.close()
