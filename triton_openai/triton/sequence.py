"""Requests that are the parts of one sequence, whose state the backend keeps between them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from msgspec.structs import replace

from triton_openai.errors import ServiceError
from triton_openai.tasks import Background
from triton_openai.triton.client import AnswerTask, Receiver, TritonClient
from triton_openai.triton.tensors import InferRequest

# The time limit for the end of a sequence that was given up, half of it for the request that still runs.
_END_TIMEOUT = 20.0
# The most parts of a live sequence that are kept, so that another Triton can get them.
_MAX_KEPT = 64


class Parts(Protocol):
    """The parts of a sequence, by their numbers from 0."""

    @property
    def closing(self) -> InferRequest:
        """The part that ends the sequence early."""
        ...

    async def get(self, number: int) -> InferRequest | None:
        """Return part *number* once it is there; ``None`` if there is none."""
        ...

    def ends(self, number: int) -> bool:
        """Return whether part *number*, which is there, is the last one."""
        ...

    def mark_answered(self, number: int) -> None:
        """Note that part *number* is answered."""
        ...


class WholeSequence:
    """A sequence of *parts* that are all there; the last one also ends it early."""

    def __init__(self, parts: Sequence[InferRequest]) -> None:
        self._parts = parts

    @property
    def closing(self) -> InferRequest:
        return self._parts[-1]

    async def get(self, number: int) -> InferRequest | None:
        if number < len(self._parts):
            return self._parts[number]
        return None

    def ends(self, number: int) -> bool:
        return number == len(self._parts) - 1

    def mark_answered(self, number: int) -> None:
        """Do nothing."""


class LiveSequence:
    """
    A sequence whose parts are made while it runs; *closing* ends it early.

    The first parts are kept for another Triton, unless they become too many.
    """

    def __init__(self, closing: InferRequest) -> None:
        self.closing = closing
        #: Whether every part is kept, so that the sequence can begin again.
        self.complete = True
        self._parts: dict[int, InferRequest] = {}
        self._count = 0
        self._answered = 0
        self._finished = False
        self._closed = False
        # Both have one waiter: what sends the parts, and what adds them.
        self._added = asyncio.Event()
        self._taken = asyncio.Event()

    def add(self, part: InferRequest, *, last: bool = False) -> None:
        """Add the next part."""
        self._parts[self._count] = part
        self._count += 1
        self._finished = last
        self._added.set()

    @property
    def unanswered(self) -> int:
        """The number of parts that are not answered yet."""
        return self._count - self._answered

    async def wait_until(self, unanswered: int) -> None:
        """Return when no more than *unanswered* parts are not answered yet, or nobody waits for answers any more."""
        while self.unanswered > unanswered and not self._closed:
            self._taken.clear()
            await self._taken.wait()

    def close(self) -> None:
        """Note that nobody waits for answers any more."""
        self._closed = True
        self._taken.set()

    async def get(self, number: int) -> InferRequest | None:
        while number >= self._count:
            if self._finished:
                return None
            self._added.clear()
            await self._added.wait()
        return self._parts[number]

    def ends(self, number: int) -> bool:
        return self._finished and number == self._count - 1

    def mark_answered(self, number: int) -> None:
        self._answered = max(self._answered, number + 1)
        if self._answered > _MAX_KEPT:
            self.complete = False
        if not self.complete:
            self._parts.pop(number, None)
        self._taken.set()


class SequenceAnswers(AnswerTask):
    """
    The stream of the answers to the *parts* of a sequence; each is sent when the one before is answered.

    See :class:`triton_openai.triton.client.ResponseStream`. *request* is the first part as it is sent; the others get
    its headers. If the sequence fails or is closed, its end is sent in the *background*: without it the backend would
    keep the state for some time.
    """

    def __init__(
        self, client: TritonClient, request: InferRequest, receiver: Receiver, background: Background, parts: Parts
    ) -> None:
        self._client = client
        self._headers = request.headers
        self._background = background
        self._parts = parts
        super().__init__(receiver)

    async def _ask(self) -> None:
        parts = self._parts
        call: asyncio.Future[Any] | None = None
        number = 0
        ended = False
        try:
            while True:
                part = await parts.get(number)
                if part is None:
                    return
                ended = parts.ends(number)
                call = asyncio.ensure_future(self._client.infer(replace(part, headers=self._headers)))
                # Shielded: if the end of the sequence arrived before this request, the backend would keep the state.
                response = await asyncio.shield(call)
                parts.mark_answered(number)
                number += 1
                self._receive(response)
        except BaseException:
            last = None
            if not ended:
                last = replace(parts.closing, headers=self._headers)
            if call is not None:
                self._background.start(_end_sequence(self._client, call, last), timeout=_END_TIMEOUT)
            raise
        finally:
            # Breaks a reference cycle: the call's error has a traceback with this frame.
            del call


async def _end_sequence(client: TritonClient, call: asyncio.Future[Any], last: InferRequest | None) -> None:
    """Wait until *call* has ended, and end the sequence with its *last* request."""
    await asyncio.wait([call], timeout=_END_TIMEOUT / 2)
    call.cancel()
    if last is not None:
        # Where the sequence has not begun, or Triton is gone, there is nothing to end.
        with suppress(ServiceError):
            await client.infer(last)
