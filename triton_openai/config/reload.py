"""Settings that are read again while the service runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from triton_openai.config.files import LOOK_SECONDS, FileWatch, read_yaml
from triton_openai.config.options import options
from triton_openai.config.tree import AccessSettings, ModelSettings, Settings
from triton_openai.errors import ConfigurationError
from triton_openai.tasks import wait_any

log = structlog.get_logger(__name__)

#: Takes new settings over, all or nothing. When asked to *reload*, tokenizers and templates are read again also where
#: their settings are the same. Raises :class:`ConfigurationError` for settings that cannot be used.
ApplySettings = Callable[[Settings, bool], Awaitable[None]]


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The names of what has changed, as the YAML file has them."""

    #: Those that apply at once.
    live: tuple[str, ...]
    #: Those that need a restart.
    fixed: tuple[str, ...]
    #: The current settings, with the new values of live settings.
    settings: Settings


def changes_between(current: Settings, new: Settings) -> Changes:
    """Return what *new* changes of *current*."""
    fixed_keys = {option.key for option in options() if not option.live}
    live = list[str]()
    fixed = list[str]()
    groups: dict[str, Any] = {}
    for group in Settings.__struct_fields__[:-1]:
        after = getattr(new, group)
        changed = _differences(getattr(current, group), after)
        taken = [name for name in changed if f"{group}.{name}" not in fixed_keys]
        live += [f"{group}.{name}" for name in taken]
        fixed += [f"{group}.{name}" for name in changed if name not in taken]
        values = {name: getattr(after, name) for name in taken}
        groups[group] = msgspec.structs.replace(getattr(current, group), **values)
    for model in sorted(current.models.keys() | new.models.keys()):
        # A model without an entry equals one whose entry is empty.
        pair = (settings.models.get(model, ModelSettings()) for settings in (current, new))
        live += [f"models.{model}.{name}" for name in _differences(*pair)]
    settings = msgspec.structs.replace(current, **groups, models=new.models)
    return Changes(live=tuple(live), fixed=tuple(fixed), settings=settings)


def _differences(before: msgspec.Struct, after: msgspec.Struct) -> list[str]:
    return [name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name)]


class Source:
    """The source of the settings: *load* reads them, and *file*, if there is one, is watched."""

    def __init__(self, load: Callable[[], Settings], file: Path | None = None) -> None:
        self.load = load
        self.file = file
        self.watch = FileWatch([file], problem="new settings refused, the old ones stay in use")

    def has_secrets(self) -> bool:
        """Return whether the file has a secret, such as an API key or a store's password."""
        # A pipe can be read only once.
        if self.file is None or not self.file.is_file():
            return False
        try:
            settings = read_yaml(self.file, "settings file", secret=True)
        except ConfigurationError:
            # The next reading of the settings reports it.
            return False
        for option in options():
            group = None
            if isinstance(settings, dict):
                group = settings.get(option.section)
            value = None
            if option.secret and isinstance(group, dict):
                value = group.get(option.path[-1])
            # The address of a store without a user has no password.
            if value and (not isinstance(value, str) or "@" in value):
                return True
        return False

    def changes(self, settings: Settings) -> Changes:
        """
        Read the settings again, and return what they change of *settings*.

        Raises :class:`ConfigurationError` for wrong settings, and for a file that has become empty: a full disk leaves
        such a file, and without its API keys the service would be open to everybody.
        """
        self.watch.check("settings file")
        changes = changes_between(settings, self.load())
        changed = bool(changes.live or changes.fixed)
        if changed and self.file is not None and self.file.is_file() and not self.file.stat().st_size:
            raise ConfigurationError(f"The settings file {self.file} is empty; for no settings, write {{}} into it.")
        return changes


class Reloader:
    """Keeps a service's settings up to date while :meth:`run` runs; *settings* are those that it has."""

    def __init__(self, settings: Settings, source: Source, apply_settings: ApplySettings) -> None:
        self.settings = settings
        self._source = source
        self._apply_settings = apply_settings
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Read the settings again, and the tokenizers and templates with them, whether or not anything changed."""
        self._requested.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await wait_any(self._requested, timeout=LOOK_SECONDS)
            reload = self._requested.is_set()
            self._requested.clear()
            if await self._source.watch.due_in_thread(settled=not reload) or reload:
                await self._reload(reload=reload)

    async def _reload(self, *, reload: bool) -> None:
        watch = self._source.watch
        read = False
        try:
            changes = await asyncio.to_thread(self._source.changes, self.settings)
            _check_restrictions(self.settings.access, changes.settings.access)
            read = True
            if changes.live or reload:
                await self._apply_settings(changes.settings, reload)
        except Exception as error:  # noqa: BLE001 - whatever it is, the watch goes on
            watch.failed(error)
            return
        finally:
            if read:
                # Settings that were refused are tried again only after the next change: each attempt may take long.
                watch.used()
        self.settings = changes.settings
        if changes.fixed:
            log.warning("settings need a restart to take effect", settings=list(changes.fixed))
        if changes.live or reload:
            log.info("settings reloaded", changed=list(changes.live))


def _check_restrictions(old: AccessSettings, new: AccessSettings) -> None:
    """
    Raise :class:`ConfigurationError` if *new* removes all keys or all restrictions of *old*.

    A file that was emptied, or has lost a line, is valid otherwise.
    """
    advice = "To serve without them, restart the service."
    if (old.api_key or old.api_keys_file) and not (new.api_key or new.api_keys_file):
        raise ConfigurationError(f"The new settings have no API keys. {advice}")
    if old.openai_restricted_api and not new.openai_restricted_api:
        raise ConfigurationError(f"The new settings have no restricted APIs. {advice}")
