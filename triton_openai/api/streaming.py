"""Turns runs into responses: collected into one answer, or streamed as server-sent events; and their usage."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
import structlog
from aiohttp import web

from triton_openai.answer.fan_out import Answers, Step
from triton_openai.answer.run import Run
from triton_openai.api.parameters import StreamOptions
from triton_openai.api.service import now
from triton_openai.api.sse import DONE, END, FIELD, EventWriter
from triton_openai.errors import ServiceError, UpstreamTimeout
from triton_openai.generation import Delta, TokenLogprob, Usage
from triton_openai.models.draining import DRAINING
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.observation import OBSERVATION, REQUEST_ID

_log = structlog.get_logger(__name__)
_encode = msgspec.json.Encoder().encode


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the prompt's tokens came from the backend's cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the completion's tokens were reasoning."""

    reasoning_tokens: int


class UsageObject(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's ``usage`` of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | msgspec.UnsetType = msgspec.UNSET
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_of(runs: Sequence[Run], *, n: int = 1, reasoning_tokens: int | None = None) -> UsageObject | None:
    """
    Return the usage of all *runs* together, or ``None`` when it is not known for every one of them.

    A prompt counts once, however many answers (*n*) it has.
    """
    usage = _total([run.usage for run in runs], n)
    if usage is None or reasoning_tokens is None:
        return usage
    details = CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
    return msgspec.structs.replace(usage, completion_tokens_details=details)


def usage_so_far(runs: Sequence[Run], *, n: int = 1) -> UsageObject | None:
    """Return the usage of all *runs* up to now, or ``None`` when a backend does not count as it goes."""
    return _total([run.usage_so_far for run in runs], n)


def _total(usages: Sequence[Usage | None], n: int) -> UsageObject | None:
    prompt = completion = 0
    cached: int | None = 0
    for number, usage in enumerate(usages):
        if usage is None:
            return None
        completion += usage.completion_tokens
        if number % n == 0:
            prompt += usage.prompt_tokens
            cached = None if cached is None or usage.cached_tokens is None else cached + usage.cached_tokens
    total = UsageObject(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)
    if cached is None:
        return total
    return msgspec.structs.replace(total, prompt_tokens_details=PromptTokensDetails(cached_tokens=cached))


class Chunks(ABC):
    """
    Renders the events of one stream. Each method returns whole events, or nothing.

    The parts that all chunks have in common are encoded once. *n* is how many choices each prompt has. The fingerprint
    stands in the chunk with the usage where there is one, else in the last chunk of each choice, as in vLLM's server.
    """

    def __init__(
        self, kind: str, completion_id: str, model: str, *, n: int, options: StreamOptions, fingerprint: str
    ) -> None:
        head = {"id": completion_id, "object": kind, "created": now(), "model": model}
        self._head = FIELD + _encode(head)[:-1] + b',"choices":['
        self._n = n
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._fingerprint = b',"system_fingerprint":' + _encode(fingerprint)
        #: What follows the choice in most chunks.
        self._tail = b'],"usage":null}' + END if self._include_usage else b"]}" + END

    @abstractmethod
    def first(self, choice: int, run: Run) -> bytes:
        """Return the events that open a choice."""

    @abstractmethod
    def piece(self, choice: int, delta: Delta, run: Run) -> bytes:
        """Return the events for *delta*."""

    @abstractmethod
    def last(self, choice: int, run: Run) -> bytes:
        """Return the events that end a choice."""

    def usage(self, runs: Sequence[Run]) -> bytes:
        """Return the chunk with the usage of all *runs*; nothing where it is not wanted or not known."""
        usage = self._usage(runs) if self._include_usage else None
        if usage is None:
            return b""
        return self._head + b"]" + self._fingerprint + b',"usage":' + _encode(usage) + b"}" + END

    def _usage(self, runs: Sequence[Run]) -> UsageObject | None:
        return usage_of(runs, n=self._n)

    def _counted(self, run: Run) -> bytes:
        """Return what follows the choice in a chunk that counts the tokens so far."""
        usage = usage_so_far([run]) if self._continuous else None
        return self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}" + END

    def _ended(self, run: Run) -> bytes:
        """Return what follows the choice in its last chunk."""
        tail = self._counted(run)
        return tail if self._include_usage else tail[:1] + self._fingerprint + tail[1:]


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

    answers = Answers(runs)
    try:
        async with asyncio.timeout(timeout):
            await answers.start()
            left = len(runs)
            while left:
                step = await answers.read()
                deltas[step.choice] += step.deltas
                left -= step.finished
    except TimeoutError as error:
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
        fields = {"request_id": request.get(REQUEST_ID), "model": runs[0].model.name}
        warn(_log, "stream failed", error, **fields, code=error.code)
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
    try:
        async with asyncio.timeout(timeout):
            await answers.start()
    except TimeoutError as error:
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
