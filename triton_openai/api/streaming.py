"""Turns runs into responses: collected into one answer, or streamed as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog
from aiohttp import web

from triton_openai.answers import Answers, Step
from triton_openai.api.service import REQUEST_ID
from triton_openai.api.sse import DONE, EventWriter
from triton_openai.deadlines import within
from triton_openai.draining import DRAINING
from triton_openai.errors import ServiceError, UpstreamTimeout
from triton_openai.generation import Delta, TokenLogprob
from triton_openai.running import Run
from triton_openai.telemetry.observation import OBSERVATION

_log = structlog.get_logger(__name__)


class Chunks(Protocol):
    """Renders what one stream sends, each method returning whole events."""

    def first(self, choice: int, run: Run) -> bytes:
        """Return what opens a choice."""
        ...

    def piece(self, choice: int, delta: Delta, run: Run) -> bytes:
        """Return a piece of text, or of what else the delta brings."""
        ...

    def last(self, choice: int, run: Run) -> bytes:
        """Return what ends a choice."""
        ...

    def usage(self, runs: Sequence[Run]) -> bytes:
        """Return the usage of the whole request; empty where it is not wanted or not known."""
        ...


class Collected(msgspec.Struct):
    """The whole answer of one run, in the pieces in which it came."""

    run: Run
    deltas: Sequence[Delta]

    @property
    def text(self) -> str:
        """Its text."""
        return "".join([delta.text for delta in self.deltas])

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """The log probabilities of its tokens."""
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of its tokens, where the backend tells them."""
        return [number for delta in self.deltas for number in delta.token_ids]


async def collect(runs: Sequence[Run], *, timeout: float | None) -> list[Collected]:
    """
    Return the whole answer of each run.

    Raises :class:`ServiceError`, also when *timeout* seconds were not enough.
    """
    deltas: list[list[Delta]] = [[] for _ in runs]

    async def read_all(answers: Answers) -> None:
        await answers.start()
        left = len(runs)
        while left:
            step = await answers.read()
            deltas[step.choice] += step.deltas
            left -= step.finished

    answers = Answers(runs)
    try:
        await within(timeout, read_all(answers))
    except asyncio.TimeoutError as error:
        raise _too_long(timeout) from error
    finally:
        await answers.close()
    return [Collected(run=run, deltas=pieces) for run, pieces in zip(runs, deltas, strict=True)]


async def stream(
    request: web.Request, runs: Sequence[Run], chunks: Chunks, *, heartbeat: float, timeout: float | None
) -> web.StreamResponse:
    """
    Stream *runs* to the client, for *timeout* seconds at most.

    The status line waits for Triton's first answer (at most *heartbeat* seconds), so that a request which is refused
    upstream gets its own status; after that, errors are events.
    """
    writer = EventWriter(request, heartbeat=heartbeat)
    try:
        async with writer:
            await _stream(request, Answers(runs), writer, chunks, heartbeat=heartbeat, timeout=timeout)
    except (asyncio.CancelledError, ConnectionError):
        # Clients go as soon as they have read how it ended, and some before the body has: that is no leaving.
        if not writer.told:
            raise
    return writer.response


async def _stream(
    request: web.Request,
    answers: Answers,
    writer: EventWriter,
    chunks: Chunks,
    *,
    heartbeat: float,
    timeout: float | None,
) -> None:
    runs = answers.runs
    loop = asyncio.get_running_loop()
    began, deadline = loop.time(), None
    try:
        await _start(answers, timeout)
        if timeout is not None:
            deadline = loop.call_at(began + timeout, answers.abort, _too_long(timeout))
        first = asyncio.create_task(answers.read())
        try:
            done, _ = await asyncio.wait({first}, timeout=heartbeat)
            if done:
                step = first.result()
                await writer.start()
            else:
                await writer.start()
                await writer.heartbeat()
                step = await first
        finally:
            first.cancel()
        await _relay(step, answers, writer, chunks)
    except ServiceError as error:
        if not writer.started:
            raise
        _log.warning(
            "stream failed",
            request_id=request.get(REQUEST_ID),
            model=runs[0].model.name,
            reason=error.reason,
            code=error.code,
        )
        request[OBSERVATION].error = error
        await writer.fail(error)
    except asyncio.CancelledError:
        reason = request.app[DRAINING].reason()
        if reason is None or not writer.started:
            raise
        request[OBSERVATION].error = reason
        await writer.fail(reason)
    except ConnectionError:
        # The client has left: there is nobody to tell, and what ran for it is stopped below.
        request[OBSERVATION].client_left = True
        return
    except Exception:
        if not writer.started:
            raise
        # A mistake of ours, or of a third party's parser: the answer has begun, so it has to be told in it.
        _log.exception("stream failed", request_id=request.get(REQUEST_ID), model=runs[0].model.name)
        failure = request[OBSERVATION].error = ServiceError("The service failed to answer the request.")
        await writer.fail(failure)
    finally:
        if deadline is not None:
            deadline.cancel()
        await answers.close()
    await writer.finish()


async def _start(answers: Answers, timeout: float | None) -> None:
    """Send the requests. Raises :class:`ServiceError`, also when that took *timeout* seconds: abort is for later."""
    if timeout is None:
        await answers.start()
        return
    try:
        await within(timeout, answers.start())
    except asyncio.TimeoutError as error:
        raise _too_long(timeout) from error


def _too_long(timeout: float | None) -> UpstreamTimeout:
    return UpstreamTimeout(f"The answer was not complete after {timeout or 0:g} seconds.")


async def _relay(step: Step, answers: Answers, writer: EventWriter, chunks: Chunks) -> None:
    """Write what comes; this is the loop that turns once per token."""
    runs = answers.runs
    # All choices and in their order, whichever comes first: the official client takes the first chunk for choice 0.
    opening = b"".join([chunks.first(choice, run) for choice, run in enumerate(runs)])
    left = len(runs)
    while True:
        choice = step.choice
        # What arrived together leaves together.
        events = b"".join([chunks.piece(choice, delta, runs[choice]) for delta in step.deltas])
        if opening:
            events, opening = opening + events, b""
        if step.finished:
            left -= 1
            events += chunks.last(choice, runs[choice])
            if not left:
                events += chunks.usage(runs) + DONE
        await writer.write(events)
        if not left:
            writer.told = True
            return
        step = await answers.read()
