"""The hostile requests of ``tests.faults``: they are made for every endpoint."""

from __future__ import annotations

from tests.faults.hostile_requests import check_complete


def test_every_endpoint_gets_hostile_requests() -> None:
    """A new endpoint has requests of its own from its beginning."""
    check_complete()
