"""
Leases: which process runs a batch, and which one runs quarantined lines.

A lease has a generation that grows with each claim. A write of an older generation is refused, so a process that was
frozen changes nothing after another one has claimed its batch. The clock of leases is that of the database.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from triton_openai.storage.batch_records import Batch, next_group
from triton_openai.storage.batch_tables import BATCH_COLUMNS, Tables, batch_of_row, lock_leased
from triton_openai.storage.sql import Steps, operation


class LeaseTable(Tables):
    """The leases of all processes; see :class:`Tables` for the errors."""

    @operation(write=True, long=True)
    def claim(
        self, holder: str, seconds: float, *, max_running: int, full: Collection[str] = ()
    ) -> Steps[Batch | None]:
        """
        Give *holder* the lease of a batch without one, for *seconds*; return ``None`` if there is none.

        The owners with the fewest leased batches come first, then the oldest batches. Owners in *full* are left out.
        Lines that ran when the last holder was lost wait again, quarantined, and a line that ran alone has a death
        more. *max_running* is the number of lines that run at a time for a model: lines beyond it had an answer that
        was not stored yet.
        """
        rows = yield (
            "SELECT b.id FROM batch b LEFT JOIN (SELECT owner, COUNT(*) AS number FROM batch WHERE open = 1"
            " AND until >= CLOCK() GROUP BY owner) h ON h.owner = b.owner WHERE b.open = 1 AND b.until < CLOCK()"
            " AND b.owner NOT IN EACH($1) ORDER BY COALESCE(h.number, 0), b.created, b.id LIMIT 1"
            " FOR UPDATE OF b SKIP LOCKED",
            json.dumps([*full]),
        )
        if not rows:
            return None
        claimed = yield (
            "UPDATE batch SET holder = $2, until = CLOCK() + $3, generation = generation + 1 WHERE id = $1"
            f" RETURNING {BATCH_COLUMNS}",
            *(rows[0][0], holder, seconds),
        )
        batch = batch_of_row(claimed[0])
        ran = yield "SELECT COUNT(*) FROM line WHERE batch = $1 AND state = 1 AND running = 1", batch.id
        yield (
            "UPDATE line SET running = 0, max_group = $2, attempts = attempts + CASE WHEN max_group = 1 THEN 1 ELSE 0"
            " END WHERE batch = $1 AND state = 1 AND running = 1",
            *(batch.id, next_group(min(ran[0][0], max_running))),
        )
        yield "UPDATE line SET state = 0 WHERE batch = $1 AND state = 1", batch.id
        return batch

    @operation()
    def batches_of(self, holder: str) -> Steps[Mapping[str, Batch]]:
        """Return the open batches whose last lease is that of *holder*, by their ids."""
        rows = yield f"SELECT {BATCH_COLUMNS} FROM batch WHERE open = 1 AND holder = $1", holder
        return {batch.id: batch for batch in map(batch_of_row, rows)}

    @operation()
    def holders(self) -> Steps[Collection[str]]:
        """Return the holders whose leases have not expired."""
        rows = yield ("SELECT DISTINCT holder FROM batch WHERE open = 1 AND until >= CLOCK()",)
        return {row[0] for row in rows}

    @operation(write=True)
    def renew(self, holder: str, seconds: float) -> Steps[None]:
        """Make the leases of *holder* expire in *seconds*."""
        yield "UPDATE batch SET until = CLOCK() + $2 WHERE open = 1 AND holder = $1", holder, seconds
        yield "UPDATE quarantine SET until = CLOCK() + $2 WHERE holder = $1 AND until >= CLOCK()", holder, seconds

    @operation(write=True)
    def expire_leases(self, holder: str) -> Steps[None]:
        """End all leases of *holder*, whose process has ended."""
        yield "UPDATE batch SET until = 0 WHERE open = 1 AND holder = $1", holder
        yield "UPDATE quarantine SET until = 0 WHERE holder = $1", holder

    @operation(write=True, long=True)
    def release(self, batch: Batch) -> Steps[None]:
        """End the lease of *batch*. Lines that still run wait again."""
        yield from lock_leased(batch)
        yield "UPDATE line SET state = 0, running = 0 WHERE batch = $1 AND state = 1", batch.id
        yield "UPDATE batch SET until = 0, holder = '' WHERE id = $1", batch.id

    @operation(write=True)
    def enter_quarantine(self, holder: str, seconds: float) -> Steps[bool]:
        """
        Ask for the lease to run quarantined lines, for *seconds*; return whether *holder* has it.

        One process has it at a time: lines that run alone in two processes could ask the same Triton.
        """
        rows = yield (
            "INSERT INTO quarantine (number, holder, until) VALUES (1, $1, CLOCK() + $2) ON CONFLICT (number) DO UPDATE"
            " SET holder = $1, until = CLOCK() + $2 WHERE quarantine.until < CLOCK() OR quarantine.holder = $1"
            " RETURNING holder",
            *(holder, seconds),
        )
        return bool(rows)

    @operation(write=True)
    def leave_quarantine(self, holder: str) -> Steps[None]:
        """End the lease of *holder* to run quarantined lines."""
        yield "UPDATE quarantine SET until = 0 WHERE holder = $1", holder
