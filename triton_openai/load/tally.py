"""The load generator's bookkeeping: what happens when, inside the measured window, and percentiles of it."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from triton_openai.tasks import wait_any


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """
    One measurement: of a window of time, or of a number of answers.

    A window opens after the first token of every stream. Answers are counted and timed from the first request on.
    """

    #: Requests that run at the same time. A stream that has its answer asks again, until the measurement ends.
    streams: int
    #: Seconds over which the streams start.
    ramp: float = 0.0
    #: Seconds before the window opens, after the first tokens.
    warm: float = 0.0
    #: Length of the window.
    seconds: float = 0.0
    #: Not a window of time, but this many answers in all.
    answers: int | None = None
    #: Whether first tokens count inside the window only.
    settled: bool = False
    #: Seconds after which all streams must have a token, and all answers must be complete; ``None``: no limit.
    limit: float | None = None
    #: Requests that may fail before the measurement ends.
    max_errors: int = 0


class Outcome(msgspec.Struct, kw_only=True):
    """What was measured, in seconds unless a field says otherwise."""

    seconds: float = 0.0
    tokens: int = 0
    answers: int = 0
    #: From the start of a request (of its connection, for the first of a stream) to its first token.
    first: list[float] = []
    #: Between the tokens of one stream, in microseconds.
    gaps: list[int] = []
    #: From the start of a request to the end of its answer.
    whole: list[float] = []
    errors: list[str] = []


class Tally:
    """Gets every token of the streams; opens and closes the window."""

    def __init__(self, plan: Plan, outcome: Outcome) -> None:
        self._plan = plan
        self._begun = 0
        self._all_begun = asyncio.Event()
        self._enough = asyncio.Event()
        self._failed = asyncio.Event()
        self._open = False
        self._gaps = array("d")
        #: Whether streams stop after their current answers.
        self.closing = False
        self.outcome = outcome

    def first(self, waited: float, *, of_stream: bool) -> None:
        """Note a request's first token; *of_stream*: it was also the first of its stream."""
        if self._open or not self._plan.settled:
            self.outcome.first.append(waited)
        if of_stream:
            self._begun += 1
            if self._begun == self._plan.streams:
                self._all_begun.set()

    def tokens(self, count: int, gap: float | None) -> None:
        """Note tokens that came together, *gap* seconds after the stream's last one."""
        if self._open:
            self.outcome.tokens += count
            if gap is not None:
                self._gaps.append(gap)
                # They came at the same moment, as the client sees it.
                self._gaps.extend([0.0] * (count - 1))

    def answered(self, seconds: float) -> bool:
        """Note the end of an answer, *seconds* after its request; return whether the stream is to ask again."""
        if self._open:
            self.outcome.answers += 1
            self.outcome.whole.append(seconds)
        return self._goes_on()

    def failed(self, reason: str) -> bool:
        """Note a request that failed; return whether the stream is to ask again."""
        self.outcome.errors.append(reason)
        if len(self.outcome.errors) > self._plan.max_errors:
            self._failed.set()
            return False
        return self._goes_on()

    def _goes_on(self) -> bool:
        wanted = self._plan.answers
        if wanted is None:
            return not self.closing
        ended = self.outcome.answers + len(self.outcome.errors)
        if ended >= wanted:
            self._enough.set()
        return ended + self._plan.streams <= wanted

    def opened(self) -> None:
        """Called when the window opens."""

    def closed(self) -> None:
        """Called when the window has closed."""

    async def drain(self, ended: Callable[[], bool]) -> None:
        """Stop the streams after their current answers; *ended* returns whether all have stopped."""
        self.closing = True

    async def measure(self) -> None:
        """Wait for the beginning, and keep the window open for its time."""
        plan = self._plan
        if plan.answers is None:
            if not await self._wait(self._all_begun, plan.limit):
                self._end(f"only {self._begun} of {plan.streams} streams had a token")
            await self._wait(self._failed, plan.warm)
        self.opened()
        started = time.perf_counter()
        self._open = True
        try:
            if plan.answers is None:
                await self._wait(self._failed, plan.seconds)
            elif not await self._wait(self._enough, plan.limit):
                self._end(f"only {self.outcome.answers} of {plan.answers} answers came")
        finally:
            self._open = False
            self.outcome.seconds = time.perf_counter() - started
            self.outcome.gaps = [round(gap * 1e6) for gap in self._gaps]
        self.closed()

    def _end(self, reason: str) -> None:
        """Note why the measurement cannot go on, unless a failed request has ended it."""
        if not self._failed.is_set():
            self.outcome.errors.append(reason)
            self._failed.set()

    async def _wait(self, event: asyncio.Event, seconds: float | None) -> bool:
        """Wait for *event* or a failure, at most *seconds*; return whether it was *event*."""
        await wait_any(event, self._failed, timeout=seconds)
        return event.is_set()


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the value below which *share* (0 to 1) of *values* lie, between neighbours in proportion."""
    if not values:
        return None
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
