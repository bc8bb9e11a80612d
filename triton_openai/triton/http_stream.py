"""
Calls and streams of Triton's HTTP protocol over pooled connections, on asyncio's protocols and llhttp (httptools).

This is the hot path of the product: once per token a packet is parsed here. A raw protocol takes about two thirds of
the CPU time that aiohttp's client takes for the same stream (`make bench` measures it).

Source of the facts: Triton's ``extension_generate.md`` and http_server.cc: each response is one ``data: {json}``
event ended by an empty line, the end of the body is the end of the answers, and a failure is a JSON object with the
key ``error``, as an event or as a plain body, under a status that cannot be relied on.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from time import monotonic
from typing import Any, ClassVar, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from triton_openai import offload
from triton_openai.config.tls import PERHAPS_REFUSED, ReloadingContext, failure_reason
from triton_openai.errors import ServiceError
from triton_openai.triton.client import Receiver
from triton_openai.triton.connection import ConnectionSettings, detect_dead_peer
from triton_openai.triton.http_json import UNREADABLE, decode_leniently, refusal, too_long
from triton_openai.triton.status import classify, cut_off_error, unreachable_error
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonOutputs, JsonResponse, json_size

# The most that is read of an error that does not come from Triton.
MAX_ERROR_BYTES = 256 * 1024
# The most that is read of an answer's head, or between two pieces of its body, and of an event.
MAX_HEAD_BYTES = 64 * 1024
MAX_EVENT_BYTES = 64 * 1024 * 1024
# The types of an output of the generate extension. Anything else is read leniently, and refused where it is used.
_Scalar = str | int | float | bool | None
_Output = _Scalar | list[_Scalar]
# Idle connections are closed long before a server or a load balancer closes them.
IDLE_SECONDS = 30.0
MAX_IDLE = 512
# If the server had closed the connection before it saw the request, the connection is lost within a round trip. Later,
# the request may have been processed, and may have crashed the server, so it is not sent again.
STALE_SECONDS = 1.0
EVENT_END = b"\n\n"
# The JSON of an event of Triton; the space before it is optional in the format.
_JSON = slice(len(b"data: "), None)


class Event(JsonOutputs, msgspec.Struct, gc=False):
    """A response, with a field for each requested output. Other JSON is not decoded."""

    error: Any = None
    model_name: Any = None
    #: The Triton model that answered.
    model: ClassVar[str] = ""
    #: The names of the fields by those of the outputs.
    fields: ClassVar[Mapping[str, str]] = {}
    #: The first output. Nearly every event has it.
    output_0: ClassVar[Any] = None
    absent: ClassVar[None] = None

    def value(self, name: str) -> Any:
        return getattr(self, self.fields.get(name, "absent"))

    @property
    def size(self) -> int:
        return json_size([getattr(self, field) for field in self.fields.values()])


@lru_cache(256)
def _decoder(model: str, outputs: Sequence[str]) -> Callable[[bytes], Event]:
    """Return the decoder of events of *model* with these *outputs*."""
    own = ("error", "model_name")
    fields: dict[str, str] = {}
    for number, name in enumerate(outputs):
        fields[name] = f"output_{number}"
        if name in own:
            fields[name] = name
    getters: dict[tuple[str, ...], Callable[[Event], Sequence[Any]]] = {}

    def first(event: Event, names: tuple[str, ...]) -> Sequence[Any]:
        getter = getters.get(names)
        if getter is None:
            getter = getters[names] = attrgetter(*[fields.get(name, "absent") for name in names])
        values = getter(event)
        # All outputs of a response have the same number of elements.
        if type(values[0]) is list:
            return JsonOutputs.first(event, names)
        return values

    kind = msgspec.defstruct(
        "Event",
        [(field, _Output, None) for field in fields.values() if field not in own],
        bases=(Event,),
        rename={field: name for name, field in fields.items()},
        namespace={"fields": fields, "first": first, "model": model},
        gc=False,
    )
    return cast(Callable[[bytes], Event], msgspec.json.Decoder(kind).decode)


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection that carries one stream, or one call, at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        # Set before anything else is called.
        self._transport: asyncio.Transport
        # From the first request until the connection is lost: it holds this object's methods, a cycle.
        self._parser: httptools.HttpResponseParser | None = None
        self._parse: Callable[[bytes], None] | None = None
        self._stream: HttpStream | HttpCall | None = None
        self._sent = 0.0
        self._parts: list[bytes] = []
        #: Called by llhttp with each piece of a body.
        self.on_body = self._parts.append
        self._complete = False
        self._reusable = False
        # The bytes received since the last piece of a body.
        self._bare = 0
        # Whether it has served a request before.
        self._used = False
        self._encrypted = False

    # Called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not asserted: uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._encrypted = transport.get_extra_info("sslcontext") is not None

    def data_received(self, data: bytes) -> None:
        """Parse *data*, and pass the body to the stream."""
        stream = self._stream
        parse = self._parse
        parts = self._parts
        if stream is None or parse is None:
            # Data without a request is not HTTP.
            self.close()
            return
        broken = False
        try:
            parse(data)
        except httptools.HttpParserError:
            broken = True
        if parts:
            body = b"".join(parts)
            parts.clear()
            self._bare = 0
            stream.feed(body)
        else:
            self._bare += len(data)
            if self._bare > MAX_HEAD_BYTES:
                self._stream = None
                stream.lose(too_long("head"))
                self.close()
                return
        if self._complete and self._stream is stream:
            stream.finish()
        elif broken:
            self._lose(None, data)
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._parser = self._parse = None
        self._lose(error)

    # Called by llhttp

    def on_header(self, name: bytes, value: bytes) -> None:
        """Read the headers that matter."""
        stream = self._stream
        name = name.lower()
        if stream is None:
            return
        if name == b"content-type":
            stream.events = value.lower().startswith(b"text/event-stream")
        elif name == b"inference-header-content-length":
            stream.json_length = value

    def on_headers_complete(self) -> None:
        if self._complete:
            # There was no request for it; its body must not become a part of the previous answer.
            self._reusable = False
            raise ValueError("a second answer to one request")
        if self._stream is not None:
            assert self._parser is not None
            self._stream.status = self._parser.get_status_code()
            # Under an error status the body is read as a whole.
            self._stream.events &= self._stream.status < 400

    def on_message_complete(self) -> None:
        """Record whether the connection can be reused: the parser forgets that afterwards."""
        self._complete = True
        self._reusable = self._parser is not None and self._parser.should_keep_alive()

    # Called by the pool and the stream

    @property
    def usable(self) -> bool:
        """Whether a request can be sent on it."""
        return not self._transport.is_closing()

    def send(self, message: bytes, stream: HttpStream | HttpCall) -> None:
        """Send a whole request; *stream* gets its answer."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
            self._parse = self._parser.feed_data
        self._stream = stream
        self._complete = False
        self._bare = 0
        self._sent = monotonic()
        self._transport.write(message)

    def pause(self) -> None:
        """Read nothing more."""
        if self.usable:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Continue to read."""
        if self.usable:
            self._transport.resume_reading()

    def release(self) -> None:
        """Return the connection to the pool, after its answer was read to the end."""
        self._stream = None
        if self._reusable and not self._transport.is_closing():
            self._used = True
            self._pool.keep(self)
        else:
            self.close()

    def close(self) -> None:
        """Close it; Triton takes this as the cancellation of a request in flight."""
        self._stream = None
        self._transport.abort()

    def _lose(self, error: Exception | None, data: bytes = b"") -> None:
        stream = self._stream
        self._stream = None
        if stream is None:
            return
        if self._used and not stream.status and monotonic() - self._sent < STALE_SECONDS:
            stream.lose(None)
        elif self._encrypted and not self._used and not stream.status:
            reason = PERHAPS_REFUSED
            if isinstance(error, ssl.SSLError):
                reason = failure_reason(error)
            stream.lose(unreachable_error(reason))
        elif self._used or stream.status or (self._bare and not data):
            stream.lose(cut_off_error())
        else:
            stream.lose(cut_off_error(_protocol_of(data)))


def _protocol_of(data: bytes) -> str:
    """Return a sentence about the protocol of a server that sent *data* in place of its first answer."""
    # A frame of settings on stream 0 (RFC 9113, 6.5).
    if data[3:9] in (b"\x04\x00" + bytes(4), b"\x04\x01" + bytes(4)):
        return "The server speaks HTTP/2, as for gRPC."
    if data.startswith(b"\x15\x03"):
        return "The server speaks TLS."
    if data:
        return "The server's answer is not HTTP."
    return "The server closed the connection without an answer."


class ConnectionPool:
    """Keep-alive connections to the server at *url*. Their number is not limited: admission limits the requests."""

    def __init__(self, url: str, settings: ConnectionSettings) -> None:
        parts = urlsplit(url)
        self._settings = settings
        self._tls: ReloadingContext | None = None
        default_port = 8000
        if parts.scheme == "https":
            default_port = 443
            self._tls = settings.ssl_context()
        #: Host and port.
        self.address = parts.hostname or "localhost", parts.port or default_port
        self._idle: deque[tuple[float, Connection]] = deque()
        self._closed = False

    def idle(self) -> Connection | None:
        """Return an idle connection, if there is one."""
        while self._idle:
            since, connection = self._idle.pop()
            if monotonic() - since < IDLE_SECONDS and connection.usable:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """Return a new connection. Raises :class:`UpstreamUnavailable`."""
        try:
            async with asyncio.timeout(self._settings.connect_timeout):
                if self._tls is None:
                    name = None
                else:
                    name = self._settings.access.server_name
                transport, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(self), *self.address, ssl=self._tls, server_hostname=name
                )
        except (TimeoutError, OSError) as error:
            raise unreachable_error(failure_reason(error)) from error
        detect_dead_peer(transport)
        if not connection.usable:
            # A server that is stopping accepts a connection and closes it.
            raise unreachable_error("the connection was closed at once")
        return connection

    def keep(self, connection: Connection) -> None:
        """Take back a connection that can serve again."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.close()
            return
        now = monotonic()
        # The oldest are at the left end.
        while self._idle and now - self._idle[0][0] >= IDLE_SECONDS:
            self._idle.popleft()[1].close()
        self._idle.append((now, connection))

    def close_idle(self) -> None:
        """Close every idle connection: one was silent, so the others may be dead too."""
        while self._idle:
            self._idle.pop()[1].close()

    def close(self) -> None:
        """Close every idle connection; those in use close when they are given back."""
        self._closed = True
        self.close_idle()


class HttpCall:
    """The whole answer to one request; one of more than *max_size* bytes ends with the error *too_long*."""

    def __init__(self, too_long: ServiceError, max_size: int) -> None:
        self._too_long = too_long
        self._max_size = max_size
        self.status = 0
        self.events = False
        #: The length of the JSON before tensors.
        self.json_length = b""
        #: The body.
        self.parts: list[bytes] = []
        self._size = 0
        # Whether the answer is complete; if not, the connection was stale.
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @classmethod
    async def send(cls, pool: ConnectionPool, message: bytes, too_long: ServiceError, *, max_size: int) -> HttpCall:
        """
        Send a whole request and return its answer. Raises :class:`ServiceError` if there is none.

        Raises *too_long* for one of more than *max_size* bytes.
        """
        connection = pool.idle() or await pool.connect()
        while True:
            call = cls(too_long, max_size)
            connection.send(message, call)
            try:
                complete = await call._ended
            except BaseException:
                connection.close()
                raise
            if complete:
                connection.release()
                return call
            # Other idle connections may be stale too.
            connection = await pool.connect()

    def feed(self, data: bytes) -> None:
        if self._ended.done():
            # The call has been given up.
            return
        self.parts.append(data)
        self._size += len(data)
        if self.status >= 300 and self._size > MAX_ERROR_BYTES:
            self.lose(too_long("error"))
        elif self._size > self._max_size:
            self.parts.clear()
            self.lose(self._too_long)

    def finish(self) -> None:
        if not self._ended.done():
            self._ended.set_result(True)

    def lose(self, error: ServiceError | None) -> None:
        """Take the loss of the connection; without an *error* the request is sent again."""
        if self._ended.done():
            return
        if error is None:
            self._ended.set_result(False)
        else:
            self._ended.set_exception(error)


class HttpStream:
    """
    One ``generate_stream`` call. See :class:`triton_openai.triton.client.ResponseStream`.

    *message* returns its bytes, and runs in a thread if the request is large. An event without any of the requested
    outputs is not an answer; if the request names no outputs, every event is one.
    """

    def __init__(
        self, pool: ConnectionPool, request: InferRequest, receiver: Receiver, *, message: Callable[[], bytes]
    ) -> None:
        self._pool = pool
        self._model = request.model
        self._outputs = request.outputs
        self._decode = _decoder(request.model, request.outputs)
        self._receiver: Receiver | None = receiver
        self._make = message
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        # The answer, with the received part of an event or of another body
        self.status = 0
        self.events = False
        self.json_length = b""
        self._parts: list[bytes] = []
        self._size = 0
        self._cost = request.cost
        if self._cost <= offload.INLINE:
            connection = pool.idle()
            if connection is not None:
                self._send(connection, message())
                return
        self._connecting = asyncio.create_task(self._connect())

    async def _connect(self, *, again: bool = False) -> None:
        try:
            # Not kept: while the answer is made, it would take as much memory as the prompt.
            message = await offload.run(self._make, cost=self._cost)
            # The first connection was stale, and other idle ones may be too.
            if again:
                idle = None
            else:
                idle = self._pool.idle()
            self._send(idle or await self._pool.connect(), message)
        except Exception as error:  # noqa: BLE001 - the receiver handles every error
            self._end(error)

    def _send(self, connection: Connection, message: bytes) -> None:
        self._connection = connection
        connection.send(message, self)
        if self._paused:
            connection.pause()

    # Called by the connection

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""
        receiver = self._receiver
        assert receiver is not None
        if self.events and not self._parts:
            # Usually the data is exactly one event.
            try:
                event = self._decode(data[_JSON])
            except UNREADABLE:
                pass
            else:
                if event.output_0 is not None:
                    receiver.receive((event,))
                    return
        self._feed_parts(data, receiver)

    def _feed_parts(self, data: bytes, receiver: Receiver) -> None:
        parts = self._parts
        if not self.events:
            parts.append(data)
            self._size += len(data)
            if self._size >= MAX_ERROR_BYTES:
                self._refuse()
            return
        if parts:
            # The beginning of an event arrived before.
            if EVENT_END not in data and not (data.startswith(b"\n") and parts[-1].endswith(b"\n")):
                parts.append(data)
                self._size += len(data)
                if self._size > MAX_EVENT_BYTES:
                    self._end(too_long("event", self._model))
                return
            data = b"".join((*parts, data))
            parts.clear()
            self._size = 0
        *events, rest = data.split(EVENT_END)
        if rest:
            parts.append(rest)
        responses: list[InferResponse] = []
        for text in events:
            try:
                response = self._response(text)
            except ServiceError as error:
                if responses:
                    receiver.receive(responses)
                self._end(error)
                return
            if response is not None:
                responses.append(response)
        if responses:
            receiver.receive(responses)

    def _response(self, text: bytes) -> InferResponse | None:
        """Return the response in the event *text*, if it is one. Raises :class:`ServiceError` for an error in it."""
        try:
            event = self._decode(text[_JSON])
        except UNREADABLE:
            pass
        else:
            if event.output_0 is not None:
                return event
        values = decode_leniently(text, self._model)
        error = values.get("error")
        if error is not None and "model_name" not in values:
            raise classify(str(error), self._model)
        if not values or (self._outputs and values.keys().isdisjoint(self._outputs)):
            return None
        return JsonResponse(values, self._model)

    def finish(self) -> None:
        """Take the end of the body."""
        if not self.events:
            self._refuse()
        else:
            error = None
            if b"".join(self._parts).strip():
                error = cut_off_error()
            self._end(error, whole=True)

    def lose(self, error: ServiceError | None) -> None:
        """Take the loss of the connection before the end of the body; without an *error* the request is sent again."""
        if error is None:
            self._connecting = asyncio.create_task(self._connect(again=True))
        else:
            self._end(error)

    def _refuse(self) -> None:
        self._end(refusal(self._parts, self.status, self._model))

    def _end(self, error: Exception | None, *, whole: bool = False) -> None:
        receiver = self._receiver
        self._stop(whole=whole)
        if receiver is not None:
            receiver.end(error)

    def _stop(self, *, whole: bool) -> None:
        """Release the receiver and the connection, which can be reused if the *whole* body was read."""
        self._receiver = None
        connection = self._connection
        self._connection = None
        if connection is None:
            return
        if whole:
            if self._paused:
                connection.resume()
            connection.release()
        else:
            connection.close()

    # Called by the sender

    def pause(self) -> None:
        if not self._paused and self._receiver is not None:
            self._paused = True
            if self._connection is not None:
                self._connection.pause()

    def resume(self) -> None:
        if self._paused and self._receiver is not None:
            self._paused = False
            if self._connection is not None:
                self._connection.resume()

    def close(self, *, silent: bool = False) -> None:
        if self._receiver is None:
            return
        if self._connecting is not None:
            self._connecting.cancel()
            # Its error has a frame with this stream in its traceback: a reference cycle.
            self._connecting = None
        self._stop(whole=False)
        if silent:
            self._pool.close_idle()
