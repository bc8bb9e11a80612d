"""Notifications of PostgreSQL, by which the process that polls for a machine hears of changes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from triton_openai.errors import ServiceError
from triton_openai.storage.batch_store import BatchStore
from triton_openai.tasks import cancel

_log = structlog.get_logger(__name__)


class Notifications:
    """
    Has *notify* called when a process has changed the tables of *store*.

    A database that takes no further connection, or a connection that is dead, delays nothing: a task connects.
    """

    def __init__(self, store: BatchStore, notify: Callable[[], None]) -> None:
        self._store = store
        self._notify = notify
        self._checking: asyncio.Task[None] | None = None
        self._failing = False
        #: Whether changes are notified, as far as is known.
        self.active = False

    def check(self) -> None:
        """Check the connection, and connect where there is none. It does not wait for that."""
        if self._checking is None or self._checking.done():
            self._checking = asyncio.create_task(self._check())

    async def _check(self) -> None:
        try:
            self.active = await self._store.listen(self._notify)
            self._failing = False
        except ServiceError as error:
            self.active = False
            if not self._failing:
                _log.warning("no notifications, tables are polled", reason=error.reason)
            self._failing = True
        except Exception:  # noqa: BLE001 - the last resort: logged, and tried again
            self.active = False
            _log.exception("no notifications, tables are polled")

    async def close(self) -> None:
        """Stop checking."""
        await cancel(self._checking)
