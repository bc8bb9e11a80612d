"""Files that others replace while the service runs: certificates, keys, tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISFIFO
from typing import Generic, TypeVar

from triton_openai.errors import ConfigurationError
from triton_openai.telemetry.logging import get_logger

_log = get_logger(__name__)

_Value = TypeVar("_Value")
_Mark = tuple[tuple[int, int, int] | None, ...]

#: Files are looked at when what they hold is asked for, but not more often than this.
LOOK_SECONDS = 1.0


class FromFiles(Generic[_Value]):
    """
    What *read* makes of *paths*, made again when one of them has changed.

    The first reading happens here, and raises what *read* raises. A later one that raises
    :class:`ConfigurationError` is logged, once for each change, and leaves what there was: a certificate is often
    replaced before its key is. *what* names it in the log.
    """

    def __init__(
        self,
        read: Callable[[], _Value],
        paths: Sequence[Path | None],
        *,
        what: str,
        look_seconds: float | None = None,
    ) -> None:
        self._read = read
        self._paths = [path for path in paths if path is not None]
        self._what = what
        self._look_seconds = LOOK_SECONDS if look_seconds is None else look_seconds
        # Before the reading: what changes meanwhile is read again.
        self._mark = _mark(self._paths)
        # What was wrong at the last reading.
        self._wrong: str | None = None
        self._next_look = time.monotonic() + self._look_seconds
        self._value = read()

    def current(self) -> _Value:
        """Return the newest value. Never raises what *read* raises for files that cannot be used."""
        now = time.monotonic()
        if now < self._next_look:
            return self._value
        self._next_look = now + self._look_seconds
        mark = _mark(self._paths)
        if mark == self._mark and self._wrong is None:
            return self._value
        told = self._wrong if mark == self._mark else None
        self._mark = mark
        try:
            for path in self._paths:
                check_no_pipe(path)
            self._value = self._read()
        except (ConfigurationError, OSError) as error:
            self._wrong = error.message if isinstance(error, ConfigurationError) else str(error)
            if self._wrong != told:
                _log.error("changed files not used", what=self._what, reason=self._wrong)
        else:
            self._wrong = None
            _log.info("changed files in use", what=self._what)
        return self._value


def check_no_pipe(path: Path, what: str = "file") -> None:
    """
    Raise :class:`ConfigurationError` where *path*, which is to be read again, is a pipe; *what* says what it is.

    Nobody may ever write into it again: whoever reads would wait for ever.
    """
    with suppress(OSError):
        if S_ISFIFO(path.stat().st_mode):
            raise ConfigurationError(f"The {what} {path} is a pipe, which is read at the start only.")


def _mark(paths: Sequence[Path]) -> _Mark:
    """Return what changes when a file does, also where it is a link whose target is exchanged."""
    return tuple(map(_mark_of, paths))


def _mark_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_file(path: Path, origin: str) -> bytes:
    """Return the contents of the file that the setting *origin* names. Raises :class:`ConfigurationError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"The file {path} given by {origin} cannot be read: {error.strerror or error}."
        ) from error


def read_secret(path: Path, origin: str) -> str:
    """Return the first line of the file that the setting *origin* names. Raises :class:`ConfigurationError`."""
    try:
        lines = read_file(path, origin).decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The file {path} given by {origin} is not text.") from error
    secret = lines[0].strip() if lines else ""
    if not secret:
        raise ConfigurationError(f"The file {path} given by {origin} has nothing in its first line.")
    return secret
