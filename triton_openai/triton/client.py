"""
The interface of both transports: everything that the service asks of a Triton.

Every method raises errors of :mod:`triton_openai.errors` only; what a transport's own library raises is translated in
:mod:`triton_openai.triton.status`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from triton_openai.errors import InvalidValue
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig

# The longest name of a folder on the usual file systems.
_LONGEST = 255
# Bytes that a response takes at least.
_LEAST = 256
_FORBIDDEN = re.compile(r"[/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def check_name(name: str) -> None:
    """
    Raise :class:`InvalidValue` if *name* cannot be a folder in a model repository.

    Triton 2.51 accepts ``..`` as a model, and reads its configuration from outside the repository.
    """
    if not name:
        raise InvalidValue("The model's name is empty.", "model")
    if name in (".", "..") or _FORBIDDEN.search(name):
        raise InvalidValue("The model's name is not a valid folder name in a model repository.", "model")
    if len(name.encode()) > _LONGEST:
        raise InvalidValue(f"The model's name is longer than {_LONGEST} bytes.", "model")


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
    """A server's name and version."""

    #: ``triton`` unless it was started with another ``--id``.
    name: str
    version: str
    #: Whether it answers at its gRPC address too, if it has one beside that of HTTP and this is known.
    grpc_answers: bool | None = None


class Receiver(Protocol):
    """
    Takes the answers to one request as soon as their bytes arrive.

    It neither blocks nor raises. It is called in any context, so it reads no context variable.
    """

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together, at least one."""

    def end(self, error: Exception | None) -> None:
        """Take the end, the last call. *error* is what the backend or the transport reported, if it did."""


class ResponseStream(Protocol):
    """
    The sender's side of a request whose answers come one by one.

    The sender must call :meth:`close`. Each method may be called twice, at any time, also by the receiver.
    """

    def pause(self) -> None:
        """Receive no responses until :meth:`resume`; the backend waits. The end may still arrive."""

    def resume(self) -> None:
        """Receive again."""

    def close(self, *, silent: bool = False) -> None:
        """
        Cancel the work unless it has ended. The receiver gets nothing more. Never raises.

        *silent* is whether the backend sent nothing for too long. Its connection is then not reused.
        """


class TritonClient(Protocol):
    """One Triton behind one transport."""

    async def server_info(self) -> ServerInfo:
        """Return the server's name and version."""

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return all models that the server knows, ready or not."""

    async def model_config(self, model: str) -> ModelConfig:
        """Return the configuration of a ready model."""

    async def load_model(self, model: str) -> None:
        """Load a model, or load it again; returns when it is ready, however long that takes."""

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """
        Begin to unload a model, with *dependents* also the models that it is an ensemble of.

        Triton answers at once, also for a model that it does not know: the repository index shows when it is unloaded.
        """

    async def infer(self, request: InferRequest) -> InferResponse:
        """Run a model that answers exactly once (one that is not decoupled). The caller limits the time."""

    def stream(self, request: InferRequest, receiver: Receiver) -> ResponseStream:
        """
        Send a request. Its answers reach *receiver* one by one, after this method has returned.

        Raises :class:`ServiceError` only for a request that cannot be sent; *receiver* gets all other errors.
        """

    async def close(self) -> None:
        """Close all connections."""


class SingleAnswer:
    """The one answer of a model that is not decoupled, as a stream of one response."""

    def __init__(self, client: TritonClient, request: InferRequest, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._task = asyncio.create_task(self._ask(client, request))

    async def _ask(self, client: TritonClient, request: InferRequest) -> None:
        failure = None
        try:
            response = await client.infer(request)
            if self._receiver is not None:
                self._receiver.receive((response,))
        except Exception as error:  # noqa: BLE001 - the receiver handles every error
            failure = error
        receiver = self._receiver
        self._receiver = None
        if receiver is not None:
            receiver.end(failure)

    def pause(self) -> None:
        """Do nothing: one response is on its way at most."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self, *, silent: bool = False) -> None:
        if self._receiver is not None:
            self._receiver = None
            self._task.cancel()


#: Gets the responses to a request so far, whenever there are new ones. It neither blocks nor raises.
Heard: TypeAlias = Callable[[Sequence[InferResponse]], None]


class _Gathering:
    """Receives the responses of one stream, of *max_size* bytes together."""

    def __init__(self, heard: Heard | None, max_size: int) -> None:
        self.responses: list[InferResponse] = []
        self._heard = heard
        self._left = max_size
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def receive(self, responses: Sequence[InferResponse]) -> None:
        self.responses += responses
        self._left -= sum([max(response.size, _LEAST) for response in responses])
        if self._left < 0:
            self.end(responses[0].invalid("its responses are too long together"))
            return
        if self._heard is not None:
            self._heard(self.responses)

    def end(self, error: Exception | None) -> None:
        if not self.ended.done():
            if error is None:
                self.ended.set_result(None)
            else:
                self.ended.set_exception(error)


async def gather(client: TritonClient, request: InferRequest, heard: Heard | None = None) -> Sequence[InferResponse]:
    """Return all responses to *request*; *heard* gets those of a stream so far. Raises :class:`ServiceError`."""
    if not request.stream:
        return (await client.infer(request),)
    gathering = _Gathering(heard, request.max_answer)
    stream = client.stream(request, gathering)
    try:
        await gathering.ended
        return gathering.responses
    finally:
        stream.close()
        # Breaks a reference cycle: an error's traceback has frames with the receiver.
        del gathering.ended
