"""
What is remembered of one request: the one record from which its log line, its metrics and its spans are made.

Handlers fill it in as they learn things; nothing is written to it per token. Times are those of ``time.monotonic``,
which is also the event loop's clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason, Usage

#: Status of a request whose client left before it was answered, as nginx writes it.
CLIENT_CLOSED_REQUEST = 499


class Answering(Protocol):
    """One answer being generated: when it was sent to the backend, when its first token came, and when it ended."""

    sent: float | None
    first: float | None
    ended: float | None
    finish_reason: FinishReason | None
    usage: Usage | None

    @property
    def usage_so_far(self) -> Usage | None:
        """The tokens of an answer that has not ended, where the backend counts them with every step."""
        ...

    @property
    def steps(self) -> int:
        """In how many steps it came; 1 is an answer in one piece."""
        ...


class Observation:
    """
    One request.

    ``operation`` is OpenTelemetry's name of what was asked for (``chat``, ``text_completion``, ``embeddings``, …), and
    ``None`` for everything that is not inference. ``model`` is the name that the client used, once it is known to be
    one of a served model; ``adapter`` is who answers for it. ``answers`` are those that are generated, *n* for each
    prompt. ``key`` is the name of the API key that let it in. ``error`` is what went wrong, also after the status had
    left; ``client_left`` is whether nobody was there any more to be told.
    ``queued_seconds`` is how long the request had to wait for others.
    """

    def __init__(self, *, request_id: str, method: str, path: str) -> None:
        # The request
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
        # The answer
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
        """The tokens of all answers, a prompt counted once; ``None`` where they are not known for each of them."""
        prompt = completion = 0
        for number, answer in enumerate(self.answers):
            if answer.usage is None:
                return None
            completion += answer.usage.completion_tokens
            prompt += 0 if number % self.n else answer.usage.prompt_tokens
        if self.answers:
            return Usage(prompt_tokens=prompt, completion_tokens=completion)
        return None if self.input_tokens is None else Usage(prompt_tokens=self.input_tokens, completion_tokens=0)

    @property
    def tokens_so_far(self) -> int:
        """The tokens that are known to have been used, of answers that were cut short too; 0 where nobody counts."""
        total = self.input_tokens or 0
        for number, answer in enumerate(self.answers):
            usage = answer.usage_so_far
            if usage is not None:
                total += usage.completion_tokens + (0 if number % self.n else usage.prompt_tokens)
        return total

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


def observe(request: web.Request, operation: str, *, model: str, adapter: str, stream: bool = False) -> Observation:
    """Say what *request* asks for, and of whom; returns its record for what is learned later."""
    observation = request[OBSERVATION]
    observation.of(operation, model=model, adapter=adapter, stream=stream)
    request.app[OBSERVERS].identified(observation)
    return observation
