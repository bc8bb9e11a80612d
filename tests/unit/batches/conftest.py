"""Limits of the service that no test of batches is about, and that a machine that stands still would reach."""

from __future__ import annotations

import pytest

from tests.patient_stores import _patient_stores
from triton_openai.batches import timing

__all__ = ["_patient_stores"]
# More than a test takes.
_SECONDS = 1000.0


@pytest.fixture(autouse=True)
def _patient_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reads of the disk take as long as they do, and keep lines that wait."""
    monkeypatch.setattr(timing, "SLOW_READ", _SECONDS)
    monkeypatch.setattr(timing, "GIVE_BACK", _SECONDS)
