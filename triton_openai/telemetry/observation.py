"""
What is remembered of one request: the one record from which its log line, its metrics and its spans are made.

Handlers fill it in as they learn things; nothing is written to it per token. Times are those of ``time.monotonic``,
which is also the event loop's clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason, Usage
from triton_openai.models import ServedModel
from triton_openai.telemetry.gaps import Gaps
from triton_openai.telemetry.upstream import Upstream

#: Status of a request whose client left before it was answered, as nginx writes it.
CLIENT_CLOSED_REQUEST = 499


_NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())


def _not_counted() -> int | None:
    """Count nothing: most models do not reason."""
    return None


class Answering(Protocol):
    """
    One answer being generated: when it was sent to the backend, when its first token came, how far apart all of them
    were, when and how it ended.
    """

    sent: float | None
    first: float | None
    ended: float | None
    gaps: Gaps
    finish_reason: FinishReason | None
    usage: Usage | None
    error: ServiceError | None

    @property
    def usage_so_far(self) -> Usage | None:
        """The tokens of an answer that has not ended, where the backend counts them with every step."""
        ...

    @property
    def usage_estimate(self) -> Usage:
        """About what the tokens up to now are, where they are not counted."""
        ...

    @property
    def steps(self) -> int:
        """In how many steps it came; 1 is an answer in one piece."""
        ...

    @property
    def text(self) -> str:
        """What the backend has written up to now; nothing of it is to be logged unless the operator wants it."""
        ...


class Stage:
    """A part of the work on a request: its *name*, when it began, when it ended, and whether by an exception."""

    __slots__ = ("began", "ended", "failed", "name")

    def __init__(self, name: str, *, began: float | None = None) -> None:
        self.name = name
        self.began = time.monotonic() if began is None else began
        self.ended: float | None = None
        self.failed = False

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.ended = time.monotonic()
        self.failed = kind is not None


class Observation:
    """
    One request.

    ``operation`` is OpenTelemetry's name of what was asked for (``chat``, ``text_completion``, ``embeddings``, …), and
    ``None`` for everything that is not inference. ``model`` is the name that the client used, once it is known to be
    one of a served model; ``adapter`` is who answers for it. ``answers`` are those that are generated, *n* for each
    prompt. ``key`` is the name of the API key that let it in. ``error`` is what went wrong, also after the status had
    left; ``client_left`` is whether nobody was there any more to be told.
    ``queued_seconds`` is how long the request had to wait for others.

    ``parameters`` is the request's body, which has what the client asked for in fields of the API's names;
    ``response_id`` is the id of the answer, with which those of the requests to Triton begin; ``response_model`` is the
    name of the model that answers, whatever alias the client used; ``reasoning_tokens`` counts those of the answers
    when it is called. ``upstream`` is what goes along to Triton, and ``log_fields`` what stands in every line that is
    logged for the request.
    """

    def __init__(self, *, request_id: str, method: str, path: str, request: web.BaseRequest | None = None) -> None:
        # The request
        self.request = request
        self.request_id = request_id
        self.method = method
        self.path = path
        self.began = time.monotonic()
        self.key: str | None = None
        self.operation: str | None = None
        self.model: str | None = None
        self.adapter: str | None = None
        self.stream = False
        self.n = 1
        self.parameters: object = None
        self.upstream = Upstream({"x-request-id": request_id})
        self.log_fields: Mapping[str, str] = {"request_id": request_id}
        # The answer
        self.response_id: str | None = None
        self.response_model: str | None = None
        self.reasoning_tokens: Callable[[], int | None] = _not_counted
        self.stages: list[Stage] = []
        self.answers: Sequence[Answering] = ()
        self.input_tokens: int | None = None
        self.queued_seconds = 0.0
        self.status = CLIENT_CLOSED_REQUEST
        self.error: ServiceError | None = None
        self.client_left = False
        self.ended: float | None = None

    def of(self, operation: str, *, model: str, adapter: str, stream: bool = False) -> None:
        """Say what is asked for, and of whom."""
        self.operation, self.model, self.adapter, self.stream = operation, model, adapter, stream

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The request's headers."""
        return _NO_HEADERS if self.request is None else self.request.headers

    def stage(self, name: str) -> Stage:
        """Return what is to be entered and left around a part of the work."""
        stage = Stage(name)
        self.stages.append(stage)
        return stage

    def let_go(self) -> None:
        """
        Drop what leads back to the request, which has this record: itself, and the tracebacks of what went wrong.

        For when the observers know of the end. Such a cycle would keep prompt and answer until Python's collector comes
        by, which it seldom does in a process with many lasting objects.
        """
        self.request = None
        for known in (self.error, *(answer.error for answer in self.answers)):
            error: BaseException | None = known
            while error is not None:
                error.__traceback__ = None
                error = error.__context__

    @property
    def duration(self) -> float:
        """Seconds since the request came, up to its end."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds until the backend's first token came; ``None`` when none did."""
        firsts = [answer.first for answer in self.answers if answer.first is not None]
        return min(firsts) - self.began if firsts else None

    @property
    def usage(self) -> Usage | None:
        """
        The tokens of all answers, also of those that were cut short, a prompt counted once; ``None`` where they are not
        known for each of them.
        """
        prompt = completion = 0
        cached: int | None = 0
        for number, answer in enumerate(self.answers):
            usage = answer.usage_so_far
            if usage is None:
                return None
            completion += usage.completion_tokens
            if number % self.n == 0:
                prompt += usage.prompt_tokens
                known = usage.cached_tokens
                cached = None if cached is None or known is None else cached + known
        if self.answers:
            return Usage(prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached)
        return None if self.input_tokens is None else Usage(prompt_tokens=self.input_tokens, completion_tokens=0)

    @property
    def finish_reasons(self) -> Sequence[str]:
        """Why the answers ended, as far as it is known."""
        return [answer.finish_reason.value for answer in self.answers if answer.finish_reason is not None]


class Observer:
    """Something that wants to know of requests. Called in the event loop, and must not block or raise."""

    def started(self, observation: Observation) -> None:
        """Learn of a request that has come; nothing is known of it but its head."""

    def identified(self, observation: Observation) -> None:
        """Learn what is asked for, and of which model."""

    def queued(self, observation: Observation) -> None:
        """Learn that the request has to wait for others to end."""

    def admitted(self, observation: Observation) -> None:
        """Learn that the wait is over, because the request is let in or because it gives up."""

    def ended(self, observation: Observation) -> None:
        """Learn of the end of a request, when its last byte has left or nobody was there to take it."""


class Observers(Observer):
    """All observers of a service, as one."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def started(self, observation: Observation) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.started(observation)

    def identified(self, observation: Observation) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.identified(observation)

    def queued(self, observation: Observation) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.queued(observation)

    def admitted(self, observation: Observation) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.admitted(observation)

    def ended(self, observation: Observation) -> None:
        """Tell all of them."""
        for observer in self._observers:
            observer.ended(observation)


OBSERVATION: web.RequestKey[Observation] = web.RequestKey("observation", Observation)
OBSERVERS: web.AppKey[Observers] = web.AppKey("observers", Observers)


def observe(request: web.Request, operation: str, *, model: ServedModel, stream: bool = False) -> Observation:
    """Say what *request* asks for, and of whom; returns its record for what is learned later."""
    observation = request[OBSERVATION]
    observation.of(operation, model=model.name, adapter=model.adapter.name, stream=stream)
    observation.response_model = model.answers_as
    request.app[OBSERVERS].identified(observation)
    return observation
