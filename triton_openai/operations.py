"""
Operations of the APIs, without HTTP: their calls and their replies.

An operation is a function of the running service and a :class:`Call`; it returns a :class:`Reply`. An HTTP request, a
line of a batch and a test make the call and take the reply, each in its own way. A stream leaves through the
:class:`Output` of the call while the operation runs, because admission and failover last until its end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from copy import copy
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.access.keys import ApiKey
from triton_openai.access.rate_limits import Reservation
from triton_openai.answer.run import Run
from triton_openai.config.tree import ApiGroup
from triton_openai.errors import ServiceError
from triton_openai.generation import Delta
from triton_openai.jobs import JobType
from triton_openai.telemetry.request_record import RequestRecord

_Body = TypeVar("_Body")
_Other = TypeVar("_Other")
_NONE: Mapping[str, str] = MappingProxyType({})
NO_HEADERS: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())


class Renderer(ABC):
    """Renders the events of one stream, with a choice for each run. Each method returns whole events, or nothing."""

    #: Whether all clients understand the events that end a failed stream. If not, its body is broken off after them.
    has_error_event = True

    @abstractmethod
    def opening(self) -> bytes:
        """Return the events that open all choices, in order."""

    def openings(self) -> Iterable[bytes]:
        """Return the same in pieces, as they may be tens of megabytes."""
        return (self.opening(),)

    @abstractmethod
    def piece(self, choice: int, delta: Delta) -> bytes:
        """Return the events for *delta*."""

    @abstractmethod
    def last(self, choice: int) -> bytes:
        """Return the events that end a choice."""

    @abstractmethod
    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the events that end the stream, by *error* if there is one, after storing what has to be stored."""

    @abstractmethod
    def keep_alive(self) -> bytes:
        """Return what keeps the connection open while there is nothing to send, also before the first text."""


class FormPart(Protocol):
    """A part of a form."""

    #: The field's name.
    name: str
    #: That of a file, ``None`` for a text.
    filename: str | None
    media_type: str

    def pieces(self) -> AsyncIterator[bytes]:
        """Yield the contents as they arrive. Raises :class:`ServiceError`."""
        ...

    async def read(self, max_size: int) -> bytes:
        """Return the contents. Raises :class:`PayloadTooLarge` for more than *max_size* bytes."""
        ...


class Form(Protocol):
    """A form, as it arrives."""

    def parts(
        self, max_size: int, on_arrival: Callable[[int], Awaitable[None]] | None = None
    ) -> AsyncIterator[FormPart]:
        """
        Yield the parts of a form of *max_size* bytes at most, once. What is not read of a part is skipped.

        *on_arrival* is awaited with the number of bytes that have arrived, before more of them is read. Raises
        :class:`InvalidRequest`, and :class:`PayloadTooLarge` for a larger declared size.
        """
        ...

    @property
    def size(self) -> int:
        """The bytes that have arrived."""
        ...

    @property
    def declared_size(self) -> int | None:
        """The size that the client declares, in bytes; ``None`` without one."""
        ...


class Whole(msgspec.Struct, frozen=True):
    """A reply whose body is known."""

    body: bytes
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = _NONE


class LocalFile(msgspec.Struct, frozen=True):
    """A reply with the contents of a file on this machine, of which the caller may request a range."""

    path: Path
    media_type: str
    headers: Mapping[str, str] = _NONE


class RemoteFile(msgspec.Struct, frozen=True):
    """A reply with the contents of a file that is elsewhere, of which the caller may request a range."""

    #: It never changes for the same contents.
    tag: str
    #: In bytes.
    size: int
    #: Returns the bytes from the first number to the second, or the first of them. Raises :class:`ServiceError`.
    read: Callable[[int, int], Awaitable[bytes]]
    media_type: str
    headers: Mapping[str, str] = _NONE


class Streamed(Enum):
    """A reply that has left through the output of its call."""

    STREAMED = "streamed"


STREAMED = Streamed.STREAMED
#: Makes the runs of a stream that has begun. Raises :class:`ServiceError`.
PrepareRuns: TypeAlias = Callable[[], Awaitable[Sequence[Run]]]
Reply: TypeAlias = Whole | LocalFile | RemoteFile | Streamed


class Output(Protocol):
    """
    Where the streams of one call go.

    Each method returns when the stream has ended. It raises :class:`ServiceError` for what goes wrong before anything
    was sent; after that, the error is the last event of the stream. An output has the methods for the streams that its
    caller takes.
    """

    def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        """Start *runs*, and send what *renderer* makes of them, within *timeout* seconds."""
        _refuse()

    def stream_later(self, prepare: PrepareRuns, renderer: Renderer, *, timeout: float | None) -> Awaitable[Streamed]:
        """
        Send the opening of *renderer* at once, and do as :meth:`stream` with the runs that *prepare* returns.

        While they are being prepared, the renderer keeps the connection open. Then its opening is asked for again: it
        returns what there is to say about the preparation.
        """
        _refuse()

    def send_parts(
        self, parts: AsyncGenerator[bytes, None], *, timeout: float | None, media_type: str | None = None
    ) -> Awaitable[Streamed]:
        """
        Send *parts* as they come, within *timeout* seconds: of a file of *media_type*, or else events.

        While there is no event, comments keep the connection open. A client that reads slowly slows *parts* down.
        """
        _refuse()

    async def send_events(
        self, following: Callable[[float], Awaitable[bytes | None]], stop: Callable[[ServiceError], None]
    ) -> Streamed:
        """
        Send events that were made before, or elsewhere, from the first moment as a stream.

        *following* returns further events, nothing if there are none for so many seconds, and ``None`` at the end.
        *stop* is called with the reason why this process stops, and makes the end come soon.
        """
        _refuse()


def _refuse() -> NoReturn:
    raise AssertionError("the caller takes no such stream")


class NoStream(Output):
    """The output of a caller that takes no streams."""


class Session(Protocol):
    """A connection over which a client asks for more than one thing, in text frames."""

    #: The largest frame of the client, in bytes.
    max_frame_size: int

    async def begin(self) -> None:
        """Send what comes first: the connection is open."""
        ...

    async def receive(self, frame: bytes) -> None:
        """Begin what *frame* asks for. What is wrong with it is answered by a frame."""
        ...

    async def finish(self) -> None:
        """Begin nothing more, because the service stops, and return when nothing runs or waits."""
        ...

    async def end(self, error: ServiceError) -> None:
        """End what runs, and send *error*."""
        ...

    def close(self) -> None:
        """Begin to end what runs: the client has left."""
        ...


#: Sends a text frame, and returns when the client can take more. Raises :class:`ConnectionError`.
Send: TypeAlias = Callable[[bytes], Awaitable[None]]


class Opening(msgspec.Struct, frozen=True):
    """The request that opens a session."""

    headers: CIMultiDictProxy[str]
    query: Mapping[str, str]
    record: RequestRecord
    key: ApiKey


#: Opens the session of a request that asks for a WebSocket. Raises :class:`ServiceError` for one that is refused.
OpenSession: TypeAlias = Callable[[Opening, Send], Session]


class BodyKind(Enum):
    """How the body of an operation is read."""

    NONE = "none"
    JSON = "json"
    #: JSON, or nothing: then the request has its defaults.
    OPTIONAL_JSON = "optional JSON"
    #: The parts of a form, which the operation reads as they arrive.
    FORM = "form"
    #: The bytes, which the operation decodes.
    BYTES = "bytes"


#: The parameters of a query by name, each with its meaning and its schema.
Query: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]
#: An operation as it is run: the first argument is the running service.
OperationFunction: TypeAlias = Callable[[Any, Any], Awaitable[Reply]]


class Operation(msgspec.Struct, frozen=True):
    """A row in the table of what is served: a function, and all that follows from its row elsewhere."""

    function: OperationFunction
    #: Methods and paths; GET includes HEAD.
    routes: tuple[str, ...]
    #: The operation's id in the OpenAPI document.
    name: str
    #: What keys and restrictions open.
    group: ApiGroup
    #: The type of the body.
    request: type[msgspec.Struct] | None = None
    #: The type of the answer; without it, the answer is *text* or any object.
    answer: type[msgspec.Struct] | None = None
    #: How the body is read; ``None``: as JSON, if there is a type of it.
    reads: BodyKind | None = None
    #: The type that a body is decoded as which the documents do not show.
    hidden_request: type[msgspec.Struct] | None = None
    #: Whether unknown fields of the body are refused; ``None``: as the settings say.
    strict: bool | None = None
    #: Raises :class:`ServiceError` for a key that may not ask, before the body is read. Gets the service and the key.
    check: Callable[[Any, ApiKey], None] | None = None
    #: The type of a stream's events.
    event: type[msgspec.Struct] | None = None
    #: Whether the answer is, or can be, plain text.
    text: bool = False
    #: The media types of an answer that is a file. Of one that no job makes, clients can ask for a part.
    media: tuple[str, ...] = ()
    #: The jobs that do it, of which a model has to take one; the first is what the operation is for. Triton is asked,
    #: within limits of time.
    jobs: tuple[JobType, ...] = ()
    #: What logs, metrics and spans call it (OpenTelemetry's ``gen_ai.operation.name``), if not by its name.
    label: str = ""
    query: Query = MappingProxyType({})
    #: Errors that do not follow from the rest.
    errors: tuple[type[ServiceError], ...] = ()
    #: A status that can have the *answer* itself as its body.
    failure: int | None = None
    #: Opens the session of a request that asks for a WebSocket. Gets the service.
    session: Callable[[Any, Opening, Send], Session] | None = None
    #: The JSON with which a line of a batch asks an operation that takes a form, and what answers it.
    line_request: type[msgspec.Struct] | None = None
    line_function: OperationFunction | None = None
    #: The answer to clients of Anthropic's API where both have the path.
    shared: type[msgspec.Struct] | None = None

    @property
    def body_kind(self) -> BodyKind:
        """How the body is read."""
        if self.reads is not None:
            return self.reads
        if self.request is None:
            return BodyKind.NONE
        return BodyKind.JSON

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.routes[0].split()[1]

    @property
    def anthropic(self) -> bool:
        """Whether it is an operation of Anthropic's API, with its errors."""
        return self.path.startswith("/v1/messages")


class Call(msgspec.Struct, Generic[_Body], eq=False):
    """What a caller asks of an operation."""

    operation: Operation
    body: _Body
    #: The rights and limits of the caller, and under its name what is stored for it.
    key: ApiKey
    record: RequestRecord
    output: Output
    headers: CIMultiDictProxy[str] = NO_HEADERS
    #: The parameters of the path.
    path: Mapping[str, str] = _NONE
    query: Mapping[str, str] = _NONE
    #: What the call uses of the key's limits. Work that goes on after the reply takes it.
    reservation: Reservation | None = None

    def with_body(self, body: _Other) -> Call[_Other]:
        """Return the call with another *body*."""
        call: Call[Any] = copy(self)
        call.body = body
        return call
