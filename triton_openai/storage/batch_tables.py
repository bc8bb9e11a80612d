"""What the tables of files, batches, leases and lines have in common."""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

from triton_openai import errors
from triton_openai.storage.batch_records import Batch, LeaseLost, Part
from triton_openai.storage.sql import Database, Steps

_T = TypeVar("_T")
#: Seconds for one operation, and for one that inserts, changes or deletes many lines.
TIMEOUT = 5.0
LONG_TIMEOUT = 30.0
#: Bytes that a file or a batch counts besides its contents, so that a limit of bytes limits their number, too.
ROW_SIZE = 4096
#: The columns of a batch for :func:`batch_of_row`.
BATCH_COLUMNS = "detail, generation, parts"
#: The channel on which PostgreSQL notifies processes of changes for which they wait.
CHANNEL = "openai_batches"
#: Notifies the processes that wait. They are notified when the transaction ends.
NOTIFY = f"NOTIFY {CHANNEL}"

#: Returns a batch for its column ``detail``.
encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Batch).decode


class Tables:
    """
    Base of the operations on some tables of *database*.

    Every method raises :class:`StorageFull` or :class:`StoreUnavailable` when the database fails. A method that changes
    a batch of a generation raises :class:`LeaseLost` if the batch has ended or has another generation.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def _run(self, steps: Steps[_T], *, write: bool = False, long: bool = False) -> _T:
        timeout = TIMEOUT
        if long:
            timeout = LONG_TIMEOUT
        with reported():
            return await self._database.run(steps, timeout=timeout, write=write)


@contextmanager
def reported() -> Iterator[None]:
    """Raise :class:`StorageFull` or :class:`StoreUnavailable` for an error of the database."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise failed_write(error) from error


def failed_write(error: Exception) -> errors.ServiceError:
    """Return the error for a disk or a database that fails."""
    detail = f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or (isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_FULL):
        return errors.StorageFull("There is no room for more files.", detail=detail)
    return errors.StoreUnavailable("Files and batches cannot be used at the moment.", detail=detail, retry_after=2)


def batch_of_row(row: Sequence[Any]) -> Batch:
    """Return the batch of a row of BATCH_COLUMNS."""
    batch = _decode(bytes(row[0]))
    batch.generation = row[1]
    batch.parts = row[2]
    return batch


def lock_batch(batch_id: str) -> Steps[Batch | None]:
    """Lock an open batch until the transaction ends, and return it; ``None`` if there is none."""
    rows = yield f"SELECT {BATCH_COLUMNS} FROM batch WHERE id = $1 AND open = 1 FOR UPDATE", batch_id
    if rows:
        return batch_of_row(rows[0])
    return None


def lock_leased(batch: Batch) -> Steps[Batch]:
    """Lock *batch* and return its row. Raises :class:`LeaseLost` unless it is open and has the same generation."""
    locked = yield from lock_batch(batch.id)
    if locked is None or locked.generation != batch.generation:
        raise LeaseLost
    return locked


def lock_part(part: Part) -> Steps[None]:
    """
    Lock the lease of *part* until the transaction ends. Raises :class:`LeaseLost` if it was ended.

    An operation that locks a batch and one of its parts locks the batch first.
    """
    rows = yield "SELECT 1 FROM lease WHERE batch = $1 AND part = $2 FOR UPDATE", part.batch, part.number
    if not rows:
        raise LeaseLost


def update_batch(batch: Batch) -> Steps[None]:
    """Write *batch*, which is locked."""
    yield "UPDATE batch SET detail = $2, open = $3 WHERE id = $1", batch.id, encode(batch), int(batch.open)


def add_bytes(owner: str, number: int) -> Steps[int]:
    """
    Add *number* to the bytes of the complete files and the batches of *owner*, and return the sum.

    Until the transaction ends, others that count for the owner wait. An operation that locks a batch locks it before
    this, and files after this.
    """
    rows = yield (
        "INSERT INTO owner_bytes (owner, bytes) VALUES ($1, $2) ON CONFLICT (owner) DO UPDATE"
        " SET bytes = owner_bytes.bytes + $2 RETURNING bytes",
        *(owner, number),
    )
    return int(rows[0][0])


def bytes_of_owner(owner: str) -> Steps[int]:
    """
    Return the bytes of the files and batches of *owner* that count for its limit, and exclude others that count.

    Files that are being deleted do not count, nor do uploads that nobody renews: their process has ended.
    """
    complete = yield from add_bytes(owner, 0)
    rows = yield (
        f"SELECT COALESCE(SUM(bytes + {ROW_SIZE}), 0) FROM file WHERE owner = $1 AND state = 'uploading'"
        " AND (expires IS NULL OR expires > $2)",
        *(owner, time.time()),
    )
    return complete + int(rows[0][0])


def page_of_owner(
    table: str,
    columns: str,
    condition: str,
    owner: str,
    *values: Any,
    after: str | None,
    limit: int,
    reverse: bool,
) -> Steps[Sequence[Sequence[Any]] | None]:
    """
    Return *limit* rows of *owner* that fulfil *condition*, by the time of their creation.

    The newest come first if *reverse*. The parameters of *condition* begin with ``$5``, and are *values*. Returns
    ``None`` if the row with the id *after*, behind which the page begins, does not exist.
    """
    created = 0.0
    row_id = ""
    comparison = ">"
    order = "ASC"
    if reverse:
        created = 1e18
        comparison = "<"
        order = "DESC"
    if after is not None:
        rows = yield f"SELECT created, id FROM {table} WHERE id = $1 AND owner = $2", after, owner
        if not rows:
            return None
        created, row_id = rows[0]
    return (
        yield (
            f"SELECT {columns} FROM {table} WHERE owner = $1 AND (created, id) {comparison} ($2, $3) AND {condition}"
            f" ORDER BY created {order}, id {order} LIMIT $4",
            *(owner, created, row_id, limit, *values),
        )
    )
