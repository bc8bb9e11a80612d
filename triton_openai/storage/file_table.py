"""The table of files."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from triton_openai.storage.batch_records import StoredFile
from triton_openai.storage.batch_tables import ROW_SIZE, Tables, add_bytes, bytes_of_owner, page_of_owner
from triton_openai.storage.sql import Steps, operation

_COLUMNS = "id, owner, purpose, filename, bytes, created, expires, state"
# The files whose bytes are in the sum of their owner.
_COUNTED = "state = 'processed' AND COALESCE(expires, 1) > 0"


class FileTable(Tables):
    """The files of all owners, without their contents; see :class:`Tables` for the errors."""

    @operation(write=True)
    def bucket_id(self, new: str | None = None) -> Steps[str | None]:
        """Return the name of the object that marks the bucket of all files; set it to *new* if there is none."""
        if new is not None:
            yield "INSERT INTO place (number, id) VALUES (1, $1) ON CONFLICT DO NOTHING", new
        rows = yield ("SELECT id FROM place",)
        if rows:
            return str(rows[0][0])
        return None

    @operation(write=True)
    def reserve(self, file: StoredFile, max_total: int) -> Steps[bool]:
        """
        Add a *file* that is being uploaded; return ``False`` if its owner would have more than *max_total* bytes.

        It counts until it expires, unless :meth:`renew_upload` is called before.
        """
        total = yield from bytes_of_owner(file.owner)
        if total + file.bytes > max_total:
            return False
        yield from insert_file(file)
        return True

    @operation(write=True)
    def renew_upload(self, file_id: str, until: float) -> Steps[None]:
        """Keep the reservation of a file that is being uploaded *until* a time. Other files stay as they are."""
        yield "UPDATE file SET expires = $2 WHERE id = $1 AND state = 'uploading'", file_id, until

    @operation(write=True)
    def complete(self, file: StoredFile) -> Steps[None]:
        """Replace the reservation of *file* by the complete file."""
        yield from _replace_file(file)

    @operation(write=True)
    def complete_upload(self, file: StoredFile) -> Steps[bool]:
        """Do as :meth:`complete`, if the reservation is still there and has not expired; return whether it is."""
        # Two requests complete an upload one after the other.
        yield from add_bytes(file.owner, 0)
        rows = yield (
            "SELECT 1 FROM file WHERE id = $1 AND state = 'uploading' AND expires > $2",
            *(file.id, time.time()),
        )
        if not rows:
            return False
        yield from _replace_file(file)
        return True

    @operation()
    def find(self, file_id: str, owner: str) -> Steps[StoredFile | None]:
        """Return a complete file of *owner*."""
        file = yield from _find(file_id, owner)
        if file is None or file.state == "uploading":
            return None
        return file

    @operation()
    def find_upload(self, file_id: str, owner: str) -> Steps[StoredFile | None]:
        """Return a file of *owner* that has not expired, whether it is complete or not."""
        return (yield from _find(file_id, owner))

    @operation()
    def page(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, reverse: bool
    ) -> Steps[Sequence[StoredFile] | None]:
        """Return files of *owner*, the newest first if *reverse*; ``None`` if the file *after* does not exist."""
        condition = "state = 'processed' AND (expires IS NULL OR expires > $5) AND ($6 = '' OR purpose = $6)"
        rows = yield from page_of_owner(
            "file", _COLUMNS, condition, owner, time.time(), purpose or "", after=after, limit=limit, reverse=reverse
        )
        if rows is None:
            return None
        return [_file(row) for row in rows]

    @operation(write=True)
    def expire(self, file_id: str) -> Steps[bool]:
        """Make a file expire now; return ``False`` if an open batch reads it, and leave it then."""
        owners = yield "SELECT owner FROM file WHERE id = $1", file_id
        for row in owners:
            yield from add_bytes(row[0], 0)
        yield "SELECT 1 FROM file WHERE id = $1 FOR UPDATE", file_id
        readers = yield "SELECT 1 FROM batch WHERE open = 1 AND input = $1", file_id
        if readers:
            return False
        counted = yield (
            f"SELECT owner, bytes + {ROW_SIZE} FROM file WHERE id = $1 AND {_COUNTED}",
            file_id,
        )
        yield "UPDATE file SET expires = 0 WHERE id = $1", file_id
        yield from _discount(counted)
        return True

    @operation()
    def expired_ids(self, *, uploads_before: float) -> Steps[Sequence[str]]:
        """Return the files that have expired, and the uploads that began before a time and never ended."""
        rows = yield (
            "SELECT id FROM file WHERE (expires < $1 OR (state = 'uploading' AND created < $2))"
            " AND id NOT IN (SELECT input FROM batch WHERE open = 1)",
            *(time.time(), uploads_before),
        )
        return [row[0] for row in rows]

    @operation(write=True, long=True)
    def delete(self, file_ids: Sequence[str]) -> Steps[None]:
        """Delete files whose contents are deleted."""
        names = json.dumps(file_ids)
        counted = yield (
            f"SELECT owner, bytes + {ROW_SIZE} FROM file WHERE id IN EACH($1) AND {_COUNTED}",
            names,
        )
        yield from _discount(counted)
        yield "DELETE FROM file WHERE id IN EACH($1)", names

    @operation()
    def total_bytes(self) -> Steps[float]:
        """Return the bytes of all files."""
        rows = yield ("SELECT COALESCE(SUM(bytes), 0) FROM file",)
        return float(rows[0][0])


def _find(file_id: str, owner: str) -> Steps[StoredFile | None]:
    rows = yield (
        f"SELECT {_COLUMNS} FROM file WHERE id = $1 AND owner = $2 AND (expires IS NULL OR expires > $3)",
        *(file_id, owner, time.time()),
    )
    if rows:
        return _file(rows[0])
    return None


def insert_file(file: StoredFile) -> Steps[None]:
    """Insert the row of *file*, and count its bytes if it is complete."""
    if file.state == "processed":
        yield from add_bytes(file.owner, file.bytes + ROW_SIZE)
    yield (
        f"INSERT INTO file ({_COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        *msgspec.structs.astuple(file),
    )


def _replace_file(file: StoredFile) -> Steps[None]:
    yield "DELETE FROM file WHERE id = $1", file.id
    yield from insert_file(file)


def _discount(counted: Sequence[Sequence[Any]]) -> Steps[None]:
    """Subtract bytes from the sums of owners; *counted* has an owner and bytes in each row."""
    sums: Counter[str] = Counter()
    for owner, size in counted:
        sums[owner] += size
    for owner, size in sorted(sums.items()):
        yield from add_bytes(owner, -size)


def _file(row: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip(_COLUMNS.split(", "), row, strict=True)))
