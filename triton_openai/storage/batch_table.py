"""The table of batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from triton_openai.storage.batch_records import Batch, BatchError, StoredFile
from triton_openai.storage.batch_tables import (
    BATCH_COLUMNS,
    NOTIFY,
    ROW_SIZE,
    Tables,
    add_bytes,
    batch_of_row,
    bytes_of_owner,
    encode,
    lock_batch,
    lock_leased,
    page_of_owner,
    update_batch,
)
from triton_openai.storage.file_table import insert_file
from triton_openai.storage.sql import Steps, operation


class BatchTable(Tables):
    """The batches of all owners; see :class:`Tables` for the errors."""

    @operation(write=True)
    def add(
        self, batch: Batch, *, max_open: int, max_total: int
    ) -> Steps[Literal["added", "too many", "no room", "no file"]]:
        """
        Add *batch*, whose input is a file that exists.

        Its owner may have *max_open* batches that have not ended, and *max_total* bytes of files and batches.
        """
        total = yield from bytes_of_owner(batch.owner)
        rows = yield "SELECT COUNT(*) FROM batch WHERE open = 1 AND owner = $1", batch.owner
        if rows[0][0] >= max_open:
            return "too many"
        if total > max_total:
            return "no room"
        if batch.input != batch.id:
            files = yield (
                "SELECT 1 FROM file WHERE id = $1 AND (expires IS NULL OR expires > $2) FOR UPDATE",
                *(batch.input, batch.created),
            )
            if not files:
                return "no file"
        yield (
            "INSERT INTO batch (id, owner, kind, input, open, created, holder, generation, until, detail)"
            " VALUES ($1, $2, $3, $4, 1, $5, '', 0, 0, $6)",
            *(batch.id, batch.owner, batch.kind, batch.input, batch.created, encode(batch)),
        )
        yield from add_bytes(batch.owner, ROW_SIZE)
        yield (NOTIFY,)
        return "added"

    @operation()
    def find(self, batch_id: str, owner: str, kind: str) -> Steps[Batch | None]:
        """Return a batch of *owner*."""
        rows = yield (
            f"SELECT {BATCH_COLUMNS} FROM batch WHERE id = $1 AND owner = $2 AND kind = $3",
            *(batch_id, owner, kind),
        )
        if rows:
            return batch_of_row(rows[0])
        return None

    @operation()
    def page(
        self, owner: str, kind: str, *, after: str | None, limit: int, reverse: bool = True
    ) -> Steps[Sequence[Batch] | None]:
        """Return batches of *owner*, the newest first if *reverse*; ``None`` if the batch *after* does not exist."""
        rows = yield from page_of_owner(
            "batch", BATCH_COLUMNS, "kind = $5", owner, kind, after=after, limit=limit, reverse=reverse
        )
        if rows is None:
            return None
        return [batch_of_row(row) for row in rows]

    @operation()
    def open_ids(self) -> Steps[Collection[str]]:
        """Return the ids of the batches that have not ended."""
        rows = yield ("SELECT id FROM batch WHERE open = 1",)
        return {row[0] for row in rows}

    @operation()
    def open_batches(self) -> Steps[Sequence[tuple[Batch, bool]]]:
        """Return the batches that have not ended, each with whether lines of it wait."""
        rows = yield (
            f"SELECT {BATCH_COLUMNS}, EXISTS (SELECT 1 FROM line WHERE line.batch = b.id AND line.state = 0)"
            " FROM batch b WHERE b.open = 1",
        )
        return [(batch_of_row(row), bool(row[3])) for row in rows]

    @operation(write=True)
    def change(self, batch_id: str, change: Callable[[Batch], None]) -> Steps[Batch | None]:
        """Apply *change* to an open batch, and return it; ``None`` if there is none. It may be called again."""
        batch = yield from lock_batch(batch_id)
        if batch is not None:
            change(batch)
            yield from update_batch(batch)
            yield (NOTIFY,)
        return batch

    @operation(write=True)
    def change_leased(self, batch: Batch, change: Callable[[Batch], None]) -> Steps[Batch]:
        """Apply *change* to *batch*, which this process runs, and return it. It may be called again."""
        locked = yield from lock_leased(batch)
        change(locked)
        yield from update_batch(locked)
        yield (NOTIFY,)
        return locked

    @operation()
    def reload(self, batch: Batch) -> Steps[Batch]:
        """Return *batch*, which this process runs, as it is in the table."""
        return (yield from lock_leased(batch))

    @operation(write=True)
    def report(self, batch_id: str, problems: Sequence[BatchError]) -> Steps[None]:
        """Store why an open batch can only fail. The processes that run its lines stop then."""
        batch = yield from lock_batch(batch_id)
        if batch is not None and not batch.problems:
            batch.problems = list(problems)
            yield from update_batch(batch)
            yield (NOTIFY,)

    @operation(write=True)
    def decide(self, batch: Batch, change: Callable[[Batch], None]) -> Steps[Batch | None]:
        """
        Apply *change*, the decision that *batch* ends, and return it: no process claims lines of it after that.

        Returns ``None`` while a process has a part of it, unless all its lines have results.
        """
        locked = yield from lock_leased(batch)
        parts = yield "SELECT 1 FROM lease WHERE batch = $1 AND part > 0 LIMIT 1", batch.id
        if parts and locked.unfinished:
            return None
        change(locked)
        yield from update_batch(locked)
        return locked

    @operation(write=True)
    def end(self, batch: Batch, files: Sequence[StoredFile], change: Callable[[Batch], None]) -> Steps[Batch]:
        """
        End *batch* by *change*, add its *files*, and delete its leases, in one transaction; return the batch.

        Its lines stay until :meth:`LineTable.delete` deletes them: a transaction that deletes a million of them
        takes longer than others can wait.
        """
        locked = yield from lock_leased(batch)
        for file in files:
            yield from insert_file(file)
        change(locked)
        yield from update_batch(locked)
        yield "DELETE FROM lease WHERE batch = $1", batch.id
        yield (NOTIFY,)
        return locked

    @operation(write=True)
    def delete(self, batch_id: str) -> Steps[None]:
        """Delete a batch that has ended."""
        rows = yield "DELETE FROM batch WHERE id = $1 AND open = 0 RETURNING owner", batch_id
        for row in rows:
            yield from add_bytes(row[0], -ROW_SIZE)

    @operation(write=True, long=True)
    def delete_ended(self, created_before: float) -> Steps[None]:
        """Delete the batches that were created before a time and have ended."""
        rows = yield "DELETE FROM batch WHERE open = 0 AND created < $1 RETURNING owner", created_before
        for owner, number in sorted(Counter(row[0] for row in rows).items()):
            yield from add_bytes(owner, -number * ROW_SIZE)
