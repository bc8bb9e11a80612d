"""
Connections whose clients have to hurry, and that say in their API's form what was no HTTP.

aiohttp gives a client as long for the head of its request as for the next one, and all the time in the world to take
its answer; it bounds each header and their number, and not all of them together; and it answers what it cannot read in
plain text.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any, cast

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, HttpProcessingError, LineTooLong

from triton_openai.api.bodies import unknown_coding
from triton_openai.config import LimitSettings
from triton_openai.errors import HeadersTooLarge, InvalidRequest, RequestTimeout, ServiceError
from triton_openai.server.descriptors import DESCRIPTORS
from triton_openai.telemetry.logging import get_logger
from triton_openai.telemetry.observation import OBSERVERS, Observation, Observer

_log = get_logger(__name__)
# Seconds between the end of the time and that of the connection.
_PATIENCE = 0.05
# How long what a refused client still sends is read and thrown away.
_LINGER_SECONDS = 1.0
#: Returns the body of an answer that says an error.
ErrorBody = Callable[[ServiceError], bytes]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Connection(web.RequestHandler):
    """
    One connection.

    While no request is being answered, a timer runs from the first byte of the next one's head. While a client does not
    take what was sent, another one looks whether it has taken anything. *observer* is told of requests that no handler
    gets to see.
    """

    __slots__ = (
        *("_answering", "_body", "_deadline", "_head_began", "_head_size", "_head_timeout", "_largest_head"),
        *("_observer", "_pipe", "_refused", "_unsent", "_watch", "_write_timeout"),
    )

    def __init__(
        self,
        manager: web.Server,
        limits: LimitSettings,
        body: ErrorBody,
        observer: Observer,
        *,
        auto_decompress: bool,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            # The service writes its own.
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_timeout,
            max_field_size=limits.max_header_size,
            max_line_size=limits.max_header_size,
            auto_decompress=auto_decompress,
        )
        # The settings
        self._head_timeout = limits.header_timeout
        self._largest_head = limits.max_head_size
        self._write_timeout = limits.write_timeout
        self._body = body
        self._observer = observer
        # The request
        self._answering = 0
        self._head_began = False
        self._refused = False
        self._head_size = 0
        self._deadline: asyncio.TimerHandle | None = None
        # The answer: what was not sent yet at a time since when nothing can have been added to it
        self._pipe: asyncio.WriteTransport | None = None
        self._unsent: int | None = None
        self._watch: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait: a client that connects has something to ask."""
        super().connection_made(transport)
        # aiohttp forgets its own when it closes it, which is not when all has been sent.
        self._pipe = cast(asyncio.WriteTransport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            DESCRIPTORS.taken(sock.fileno())
        self._wait_for_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Wait no longer."""
        self._pipe = None
        self._stop_waiting()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        super().connection_lost(exc)

    def close(self) -> None:
        """
        End after the answer that is being given, or at once where none is.

        aiohttp only stops to listen there: whoever asks something then would have neither an answer nor the end.
        """
        idle = self._waiter is not None and not self._waiter.done()
        super().close()
        if idle and self.transport is not None:
            self.transport.close()

    @property
    def silent(self) -> bool:
        """Whether no request has come over it yet."""
        return not self._request_count and self.transport is not None

    def pause_writing(self) -> None:
        """Learn that the client does not take what was sent."""
        super().pause_writing()
        self._unsent = self._pipe.get_write_buffer_size() if self._pipe is not None else None
        self._watch_client(anew=True)

    def resume_writing(self) -> None:
        """Learn that it goes on."""
        super().resume_writing()
        self._unsent = None

    def data_received(self, data: bytes) -> None:
        """Take what has come, of a head or of a body."""
        if self._refused:
            return
        # After an answer that did not wait for the body, aiohttp reads the rest of that before it waits for a request.
        of_head = self._waiter is not None or not self._request_count
        if not self._answering and of_head and data:
            self._head_began = True
            if self._deadline is None:
                self._wait_for_head()
        # Once it is to end, aiohttp throws away whatever comes: also the rest of a request that it has begun to answer.
        ending, self._close = self._close, False
        super().data_received(data)
        self._close = self._close or ending
        # aiohttp waits for a request, and this was not the end of one's head.
        if self._waiter is None or self._waiter.done():
            self._head_size = 0
        else:
            self._head_size += len(data)
            if self._head_size > self._largest_head:
                self._refuse(HeadersTooLarge("The headers are too large together."))

    def begin(self) -> None:
        """Learn that a request's head has come."""
        self._answering += 1
        self._unsent = None
        self._stop_waiting()

    def end(self) -> None:
        """Learn that it has been answered."""
        self._answering -= 1
        self._unsent = None
        self._head_began = False
        self._watch_client()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return what a client is told whose request could not be read, or could not be answered by any handler."""
        self._stop_waiting()
        if request.writer.output_size > 0:
            raise ConnectionError("The answer has begun: it cannot be an error any more.")
        if isinstance(exc, LineTooLong):
            error: ServiceError = HeadersTooLarge("The request line or a header is too long.")
        elif isinstance(exc, HttpProcessingError) and exc.message.startswith("Too many headers"):
            error = HeadersTooLarge(f"The request has more than {self.max_headers} headers.")
        elif isinstance(exc, ContentEncodingError):
            error = unknown_coding()
        elif isinstance(exc, HttpProcessingError):
            # Not what the parser says: it repeats what it got.
            error = InvalidRequest("The request is not valid HTTP.", code="invalid_http")
        else:
            self.logger.error("request failed", exc_info=exc)
            error = ServiceError("The service failed to answer the request.")
        request_id = uuid.uuid4().hex
        if isinstance(exc, HttpProcessingError):
            self._tell(request_id, error)
        response = web.Response(
            status=error.status,
            body=self._body(error),
            content_type="application/json",
            headers=_headers(request_id),
        )
        response.force_close()
        return response

    def _wait_for_head(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(self._head_timeout, self._look_again)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _look_again(self) -> None:
        # After a pause of the event loop, what has come by now may not have been looked at yet.
        self._deadline = asyncio.get_running_loop().call_later(_PATIENCE, self._cut)

    def _cut(self) -> None:
        """End the connection of a client that has not said in time what it wants."""
        self._deadline = None
        transport = self.transport
        if transport is None or self._answering:
            return
        if transport.get_write_buffer_size():
            # It has not read its last answer yet, which is not for this timer to take from it.
            self._wait_for_head()
            return
        if self._head_began:
            self._refuse(RequestTimeout("The head of the request did not arrive in time."))
            return
        _log.debug("connection closed", reason="no head of a request in time")
        self.force_close()

    def _refuse(self, error: ServiceError) -> None:
        """Tell *error* to a client whose request is none yet, and end its connection."""
        self._stop_waiting()
        if self.transport is not None:
            request_id = uuid.uuid4().hex
            self._tell(request_id, error)
            self.transport.write(_as_http(request_id, error, self._body(error)))
            if not self.transport.can_write_eof():
                self.force_close()
                return
            # A connection that is closed while something is unread is reset, and then its client may never see why.
            self._refused = True
            self.transport.write_eof()
            self._deadline = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.force_close)

    def _tell(self, request_id: str, error: ServiceError) -> None:
        """Let what was no request be seen as one that was refused."""
        observation = Observation(request_id=request_id, method="", path="")
        observation.status, observation.error = error.status, error
        self._observer.started(observation)
        observation.ended = time.monotonic()
        self._observer.ended(observation)

    def _watch_client(self, *, anew: bool = False) -> None:
        if self._pipe is None:
            # It has left before its answer was complete: a timer would keep what belongs to it for nothing.
            return
        if self._watch is not None:
            if not anew:
                return
            self._watch.cancel()
        self._watch = asyncio.get_running_loop().call_later(self._write_timeout, self._look_at_client)

    def _look_at_client(self, *, sure: bool = False) -> None:
        """End the connection of a client that has taken nothing since the last look."""
        self._watch = None
        pipe = self._pipe
        unsent = 0 if pipe is None else pipe.get_write_buffer_size()
        if pipe is None or not unsent:
            return
        if unsent != self._unsent:
            # Only where nobody can write meanwhile does the same size mean that nothing was taken.
            self._unsent = unsent if self.writing_paused or not self._answering else None
            self._watch_client()
        elif sure:
            _log.info("connection closed", reason="the client took nothing of its answer", seconds=self._write_timeout)
            pipe.abort()
        else:
            # After a pause of the event loop, what could be sent meanwhile is being sent now.
            look = partial(self._look_at_client, sure=True)
            self._watch = asyncio.get_running_loop().call_later(_PATIENCE, look)


def _headers(request_id: str) -> dict[str, str]:
    return {"Server": "triton-openai", "x-request-id": request_id}


def _as_http(request_id: str, error: ServiceError, body: bytes) -> bytes:
    headers = {
        **_headers(request_id),
        **error.headers(),
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
    }
    head = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{head}\r\n".encode() + body


@web.middleware
async def mark_answering(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection that its client has said what it wants, and when it may say the next thing."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.begin()
    try:
        return await handler(request)
    finally:
        connection.end()


class Site(web.SockSite):
    """Serves a runner's application on a socket, over such connections; *body* is the form that errors have."""

    __slots__ = ("_auto_decompress", "_body", "_factory", "_limits", "_observer")

    def __init__(
        self,
        runner: web.AppRunner,
        sock: socket.socket,
        *,
        limits: LimitSettings,
        body: ErrorBody = ServiceError.envelope,
        auto_decompress: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(runner, sock, **options)
        self._limits = limits
        self._body = body
        self._auto_decompress = auto_decompress
        # The relays have none: what passes through them is told of at their door.
        self._observer = runner.app.get(OBSERVERS, Observer())
        self._factory: Callable[[], Connection] | None = None

    async def start(self) -> None:
        """Listen."""
        await web.BaseSite.start(self)
        loop = asyncio.get_running_loop()
        manager = self._runner.server
        if manager is None:
            raise RuntimeError("The runner is not set up.")
        self._factory = partial(
            Connection,
            manager,
            self._limits,
            self._body,
            self._observer,
            auto_decompress=self._auto_decompress,
            loop=loop,
        )
        self._server = await loop.create_server(
            self._factory, sock=self._sock, backlog=self._backlog, **self._encryption()
        )

    async def stop(self) -> None:
        """
        Listen no more.

        Who has connected is let in first, however busy the loop was: what a socket has not accepted when it is closed
        is reset, and with it the request that may have been sent already.
        """
        waiting = [] if self._factory is None else _waiting(self._sock, self._backlog)
        await super().stop()
        if self._factory is not None and waiting:
            loop = asyncio.get_running_loop()
            joining = [loop.connect_accepted_socket(self._factory, one, **self._encryption()) for one in waiting]
            tasks = [asyncio.create_task(each) for each in joining]
            await asyncio.wait(tasks, timeout=_LINGER_SECONDS)
            # Those whose encryption takes longer.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _encryption(self) -> dict[str, Any]:
        if self._ssl_context is None:
            return {}
        # The handshake is the head of the connection, so to speak.
        return {"ssl": self._ssl_context, "ssl_handshake_timeout": self._limits.header_timeout}


def _waiting(listener: socket.socket, most: int) -> list[socket.socket]:
    """Accept and return the connections that *listener*, which does not block, has now, *most* of them at most."""
    found: list[socket.socket] = []
    with contextlib.suppress(OSError):
        while len(found) < most:
            found.append(listener.accept()[0])
    return found
