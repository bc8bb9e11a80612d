"""
Sessions over WebSockets, without the WebSocket: what a connection with many calls needs, whatever the calls are.

Each call of a session is a request of its own: the client is authenticated again, so that a key that was removed or
restricted meanwhile is refused, its limits hold, and it has a log line, metrics and a span.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import structlog

from triton_openai.access.authorizer import AuthorizedCall, Authorizer
from triton_openai.access.keys import RouteGroup
from triton_openai.access.rate_limits import Reservation
from triton_openai.errors import ServiceError, UpstreamUnavailable
from triton_openai.operations import Opening, Send
from triton_openai.serving.execution import Executor
from triton_openai.tasks import cancel
from triton_openai.telemetry.request_record import RequestRecord, request_id

_log = structlog.get_logger(__name__)


class CallSession(ABC):
    """
    Base of the sessions of connections: runs the calls that were *opened* by a request, and sends frames.

    A subclass reads frames in :meth:`receive`, and renders errors.
    """

    #: The largest frame of the client, in bytes.
    max_frame_size: int

    def __init__(self, executor: Executor, authorizer: Authorizer, opening: Opening, send: Send) -> None:
        self.opening = opening
        self.send = send
        #: Whether no call may begin any more.
        self.ended = False
        self._executor = executor
        self._authorizer = authorizer
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    async def begin(self) -> None:
        """Send what comes first: the connection is open."""

    @abstractmethod
    async def receive(self, frame: bytes) -> None:
        """Begin what *frame* asks for. What is wrong with it is answered by a frame."""

    @abstractmethod
    def error_frame(self, error: ServiceError, headers: Mapping[str, str]) -> bytes:
        """Return the frame that reports *error*, with what the *headers* of an answer over HTTP say."""

    def check_stopping(self) -> None:
        """Raise :class:`UpstreamUnavailable` once the service stops."""
        if self._executor.draining.begun:
            raise UpstreamUnavailable("The service is stopping.", code="service_stopping")

    def start(
        self, work: Coroutine[Any, Any, None], then: Callable[[asyncio.Task[None]], object] = lambda _: None
    ) -> asyncio.Task[None]:
        """Run *work* in a task, which ends with the session at the latest; *then* is called with the ended task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._idle.clear()

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            _log_failure(task)
            then(task)
            if not self._tasks:
                self._idle.set()

        task.add_done_callback(ended)
        return task

    def new_record(self) -> RequestRecord:
        """Return the record of a call."""
        opened = self.opening.record
        return RequestRecord(request_id=request_id({}), method="POST", path=opened.path, client=opened.client)

    async def run_call(
        self,
        record: RequestRecord,
        group: RouteGroup,
        work: Callable[[AuthorizedCall], Awaitable[None]],
        failed: Callable[[ServiceError], Awaitable[None]],
    ) -> None:
        """
        Run *work*, a call for *group* that counts against the limits of its key, in the current task.

        *failed* gets the error that ended it, or that refused it.
        """
        reservation: Reservation | None = None

        async def authorize_and_work() -> None:
            nonlocal reservation
            self._executor.draining.check()
            authorized = await self._authorizer.authorize(self.opening.headers, group, record, counted=True)
            reservation = authorized.reservation
            await work(authorized)
            record.status = 200

        async def report(error: ServiceError) -> None:
            record.status = error.status
            await failed(error)

        try:
            await self._executor.run(record, authorize_and_work, failed=report, reservation=lambda: reservation)
        except ConnectionError:
            # Nobody reads a further answer.
            self.ended = True

    async def send_error(self, error: ServiceError) -> None:
        """Send *error*, which is that of no call."""
        await self.send(self.error_frame(error, error.header_fields()))

    async def finish(self) -> None:
        await self._idle.wait()

    async def end(self, error: ServiceError) -> None:
        self.ended = True
        await cancel(*self._tasks)
        await self.send_error(error)

    def close(self) -> None:
        self.ended = True
        for task in self._tasks:
            task.cancel()


def _log_failure(task: asyncio.Task[None]) -> None:
    """Log what ended *task*, unless it was cancelled, or its client has left."""
    if task.cancelled():
        return
    failure = task.exception()
    if failure is not None and not isinstance(failure, ConnectionError):
        _log.error("session failed", exc_info=failure)
