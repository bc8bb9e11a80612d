"""What a process knows of the others when several serve together on one port (``--workers``)."""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """
    This process among *count* workers of one service: number *index*, from 0.

    A worker that died is replaced by one with the same index. *directory* belongs to the service alone, is shared by
    all of its workers, and goes when the service ends: what they have in common (counts of limits, metrics) is kept
    there, in files. A service of one process has no need of it and none.

    Whoever starts a worker with a directory sets ``PROMETHEUS_MULTIPROC_DIR`` in its environment to what
    :func:`triton_openai.telemetry.metrics.metrics_folder` returns for it, before anything is imported there, and calls
    :func:`triton_openai.telemetry.metrics.forget_worker` when a worker has died. Never two processes at a time may have
    the same index.
    """

    index: int = 0
    count: int = 1
    directory: Path | None = None


WORKER: web.AppKey[Worker] = web.AppKey("worker", Worker)
