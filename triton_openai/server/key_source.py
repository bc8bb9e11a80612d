"""The keys in force: read at the start, again when their file changes, and whenever the settings are read again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from triton_openai.config import AccessSettings
from triton_openai.errors import ConfigurationError
from triton_openai.server.keys import Keyring, read_keys
from triton_openai.telemetry.logging import get_logger
from triton_openai.watched_files import check_no_pipe

_log = get_logger(__name__)
# How often the file is looked at: a few microseconds each time, on any file system and through any kind of link.
_INTERVAL = 1.0


class Keys:
    """
    The keys in force.

    ``ring`` is ``None`` where the settings ask for none, and never because there are none left. Of several processes
    of one service each finds those that were in force last in the *directory* that they share: one that takes a dead
    one's place goes on with them where the file cannot be used any more. Raises :class:`ConfigurationError`.
    """

    def __init__(self, settings: AccessSettings, *, directory: Path | None = None, interval: float = _INTERVAL) -> None:
        self._settings = settings
        self._interval = interval
        self._last = None if directory is None else directory / "api-keys"
        self._seen = _signature(settings.api_keys_file)
        # What was wrong with the file when it was read last: it is told once.
        self._wrong: str | None = None
        self.ring: Keyring | None = self._first()
        self._remember()

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Read the keys of new *settings*, and return what puts them in force. Raises :class:`ConfigurationError`."""
        seen, ring = _signature(settings.api_keys_file), _read(settings)

        def take() -> None:
            self._settings, self._seen, self.ring, self._wrong = settings, seen, ring, None
            self._remember()

        return take

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """
        Read the file again whenever it is another one, until cancelled; call *changed* after each attempt.

        One that could not be used is tried again also when it looks the same: its rights may have been mended, or
        there was no descriptor to read it with.
        """
        while True:
            await asyncio.sleep(self._interval)
            seen = _signature(self._settings.api_keys_file)
            if seen == self._seen and self._wrong is None:
                continue
            self._wrong = await self._read_again(told=self._wrong if seen == self._seen else None)
            self._seen = seen
            changed()

    async def _read_again(self, *, told: str | None) -> str | None:
        """Return what is wrong with the file, which the log says unless it is what was *told* before."""
        settings = self._settings
        try:
            ring = await asyncio.to_thread(_read, settings)
        except ConfigurationError as error:
            if error.message != told:
                _log.error("the old API keys stay in force", reason=error.message)
            return error.message
        except Exception as error:  # noqa: BLE001 - whatever it is, the next change has to be noticed
            wrong = repr(error)
            if wrong != told:
                _log.exception("the old API keys stay in force")
            return wrong
        if settings is self._settings:
            self.ring = ring
            self._remember()
            _log.info("API keys are read again", names=len(ring.names) if ring is not None else 0)
        return None

    def _first(self) -> Keyring | None:
        if self._last is None or not self._last.exists():
            return read_keys(self._settings)
        try:
            return _read(self._settings)
        except ConfigurationError as error:
            _log.error("the old API keys stay in force", reason=error.message)
            self._wrong = error.message
            return Keyring.decode(self._last.read_bytes())

    def _remember(self) -> None:
        """Leave what is in force to whoever takes this process's place; nothing of it is a key."""
        if self._last is None:
            return
        if self.ring is None:
            self._last.unlink(missing_ok=True)
            return
        new = self._last.with_suffix(f".{os.getpid()}")
        try:
            new.touch(mode=0o600)
            new.write_bytes(self.ring.encode())
            new.replace(self._last)
        except OSError as error:
            # They are in force here all the same, and the next change has to be noticed.
            _log.warning("the API keys cannot be left to other workers", reason=str(error))


def _read(settings: AccessSettings) -> Keyring | None:
    """Read the keys of a running service. Raises :class:`ConfigurationError`."""
    if settings.api_keys_file is not None:
        check_no_pipe(settings.api_keys_file, "file of API keys")
    return read_keys(settings)


def _signature(file: Path | None) -> tuple[int, int, int] | None:
    """Return what differs when the file is another one, or has been written to; ``None`` when there is none."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
