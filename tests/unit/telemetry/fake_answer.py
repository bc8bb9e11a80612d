"""An answer with the times and counts that a test wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triton_openai.errors import ServiceError
from triton_openai.generation import FinishReason, Usage


@dataclass
class FakeAnswer:
    """See :class:`triton_openai.telemetry.observation.Answer`; *partial* is the usage of an answer that was cut off."""

    sent: float | None = None
    first: float | None = None
    ended: float | None = None
    arrivals: Sequence[float] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    partial: Usage | None = None
    error: ServiceError | None = None
    cancelled: bool = False
    steps: int = 2
    text: str = ""

    @property
    def usage_estimate(self) -> Usage:
        """No tokens."""
        return Usage(prompt_tokens=0, completion_tokens=0)

    @property
    def usage_so_far(self) -> Usage | None:
        """The counts up to now."""
        return self.usage or self.partial
