"""Figures of files and batches for metrics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from triton_openai.batches.file_folder import Files
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import OPEN, Batch
from triton_openai.telemetry.gauges import BatchState

# Longest time that a scrape waits for the tables.
_MAX_SECONDS = 2.0


async def batch_state(files: Files) -> BatchState | None:
    """Return the figures of *files* and batches; ``None`` if the tables cannot be read soon."""
    batches: Sequence[tuple[Batch, bool]] = ()
    size = 0.0
    now = time.time()
    try:
        async with asyncio.timeout(_MAX_SECONDS):
            if files.exist:
                batches = await files.store.batches.open_batches()
                size = await files.store.files.total_bytes()
    except (ServiceError, TimeoutError):
        return None
    counts = Counter(batch.status for batch, _ in batches)
    # The lines a second with which every batch ends in time.
    needed = 0.0
    left = 0
    for batch in sorted([batch for batch, _ in batches], key=lambda batch: batch.expires):
        left += batch.unfinished
        needed = max(needed, left / max(1.0, batch.expires - now))
    return BatchState(
        statuses={status: counts[status] for status in OPEN},
        lag=max((now - batch.created for batch, waits in batches if waits), default=0.0),
        needed=needed,
        files_bytes=size,
    )
