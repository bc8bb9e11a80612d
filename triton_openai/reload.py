"""
New settings for a running service: read again on request (SIGHUP) and when their file has changed.

What cannot be read or used changes nothing; the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from triton_openai.config import AccessSettings, Changes, Settings, changes_between
from triton_openai.draining import first_of
from triton_openai.errors import ConfigurationError
from triton_openai.telemetry.logging import get_logger
from triton_openai.watched_files import check_no_pipe

log = get_logger(__name__)

#: Takes new settings over, all or nothing. When asked to *renew*, tokenizers and templates are read again also where
#: their settings are the same. Raises :class:`ConfigurationError` for settings that cannot be used.
TakeOver = Callable[[Settings, bool], Awaitable[None]]

_LOOK_SECONDS = 1.0
# Times of modification and of change (of rights, too: it may become readable), size, and which file it is: mounted
# configurations are exchanged by renaming a link.
_Signature = tuple[int, int, int, int, int] | None


class Source:
    """Where the settings came from, to be read again: *load* reads them, *file* is the part that is watched."""

    def __init__(self, load: Callable[[], Settings], file: Path | None = None) -> None:
        self.load = load
        self.file = file
        #: What the file looked like before it was read first.
        self.first = self.signature()

    def signature(self) -> _Signature:
        """Return what differs once the file has changed; None where there is none."""
        if self.file is None:
            return None
        with contextlib.suppress(OSError):
            found = self.file.stat()
            return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
        return None

    def changes(self, settings: Settings) -> Changes:
        """
        Read the settings again, and return what they change of *settings*.

        Raises :class:`ConfigurationError` for those that are wrong, and for a file that is empty all of a sudden: that
        is what a full disk leaves of one, and it would take the API keys away and open the service.
        """
        if self.file is not None:
            check_no_pipe(self.file, "settings file")
        changes = changes_between(settings, self.load())
        if self.file is None or not (changes.live or changes.fixed):
            return changes
        if self.file.is_file() and not self.file.stat().st_size:
            raise ConfigurationError(f"The settings file {self.file} is empty; for no settings, write {{}} into it.")
        return changes


class Reloader:
    """Keeps a service's settings up to date while :meth:`run` runs; *settings* are those that it has."""

    def __init__(
        self, settings: Settings, source: Source, take_over: TakeOver, *, interval: float = _LOOK_SECONDS
    ) -> None:
        self.settings = settings
        self._source = source
        self._take_over = take_over
        self._interval = interval
        self._requested = asyncio.Event()
        self._read = source.first

    def request(self) -> None:
        """Read the settings again, and the tokenizers and templates with them, whether or not anything changed."""
        self._requested.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        seen = self._read
        while True:
            await first_of([self._requested], timeout=self._interval)
            found = await asyncio.to_thread(self._source.signature)
            if self._requested.is_set():
                self._requested.clear()
                self._read = seen = found
                await self._reload(renew=True)
            elif found == seen and found != self._read:
                # Only what has looked the same twice: whoever writes the file may not have finished.
                self._read = found
                if found is None:
                    log.warning("the settings file is gone, the old settings stay", file=str(self._source.file))
                else:
                    await self._reload(renew=False)
            seen = found

    async def _reload(self, *, renew: bool) -> None:
        try:
            changes = await asyncio.to_thread(self._source.changes, self.settings)
            _check_guards(self.settings.access, changes.settings.access)
            if changes.live or renew:
                await self._take_over(changes.settings, renew)
        except ConfigurationError as error:
            # The message says it all; where it was raised says nothing to an operator.
            log.error("new settings are not used, the old ones stay", reason=error.message)  # noqa: TRY400
            return
        except Exception:
            log.exception("new settings could not be taken over, the old ones stay")
            return
        self.settings = changes.settings
        if changes.fixed:
            log.warning("settings need a restart to take effect", settings=list(changes.fixed))
        if changes.live or renew:
            log.info("settings are read again", changed=list(changes.live))


def _check_guards(old: AccessSettings, new: AccessSettings) -> None:
    """
    Raise :class:`ConfigurationError` where *new* lets everybody in and *old* did not.

    A file that was emptied, or lost a line, has no mistake that could be told otherwise.
    """
    if (old.api_key or old.api_keys_file) and not (new.api_key or new.api_keys_file):
        raise ConfigurationError("They have no API keys any more; to serve without any takes a restart.")
    if old.openai_restricted_api and not new.openai_restricted_api:
        raise ConfigurationError("They have no restricted APIs any more; to serve without any takes a restart.")
