"""
Leases: which process takes a batch to its end, which ones have parts of it, and which one runs quarantined lines.

A batch has a generation that grows with each claim, and the number of a part is used once. A write for an older
generation, or for a part that was ended, is refused. So a process that was frozen changes nothing after another one has
its batch or its lines. The clock of leases is that of the database.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from triton_openai.storage.batch_records import Batch, Part, next_group
from triton_openai.storage.batch_tables import (
    BATCH_COLUMNS,
    NOTIFY,
    Tables,
    batch_of_row,
    lock_part,
)
from triton_openai.storage.sql import Steps, operation

# Parts of processes that have ended whose lines are put back in one transaction.
_MAX_ENDED = 16


class Overview(NamedTuple):
    """What a process has to compare with its own state."""

    #: The batches that have not ended, the oldest first.
    batches: Sequence[Batch]
    #: The leases of the process: of batches with the number 0, and of parts.
    leases: Collection[Part]
    #: The Unix time of the database.
    clock: float


class LeaseTable(Tables):
    """The leases of all processes; see :class:`Tables` for the errors."""

    @operation(write=True, long=True)
    def claim(self, holder: str, seconds: float, *, now: float, full: Collection[str] = ()) -> Steps[Batch | None]:
        """
        Give *holder* the lease of a batch without one, for *seconds*; return ``None`` if there is none.

        The owners with the fewest leased batches come first, then the oldest batches. Owners in *full* are left out.
        *now* is the time of the database at which leases count as expired.
        """
        batch_id = ""
        leased: Sequence[Sequence[Any]] = ()
        while not leased:
            rows = yield (
                "SELECT b.id FROM batch b LEFT JOIN lease l ON l.batch = b.id AND l.part = 0 LEFT JOIN"
                " (SELECT owner, COUNT(*) AS number FROM lease JOIN batch ON batch.id = lease.batch WHERE part = 0"
                " AND lease.until >= CLOCK() GROUP BY owner) h ON h.owner = b.owner WHERE b.open = 1"
                " AND COALESCE(l.until, 0) < $2"
                " AND b.owner NOT IN EACH($1) ORDER BY COALESCE(h.number, 0), b.created, b.id LIMIT 1"
                " FOR UPDATE OF b SKIP LOCKED",
                *(json.dumps([*full]), now),
            )
            if not rows:
                return None
            batch_id = rows[0][0]
            # None if another process has claimed it, or renewed its lease, while this one looked: it looks again.
            leased = yield (
                "INSERT INTO lease (batch, part, holder, until) VALUES ($1, 0, $2, CLOCK() + $3) ON CONFLICT"
                " (batch, part) DO UPDATE SET holder = $2, until = CLOCK() + $3"
                " WHERE lease.until < $4 RETURNING part",
                *(batch_id, holder, seconds, now),
            )
        claimed = yield (
            # Release 1.0.0 makes all lines of a batch with another `until` wait again.
            f"UPDATE batch SET until = 1e18, generation = generation + 1 WHERE id = $1 RETURNING {BATCH_COLUMNS}",
            batch_id,
        )
        return batch_of_row(claimed[0])

    @operation()
    def overview(self, holder: str) -> Steps[Overview]:
        """Return the open batches, and the leases of *holder*."""
        leases = yield "SELECT batch, part FROM lease WHERE holder = $1", holder
        rows = yield (f"SELECT {BATCH_COLUMNS} FROM batch WHERE open = 1 ORDER BY created, id",)
        clock = yield ("SELECT CLOCK()",)
        return Overview([batch_of_row(row) for row in rows], {Part(*row) for row in leases}, clock[0][0])

    @operation()
    def holders(self) -> Steps[Collection[str]]:
        """Return the holders whose leases have not expired."""
        rows = yield ("SELECT DISTINCT holder FROM lease WHERE until >= CLOCK()",)
        return {row[0] for row in rows}

    @operation(write=True)
    def renew(self, holder: str, seconds: float) -> Steps[None]:
        """Make the leases of *holder* expire in *seconds*."""
        yield "UPDATE lease SET until = CLOCK() + $2 WHERE holder = $1", holder, seconds
        yield "UPDATE quarantine SET until = CLOCK() + $2 WHERE holder = $1 AND until >= CLOCK()", holder, seconds

    @operation(write=True)
    def expire_leases(self, holder: str) -> Steps[None]:
        """End all leases of *holder*, whose process has ended."""
        yield "UPDATE lease SET until = 0 WHERE holder = $1", holder
        yield "UPDATE quarantine SET until = 0 WHERE holder = $1", holder
        yield "DELETE FROM slot WHERE holder = $1", holder
        yield (NOTIFY,)

    @operation(write=True)
    def release(self, batch: Batch) -> Steps[None]:
        """End the lease of *batch*, if it has the same generation."""
        yield (
            "DELETE FROM lease WHERE batch = $1 AND part = 0 AND EXISTS"
            " (SELECT 1 FROM batch WHERE id = $1 AND generation = $2)",
            *(batch.id, batch.generation),
        )
        yield (NOTIFY,)

    @operation(write=True, long=True)
    def release_unknown(self, part: Part, holder: str) -> Steps[None]:
        """End a lease whose *holder* has got no answer to its claim: of a batch, which is part 0, or of a part."""
        if part.number:
            yield from _release_part(part)
        else:
            yield "DELETE FROM lease WHERE batch = $1 AND part = 0 AND holder = $2", part.batch, holder
            yield (NOTIFY,)

    @operation(write=True, long=True)
    def release_part(self, part: Part) -> Steps[None]:
        """End the lease of *part*. Its lines without results wait again, and none is to blame for anything."""
        yield from _release_part(part)

    @operation(write=True, long=True)
    def end_expired_parts(self, now: float) -> Steps[Mapping[Part, int]]:
        """
        End the parts whose leases have expired, and return how many lines of each ran.

        *now* is the time of the database at which they count as expired.
        Their lines without results wait again. Those that ran are quarantined, and a line that ran alone has a death
        more.
        """
        rows = yield (
            "SELECT batch, part FROM lease WHERE part > 0 AND until < $2 ORDER BY batch, part"
            " LIMIT $1 FOR UPDATE SKIP LOCKED",
            *(_MAX_ENDED, now),
        )
        ended: dict[Part, int] = {}
        for row in rows:
            part = Part(*row)
            ended[part] = yield from _put_back(part)
            yield "DELETE FROM lease WHERE batch = $1 AND part = $2", part.batch, part.number
        if ended:
            yield (NOTIFY,)
        return ended

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


def _release_part(part: Part) -> Steps[None]:
    """End the lease of *part*, and make its lines without results wait again."""
    yield from lock_part(part)
    yield (
        "UPDATE line SET state = 0, running = 0 WHERE batch = $1 AND state = 1 AND part = $2",
        *(part.batch, part.number),
    )
    yield "DELETE FROM lease WHERE batch = $1 AND part = $2", part.batch, part.number
    yield (NOTIFY,)


def _put_back(part: Part) -> Steps[int]:
    """Make the lines of *part* without results wait again; return how many ran."""
    claimed = "batch = $1 AND part = $2 AND state = 1"
    rows = yield f"SELECT COUNT(*) FROM line WHERE {claimed} AND running = 1", part.batch, part.number
    ran = int(rows[0][0])
    group = next_group(ran)
    yield (
        f"UPDATE line SET running = 0, max_group = {group}, attempts = attempts + CASE WHEN max_group = 1 THEN 1 ELSE 0"
        f" END WHERE {claimed} AND running = 1",
        *(part.batch, part.number),
    )
    yield f"UPDATE line SET state = 0 WHERE {claimed}", part.batch, part.number
    return ran
