"""
Server-sent events: the only place that writes them.

Events are ``data: <json>`` and an empty line; a line that starts with a colon is a comment, which clients skip; the
stream of a completion ends with ``data: [DONE]``.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from aiohttp import HttpVersion11, web

from triton_openai.errors import ServiceError

FIELD = b"data: "
END = b"\n\n"
DONE = b"data: [DONE]\n\n"
_HEARTBEAT = b": keep-alive\n\n"
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx and what copies it would collect events otherwise.
    "X-Accel-Buffering": "no",
}


class EventWriter:
    """
    The response of one stream.

    Nothing is sent before :meth:`start`, so that until then an error can still be a JSON answer with its own status.
    While nothing else is sent, a comment goes out every *heartbeat* seconds. ``write`` waits for a slow client: that
    is what holds back the reader of Triton's stream.
    """

    def __init__(self, request: web.Request, *, heartbeat: float) -> None:
        self._request = request
        self._interval = heartbeat
        self._response = web.StreamResponse(headers=_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._beat: asyncio.Task[None] | None = None
        self._writing = False
        #: Whether the client has been told how its answer ended.
        self.told = False

    @property
    def started(self) -> bool:
        """Whether the status line has been sent."""
        return self._response.prepared

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    async def start(self) -> None:
        """Begin the response; status and headers leave with the first event or heartbeat."""
        if self._request.version >= HttpVersion11:
            # HTTP/1.0, which older proxies speak to their upstreams, ends the body with the connection.
            self._response.enable_chunked_encoding()
        await self._response.prepare(self._request)
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._interval, self._check)

    async def heartbeat(self) -> None:
        """Send a comment now. Raises ``ConnectionResetError`` when the client has left."""
        await self.write(_HEARTBEAT)

    async def write(self, events: bytes) -> None:
        """Send whole events, in one piece. Raises ``ConnectionResetError`` when the client has left."""
        self._writing = True
        await self._response.write(events)
        self._writing = False
        self._last = self._loop.time()

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event."""
        await self.write(FIELD + error.envelope() + END)
        self.told = True

    async def finish(self) -> None:
        """End the body."""
        self._stop()
        await self._response.write_eof()

    async def __aenter__(self) -> EventWriter:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    def _check(self) -> None:
        # A time stamp and one timer per stream, instead of a timer set anew for every token.
        left = self._last + self._interval - self._loop.time()
        if left <= 0:
            left = self._interval
            # A client that does not read gets no comments piled up for it.
            if not self._writing and (self._beat is None or self._beat.done()):
                self._beat = self._loop.create_task(self._send_heartbeat())
        self._timer = self._loop.call_later(left, self._check)

    async def _send_heartbeat(self) -> None:
        try:
            await self._response.write(_HEARTBEAT)
        except ConnectionError:
            # The handler learns of it by its own cancellation or its next write.
            return
        self._last = self._loop.time()
