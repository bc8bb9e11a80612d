"""Limits of stores, and leases, that hold in no test: a machine that stands still for seconds exceeds the usual."""

from __future__ import annotations

import pytest

from triton_openai.api.responses import background, conversations, event_log, stored
from triton_openai.storage import batch_tables, postgresql, store

_SECONDS = 600.0


@pytest.fixture(autouse=True)
def _patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test about such a limit sets it itself, when all has happened that is to succeed."""
    monkeypatch.setattr(store.Store, "timeout", _SECONDS)
    monkeypatch.setattr(store, "_SLOW_SECONDS", _SECONDS)
    monkeypatch.setattr(batch_tables, "TIMEOUT", _SECONDS)
    monkeypatch.setattr(batch_tables, "LONG_TIMEOUT", _SECONDS)
    monkeypatch.setattr(postgresql, "_CONNECT_SECONDS", _SECONDS)
    for module in (background, conversations, event_log, stored):
        monkeypatch.setattr(module, "LEASE_SECONDS", _SECONDS)
    # A renewal would be one write more.
    monkeypatch.setattr(conversations, "RENEW_SECONDS", _SECONDS)
