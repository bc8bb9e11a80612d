"""
The protocol that both transports answer: everything the service asks of a Triton.

Every method raises errors of :mod:`triton_openai.errors` only; what a transport's own library raises is translated in
:mod:`triton_openai.triton.status`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from triton_openai.errors import ServiceError
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig


class IndexEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the repository index: a model's version and its state (``READY``, ``UNAVAILABLE``, …)."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""

    @property
    def ready(self) -> bool:
        """Whether this version can serve."""
        return self.state == "READY"


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says it is; of Triton, *name* is ``triton`` unless it was started with another ``--id``."""

    name: str
    version: str


class ResponseStream(Protocol):
    """
    The answers to one request. Who opened it must call :meth:`close`; that also stops work that is still going on.
    """

    async def read(self) -> Sequence[InferResponse]:
        """
        Return the responses that arrived together since the last call, waiting for at least one; empty at the end.

        Raises what the backend or the transport reported, after the responses before it were returned.
        """
        ...

    def abort(self, error: ServiceError) -> None:
        """Make the pending and every later :meth:`read` raise *error*, and cancel the work."""
        ...

    def close(self) -> None:
        """Cancel the work unless it has ended. Never raises; may be called twice."""
        ...


class TritonClient(Protocol):
    """One Triton behind one transport."""

    async def live(self) -> bool:
        """Return whether the server answers at all."""
        ...

    async def server_info(self) -> ServerInfo:
        """Return what the server says of itself."""
        ...

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return all models that the server knows, ready or not."""
        ...

    async def model_config(self, model: str) -> ModelConfig:
        """Return the configuration of a ready model."""
        ...

    async def load_model(self, model: str) -> None:
        """Load a model, or load it again; returns when it is ready, however long that takes."""
        ...

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """
        Begin to unload a model, with *dependents* also the models that it is an ensemble of.

        Triton answers at once, also for a model that it does not know: the repository index tells when it is gone.
        """
        ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model that answers exactly once (one that is not decoupled)."""
        ...

    async def stream(self, request: InferRequest) -> ResponseStream:
        """Start a request whose answers come one by one."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
