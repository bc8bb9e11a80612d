"""A few seconds of what ``make soak`` does for ten minutes."""

from __future__ import annotations

import subprocess
import sys

import pytest


# Each of its faults has tests of its own.
@pytest.mark.extended
def test_a_short_soak() -> None:
    """
    A short soak gets through a fault of each kind, tells what became of the requests, and finds nothing left
    behind.
    """
    command = [sys.executable, "-m", "tests.faults.soak", "--seconds", "8", "--clients", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)

    assert 0 == done.returncode, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split()[1:] == ["answered"] for line in lines)
    (faults,) = (line for line in lines if line.startswith("faults: "))
    assert {"Triton", "store", "log"} <= set(faults.replace(",", "").split())
    assert "failed for no such reason: none" in lines
    assert "left behind: nothing" in lines
