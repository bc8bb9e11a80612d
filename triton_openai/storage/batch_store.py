"""Files, batches, their leases and their lines in a database: the rows are the queue."""

from __future__ import annotations

from collections.abc import Callable

from triton_openai.storage.batch_schema import TABLES
from triton_openai.storage.batch_table import BatchTable
from triton_openai.storage.batch_tables import CHANNEL, LONG_TIMEOUT, reported
from triton_openai.storage.enqueued_table import EnqueuedTable
from triton_openai.storage.file_table import FileTable
from triton_openai.storage.lease_table import LeaseTable
from triton_openai.storage.line_table import LineTable
from triton_openai.storage.slot_table import SlotTable
from triton_openai.storage.sql import Database


class BatchStore:
    """The tables of files and batches in *database*."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.files = FileTable(database)
        self.batches = BatchTable(database)
        self.leases = LeaseTable(database)
        self.lines = LineTable(database)
        self.enqueued = EnqueuedTable(database)
        self.slots = SlotTable(database)

    async def verify(self) -> None:
        """
        Check that this release can use the database.

        Raises :class:`ConfigurationError` if it cannot, and :class:`ServiceError` if the database does not answer.
        """
        with reported():
            await self._database.verify(TABLES, timeout=LONG_TIMEOUT)

    async def listen(self, notify: Callable[[], None]) -> bool:
        """
        Call *notify* whenever a process has changed what others wait for; return whether the database can do so.

        Call it again from time to time: it connects again where the connection was lost. Raises :class:`ServiceError`.
        """
        with reported():
            return await self._database.listen(CHANNEL, notify)

    async def close(self) -> None:
        """Disconnect."""
        await self._database.close()
