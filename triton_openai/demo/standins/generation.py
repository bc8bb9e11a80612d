"""One sequence being generated: an engine's ids, cut into the steps that a backend sends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .engine import LIMIT, WAITING, Answer, EngineFailure

_FOREVER = 3600.0


@dataclass(frozen=True)
class Step:
    """New ids, whether the end-of-sequence id came after them, and why the sequence ended (None: it goes on)."""

    ids: list[int]
    eos: bool
    finish: str | None

    @property
    def empty(self) -> bool:
        """Whether there is no progress yet."""
        return not self.ids and self.finish is None


class Generation:
    """The state of one sequence. `step` returns the new ids, `delay` the seconds until the next step."""

    def __init__(
        self,
        answer: Answer,
        *,
        end_id: int | None,
        max_tokens: int,
        stops: Callable[[list[int]], bool] = lambda _: False,
    ) -> None:
        self._source = answer.ids
        self._steering = steering = answer.steering
        self.scores = answer.scores
        self._end_id = end_id
        self._max_tokens = max_tokens
        self._stops = stops
        self._delay = steering.delay_ms / 1000.0
        self._started = False
        self.ids: list[int] = []
        self.finish: str | None = None

    @property
    def _hangs(self) -> bool:
        """Whether the sequence has reached the point where steering makes it fall silent."""
        return self._steering.hang_at is not None and len(self.ids) >= self._steering.hang_at

    def delay(self) -> float:
        """Return the seconds until the next step is due; none is while the sequence hangs."""
        if self._hangs:
            return _FOREVER
        if self._started:
            first = 0.0
        else:
            first = self._steering.first_delay_ms / 1000.0
        return first + self._delay * self._steering.tokens_per_response

    def step(self) -> Step:
        """Return the next step; raises `EngineFailure` if the engine failed, or if the steering says so."""
        self._started = True
        new: list[int] = []
        while self.finish is None and len(new) < max(1, self._steering.tokens_per_response):
            if self._steering.fail_at is not None and len(self.ids) >= self._steering.fail_at:
                if new:
                    return Step(new, eos=False, finish=None)
                raise EngineFailure(self._steering.error * self._steering.repeat)
            if new and self._hangs:
                break
            token = next(self._source, None)
            if token == WAITING:
                break
            if token is None or token in (self._end_id, LIMIT):
                if token == LIMIT:
                    self.finish = "length"
                else:
                    self.finish = "stop"
                return Step(new, eos=token is not None and token == self._end_id, finish=self.finish)
            self.ids.append(token)
            new.append(token)
            if self._stops(self.ids):
                self.finish = "stop"
            elif len(self.ids) >= self._max_tokens:
                self.finish = "length"
        return Step(new, eos=False, finish=self.finish)

    def close(self) -> None:
        """Stop the engine."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
