"""
The protocol that both transports answer: everything the service asks of a Triton.

Every method raises errors of :mod:`triton_openai.errors` only; what a transport's own library raises is translated in
:mod:`triton_openai.triton.status`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Protocol

import msgspec

from triton_openai.errors import InvalidRequest, ServiceError
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig

# The longest name of a folder on the usual file systems.
_LONGEST = 255
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str) -> None:
    """
    Raise :class:`InvalidRequest` for what cannot be the name of a folder in a model repository.

    Triton 2.51 takes ``..`` for a model, and reads its configuration from outside of the repository.
    """
    if not name:
        raise InvalidRequest("The model's name is empty.", param="model", code="invalid_value")
    if name in (".", "..") or _FORBIDDEN.search(name):
        raise InvalidRequest(
            "The model's name is none of a folder in a model repository.", param="model", code="invalid_value"
        )
    if len(name.encode()) > _LONGEST:
        raise InvalidRequest(f"The model's name is longer than {_LONGEST} bytes.", param="model", code="invalid_value")


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


class SingleAnswer:
    """The one answer of a model that is not decoupled, as a stream of one response."""

    def __init__(self, client: TritonClient, request: InferRequest) -> None:
        self._task: asyncio.Task[InferResponse] | None = asyncio.create_task(client.infer(request))
        self._error: ServiceError | None = None

    async def read(self) -> Sequence[InferResponse]:
        """Return the answer, then nothing."""
        task = self._task
        if task is None:
            return ()
        try:
            # Waited for and not awaited: cancelling this reader, or the task by abort(), must not look the same.
            await asyncio.wait({task})
        finally:
            self.close()
        if self._error is not None:
            raise self._error
        return (task.result(),)

    def abort(self, error: ServiceError) -> None:
        """Make :meth:`read` raise *error*."""
        self._error = error
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Cancel the call unless it has ended."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
