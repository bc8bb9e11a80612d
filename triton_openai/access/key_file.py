"""The keys in force: read at the start, again when their file changes, and whenever the settings are read again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from triton_openai.access.keys import Keyring, read_keys
from triton_openai.config import AccessSettings
from triton_openai.config.files import LOOK_SECONDS, FileWatch
from triton_openai.errors import ConfigurationError

_log = structlog.get_logger(__name__)


class Keys:
    """
    The keys in force.

    ``ring`` is ``None`` where the settings ask for none, and never because there are none left. Of several processes
    of one service each finds those that were in force last in the *directory* that they share: one that takes a dead
    one's place goes on with them where the file cannot be used any more. Raises :class:`ConfigurationError`.
    """

    def __init__(
        self, settings: AccessSettings, *, directory: Path | None = None, interval: float = LOOK_SECONDS
    ) -> None:
        self._settings = settings
        self._interval = interval
        self._last = None if directory is None else directory / "api-keys"
        self._file = _watch(settings)
        self.ring: Keyring | None = self._first()
        self._remember()

    def prepare(self, settings: AccessSettings) -> Callable[[], None]:
        """Read the keys of new *settings*, and return what puts them in force. Raises :class:`ConfigurationError`."""
        file = _watch(settings)
        ring = _read(settings, file)

        def take() -> None:
            self._settings, self._file, self.ring = settings, file, ring
            self._remember()

        return take

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Read the file again after each change, until cancelled; call *changed* after each attempt."""
        while True:
            await asyncio.sleep(self._interval)
            settings, file = self._settings, self._file
            if not await asyncio.to_thread(file.due, settled=True):
                continue
            try:
                ring = await asyncio.to_thread(_read, settings, file)
            except Exception as error:  # noqa: BLE001 - whatever it is, the next change has to be noticed
                file.failed(error)
            else:
                file.used()
                if settings is self._settings:
                    self.ring = ring
                    self._remember()
                    _log.info("API keys are read again", names=len(ring.names) if ring is not None else 0)
            changed()

    def _first(self) -> Keyring | None:
        if self._last is None or not self._last.exists():
            return read_keys(self._settings)
        try:
            return _read(self._settings, self._file)
        except ConfigurationError as error:
            self._file.failed(error)
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


def _watch(settings: AccessSettings) -> FileWatch:
    return FileWatch([settings.api_keys_file], problem="the old API keys stay in force")


def _read(settings: AccessSettings, file: FileWatch) -> Keyring | None:
    """Read the keys of a running service. Raises :class:`ConfigurationError`."""
    file.check("file of API keys")
    return read_keys(settings)
