"""How long live requests wait for their first tokens, and whether lines of batches make them wait."""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Collection

from triton_openai.telemetry.request_record import Observer, RequestRecord

# The first tokens that count: those of the last seconds, and of so many requests of a model at most.
_SECONDS = 10.0
_MAX_WAITS = 1000
# Fewer of them show nothing about a model.
_MIN_WAITS = 10
# Lines run fewer when live requests wait this much longer than without lines: as a factor, and in seconds besides.
_FACTOR = 1.3
_NOISE_SECONDS = 0.02
# How much the usual wait follows a new one.
_WEIGHT = 0.3


class Waits:
    """The waits of one model."""

    def __init__(self) -> None:
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MAX_WAITS)
        self._cleared_at = -math.inf
        #: The wait while next to no lines run, in seconds; ``None`` before it is known.
        self.usual: float | None = None

    def add(self, wait: float) -> None:
        """Note a live request that waited so many seconds, and has its first token now."""
        now = time.monotonic()
        if now - wait >= self._cleared_at:
            self._waits.append((now, wait))

    def clear(self) -> None:
        """Forget the waits so far, and those of requests that wait now: the number of lines has changed."""
        self._waits.clear()
        self._cleared_at = time.monotonic()

    def slowest(self, min_waits: int = 1) -> float:
        """Return the 95th percentile of the last seconds, in seconds; 0 for fewer than *min_waits* requests."""
        since = time.monotonic() - _SECONDS
        while self._waits and self._waits[0][0] < since:
            self._waits.popleft()
        waits = sorted(wait for _, wait in self._waits)
        if len(waits) < min_waits:
            return 0.0
        return waits[len(waits) * 19 // 20]

    def are_long(self, *, few_lines: bool, max_wait: float | None) -> bool:
        """
        Return whether live requests wait longer than usual, or than *max_wait* seconds.

        While *few_lines* run, the waits are the usual ones.
        """
        slowest = self.slowest()
        if max_wait is not None and slowest > max_wait:
            return True
        known = self.slowest(_MIN_WAITS)
        if not known:
            return False
        if few_lines:
            usual = known
            if self.usual is not None:
                usual = self.usual + _WEIGHT * (known - self.usual)
            self.usual = usual
            return False
        return self.usual is not None and known > _FACTOR * self.usual + _NOISE_SECONDS


class FirstTokens(Observer):
    """Observes how long live requests wait for their first tokens, by Triton model."""

    def __init__(self) -> None:
        self._models: defaultdict[str, Waits] = defaultdict(Waits)

    @property
    def models(self) -> Collection[str]:
        """The Triton models that live requests have asked."""
        return self._models.keys()

    def of(self, model: str) -> Waits:
        """Return the waits for a Triton model."""
        return self._models[model]

    def ended(self, record: RequestRecord) -> None:
        wait = record.time_to_first_token
        if record.batch is not None or wait is None or record.triton_model is None:
            return
        # All answers of a request come whole, or none does.
        if not record.answers[0].whole:
            self._models[record.triton_model].add(wait)
