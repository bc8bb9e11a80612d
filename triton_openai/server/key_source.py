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
        self.ring: Keyring | None = self._first()
        self._remember()

    def replace(self, settings: AccessSettings) -> None:
        """Take the keys of new *settings*. Raises :class:`ConfigurationError`, and the old ones stay."""
        seen = _signature(settings.api_keys_file)
        ring = read_keys(settings)
        self._settings, self._seen, self.ring = settings, seen, ring
        self._remember()

    async def watch(self, changed: Callable[[], None] = lambda: None) -> None:
        """Read the file again whenever it is another one, until cancelled; call *changed* after each attempt."""
        while True:
            await asyncio.sleep(self._interval)
            seen = _signature(self._settings.api_keys_file)
            if seen == self._seen:
                continue
            self._seen = seen
            await self._read_again()
            changed()

    async def _read_again(self) -> None:
        settings = self._settings
        try:
            ring = await asyncio.to_thread(read_keys, settings)
        except ConfigurationError as error:
            _log.error("the old API keys stay in force", reason=error.message)
        except Exception:  # noqa: BLE001 - whatever it is, the next change has to be noticed
            _log.exception("the old API keys stay in force")
        else:
            if settings is self._settings:
                self.ring = ring
                self._remember()
                _log.info("API keys are read again", names=len(ring.names) if ring is not None else 0)

    def _first(self) -> Keyring | None:
        try:
            return read_keys(self._settings)
        except ConfigurationError as error:
            if self._last is None or not self._last.exists():
                raise
            _log.error("the old API keys stay in force", reason=error.message)
            return Keyring.decode(self._last.read_bytes())

    def _remember(self) -> None:
        """Leave what is in force to whoever takes this process's place; nothing of it is a key."""
        if self._last is None:
            return
        if self.ring is None:
            self._last.unlink(missing_ok=True)
            return
        new = self._last.with_suffix(f".{os.getpid()}")
        new.touch(mode=0o600)
        new.write_bytes(self.ring.encode())
        new.replace(self._last)


def _signature(file: Path | None) -> tuple[int, int, int] | None:
    """Return what differs when the file is another one, or has been written to; ``None`` when there is none."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
