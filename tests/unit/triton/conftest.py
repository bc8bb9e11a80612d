"""Limits of the service that no test of Triton's clients is about, and that a machine that stands still would reach."""

from __future__ import annotations

from functools import partial

import pytest

from triton_openai.triton import endpoint
from triton_openai.triton.connection import ConnectionSettings

# More than a test takes.
_SECONDS = 600.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections and calls, and looks at what listens, take as long as they do."""
    patient = partial(ConnectionSettings, connect_timeout=_SECONDS, control_timeout=_SECONDS)
    monkeypatch.setattr(endpoint, "ConnectionSettings", patient)
    monkeypatch.setattr(endpoint, "_LOOK_SECONDS", _SECONDS)
