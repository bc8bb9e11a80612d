"""
Locks of the processes that run batches: others see by its lock whether a process still runs.

A lock is the file ``HOLDER.lock``. It is locked while the process runs, and has the id of its machine.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

_SUFFIX = ".lock"


class ProcessLocks:
    """
    The locks in *folder*. *local* is whether only processes of this machine use them.

    The state of processes on other machines is unknown, because many shared file systems do not share locks. Their end
    is noticed when their leases expire.
    """

    def __init__(self, folder: Path, *, local: bool) -> None:
        self._folder = folder
        self._local = local

    def lock(self, holder: str) -> int:
        """
        Lock the file of *holder*, the name of this process, until the returned descriptor is closed.

        Raises :class:`OSError`.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path(holder), os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        try:
            os.write(descriptor, _machine())
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def is_stale(self, holder: str) -> bool:
        """Return whether the process of *holder* has certainly ended. A process that is frozen has not."""
        return self._is_unlocked(holder, anywhere=self._local)

    def unlock(self, holder: str) -> None:
        """Delete the lock of *holder*, which has no leases any more. Raises :class:`OSError`."""
        self._path(holder).unlink(missing_ok=True)

    def stale_before(self, before: float) -> Sequence[str]:
        """Return the names of the files of ended processes, on any machine, that were last changed before a time."""
        names = names_before(self._folder, (_SUFFIX,), before)
        return [name for name in names if self._is_unlocked(name.removesuffix(_SUFFIX), anywhere=True)]

    def _path(self, holder: str) -> Path:
        return self._folder / f"{holder}{_SUFFIX}"

    def _is_unlocked(self, holder: str, *, anywhere: bool) -> bool:
        """Return whether nobody locks the file of *holder*; ``False`` for other machines unless *anywhere*."""
        try:
            descriptor = os.open(self._path(holder), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            if not (anywhere or os.read(descriptor, 100) == _machine()):
                return False
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(descriptor)
        return True


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


def _machine() -> bytes:
    """Return an id of this machine that changes when it is started again."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return os.uname().nodename.encode()
