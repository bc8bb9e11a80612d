"""
A table of whole numbers that the workers of one service have in common: records of one width, found by name.

A service of one process has the table in its own memory; several processes map the same file, and what is read and
changed together is so under a lock on a place in the file (``fcntl``), which the system takes from a process that dies.
Everything here takes microseconds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from triton_openai.errors import ConfigurationError

#: Records that a table has room for.
CAPACITY = 4096
#: Words at the start of each record that belong to the table.
ID_WORDS = 2
_WORD = 8
_HEAD_WORDS = 2


class SharedTable:
    """
    The table, as worker *index* of *workers* sees it; *file* is shared by them, and ``None`` for one process alone.

    A record has *width* words beyond the table's own. Raises
    :class:`ConfigurationError` where it cannot be.
    """

    def __init__(self, file: Path | None, *, index: int, workers: int, width: int) -> None:
        self.index = index
        self.workers = workers
        self._record = ID_WORDS + width
        size = (_HEAD_WORDS + CAPACITY * self._record) * _WORD
        self._file: int | None = None
        if file is None:
            # Pages that nobody touches are none.
            self._memory = mmap.mmap(-1, size)
        else:
            try:
                self._memory = self._map(file, size)
            except OSError as error:
                raise ConfigurationError(
                    f"What workers share cannot be kept in {file.parent}: {error.strerror or error}. XDG_RUNTIME_DIR "
                    "or TMPDIR names another folder."
                ) from error
        self.words = memoryview(self._memory).cast("Q")

    def _map(self, file: Path, size: int) -> mmap.mmap:
        """Return the memory of *file*, all of which has its place: to write to a full disk this way kills (SIGBUS)."""
        self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with self.locked(0):
                if os.fstat(self._file).st_size < size:
                    os.posix_fallocate(self._file, 0, size)
            return mmap.mmap(self._file, size)
        except OSError:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Let go of the table."""
        self.words.release()
        self._memory.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextlib.contextmanager
    def locked(self, word: int) -> Iterator[None]:
        """Keep all other processes that do the same from *word*."""
        self.lock(word)
        try:
            yield
        finally:
            self.unlock(word)

    def lock(self, word: int) -> None:
        """Wait until no other process has *word* locked, and lock it."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_EX, 1, word * _WORD)

    def unlock(self, word: int) -> None:
        """Let others have *word*."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, word * _WORD)

    def find(self, name: str) -> int:
        """
        Return where the record *name* starts, with the table's own words; a new one if need be.

        Raises ``OverflowError`` when there is no room for it.
        """
        first, second = struct.unpack_from("=QQ", hashlib.sha256(name.encode()).digest())
        with self.locked(0):
            for start in self.starts():
                if self.words[start] == first and self.words[start + 1] == second:
                    return start
            used = self.words[0]
            if used == CAPACITY:
                raise OverflowError(f"There is no room for more than {CAPACITY} records.")
            start = _HEAD_WORDS + used * self._record
            self.words[start], self.words[start + 1] = first, second
            # Only now: a process that died before has left a place that is taken again.
            self.words[0] = used + 1
            return start

    def starts(self) -> Iterable[int]:
        """Return where the records start."""
        return range(_HEAD_WORDS, _HEAD_WORDS + self.words[0] * self._record, self._record)
