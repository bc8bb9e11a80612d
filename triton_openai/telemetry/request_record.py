"""
The record of one request, from which its log line, its metrics and its spans are made.

Handlers fill it in step by step; nothing is written to it per token. Times are those of ``time.monotonic``,
which is also the event loop's clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from os import urandom
from types import MappingProxyType, TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec.structs import replace

from triton_openai.errors import ServiceError, holds_key, printable
from triton_openai.generation import AnswerState, Usage, total_usage

#: The stages in which a prompt is made.
RENDER = "render prompt"
TOKENIZE = "tokenize prompt"
#: Status of a request whose client left before it was answered, as nginx writes it.
CLIENT_CLOSED_REQUEST = 499
# Clients choose the length of both.
_MAX_METHOD_CHARS = 32
_MAX_PATH_CHARS = 256


_NOTHING: Mapping[str, str] = MappingProxyType({})
#: A request to Triton: an ``InferRequest``, whose module is none of telemetry's.
Request = TypeVar("Request", bound=msgspec.Struct)


class Destination(Protocol):
    """The Triton to which a request is sent."""

    @property
    def name(self) -> str | None:
        """Its name in the settings, if it is one of several."""

    def address_of(self, request: Any) -> str | None:
        """Return the address to which *request* goes, if it is known."""


class CallOutcome(Protocol):
    """How a request to Triton ended; times are those of ``time.monotonic``."""

    #: When the first token came.
    first: float | None
    error: ServiceError | None
    #: Whether the service stopped it before its end.
    cancelled: bool
    ended: float | None


class RouteTaken(Protocol):
    """The Tritons to which a request was sent."""

    #: The number of Tritons to which it was sent.
    attempts: int

    @property
    def name(self) -> str | None:
        """The name of the last one in the settings, if it is one of several."""


class CallTracer:
    """
    Traces the calls to Triton for one request of a client. This one only adds *headers*, and makes no spans.

    The service's own requests, such as probes, have no headers.
    """

    def __init__(self, headers: Mapping[str, str] = _NOTHING) -> None:
        self.headers = headers

    def begin(self, request: Request, outcome: CallOutcome, to: Destination, *, lora: str | None = None) -> Request:
        """Return *request* as it is sent. *outcome* has its end later; *lora* is the name of its LoRA adapter."""
        if self.headers:
            return replace(request, headers=self.headers)
        return request

    @contextmanager
    def call(self, request: Request, to: Destination) -> Iterator[Request]:
        """Trace a call that lasts as long as the block; yield *request* as it is sent."""
        if self.headers:
            request = replace(request, headers=self.headers)
        yield request


_NO_HEADERS = CallTracer()


class Stage(msgspec.Struct, eq=False):
    """A part of the work on a request, and its times."""

    name: str
    began: float
    ended: float | None = None
    #: Whether it ended by an exception.
    failed: bool = False

    def __enter__(self) -> None:
        """Do nothing: the time counts from the construction."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = time.monotonic()
        self.failed = kind is not None


@lru_cache(256)
def _shown(method: str, path: str) -> tuple[str, str]:
    return printable(method, _MAX_METHOD_CHARS), printable(path, _MAX_PATH_CHARS)


class ReservedMemory(Protocol):
    """Memory that is reserved; see :class:`triton_openai.byte_budget.Reservation`."""

    #: The number of bytes.
    size: int

    async def grow(self, size: int) -> None:
        """Wait until it has *size* bytes. Raises :class:`ServiceOverloaded`."""

    def shrink(self, size: int) -> None:
        """Give back what it has beyond *size* bytes."""


class RequestRecord(msgspec.Struct, eq=False, kw_only=True):
    """One request."""

    # The request
    request: web.BaseRequest | None = None
    request_id: str
    method: str
    path: str
    began: float = msgspec.field(default_factory=time.monotonic)
    #: The client's address.
    client: str | None = None
    #: The name of the API key.
    key: str | None = None
    #: The SHA-256 digest of its text, which no log has.
    key_digest: bytes = b""
    #: The batch that the request is a line of, and the name that the client gave it.
    batch: str | None = None
    custom_id: str | None = None
    #: The ``traceparent`` of the request that made the batch, if it was traced.
    batch_trace: str = ""
    #: The Triton to which a line goes if possible.
    preferred_endpoint: str | None = None
    #: OpenTelemetry's name of the operation (``chat``, ``text_completion``, ``embeddings``, …); ``None`` for a request
    #: that is not inference.
    operation: str | None = None
    #: The name that the client used, set once it is known to be served.
    model: str | None = None
    #: The model in Triton behind that name, and its adapter.
    triton_model: str | None = None
    adapter: str | None = None
    stream: bool = False
    #: How many answers a prompt has.
    n: int = 1
    #: The request's body, or the options of a conversation.
    parameters: object = None
    #: The messages of a conversation, if the parameters do not have them.
    messages: Sequence[object] | None = None
    #: Its size in bytes after decompression.
    body_size: int | None = None
    #: The names in it that the API does not have.
    unknown_fields: Sequence[str] = ()
    #: Traces the requests to Triton, and adds headers to them.
    call_tracer: CallTracer = _NO_HEADERS
    #: The way to one of several Tritons, where one was chosen.
    route: RouteTaken | None = None
    #: In every log line of the request.
    log_fields: Mapping[str, str] = _NOTHING
    # The answer
    status: int = CLIENT_CLOSED_REQUEST
    #: Added to the answer.
    headers: Mapping[str, str] = _NOTHING
    #: The id of the answer, and the prefix of the ids of the requests to Triton.
    response_id: str | None = None
    #: The model behind the client's name.
    response_model: str | None = None
    #: Counts those of the answers; most models have none.
    reasoning_tokens: Callable[[], int | None] = lambda: None
    #: The outcome of each call of a tool in the answers, and what was repaired in it.
    tool_calls: Callable[[], Sequence[tuple[str, str]]] = tuple
    stages: list[Stage] = []
    #: :attr:`n` answers for each prompt.
    answers: Sequence[AnswerState] = ()
    #: The name of the template that rendered the prompt.
    chat_template: str | None = None
    input_tokens: int | None = None
    #: Seconds of audio by direction: ``input``, ``output``.
    audio_seconds: Mapping[str, float] = {}
    queued_seconds: float = 0.0
    #: May be set after the status was sent.
    error: ServiceError | None = None
    client_left: bool = False
    # The end
    #: Seconds from the request's head to its end.
    duration: float = 0.0
    #: Seconds to the backend's first token; ``None`` when none came.
    time_to_first_token: float | None = None
    #: The memory for its media, which is given back at the end.
    memory: ReservedMemory | None = None

    def __post_init__(self) -> None:
        self.method, self.path = _shown(self.method, self.path)
        self.call_tracer = CallTracer({"x-request-id": self.request_id})
        self.log_fields = {"request_id": self.request_id}

    def identify(
        self, operation: str, *, model: str, adapter: str, triton_model: str | None = None, stream: bool = False
    ) -> None:
        """Set the operation, and the model and the adapter that answer it."""
        self.operation = operation
        self.model = model
        self.triton_model = triton_model
        self.adapter = adapter
        self.stream = stream

    def stage(self, name: str) -> Stage:
        """Return the context manager for a part of the work."""
        stage = Stage(name, time.monotonic())
        self.stages.append(stage)
        return stage

    def end(self, now: float) -> None:
        """Set the duration, which ends *now*, and the time to the first token."""
        self.duration = now - self.began
        for answer in self.answers:
            if answer.first is None:
                continue
            seconds = answer.first - self.began
            if self.time_to_first_token is None or seconds < self.time_to_first_token:
                self.time_to_first_token = seconds

    def release(self) -> None:
        """
        Drop the references to the request and the trace, which hold this record, after the observers have seen the end.

        Such a cycle would keep the prompt and the answer in memory until the garbage collector runs, which it seldom
        does in a process with many long-lived objects.
        """
        self.request = None
        self.call_tracer = _NO_HEADERS
        if self.memory is not None:
            self.free_memory()
        for known in [self.error, *[answer.error for answer in self.answers]]:
            error: BaseException | None = known
            while error is not None:
                error.__traceback__ = None
                error = error.__context__

    def answer_headers(self, error: ServiceError | None = None) -> dict[str, str]:
        """
        Return what the answer, which may be an *error*, says beside its body, as of now.

        Over HTTP these are headers. Over a WebSocket an event of the answer has them as its field ``headers``.
        """
        milliseconds = round((time.monotonic() - self.began) * 1000)
        headers = {"x-request-id": self.request_id, "openai-processing-ms": str(milliseconds), **self.headers}
        if error is not None:
            headers.update(error.header_fields())
        return headers

    def free_memory(self) -> None:
        """Give back the memory for its media."""
        if self.memory is not None:
            self.memory.shrink(0)

    @property
    def usage(self) -> Usage | None:
        """The tokens of all answers, each prompt counted once; ``None`` where those of one answer are not known."""
        if len(self.answers) == 1:
            return self.answers[0].usage_so_far
        if self.answers:
            return total_usage([answer.usage_so_far for answer in self.answers], n=self.n)
        if self.input_tokens is None:
            return None
        return Usage(prompt_tokens=self.input_tokens, completion_tokens=0)

    @property
    def finish_reasons(self) -> Sequence[str]:
        """The finish reasons of the answers that have one."""
        return [str(answer.finish_reason) for answer in self.answers if answer.finish_reason is not None]


class Observer:
    """Observes the requests of a service. Called in the event loop; must not block or raise."""

    def started(self, record: RequestRecord) -> None:
        """Observe a request whose head has come."""

    def identified(self, record: RequestRecord) -> None:
        """Observe the operation and the model."""

    def queued(self, record: RequestRecord) -> None:
        """Observe the beginning of a wait in the queue."""

    def admitted(self, record: RequestRecord) -> None:
        """Observe the end of the wait: the request runs, or has ended."""

    def ended(self, record: RequestRecord) -> None:
        """Observe the end: the last byte was sent, or the client left."""


class Observers(Observer):
    """Calls the method for each event of every request on those of *observers* that override it."""

    def __init__(self, *observers: Observer) -> None:
        for event in ("started", "identified", "ended"):
            methods = [getattr(observer, event) for observer in observers if _overrides(observer, event)]
            if len(methods) == 1:
                setattr(self, event, methods[0])
            else:
                setattr(self, event, partial(_call_all, methods))


def _overrides(observer: Observer, event: str) -> bool:
    return getattr(type(observer), event) is not getattr(Observer, event)


def _call_all(methods: Sequence[Callable[[RequestRecord], None]], record: RequestRecord) -> None:
    for method in methods:
        method(record)


RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)
OBSERVERS: web.AppKey[Observers] = web.AppKey("observers", Observers)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def request_id(headers: Mapping[str, str]) -> str:
    """Return the client's ``x-request-id`` if it is safe in headers and logs and looks like no key, else a new one."""
    sent = headers.get("x-request-id")
    if sent is not None and _REQUEST_ID.fullmatch(sent) and not holds_key(sent):
        return sent
    return urandom(16).hex()
