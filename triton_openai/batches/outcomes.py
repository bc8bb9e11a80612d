"""The outcome of a batch that ends before all its lines have results."""

from __future__ import annotations

import time
from typing import Literal, TypeAlias

from triton_openai.batches.host import Host
from triton_openai.storage.batch_records import Batch

Outcome: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]


def early_outcome(host: Host, batch: Batch) -> Outcome | None:
    """Return the outcome of an open *batch* whose lines are to end now; ``None`` if they go on."""
    if batch.problems or host.problem(batch) is not None:
        return "failed"
    if batch.status == "cancelling":
        return "cancelled"
    if time.time() >= batch.expires:
        return "expired"
    return None
