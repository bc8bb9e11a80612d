"""The table of lines: the queue of each batch, and its results."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from triton_openai.storage.batch_records import FAILED, SUCCEEDED, Batch, Done, LeaseLost, Line, Part, Result
from triton_openai.storage.batch_tables import (
    NOTIFY,
    Tables,
    lock_batch,
    lock_leased,
    lock_part,
    update_batch,
)
from triton_openai.storage.sql import Steps, operation

# Lines that are deleted in one transaction.
_MAX_DELETED = 10_000
_LINE_COLUMNS = "number, place, length, model, prefix, attempts, triton_deaths, max_group"


class LineTable(Tables):
    """The lines of batches that have not ended; see :class:`Tables` for the errors."""

    @operation(write=True)
    def end_parts(self, batch: Batch) -> Steps[None]:
        """End the parts of *batch*. Its lines can be deleted after that."""
        yield from lock_leased(batch)
        yield "DELETE FROM lease WHERE batch = $1 AND part > 0", batch.id

    async def delete(self, batch_id: str, generation: int | None = None) -> None:
        """
        Delete all lines of a batch that has ended, or that is open and has this *generation*, and no parts.

        There are many transactions, between which other operations run. Raises :class:`LeaseLost`.
        """
        last = -1
        while (deleted := await self._delete_some(batch_id, generation, last)) is not None:
            last = deleted

    @operation(write=True, long=True)
    def _delete_some(self, batch_id: str, generation: int | None, after: int) -> Steps[int | None]:
        """Delete the first lines whose numbers are greater than *after*; return the last one, ``None`` without any."""
        locked = yield from lock_batch(batch_id)
        if locked is not None and locked.generation != generation:
            raise LeaseLost
        rows = yield (
            "SELECT MAX(number) FROM (SELECT number FROM line WHERE batch = $1 AND number > $2 ORDER BY number"
            " LIMIT $3) n",
            *(batch_id, after, _MAX_DELETED),
        )
        last: int | None = rows[0][0]
        if last is not None:
            yield "DELETE FROM line WHERE batch = $1 AND number > $2 AND number <= $3", batch_id, after, last
        return last

    @operation()
    def ended_batches(self) -> Steps[Sequence[str]]:
        """Return the ids of batches that have ended, or were deleted, and have lines."""
        # From one id to the next over the primary key: the table may have millions of lines.
        rows = yield (
            "WITH RECURSIVE batches (id) AS (SELECT MIN(batch) FROM line UNION ALL SELECT (SELECT MIN(batch) FROM line"
            " WHERE batch > batches.id) FROM batches WHERE batches.id IS NOT NULL) SELECT id FROM batches"
            " WHERE id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM batch WHERE batch.id = batches.id AND open = 1)",
        )
        return [row[0] for row in rows]

    @operation(write=True, long=True)
    def add(self, batch: Batch, lines: Sequence[Line]) -> Steps[None]:
        """Add lines that wait."""
        yield from lock_leased(batch)
        yield (
            "INSERT INTO line (batch, number, place, length, model, prefix, state, attempts)"
            " VALUES ($1, $2, $3, $4, $5, $6, 0, 0)",
            [(batch.id, line.number, line.offset, line.length, line.model, line.prefix) for line in lines],
        )

    @operation(write=True, long=True)
    def analyze(self) -> Steps[None]:
        """Renew PostgreSQL's statistics after lines were added: its plan for claims depends on them."""
        yield ("ANALYZE line",)

    @operation(write=True)
    def open_part(self, batch: Batch, holder: str, seconds: float) -> Steps[Part]:
        """Give *holder* a part of *batch*, whose lease it has, for *seconds*."""
        yield from lock_leased(batch)
        return (yield from _open_part(batch.id, holder, seconds))

    @operation(write=True, long=True)
    def join(
        self, batch_id: str, holder: str, seconds: float, limit: int, without: Collection[str] = ()
    ) -> Steps[tuple[Batch, Part, Sequence[Line]] | None]:
        """
        Give *holder* a part of a batch for *seconds*, with lines that wait; see :meth:`claim`.

        Returns ``None`` if no lines wait, or if none may run.
        """
        batch = yield from lock_batch(batch_id)
        if batch is None or batch.status != "in_progress" or batch.problems:
            return None
        lines = yield from _select_waiting(batch_id, limit, without)
        if not lines:
            return None
        part = yield from _open_part(batch_id, holder, seconds)
        yield from _assign(part, [line.number for line in lines])
        return batch, part, lines

    @operation(write=True, long=True)
    def claim(self, part: Part, limit: int, without: Collection[str] = ()) -> Steps[Sequence[Line]]:
        """
        Claim *limit* lines that wait for *part*, in the order of their numbers, and as many quarantined ones.

        Lines for the models *without* are left out. Other processes claim at the same time, and get other lines.
        """
        yield from lock_part(part)
        lines = yield from _select_waiting(part.batch, limit, without)
        yield from _assign(part, [line.number for line in lines])
        return lines

    @operation(write=True, long=True)
    def assign(self, part: Part, numbers: Collection[int]) -> Steps[None]:
        """Claim the lines *numbers* for *part*, which no other process can claim."""
        yield from lock_part(part)
        yield from _assign(part, numbers)

    @operation(write=True, long=True)
    def give_back(self, part: Part, numbers: Collection[int]) -> Steps[None]:
        """Make lines that were claimed and do not run wait again, for any process."""
        yield from lock_part(part)
        yield (
            "UPDATE line SET state = 0, running = 0 WHERE batch = $1 AND part = $2 AND state = 1"
            " AND number IN NUMBERS($3)",
            *(part.batch, part.number, json.dumps([*numbers])),
        )
        yield (NOTIFY,)

    @operation()
    def unfinished_in(self, part: Part) -> Steps[Sequence[Line]]:
        """Return the lines that are claimed for *part* and have no result."""
        yield from lock_part(part)
        rows = yield (
            f"SELECT {_LINE_COLUMNS} FROM line WHERE batch = $1 AND state = 1 AND part = $2 ORDER BY number",
            *(part.batch, part.number),
        )
        return [Line(*row) for row in rows]

    @operation()
    def unfinished(self, batch: Batch, after: int, limit: int) -> Steps[Sequence[Line]]:
        """Return *limit* lines without a result, by their numbers, which are greater than *after*."""
        rows = yield (
            f"SELECT {_LINE_COLUMNS} FROM line WHERE batch = $1 AND state < 2 AND number > $2 ORDER BY number LIMIT $3",
            *(batch.id, after, limit),
        )
        return [Line(*row) for row in rows]

    async def mark_running(self, part: Part, numbers: Collection[int]) -> None:
        """Mark lines as running. They are quarantined if the process ends before :meth:`mark_stopped`."""
        await self._set_running(part, numbers, 1)

    async def mark_stopped(self, part: Part, numbers: Collection[int]) -> None:
        """Mark lines as claimed and not running: they have no result yet, and are not to blame if the process ends."""
        await self._set_running(part, numbers, 0)

    @operation(write=True, long=True)
    def _set_running(self, part: Part, numbers: Collection[int], running: int) -> Steps[None]:
        yield from lock_part(part)
        yield (
            "UPDATE line SET running = $4 WHERE batch = $1 AND part = $2 AND state = 1 AND number IN NUMBERS($3)",
            *(part.batch, part.number, json.dumps([*numbers]), running),
        )

    @operation(write=True)
    def quarantine(self, part: Part, lines: Collection[Line]) -> Steps[None]:
        """Store the deaths and the largest groups of *lines*, and mark them as not running."""
        yield from lock_part(part)
        yield (
            "UPDATE line SET running = 0, triton_deaths = $4, max_group = $5 WHERE batch = $1 AND part = $2"
            " AND number = $3 AND state = 1",
            [(part.batch, part.number, line.number, line.triton_deaths, line.max_group) for line in lines],
        )

    @operation(write=True, long=True)
    def finish(self, part: Part, done: Sequence[Done]) -> Steps[Batch]:
        """Store the results of lines; return the batch with its new counts. Doing it again changes nothing."""
        batch = yield from lock_batch(part.batch)
        if batch is None:
            raise LeaseLost
        yield from lock_part(part)
        rows = yield "SELECT number FROM line WHERE batch = $1 AND state = 1 AND part = $2", part.batch, part.number
        claimed = {row[0] for row in rows}
        new = [line for line in done if line.number in claimed]
        yield (
            "UPDATE line SET state = $3, part_place = $4, part_length = $5 WHERE batch = $1 AND number = $2",
            [(part.batch, line.number, line.state, line.offset, line.length) for line in new],
        )
        for line in new:
            batch.usage.add(line.usage)
        batch.succeeded += sum(line.state == SUCCEEDED for line in new)
        batch.failed += sum(line.state == FAILED for line in new)
        batch.exonerated += sum(line.exonerated for line in new)
        yield from update_batch(batch)
        if not batch.unfinished:
            yield (NOTIFY,)
        return batch

    @operation()
    def results(self, batch: Batch, after: int, limit: int) -> Steps[Sequence[Result]]:
        """Return *limit* results by the numbers of their lines, which are greater than *after*."""
        rows = yield (
            "SELECT number, state, part, part_place, part_length FROM line WHERE batch = $1 AND state > 1"
            " AND number > $2 ORDER BY number LIMIT $3",
            *(batch.id, after, limit),
        )
        return [Result(*row) for row in rows]


def _open_part(batch_id: str, holder: str, seconds: float) -> Steps[Part]:
    """Give *holder* a new part of a batch that is locked."""
    rows = yield "UPDATE batch SET parts = parts + 1 WHERE id = $1 RETURNING parts", batch_id
    part = Part(batch_id, rows[0][0])
    yield (
        "INSERT INTO lease (batch, part, holder, until) VALUES ($1, $2, $3, CLOCK() + $4)",
        *(part.batch, part.number, holder, seconds),
    )
    return part


def _select_waiting(batch_id: str, limit: int, without: Collection[str]) -> Steps[Sequence[Line]]:
    """Return *limit* lines that wait, and as many quarantined ones, for other models than *without*; lock them."""
    lines: list[Line] = []
    for condition in ("max_group = 0", "max_group > 0"):
        rows = yield (
            f"SELECT {_LINE_COLUMNS} FROM line WHERE batch = $1 AND state = 0 AND {condition}"
            " AND model NOT IN EACH($2) ORDER BY number + 0 LIMIT $3 FOR UPDATE SKIP LOCKED",
            *(batch_id, json.dumps([*without]), limit),
        )
        lines += [Line(*row) for row in rows]
    return lines


def _assign(part: Part, numbers: Collection[int]) -> Steps[None]:
    """Claim lines for *part*."""
    yield (
        "UPDATE line SET state = 1, running = 0, part = $2 WHERE batch = $1 AND state = 0 AND number IN NUMBERS($3)",
        *(part.batch, part.number, json.dumps([*numbers])),
    )
