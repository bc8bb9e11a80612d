"""
Changes of the tables that processes of one machine wait for.

One process of the machine, the poller, looks at the tables from time to time, or is notified by PostgreSQL. It
announces a change to the others by a file, whose time they look at; it locks the same file. A process that changes the
tables announces that, too.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import NamedTuple


class Look(NamedTuple):
    """What a look at the file has shown."""

    #: Whether a change was announced since the last look.
    changed: bool
    #: Whether this process is the poller.
    polls: bool


class Changes:
    """The file of changes in *folder*. The methods read and write files, so they run in a thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "poller.lock"
        self._seen = 0
        # The descriptor of the lock that the poller has; -1 in other processes.
        self._lock = -1

    def announce(self) -> None:
        """Announce a change. Raises :class:`OSError`."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        try:
            if os.fstat(descriptor).st_size > 4096:
                os.ftruncate(descriptor, 0)
            # The size changes, too: two changes may have the same time.
            os.write(descriptor, b".")
        finally:
            os.close(descriptor)

    def look(self) -> Look:
        """Look at the file, and become the poller if there is none. Raises :class:`OSError`."""
        if self._lock >= 0 and not self._is_current(self._lock):
            # The file was deleted: others lock another one.
            self.close()
        if self._lock < 0:
            self._lock = self._try_lock()
        status = self._path.stat()
        state = hash((status.st_mtime_ns, status.st_size, status.st_ino))
        changed = state != self._seen
        self._seen = state
        return Look(changed, self._lock >= 0)

    def _is_current(self, descriptor: int) -> bool:
        """Return whether *descriptor* is of the file that has the path now."""
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _try_lock(self) -> int:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return -1
        return descriptor

    def close(self) -> None:
        """Stop being the poller."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
