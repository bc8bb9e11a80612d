"""A few hundred of what ``make hostile`` sends a hundred thousand of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hostile import attack, render
from tests.faults.hostile_requests import BODIES, check_complete
from tests.triton_fixture import TestTriton


def test_hostile_requests(triton: TestTriton, tmp_path: Path) -> None:
    """No request is an error of the service, holds its loop, makes it large, or leaves anything behind."""
    figures, complaints = attack(tmp_path, triton.server, triton.tokenizer, range(250), seed=7, clients=4)

    assert figures.passed, render(figures, 7)
    # The Triton of all tests has synthesizers that need settings, which this service is not given.
    assert [] == [complaint for complaint in complaints if "cannot be served" not in complaint]
    assert figures.statuses["200"] > 25


def test_an_endpoint_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever adds one is told to add its requests."""
    monkeypatch.delitem(BODIES, "rerank")

    with pytest.raises(AssertionError, match="rerank"):
        check_complete()
