"""A worker of a service, and the private directory that the workers of one service share."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from triton_openai.errors import ConfigurationError


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """
    This process among the workers of one service.

    A dead worker is replaced by one with the same index. Two living workers never have the same index.
    """

    #: Its number, from 0.
    index: int = 0
    count: int = 1
    #: The directory with the metrics of all workers; ``None`` for a single process.
    directory: Path | None = None

    def share(self, limit: int) -> int:
        """Return this worker's part of *limit*: those of all workers differ by one at most and add up to it."""
        return (limit + self.count - 1 - self.index) // self.count


@contextmanager
def private_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """
    Yield a new directory, which is removed at the end.

    It is made in ``XDG_RUNTIME_DIR`` or among the temporary files, with the lock that keeps systemd-tmpfiles from
    clearing it up (tmpfiles.d(5)). Raises :class:`ConfigurationError` where nothing can be written.
    """
    runtime_directory = environment.get("XDG_RUNTIME_DIR")
    usable = runtime_directory and os.access(runtime_directory, os.W_OK | os.X_OK) and Path(runtime_directory).is_dir()
    try:
        # mkdtemp gives access to this user only.
        directory = Path(tempfile.mkdtemp(prefix="triton-openai-", dir=runtime_directory if usable else None))
    except OSError as error:
        raise ConfigurationError(
            f"There is no folder for the files that workers share: {error.strerror or error}. "
            "Set XDG_RUNTIME_DIR or TMPDIR to a folder that can be written to."
        ) from error
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Files that are only mapped look unused after some days.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield directory
    finally:
        os.close(lock)
        shutil.rmtree(directory, ignore_errors=True)
