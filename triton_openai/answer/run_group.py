"""The runs of one request, in parallel, and the wait for their ends."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from time import monotonic

import msgspec

from triton_openai import offload
from triton_openai.answer.run import Push, Run
from triton_openai.errors import UpstreamTimeout
from triton_openai.generation import Delta, TokenLogprob

# Prompts of one request that are sent to Triton at the same time.
_PARALLEL_RUNS = 32


class RunGroup:
    """
    The runs of one request. Calls *push* with the number of a run and its deltas as they arrive.

    One timer for the whole request checks the silence of each run, and calls *check*, which gets the time and returns
    the seconds until the next call.

    Must be closed; :meth:`close` closes every run.
    """

    def __init__(
        self, runs: Sequence[Run], push: Push, *, check: Callable[[float], float] = lambda _: math.inf
    ) -> None:
        self.runs = runs
        #: The number of runs that :meth:`wait` has not returned.
        self.unfinished = len(runs)
        self._push = push
        self._sent = 0
        self._check = check
        self._timer: asyncio.TimerHandle | None = None
        self._ended: deque[int] = deque()
        self._loop = asyncio.get_running_loop()
        # Done when :meth:`wait` has work. A future costs less than an event.
        self._wakeup = self._loop.create_future()

    async def start(self) -> None:
        """Send the requests. Raises :class:`ServiceError`."""
        self._check_time()
        for _ in range(min(len(self.runs), _PARALLEL_RUNS)):
            self._send_next()
            if self._sent < len(self.runs):
                # Encoding a long prompt takes time: one prompt in each turn of the event loop.
                await asyncio.sleep(0)

    def _send_next(self) -> None:
        choice = self._sent
        self._sent += 1
        self.runs[choice].start(choice, self._push, self._end)

    def _end(self, choice: int) -> None:
        self._ended.append(choice)
        self.wake()

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        if not self._wakeup.done():
            self._wakeup.set_result(None)

    def _check_time(self) -> None:
        """Check what may be late, and when to check again."""
        now = monotonic()
        left = self._check(now)
        for run in self.runs:
            left = min(left, run.check(now))
        self._timer = self._loop.call_later(left, self._check_time)

    async def wait(self) -> Sequence[int]:
        """
        Wait until a run has ended, or for :meth:`wake`, and return the numbers of the runs that have ended meanwhile.

        Their finish reasons and usage are set. Raises the error of a run that failed.
        """
        await self._wakeup
        self._wakeup = self._loop.create_future()
        ended = []
        while self._ended:
            choice = self._ended.popleft()
            run = self.runs[choice]
            if run.failure is not None:
                raise run.failure
            await run.finalize()
            if self._sent < len(self.runs):
                self._send_next()
            self.unfinished -= 1
            ended.append(choice)
        return ended

    def pause(self) -> None:
        """Pause every run."""
        for run in self.runs:
            run.pause()

    def resume(self) -> None:
        """Undo one :meth:`pause`."""
        for run in self.runs:
            run.resume()

    def close(self) -> None:
        """Close every run."""
        if self._timer is not None:
            self._timer.cancel()
        for run in self.runs:
            run.close()
        # Breaks a reference cycle: the request must not wait for the garbage collector.
        del self._push
        del self._check


def timeout_error(timeout: float | None, runs: Sequence[Run] = ()) -> UpstreamTimeout:
    """Return the error for an answer, of *runs* if there are any, that took more than *timeout* seconds."""
    cause = next((run.no_answer_cause for run in runs if run.no_answer_cause), "")
    return UpstreamTimeout(f"The answer was not complete after {timeout or 0:g} seconds.{cause}")


class Collected(msgspec.Struct):
    """The whole answer of one run, as a list of deltas."""

    run: Run
    deltas: Sequence[Delta]

    @property
    def text(self) -> str:
        """Its text."""
        return "".join([delta.text for delta in self.deltas])

    @property
    def logprobs(self) -> Sequence[TokenLogprob]:
        """The log probabilities of its tokens."""
        return list(chain.from_iterable([delta.logprobs for delta in self.deltas]))

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids of its tokens, if the backend sends them."""
        return list(chain.from_iterable([delta.token_ids for delta in self.deltas]))


def answers_cost(answers: Sequence[Collected], per_character: float = offload.BYTE) -> float:
    """Return about how many microseconds it takes to render *answers*, with so many for each character."""
    alternatives = None
    if answers:
        alternatives = answers[0].run.generation.sampling.logprobs
    deltas = [delta for answer in answers for delta in answer.deltas]
    cost = per_character * sum([len(delta.text) for delta in deltas])
    if alternatives is not None:
        cost += offload.logprobs_cost(sum([len(delta.logprobs) for delta in deltas]), alternatives)
    return cost


async def collect(runs: Sequence[Run], *, timeout: float | None, push: Push | None = None) -> list[Collected]:
    """
    Return the whole answer of each run; with *push*, it gets the pieces as they come, and they are not returned.

    Raises :class:`ServiceError`, also when *timeout* seconds were not enough.
    """
    collected: list[list[Delta]] = [[] for _ in runs]
    group = RunGroup(runs, push or (lambda choice, deltas: collected[choice].extend(deltas)))
    try:
        async with asyncio.timeout(timeout):
            await group.start()
            while group.unfinished:
                await group.wait()
    except TimeoutError as error:
        raise timeout_error(timeout, runs) from error
    finally:
        group.close()
    return list(map(Collected, runs, collected))
