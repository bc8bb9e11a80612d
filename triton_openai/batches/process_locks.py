"""
Locks of the processes that run batches: others see by its lock whether a process still runs.

A lock is the file ``HOLDER.lock``, which is locked while the process runs.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

_SUFFIX = ".lock"


class ProcessLocks:
    """
    The locks in *folder*, which is a folder of this machine.

    Processes on other machines have no lock here. Their end is noticed when their leases expire.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lock(self, holder: str) -> int:
        """
        Lock the file of *holder*, the name of this process, until the returned descriptor is closed.

        Raises :class:`OSError`.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path(holder), os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_stale(self, holder: str) -> bool:
        """
        Return whether the process of *holder* has certainly ended. A process that is frozen has not.

        Without a lock, nothing is certain.
        """
        try:
            descriptor = os.open(self._path(holder), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True

    def unlock(self, holder: str) -> None:
        """Delete the lock of *holder*, which has no leases any more. Raises :class:`OSError`."""
        self._path(holder).unlink(missing_ok=True)

    def stale_before(self, before: float) -> Sequence[str]:
        """Return the names of the files of ended processes that were last changed before a time."""
        names = names_before(self._folder, (_SUFFIX,), before)
        return [name for name in names if self.is_stale(name.removesuffix(_SUFFIX))]

    def _path(self, holder: str) -> Path:
        return self._folder / f"{holder}{_SUFFIX}"


def names_before(folder: Path, suffixes: tuple[str, ...], before: float) -> Sequence[str]:
    """Return the files of *folder* with one of *suffixes* that were last changed before a time."""
    if not folder.exists():
        return []
    return [entry.name for entry in os.scandir(folder) if entry.name.endswith(suffixes) and _is_older(entry, before)]


def _is_older(entry: os.DirEntry[str], time: float) -> bool:
    try:
        return entry.stat().st_mtime < time
    except FileNotFoundError:
        return False
