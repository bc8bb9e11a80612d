"""
The execution of calls: each is counted as running, observed, and charged, and its failure becomes one error.

HTTP requests, lines of batches, responses in the background and probes of models all run here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

import structlog

from triton_openai.access.rate_limits import Reservation, tokens_charged
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import timeout_error
from triton_openai.draining import Draining
from triton_openai.errors import ServiceError
from triton_openai.operations import STREAMED, Streamed
from triton_openai.telemetry.logging import LOG_FIELDS, warn
from triton_openai.telemetry.request_record import Observer, RequestRecord

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


def stream_error(record: RequestRecord, error: Exception) -> ServiceError:
    """Log *error*, which ended a stream that has begun, and return what the client gets."""
    fields = {"request_id": record.request_id, "model": record.model}
    if isinstance(error, ServiceError):
        warn(_log, "stream failed", error, **fields, code=error.code)
        return error
    # A bug, or an error of a third party's parser. The answer has begun, so the error is an event in it.
    _log.exception("stream failed", **fields, exc_info=error)
    return ServiceError()


class StreamSender(Protocol):
    """Sends one stream to a client."""

    @property
    def begun(self) -> bool:
        """Whether the answer has begun, so that an error can only be an event."""
        ...

    @property
    def complete(self) -> bool:
        """Whether the last event, the end or an error, was sent."""
        ...

    async def run(self) -> None:
        """Send the stream up to its end. Raises its error, and ``ConnectionError`` if the client has left."""
        ...

    async def fail(self, error: ServiceError) -> None:
        """Send *error* as the last event. Raises ``ConnectionError`` if the client has left."""
        ...


async def send_stream(
    sender: StreamSender, record: RequestRecord, draining: Draining, *, timeout: float | None, runs: Sequence[Run] = ()
) -> Streamed:
    """
    Run *sender*, whose answer is of *runs* if there are any, within *timeout* seconds; return that it was sent.

    The error of an answer that has begun becomes its last event. Raises any other one, but none for a client that has
    left.
    """
    try:
        async with asyncio.timeout(timeout):
            await sender.run()
    except ConnectionError:
        # A client that disconnects after the last event has read its answer.
        record.client_left = not sender.complete
    except asyncio.CancelledError:
        reason = draining.reason()
        if not sender.complete:
            if reason is None or not sender.begun:
                raise
            await _fail_stream(sender, record, reason)
    except Exception as error:  # noqa: BLE001 - what has begun ends with an event; the rest is raised
        if isinstance(error, TimeoutError) and sender.complete:
            # All was written, and the client is slow to read it.
            return STREAMED
        failure: Exception = error
        if isinstance(error, TimeoutError):
            failure = timeout_error(timeout, runs)
        if not sender.begun:
            raise failure from None
        await _fail_stream(sender, record, stream_error(record, failure))
    return STREAMED


async def _fail_stream(sender: StreamSender, record: RequestRecord, error: ServiceError) -> None:
    record.error = error
    try:
        await sender.fail(error)
    except (asyncio.CancelledError, ConnectionError):
        # Some clients disconnect as soon as they have read the last event.
        if not sender.complete:
            raise


class Executor:
    """Runs the calls of a service."""

    def __init__(self, draining: Draining, observer: Observer) -> None:
        self.draining = draining
        self.observer = observer

    async def run(
        self,
        record: RequestRecord,
        work: Callable[[], Awaitable[_T]],
        *,
        failed: Callable[[ServiceError], Awaitable[_T]],
        reservation: Callable[[], Reservation | None] = lambda: None,
    ) -> _T:
        """
        Return what *work* returns, or what *failed* makes of the error that ended it.

        *record* describes the call; both functions set its status. *reservation* returns what is closed at the end.
        Work that is cancelled because its caller has left raises ``CancelledError`` or ``ConnectionError``.
        """
        task = self.draining.enter(record)
        self.observer.started(record)
        # The task of a call, and with it the context, is its own.
        LOG_FIELDS.set(record.log_fields)
        served = False
        cut_short = False
        try:
            result = await work()
            served = True
            return result
        except (asyncio.CancelledError, ConnectionError) as error:
            cut_short = True
            reason = None
            if isinstance(error, asyncio.CancelledError):
                reason = self.draining.reason()
            if reason is None:
                # The client has left.
                record.client_left = True
                raise
            record.error = reason
            return await failed(reason)
        except ServiceError as error:
            record.error = error
            return await failed(error)
        except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
            named = {"response": record.response_id, "batch": record.batch}
            fields = {name: value for name, value in named.items() if value is not None}
            _log.exception("request failed", request_id=record.request_id, path=record.path, **fields)
            record.error = ServiceError()
            return await failed(record.error)
        finally:
            reserved = reservation()
            if reserved is not None:
                cut_short = cut_short or record.client_left
                reserved.close(tokens_charged(record, served=served, cut_short=cut_short))
            self.draining.leave(task)
            record.end(time.monotonic())
            self.observer.ended(record)
            record.release()
