"""The directory that the workers of one service share, and nobody else can look into."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from triton_openai.errors import ConfigurationError


@contextmanager
def private_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """
    Yield a new directory that goes at the end, with a folder ``metrics`` in it.

    It is made where *environment* says that a user's running programs keep such things (``XDG_RUNTIME_DIR``, from the
    XDG base directory specification), otherwise among the temporary files. Raises :class:`ConfigurationError` where
    neither can be written to.
    """
    place = environment.get("XDG_RUNTIME_DIR")
    usable = place and os.access(place, os.W_OK | os.X_OK) and Path(place).is_dir()
    # mkdtemp lets nobody else in.
    try:
        directory = Path(tempfile.mkdtemp(prefix="triton-openai-", dir=place if usable else None))
    except OSError as error:
        raise ConfigurationError(
            f"There is no folder for what workers share: {error.strerror or error}. Give XDG_RUNTIME_DIR or TMPDIR one "
            "that can be written to."
        ) from error
    try:
        (directory / "metrics").mkdir(mode=0o700)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
