"""
What the workers of one service share: the counts of rate limits, and which models take no requests now.

The parent of the workers keeps it (:class:`SharedState`); a worker asks over its control channel
(:class:`SharedClient`). So one event loop sees everything in one order, there are no locks, and what a worker has that
ends is given back at once.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from triton_openai.access.rate_limits import Decision, RateLimit, RateLimits
from triton_openai.errors import ServiceOverloaded
from triton_openai.models.draining import ModelChange
from triton_openai.serving.workers.channel import (
    Admit,
    Answer,
    ChangeGates,
    Claim,
    Done,
    FromWorker,
    Leave,
    Listening,
    Message,
    Unclaim,
)

# Longest wait for the parent, which answers at once unless it is stopped.
_ANSWER_SECONDS = 5.0


class _Change:
    """A change of models that was passed on to the workers *left*; *owner* is told when all have made it."""

    def __init__(self, owner: int, message: ChangeGates) -> None:
        self.owner = owner
        self.message = message
        self.left: set[int] = set()


class SharedState:
    """The parent's side. Workers are known by their numbers."""

    def __init__(self) -> None:
        self._limits = RateLimits()
        self._running: dict[int, Counter[str]] = {}
        self._send: dict[int, Callable[[Message], None]] = {}
        self._claims: dict[str, int] = {}
        # The models that each worker has closed, and the changes that other workers have not made yet.
        self._closed: dict[int, set[str]] = {}
        self._changes: dict[int, _Change] = {}
        self._numbers = itertools.count(1)

    def heard(self, index: int, message: FromWorker, send: Callable[[Message], None]) -> None:
        """Do what worker *index* asks for; *send* sends it a message."""
        if isinstance(message, Admit):
            decision = self._limits.decide(message.name, message.limit)
            if decision.refusal is None:
                self._running.setdefault(index, Counter())[message.name] += 1
            send(Answer(message.id, decision=decision))
        elif isinstance(message, Leave):
            running = self._running.get(index)
            if running is not None and running[message.name]:
                running[message.name] -= 1
                self._limits.leave(message.name, message.tokens)
        elif isinstance(message, Claim):
            taken = next((model for model in message.models if model in self._claims), None)
            if taken is None:
                self._claims.update(dict.fromkeys(message.models, index))
            send(Answer(message.id, taken=taken))
        elif isinstance(message, Unclaim):
            for model in message.models:
                self._claims.pop(model, None)
        elif isinstance(message, ChangeGates):
            self._change(index, message)
        elif isinstance(message, Done):
            self._done(message.id, index)
        elif isinstance(message, Listening):
            self._send[index] = send
            for owner, models in self._closed.items():
                # It has just begun to serve, so whoever closed them need not wait for it.
                self._pass_on(_Change(owner, ChangeGates(0, "close", tuple(models))), [index])

    def forget(self, index: int) -> None:
        """Give back what worker *index* had, which has ended."""
        self._send.pop(index, None)
        for name, count in self._running.pop(index, Counter()).items():
            for _ in range(count):
                self._limits.leave(name, 0)
        self._claims = {model: owner for model, owner in self._claims.items() if owner != index}
        closed = tuple(self._closed.get(index, ()))
        if closed:
            self._change(index, ChangeGates(0, "open", closed))
        for number in list(self._changes):
            self._done(number, index)

    def _change(self, index: int, message: ChangeGates) -> None:
        closed = self._closed.setdefault(index, set())
        if message.action == "close":
            closed.update(message.models)
        elif message.action == "open":
            closed.difference_update(message.models)
        self._pass_on(_Change(index, message), [other for other in self._send if other != index])

    def _pass_on(self, change: _Change, workers: Collection[int]) -> None:
        number = next(self._numbers)
        self._changes[number] = change
        change.left.update(workers)
        for index in workers:
            self._send[index](ChangeGates(number, change.message.action, change.message.models))
        self._tell_owner(number)

    def _done(self, number: int, index: int) -> None:
        if number in self._changes:
            self._changes[number].left.discard(index)
            self._tell_owner(number)

    def _tell_owner(self, number: int) -> None:
        change = self._changes[number]
        if not change.left:
            del self._changes[number]
            if change.owner in self._send:
                self._send[change.owner](Answer(change.message.id))


class SharedClient:
    """A worker's side; *send* sends a message to the parent."""

    def __init__(self, send: Callable[[Message], None]) -> None:
        self._send = send
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._apply: Callable[[ModelChange, Collection[str]], Coroutine[Any, Any, None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def admit(self, name: str, limit: RateLimit) -> Decision:
        """
        See :class:`triton_openai.access.rate_limits.LimitStore`.

        Raises :class:`ServiceOverloaded` when the parent does not answer.
        """
        number, answer = self._ask()
        self._send(Admit(number, name, limit))

        def give_back(answer: asyncio.Future[Answer]) -> None:
            decision = answer.result().decision
            if decision is not None and decision.refusal is None:
                self.leave(name, 0)

        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                decision = (await asyncio.shield(answer)).decision
        except BaseException as error:
            # Nobody waits for the answer any more, which may be that the request was counted in.
            answer.add_done_callback(give_back)
            if isinstance(error, TimeoutError):
                raise ServiceOverloaded("The rate limits cannot be checked now.", retry_after=1) from error
            raise
        assert decision is not None
        return decision

    def leave(self, name: str, tokens: int) -> None:
        """See :class:`triton_openai.access.rate_limits.LimitStore`."""
        self._send(Leave(name, tokens))

    async def claim(self, models: Collection[str]) -> str | None:
        """See :class:`triton_openai.models.draining.Peers`."""
        number, answer = self._ask()
        self._send(Claim(number, tuple(models)))
        return (await answer).taken

    def unclaim(self, models: Collection[str]) -> None:
        """See :class:`triton_openai.models.draining.Peers`."""
        self._send(Unclaim(tuple(models)))

    def change(self, action: ModelChange, models: Collection[str]) -> asyncio.Future[Any]:
        """See :class:`triton_openai.models.draining.Peers`."""
        number, answer = self._ask()
        self._send(ChangeGates(number, action, tuple(models)))
        return answer

    def listen(self, apply: Callable[[ModelChange, Collection[str]], Coroutine[Any, Any, None]]) -> None:
        """Call *apply* for what other workers change; it returns when it has made the change."""
        self._apply = apply

    def heard(self, message: Answer | ChangeGates) -> None:
        """Take note of what the parent says."""
        if isinstance(message, ChangeGates):
            task = asyncio.create_task(self._make(message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            answer = self._asked.pop(message.id, None)
            if answer is not None and not answer.done():
                answer.set_result(message)

    def _ask(self) -> tuple[int, asyncio.Future[Answer]]:
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        return number, answer

    async def _make(self, message: ChangeGates) -> None:
        if self._apply is not None:
            await self._apply(message.action, message.models)
        self._send(Done(message.id))
