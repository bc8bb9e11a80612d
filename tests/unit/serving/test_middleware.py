"""What the middleware does around every request."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from triton_openai.models.draining import DRAINING, Draining
from triton_openai.serving.middleware import Observed
from triton_openai.telemetry.observation import OBSERVERS, Observation


async def test_all_observers_see_the_same_duration() -> None:
    """However long one of them takes."""
    seen: list[float] = []
    observers = Mock(ended=lambda observation: seen.extend((observation.duration, observation.duration)))
    app: Any = {DRAINING: Draining(), OBSERVERS: observers}
    with Observed(app, Observation(request_id="r", method="POST", path="/")):
        pass

    assert 1 == len(set(seen))
