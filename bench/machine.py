"""The machine: its facts for the report, and which core is whose."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("aiohttp", "grpcio", "hpack", "httptools", "msgspec", "nvidia-pytriton", "uvloop")


@dataclass(frozen=True)
class Cores:
    """Who runs where; empty: wherever the kernel likes."""

    triton: tuple[int, ...] = ()
    relay: tuple[int, ...] = ()
    client: tuple[int, ...] = ()


def place(cores: Sequence[int]) -> Cores:
    """
    Give Triton, the relay and the client one core each, the last three; with fewer nothing is pinned.

    So a relay and its client have two cores, and the source of the tokens is the same whether something stands in front
    of it or not. Triton and its Python process hand every token to each other and wait: on one core that takes a third
    of the time that it takes across two, so one core gives more tokens here, and at a steadier pace.
    """
    if len(cores) < 3:
        return Cores()
    triton, relay, client = sorted(cores)[-3:]
    return Cores((triton,), (relay,), (client,))


def pin(cores: Sequence[int]) -> None:
    """Run this process, and what it starts, on *cores* only; nothing happens where there are none or it cannot be."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin what is started inside the block, and nothing else."""
    before = available()
    pin(cores)
    try:
        yield
    finally:
        pin(before)


def available() -> list[int]:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def facts() -> dict[str, str | int | float]:
    """Return what a reader needs to know about the machine and the versions."""
    return {
        "processor": _processor(),
        "cores": len(available()),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version for name in _PACKAGES if (version := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
