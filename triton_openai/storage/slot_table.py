"""
The table of slots: how many lines for a model each process runs, so that all of them together run no more than allowed.
"""

from __future__ import annotations

from triton_openai.storage.batch_tables import Tables
from triton_openai.storage.sql import Steps, operation


class SlotTable(Tables):
    """The slots of all processes; see :class:`Tables` for the errors."""

    @operation(write=True)
    def take(self, model: str, holder: str, seconds: float, *, wanted: int, running: int, total: int) -> Steps[int]:
        """
        Return how many lines for *model* the process *holder* may run for *seconds*, of *total* for all processes.

        *wanted* is how many it could run, *running* how many run now: those keep their slots until they end. A process
        that wants more than its share gets what the others leave, and gives it back as its lines end.
        """
        # A row of the model that all processes lock, so that one of them counts at a time.
        yield (
            "INSERT INTO slot (model, holder, wanted, taken, until) VALUES ($1, '', 0, 0, 0)"
            " ON CONFLICT (model, holder) DO UPDATE SET taken = 0",
            model,
        )
        yield "DELETE FROM slot WHERE model = $1 AND holder <> '' AND until < CLOCK()", model
        rows = yield "SELECT wanted, taken FROM slot WHERE model = $1 AND holder NOT IN ('', $2)", model, holder
        share = fair_share(wanted, [row[0] for row in rows], total)
        free = total - sum(int(row[1]) for row in rows)
        taken = max(running, min(share, free), 0)
        yield (
            "INSERT INTO slot (model, holder, wanted, taken, until) VALUES ($1, $2, $3, $4, CLOCK() + $5)"
            " ON CONFLICT (model, holder) DO UPDATE SET wanted = $3, taken = $4, until = CLOCK() + $5",
            *(model, holder, wanted, taken, seconds),
        )
        return min(share, taken)

    @operation(write=True)
    def delete_expired(self) -> Steps[None]:
        """Delete the slots of processes that have ended, of models that nobody asks any more."""
        rows = yield ("SELECT DISTINCT model FROM slot ORDER BY model",)
        for row in rows:
            model = row[0]
            yield "SELECT 1 FROM slot WHERE model = $1 AND holder = '' FOR UPDATE", model
            yield "DELETE FROM slot WHERE model = $1 AND holder <> '' AND until < CLOCK()", model
            yield (
                "DELETE FROM slot WHERE model = $1 AND NOT EXISTS (SELECT 1 FROM slot s WHERE s.model = $1"
                " AND s.holder <> '')",
                model,
            )

    @operation(write=True)
    def release(self, holder: str, model: str) -> Steps[None]:
        """Give back the slots of *holder* for *model*."""
        yield "DELETE FROM slot WHERE model = $1 AND holder = $2", model, holder


def fair_share(wanted: int, others: list[int], total: int) -> int:
    """Return how many of *total* a process gets that has *wanted* so many, beside *others* that want so many each."""
    left = total
    processes = len(others) + 1
    for other in sorted(others):
        if other >= wanted or other > left // processes:
            break
        left -= other
        processes -= 1
    return min(wanted, max(1, left // processes))
