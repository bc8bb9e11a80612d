"""Connections of clients, errors in the API's own form for what is not HTTP, and responses that leave in one write."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from email.utils import formatdate
from functools import lru_cache

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from triton_openai.config.tree import LimitSettings
from triton_openai.errors import HeadersTooLarge, InvalidRequest, ServiceError
from triton_openai.telemetry.process import DESCRIPTORS
from triton_openai.telemetry.request_record import Observer, RequestRecord

# Longest single header, or request line. A request may have 128 headers.
_MAX_HEADER_SIZE = 16 * 1024
# How long the rest of a refused body is read, and how long a client may pause meanwhile.
_MAX_REST_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 1.0


class Connection(web.RequestHandler):
    """One connection. It closes if the head of a request takes too long. *observer* observes what is not HTTP."""

    def __init__(self, manager: web.Server, limits: LimitSettings, observer: Observer) -> None:
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            # The service writes its own access log.
            access_log=None,  # type: ignore[arg-type]
            keepalive_timeout=limits.keepalive_timeout,
            max_field_size=_MAX_HEADER_SIZE,
            max_line_size=_MAX_HEADER_SIZE,
            # Only a request that is authorized may cost more than its bytes.
            auto_decompress=False,
            # The rest of a refused body is read by finish_response, for as long as the client sends.
            lingering_time=0.0,
        )
        self._header_timeout = limits.header_timeout
        self._observer = observer
        # When the first byte of a head came that is not complete.
        self._head_began: float | None = None
        # One timer that checks this time, instead of a new timer for every request.
        self._header_timer: asyncio.TimerHandle | None = None
        self._answering = False
        self._paused_reading = False
        #: Whether it closes after the next answer.
        self.closes = False
        # Whether a request has come, whether the connection has ended, and the body of which the rest is read.
        self._used = False
        self._lost = False
        self._unread: StreamReader | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        DESCRIPTORS.check(transport.get_extra_info("socket").fileno(), time.monotonic())

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
        self._lost = True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if data and not self._answering and self._head_began is None:
            self._head_began = time.monotonic()
            if self._header_timer is None:
                self._check_head()
        super().data_received(data)

    def pause_reading(self) -> None:
        self._paused_reading = True
        super().pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        """Read on after :meth:`pause_reading`. aiohttp asks for it with every body, and would parse again each time."""
        if self._paused_reading:
            self._paused_reading = False
            super().resume_reading(resume_parser)

    def _check_head(self) -> None:
        self._header_timer = None
        if self._head_began is None:
            return
        left = self._head_began + self._header_timeout - time.monotonic()
        if left > 0:
            self._header_timer = asyncio.get_running_loop().call_later(left, self._check_head)
        else:
            self.force_close()

    def begin_answer(self) -> None:
        """Note that the head of a request is complete."""
        self._answering = True
        self._used = True
        self._head_began = None

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the rest of the response. The connection closes after it if the request's body was not read."""
        if request.content.is_eof():
            self._unread = None
        else:
            self._unread = request.content
        if self.closes or self._unread is not None:
            resp.force_close()
        try:
            finished = await super().finish_response(request, resp, start_time)
        finally:
            self._answering = False
        if self._unread is not None:
            await _read_rest(self._unread)
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """
        Return the response to what is not HTTP, or to a request whose handler failed.

        Raises *exc* where the handler failed because its client has left: that is no error.
        """
        if isinstance(exc, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            raise exc
        request_id = uuid.uuid4().hex
        error = ServiceError()
        if isinstance(exc, HttpProcessingError):
            # Not the parser's own message: it repeats what it got.
            error = InvalidRequest("The request is not valid HTTP.", code="invalid_http")
            if isinstance(exc, LineTooLong) or exc.message.startswith("Too many headers"):
                error = HeadersTooLarge(
                    f"The request line or a header is too long, or it has more than {self.max_headers} headers."
                )
            # What is not HTTP has no headers that say more.
            record = RequestRecord(request_id=request_id, method="", path="", client=request.remote)
            record.status = error.status
            record.error = error
            record.end(time.monotonic())
            self._observer.started(record)
            self._observer.ended(record)
        else:
            # It logs the error, and ends the connection where the response has begun.
            super().handle_error(request, status, exc, message)
        headers = {"Server": "triton-openai", "x-request-id": request_id, "Connection": "close"}
        body = error.envelope()
        response = web.Response(status=error.status, body=body, content_type="application/json", headers=headers)
        response.force_close()
        return response

    def awaits_request(self) -> bool:
        """Return whether its client has connected and not sent a request yet, or not all of a head."""
        return not self._lost and not self._answering and (not self._used or self._head_began is not None)

    def has_unsent_answer(self) -> bool:
        """Return whether an answer has not left yet, or the rest of a refused body is still read."""
        if self._lost or self.transport is None:
            return False
        reading = self._unread is not None and not self._unread.is_eof()
        return self._answering or reading or self.transport.get_write_buffer_size() > 0

    def close_idle(self) -> None:
        """Close the connection, unless a request has begun."""
        if not self._answering and self._head_began is None:
            self.force_close()


async def _read_rest(body: StreamReader) -> None:
    """
    Read what a client still sends of a *body* that was refused, and drop it.

    A connection that is closed while something is unread is reset, and then its client may never see the answer (RFC
    9112, section 9.6). Many clients, such as Python's http.client, send all of a body before they read.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + _MAX_REST_SECONDS
    with contextlib.suppress(TimeoutError, web.RequestPayloadError):
        while not body.is_eof():
            async with asyncio.timeout(min(_MAX_PAUSE_SECONDS, end - loop.time())):
                await body.readany()


class WholeResponse(web.Response):
    """
    A response whose body is known, and is some bytes.

    Where nothing is special about the connection, its head is composed here at once, and goes out with the body. That
    costs less than aiohttp's way, which is for all that a response may be.
    """

    _sent = False

    @property
    def keep_alive(self) -> bool:
        """Whether the connection stays open after it; not if it was closed by force."""
        return super().keep_alive is not False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Send it, or prepare to send it in aiohttp's way."""
        body = self.body
        kept = request.keep_alive and self.keep_alive and request.version == HttpVersion11
        if (
            not (kept and body and isinstance(body, bytes) and isinstance(request, web.Request))
            or request.method == "HEAD"
        ):
            return await super().prepare(request)
        await request.app.on_response_prepare.send(request, self)
        if self.chunked:
            length = "Transfer-Encoding: chunked"
        else:
            length = f"Content-Length: {len(body)}"
        lines = "".join([f"{name}: {value}\r\n" for name, value in self.headers.items()])
        if lines.count("\n") + lines.count("\r") != 2 * len(self.headers):
            raise ValueError("A header has a line break.")
        date = _date(int(time.time()))
        head = f"HTTP/1.1 {self.status} {self.reason}\r\n{lines}Date: {date}\r\n{length}\r\n\r\n".encode()
        self._sent = True
        if self.chunked:
            body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        await request.writer.write_eof(head + body)
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        """Send what is not sent yet."""
        if not self._sent:
            await super().write_eof(data)


@lru_cache(1)
def _date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
