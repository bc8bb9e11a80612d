"""The directory that the workers of one service share, and nobody else can look into."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from triton_openai.errors import ConfigurationError


@contextmanager
def private_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """
    Yield a new directory that goes at the end, with a folder ``metrics`` in it.

    It is made where *environment* says that a user's running programs keep such things (``XDG_RUNTIME_DIR``, from the
    XDG base directory specification), otherwise among the temporary files. What clears those up leaves it alone: it
    holds the lock that systemd-tmpfiles looks for (tmpfiles.d(5)). Raises :class:`ConfigurationError` where nothing can
    be written.
    """
    place = environment.get("XDG_RUNTIME_DIR")
    usable = place and os.access(place, os.W_OK | os.X_OK) and Path(place).is_dir()
    try:
        # mkdtemp lets nobody else in.
        directory = Path(tempfile.mkdtemp(prefix="triton-openai-", dir=place if usable else None))
    except OSError as error:
        raise ConfigurationError(
            f"There is no folder for what workers share: {error.strerror or error}. "
            "Let XDG_RUNTIME_DIR or TMPDIR name one that can be written to."
        ) from error
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # Files that are only mapped look unused after some days, and a worker that took another's place then would not
        # count with the rest.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        (directory / "metrics").mkdir(mode=0o700)
        yield directory
    finally:
        os.close(lock)
        shutil.rmtree(directory, ignore_errors=True)
