"""What all tests of this folder have."""

from __future__ import annotations

import pytest

from tests.patient_stores import _patient_stores
from triton_openai.triton import carrier
from triton_openai.triton.connection import ConnectionSettings

__all__ = ["_patient_stores"]


@pytest.fixture(autouse=True)
def _patient_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection to Triton, and no model's process, is taken for a dead one: the machine may stand still."""
    monkeypatch.setattr(carrier, "SILENCE", 600.0)
    defaults = ConnectionSettings.__init__.__kwdefaults__
    assert defaults is not None
    # These are of services that a test starts itself.
    monkeypatch.setitem(defaults, "connect_timeout", 600.0)
    monkeypatch.setitem(defaults, "control_timeout", 600.0)
