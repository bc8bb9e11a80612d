"""The input tokens of the batches that have not ended, which are limited for each key and model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_openai.storage.batch_records import Batch, LeaseLost
from triton_openai.storage.batch_tables import BATCH_COLUMNS, Tables, batch_of_row, update_batch
from triton_openai.storage.sql import Steps, operation


class EnqueuedTable(Tables):
    """The enqueued tokens of all owners; see :class:`Tables` for the errors."""

    @operation(write=True)
    def add(self, batch: Batch, tokens: Mapping[str, int], limits: Mapping[str, int]) -> Steps[Sequence[str]]:
        """
        Count the *tokens* of *batch* by model until it ends, unless its owner would have more than the *limits*.

        Returns the models for which it would; then nothing is counted.
        """
        # In one order: two batches of an owner that are validated at the same time wait for each other.
        rows = yield (
            f"SELECT {BATCH_COLUMNS} FROM batch WHERE owner = $1 AND open = 1 ORDER BY id FOR UPDATE",
            batch.owner,
        )
        own = None
        enqueued = dict.fromkeys(tokens, 0)
        for row in rows:
            other = batch_of_row(row)
            if other.id == batch.id:
                own = other
                continue
            for model in enqueued:
                enqueued[model] += other.enqueued.get(model, 0)
        if own is None or own.generation != batch.generation:
            raise LeaseLost
        exceeded = [model for model, limit in limits.items() if enqueued.get(model, 0) + tokens.get(model, 0) > limit]
        if not exceeded:
            own.enqueued = dict(tokens)
            yield from update_batch(own)
        return exceeded
