"""
What a batch and a part of one have in common: their steps are repeated until they end, and failures are handled alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal, Protocol, TypeAlias

import structlog

from triton_openai.batches import timing
from triton_openai.batches.host import Host
from triton_openai.batches.running_batch import Phase
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, LeaseLost

_log = structlog.get_logger(__name__)

Outcome: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]

_MISSING_INPUT = BatchError(code="input_file_missing", message="The input file is not there any more.")
_MISSING_RESULTS = BatchError(code="results_missing", message="Results of the batch are not there any more.")
_FAILED_TO_RUN = BatchError(code="server_error", message="The service failed to run the batch.")


class ResultsMissing(Exception):
    """The file of a part does not have the results that the table says it has."""


class Stepped(Protocol):
    """A batch, or a part of one, in this process."""

    batch: Batch
    phase: Phase

    def lose(self) -> None:
        """Stop: another process has it."""


async def run_steps(
    stepped: Stepped,
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
            _resume(stepped)
        except LeaseLost:
            stepped.lose()
            return
        except FileNotFoundError:
            await fail(_MISSING_INPUT)
        except ResultsMissing:
            _log.error("results of a batch are missing", batch=stepped.batch.id)
            await fail(_MISSING_RESULTS)
        except (OSError, ServiceError) as error:
            _pause(stepped, error)
            await asyncio.sleep(timing.FAILURE_PAUSE)
        except Exception:  # noqa: BLE001 - the last resort: logged, and the batch ends
            _log.exception("batch failed", batch=stepped.batch.id)
            await fail(_FAILED_TO_RUN)
            await asyncio.sleep(timing.FAILURE_PAUSE)


def _pause(stepped: Stepped, error: OSError | ServiceError) -> None:
    if stepped.phase not in (Phase.PAUSED, Phase.LOST):
        reason = getattr(error, "reason", str(error))
        _log.warning("batch paused", batch=stepped.batch.id, reason=reason)
        stepped.phase = Phase.PAUSED


def _resume(stepped: Stepped) -> None:
    if stepped.phase is Phase.PAUSED:
        stepped.phase = Phase.RUNNING
        _log.info("batch resumed", batch=stepped.batch.id)


def early_outcome(host: Host, batch: Batch) -> Outcome | None:
    """Return the outcome of an open *batch* whose lines are to end now; ``None`` if they go on."""
    if batch.problems or host.problem(batch) is not None:
        return "failed"
    if batch.status == "cancelling":
        return "cancelled"
    if time.time() >= batch.expires:
        return "expired"
    return None
