"""
The interface of both transports: all calls that the service makes to a Triton.

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

# The longest name of a folder on the usual file systems, in bytes.
_MAX_NAME_SIZE = 255
# The bytes of memory that a response counts at least.
_MIN_RESPONSE_SIZE = 256
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
    if len(name.encode()) > _MAX_NAME_SIZE:
        raise InvalidValue(f"The model's name is longer than {_MAX_NAME_SIZE} bytes.", "model")


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
    #: Whether it also answers at its gRPC address; ``None`` if it has only one address, or this is not known.
    grpc_answers: bool | None = None


class Receiver(Protocol):
    """
    Takes the answers to one request as soon as their bytes arrive.

    It does not block or raise. It is called in any context, so it must not read context variables.
    """

    def receive(self, responses: Sequence[InferResponse]) -> None:
        """Take the responses that arrived together, at least one."""

    def end(self, error: Exception | None) -> None:
        """Take the end, as the last call. *error* is what the backend or the transport reported, if it did."""


class ResponseStream(Protocol):
    """
    The control of a request whose answers come one by one.

    Its owner must call :meth:`close`. Each method may be called twice, at any time, also by the receiver.
    """

    def pause(self) -> None:
        """Receive no responses until :meth:`resume`; the backend waits. The end may still arrive."""

    def resume(self) -> None:
        """Receive again."""

    def close(self, *, silent: bool = False) -> None:
        """
        Cancel the work unless it has ended. The receiver gets no further calls. Never raises.

        *silent* means that the backend sent nothing for too long: its connection is not reused then.
        """


class TritonClient(Protocol):
    """One Triton behind one transport."""

    async def server_info(self) -> ServerInfo:
        """Return the server's name and version."""

    async def repository_index(self) -> Sequence[IndexEntry]:
        """Return all models in the repository, ready or not."""

    async def model_config(self, model: str) -> ModelConfig:
        """Return the configuration of a ready model."""

    async def load_model(self, model: str) -> None:
        """Load a model, or load it again; returns when it is ready, however long that takes."""

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        """
        Begin to unload a model, with *dependents* also the models that it is an ensemble of.

        Triton answers at once, also for an unknown model. The repository index shows when the model is unloaded.
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


class AnswerTask:
    """
    Base of the streams of models that are not decoupled: a task whose :meth:`_ask` passes each answer on.

    Such a stream cannot be paused: one response is on its way at most.
    """

    def __init__(self, receiver: Receiver) -> None:
        self._receiver: Receiver | None = receiver
        self._task = asyncio.create_task(self._run())

    async def _ask(self) -> None:
        """Ask for the answers, and give each to :meth:`_receive`. Raises any error."""
        raise NotImplementedError

    async def _run(self) -> None:
        failure = None
        try:
            await self._ask()
        except Exception as error:  # noqa: BLE001 - the receiver handles every error
            failure = error
        receiver = self._receiver
        self._receiver = None
        if receiver is not None:
            receiver.end(failure)
        # Breaks a reference cycle: the error's traceback has this frame.
        del failure

    def _receive(self, response: InferResponse) -> None:
        if self._receiver is not None:
            self._receiver.receive((response,))

    def pause(self) -> None:
        """Do nothing."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self, *, silent: bool = False) -> None:
        if self._receiver is not None:
            self._receiver = None
            self._task.cancel()


class SingleAnswer(AnswerTask):
    """The one answer of a model that is not decoupled, as a stream of one response."""

    def __init__(self, client: TritonClient, request: InferRequest, receiver: Receiver) -> None:
        self._client = client
        self._request = request
        super().__init__(receiver)

    async def _ask(self) -> None:
        self._receive(await self._client.infer(self._request))


#: Gets the responses to a request so far, whenever further ones have arrived. It neither blocks nor raises.
OnResponses: TypeAlias = Callable[[Sequence[InferResponse]], None]


class ResponseCollector:
    """The receiver that collects the responses of one stream, of at most *max_size* bytes together."""

    def __init__(self, on_responses: OnResponses | None, max_size: int) -> None:
        self._on_responses = on_responses
        self._max_size = max_size
        self._size = 0
        self._responses: list[InferResponse] = []
        self._ended: asyncio.Future[None] | None = asyncio.get_running_loop().create_future()

    async def responses(self) -> Sequence[InferResponse]:
        """Return all responses, after the end of the stream. Raises :class:`ServiceError`. Call it once."""
        assert self._ended is not None
        try:
            await self._ended
        finally:
            # Breaks a reference cycle: an error's traceback has this frame.
            self._ended = None
        return self._responses

    def clear(self) -> None:
        """Forget the responses: the request is sent again."""
        self._size = 0
        self._responses = []

    def receive(self, responses: Sequence[InferResponse]) -> None:
        self._responses += responses
        self._size += sum([max(response.size, _MIN_RESPONSE_SIZE) for response in responses])
        if self._size > self._max_size:
            self.end(responses[0].invalid("its responses are too long together"))
        elif self._on_responses is not None:
            self._on_responses(self._responses)

    def end(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


async def all_responses(client: TritonClient, request: InferRequest) -> Sequence[InferResponse]:
    """Return all responses to *request*. Raises :class:`ServiceError`."""
    if not request.stream:
        return (await client.infer(request),)
    collector = ResponseCollector(None, request.max_answer)
    stream = client.stream(request, collector)
    try:
        return await collector.responses()
    finally:
        stream.close()
