"""What all tests of this folder have."""

from __future__ import annotations

import pytest

from tests.patient_stores import _patient_stores
from triton_openai.triton import carrier

__all__ = ["_patient_stores"]


@pytest.fixture(autouse=True)
def _patient_carriers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's process that says nothing is not taken for a dead one: the machine may stand still."""
    monkeypatch.setattr(carrier, "SILENCE", 600.0)
