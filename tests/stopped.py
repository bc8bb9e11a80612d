"""Stops processes and waits until nothing of them runs: the signal only asks each of their threads to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

# Until a test fails whose process does not stop.
_SECONDS = 120


def stop_process(pid: int) -> None:
    """Stop the process *pid*, and return when all its threads have stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until_stopped(pid)


def wait_until_stopped(pid: int) -> None:
    """Wait until all threads of the process *pid* have stopped, or the process has ended."""
    deadline = time.monotonic() + _SECONDS
    while not all(state in "TtZX" for state in _states(pid)):
        assert time.monotonic() < deadline, f"the process {pid} does not stop"
        time.sleep(0.001)


def _states(pid: int) -> list[str]:
    """Return the state of each thread as the kernel names it."""
    states = []
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(thread.read_text().rpartition(")")[2].split()[0])
    return states
