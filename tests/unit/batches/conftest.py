"""Limits of the service that no test of batches is about, and that a machine that stands still would reach."""

from __future__ import annotations

import pytest

from triton_openai.batches import timing
from triton_openai.storage import batch_tables

# More than a test takes.
_SECONDS = 1000.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let operations of the database and reads of the disk take as long as they do, and keep lines that wait."""
    monkeypatch.setattr(batch_tables, "TIMEOUT", _SECONDS)
    monkeypatch.setattr(batch_tables, "LONG_TIMEOUT", _SECONDS)
    monkeypatch.setattr(timing, "SLOW_READ", _SECONDS)
    monkeypatch.setattr(timing, "GIVE_BACK", _SECONDS)
