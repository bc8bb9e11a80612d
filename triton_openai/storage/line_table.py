"""The table of lines: the queue of each batch, and its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from triton_openai.storage.batch_records import FAILED, SUCCEEDED, Batch, Done, Line, Result
from triton_openai.storage.batch_tables import Tables, lock_leased, update_batch
from triton_openai.storage.sql import Steps, operation


class LineTable(Tables):
    """The lines of batches that have not ended; see :class:`Tables` for the errors."""

    @operation(write=True, long=True)
    def clear(self, batch: Batch) -> Steps[None]:
        """Delete all lines of *batch*."""
        yield from lock_leased(batch)
        yield "DELETE FROM line WHERE batch = $1", batch.id

    @operation(write=True, long=True)
    def add(self, batch: Batch, lines: Sequence[Line]) -> Steps[None]:
        """Add lines that wait."""
        yield from lock_leased(batch)
        yield (
            "INSERT INTO line (batch, number, place, length, model, prefix, state, attempts)"
            " VALUES ($1, $2, $3, $4, $5, $6, 0, 0)",
            [(batch.id, line.number, line.offset, line.length, line.model, line.prefix) for line in lines],
        )

    async def waiting(self, batch: Batch, after: int, limit: int) -> Sequence[Line]:
        """Return *limit* lines that wait, by their numbers, which are greater than *after*."""
        return await self._select(batch, "state = 0", after, limit)

    async def unfinished(self, batch: Batch, after: int, limit: int) -> Sequence[Line]:
        """Return *limit* lines without a result, by their numbers, which are greater than *after*."""
        return await self._select(batch, "state < 2", after, limit)

    @operation()
    def _select(self, batch: Batch, condition: str, after: int, limit: int) -> Steps[Sequence[Line]]:
        rows = yield (
            "SELECT number, place, length, model, prefix, attempts, triton_deaths, max_group FROM line"
            f" WHERE batch = $1 AND {condition} AND number > $2 ORDER BY number LIMIT $3",
            *(batch.id, after, limit),
        )
        return [Line(*row) for row in rows]

    async def mark_running(self, batch: Batch, numbers: Collection[int]) -> None:
        """Mark lines as running. They are quarantined if the process ends before :meth:`mark_stopped`."""
        await self._set_running(batch, numbers, 1)

    async def mark_stopped(self, batch: Batch, numbers: Collection[int]) -> None:
        """Mark lines as claimed and not running: they have no result yet, and are not to blame if the process ends."""
        await self._set_running(batch, numbers, 0)

    @operation(write=True, long=True)
    def _set_running(self, batch: Batch, numbers: Collection[int], running: int) -> Steps[None]:
        yield from lock_leased(batch)
        yield (
            "UPDATE line SET state = 1, running = $3 WHERE batch = $1 AND number = $2 AND state < 2",
            [(batch.id, number, running) for number in numbers],
        )

    @operation(write=True)
    def quarantine(self, batch: Batch, lines: Collection[Line]) -> Steps[None]:
        """Store the deaths and the largest groups of *lines*, and mark them as not running."""
        yield from lock_leased(batch)
        yield (
            "UPDATE line SET state = 1, running = 0, triton_deaths = $3, max_group = $4 WHERE batch = $1"
            " AND number = $2 AND state < 2",
            [(batch.id, line.number, line.triton_deaths, line.max_group) for line in lines],
        )

    @operation(write=True, long=True)
    def finish(self, batch: Batch, done: Sequence[Done]) -> Steps[Batch]:
        """Store the results of lines; return *batch* with its new counts. Doing it again changes nothing."""
        locked = yield from lock_leased(batch)
        rows = yield "SELECT number FROM line WHERE batch = $1 AND state = 1", batch.id
        claimed = {row[0] for row in rows}
        new = [line for line in done if line.number in claimed]
        yield (
            "UPDATE line SET state = $3, part = $4, part_place = $5, part_length = $6 WHERE batch = $1 AND number = $2",
            [(batch.id, line.number, line.state, batch.generation, line.offset, line.length) for line in new],
        )
        for line in new:
            locked.usage.add(line.usage)
        locked.succeeded += sum(line.state == SUCCEEDED for line in new)
        locked.failed += sum(line.state == FAILED for line in new)
        locked.exonerated += sum(line.exonerated for line in new)
        yield from update_batch(locked)
        return locked

    @operation()
    def results(self, batch: Batch, after: tuple[int, int], limit: int) -> Steps[Sequence[Result]]:
        """Return *limit* results in the order in which they were written, behind a part and an offset in it."""
        rows = yield (
            "SELECT number, state, part, part_place, part_length FROM line WHERE batch = $1 AND state > 1"
            " AND (part, part_place) > ($2, $3) ORDER BY part, part_place LIMIT $4",
            *(batch.id, *after, limit),
        )
        return [Result(*row) for row in rows]
