"""
What the kernel says about a process: CPU time and memory.

CPU time is the sum of ``/proc/PID/task/*/schedstat`` over all threads of a process and of its children, in nanoseconds:
that counts what gRPC's own threads and nginx's workers do. A thread that ends takes its number along, so the last one
seen stays in the sum; threads that came and went between two looks are found by the process's own total in
``/proc/PID/stat`` (which keeps them, in steps of a clock tick).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_NS = 1_000_000_000


def parse_schedstat(text: str) -> int:
    """Return the nanoseconds on a CPU: the first of the three numbers."""
    return int(text.split(maxsplit=1)[0])


def parse_stat(text: str) -> int:
    """Return user and system time of a whole process in clock ticks; its name may contain anything, brackets too."""
    fields = text.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def parse_status(text: str, name: str) -> int:
    """Return a field of ``/proc/PID/status`` that is given in kB, in bytes."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process tree: now, and the sum of each process's own peak."""

    resident: int
    peak: int


class CpuClock:
    """The CPU time of process trees, by their roots."""

    def __init__(self, roots: Iterable[int], proc: Path = _PROC) -> None:
        self._roots = tuple(roots)
        self._proc = proc
        self._tick = _NS // os.sysconf("SC_CLK_TCK")
        self._threads: dict[tuple[int, int], int] = {}
        self._totals: dict[int, int] = {}
        #: By process: the time of threads that came and went between two looks.
        self._unseen: dict[int, int] = {}

    def read(self) -> int:
        """Return the nanoseconds that the trees have used so far."""
        for pid in tree(self._roots, self._proc):
            threads = self._read_threads(pid)
            self._threads.update({(pid, tid): spent for tid, spent in threads.items()})
            self._totals[pid] = self._read_total(pid)
        return sum(self._of(pid) for pid in self._totals)

    def _of(self, pid: int) -> int:
        seen = sum(spent for (owner, _), spent in self._threads.items() if owner == pid)
        # Two ticks of doubt: the total is rounded, and read a moment after the threads.
        unseen = self._totals[pid] - seen
        if unseen > 2 * self._tick:
            self._unseen[pid] = max(unseen, self._unseen.get(pid, 0))
        # Once counted, it stays: the sum never falls.
        return seen + self._unseen.get(pid, 0)

    def _read_threads(self, pid: int) -> dict[int, int]:
        threads = {}
        for task in _listed(self._proc / str(pid) / "task"):
            text = _read(task / "schedstat")
            if text:
                threads[int(task.name)] = parse_schedstat(text)
        return threads

    def _read_total(self, pid: int) -> int:
        text = _read(self._proc / str(pid) / "stat")
        if text:
            return parse_stat(text) * self._tick
        return self._totals.get(pid, 0)


def memory(roots: Iterable[int], proc: Path = _PROC) -> Memory:
    """Return the memory of process trees."""
    texts = [_read(proc / str(pid) / "status") for pid in tree(roots, proc)]
    return Memory(
        resident=sum(parse_status(text, "VmRSS") for text in texts),
        peak=sum(parse_status(text, "VmHWM") for text in texts),
    )


def tree(roots: Iterable[int], proc: Path = _PROC) -> list[int]:
    """Return *roots* and all their descendants."""
    pids: list[int] = []
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        for task in _listed(proc / str(pid) / "task"):
            waiting += [int(child) for child in _read(task / "children").split()]
    return pids


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it has ended
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""
