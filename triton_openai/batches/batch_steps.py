"""
What a batch and a part of one have in common: their steps are repeated until they end, and failures are handled alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import structlog

from triton_openai.batches import timing
from triton_openai.batches.host import Host
from triton_openai.batches.leased import Leased, Phase
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, FinalStatus, LeaseLost

_log = structlog.get_logger(__name__)

_MISSING_INPUT = BatchError(code="input_file_missing", message="The input file is not there any more.")
_MISSING_RESULTS = BatchError(code="results_missing", message="Results of the batch are not there any more.")
_FAILED_TO_RUN = BatchError(code="server_error", message="The service failed to run the batch.")


class ResultsMissing(Exception):
    """The file of a part does not have the results that the table says it has."""


async def run_steps(
    leased: Leased,
    advance: Callable[[], Awaitable[bool]],
    fail: Callable[[BatchError], Awaitable[None]],
) -> None:
    """
    Repeat *advance* until it returns that the end is reached, or the lease is lost.

    *fail* is called with the reason why the batch can only fail. After a failure of the disk or the database, the batch
    is paused until a step succeeds.
    """
    ended = False
    while not ended:
        try:
            ended = await advance()
            _resume(leased)
        except LeaseLost:
            leased.lose()
            return
        except FileNotFoundError:
            await fail(_MISSING_INPUT)
        except ResultsMissing:
            _log.error("results of a batch are missing", batch=leased.batch.id)
            await fail(_MISSING_RESULTS)
        except (OSError, ServiceError) as error:
            _pause(leased, error)
            await asyncio.sleep(timing.FAILURE_PAUSE)
        except Exception:  # noqa: BLE001 - the last resort: logged, and the batch ends
            _log.exception("batch failed", batch=leased.batch.id)
            await fail(_FAILED_TO_RUN)
            await asyncio.sleep(timing.FAILURE_PAUSE)


def _pause(leased: Leased, error: OSError | ServiceError) -> None:
    if leased.phase not in (Phase.PAUSED, Phase.LOST):
        reason = getattr(error, "reason", str(error))
        _log.warning("batch paused", batch=leased.batch.id, reason=reason)
        leased.phase = Phase.PAUSED


def _resume(leased: Leased) -> None:
    if leased.phase is Phase.PAUSED:
        leased.phase = Phase.RUNNING
        _log.info("batch resumed", batch=leased.batch.id)


def early_outcome(host: Host, batch: Batch) -> FinalStatus | None:
    """Return the outcome of an open *batch* whose lines are to end now; ``None`` if they go on."""
    if batch.problems or host.problem(batch) is not None:
        return "failed"
    if batch.status == "cancelling":
        return "cancelled"
    if time.time() >= batch.expires:
        return "expired"
    return None
