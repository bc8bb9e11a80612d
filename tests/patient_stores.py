"""Limits of stores, and leases, that hold in no test: a machine that stands still for seconds exceeds the usual."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

_SECONDS = 600.0
_LIMITS = [
    "app._STORE_SECONDS",
    "storage.store.Store.timeout",
    "storage.store._SLOW_SECONDS",
    "storage.sqlite._VERIFY_SECONDS",
    "storage.batch_store.LONG_TIMEOUT",
    "storage.batch_tables.LONG_TIMEOUT",
    "storage.batch_tables.TIMEOUT",
    "api.responses.background.LEASE_SECONDS",
    "api.responses.conversations.LEASE_SECONDS",
    # A renewal would be one write more.
    "api.responses.conversations.RENEW_SECONDS",
    "api.responses.event_log.LEASE_SECONDS",
    "api.responses.stored.LEASE_SECONDS",
]
if find_spec("asyncpg") is not None:
    _LIMITS.append("storage.postgresql._CONNECT_SECONDS")


@pytest.fixture(autouse=True)
def _patient_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test about such a limit sets it itself, when all has happened that is to succeed."""
    for limit in _LIMITS:
        monkeypatch.setattr(f"triton_openai.{limit}", _SECONDS)
