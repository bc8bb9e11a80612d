"""
The life of a batch: it is validated, its lines are read into memory while they run, and it is ended with its files.

What survives the death of this process is on the disk. A result is appended to a part file, synced, and then its line
is marked with the offset, so that a line is in the files once or not at all. The process that claims the batch next
goes on with the lines that have no result.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Literal, TypeAlias

import structlog

from triton_openai import errors
from triton_openai.batches import timing
from triton_openai.batches.away_models import AwayModels
from triton_openai.batches.enqueued import enqueue, fail_with_results, max_inputs_of
from triton_openai.batches.file_folder import Files
from triton_openai.batches.host import Host
from triton_openai.batches.inputs import InputReader
from triton_openai.batches.results import Results, add_result
from triton_openai.batches.running_batch import Phase, RunningBatch
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, LeaseLost, StoredFile
from triton_openai.tasks import cancel, wait_any
from triton_openai.telemetry.instruments import BATCH_LINES, BATCHES_ENDED
from triton_openai.telemetry.metrics import Series

_log = structlog.get_logger(__name__)
# Lines that are read into memory together, and those of a batch in memory if many are for models that are away.
_WINDOW = 1000
_MAX_WINDOW = 10_000
# Lines that are added to the table together.
_CHUNK = 1000
_Outcome: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]


class BatchLifecycle:
    """
    Takes batches from their validation to their end. *results* stores the results of their lines.

    *wake* is called when lines may start.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        away: AwayModels,
        results: Results,
        series: Callable[..., Series],
        wake: Callable[[], None],
    ) -> None:
        self._files = files
        self._store = files.store
        self._host = host
        self._away = away
        self._results = results
        self._series = series
        self._wake = wake

    async def run(self, running: RunningBatch) -> None:
        """Take a batch to its end, or until it is lost."""
        batch_id = running.batch.id
        while running.batch.open:
            try:
                await self._advance(running)
                self._resume(running)
            except LeaseLost:
                running.lose()
                return
            except FileNotFoundError:
                text = "The input file is not there any more."
                running.problems = [BatchError(code="input_file_missing", message=text)]
            except (OSError, ServiceError) as error:
                self._pause(running, error)
                await asyncio.sleep(timing.TROUBLE)
            except Exception:  # noqa: BLE001 - the last resort: logged, and the batch ends
                _log.exception("batch failed", batch=batch_id)
                running.problems = [BatchError(code="server_error", message="The service failed to run the batch.")]
                await asyncio.sleep(timing.TROUBLE)

    def _pause(self, running: RunningBatch, error: OSError | ServiceError) -> None:
        if running.phase not in (Phase.PAUSED, Phase.LOST):
            reason = getattr(error, "reason", str(error))
            _log.warning("batch paused", batch=running.batch.id, reason=reason)
            running.phase = Phase.PAUSED

    def _resume(self, running: RunningBatch) -> None:
        if running.phase is Phase.PAUSED:
            running.phase = Phase.RUNNING
            _log.info("batch resumed", batch=running.batch.id)
            self._wake()

    async def _advance(self, running: RunningBatch) -> None:
        """Take the next step, and wait until there is another one."""
        batch = running.batch
        if running.problems:
            batch.outcome = "failed"
            batch.problems = list(running.problems)
            await running.stop_lines()
            await self._end(running, {})
            return
        if running.input < 0:
            running.input = await self._files.open_input(batch)
            self._wake()
        if batch.outcome:
            await self._end(running, await self._results.make_files(running))
        elif "validated_at" not in batch.times:
            await self._validate(running)
        else:
            await self._run_lines(running)

    # Validation

    async def _validate(self, running: RunningBatch) -> None:
        """Check the input, and add its lines to the table."""
        batch = running.batch
        problem = self._host.problem(batch)
        if problem is not None:
            running.problems = [problem]
            return
        await self._store.lines.clear(batch)
        make = partial(
            InputReader,
            running.input,
            batch,
            max_requests=self._host.settings.max_requests,
            max_line_size=self._host.max_line_size,
            check_line=self._host.check_line,
            check_body=self._host.body_checker(batch),
            max_inputs=max_inputs_of(batch, self._host.settings),
            count_tokens=self._host.input_tokens,
        )
        # By the names that lines have for models: those with which the host finds them.
        names: dict[str, str] = {}
        with closing(await asyncio.to_thread(make)) as reader:
            checked = 0
            while lines := await asyncio.to_thread(reader.read, _CHUNK):
                for (model, brings_template), number in list(reader.asked.items())[checked:]:
                    name = await self._check_model(reader, batch, model, brings_template, number)
                    names.setdefault(model, name)
                checked = len(reader.asked)
                if not reader.problems:
                    lines = [line._replace(model=names[line.model]) for line in lines]
                    await self._store.lines.add(batch, lines)
        refused = reader.problems or await enqueue(self._store.enqueued, self._host, batch, reader, names)
        if refused and (reader.problems or batch.kind == "openai"):
            running.problems = refused
            return

        def begin(batch: Batch) -> None:
            batch.total = reader.total
            batch.times["validated_at"] = int(time.time())
            batch.model = None
            if len(names) == 1:
                (batch.model,) = names.values()
            if refused:
                fail_with_results(batch, refused)
            elif batch.status == "validating":
                batch.set_status("in_progress")

        running.batch = await self._store.batches.change_leased(batch, begin)
        if not refused:
            await self._add_rejected(running, reader)

    async def _check_model(
        self, reader: InputReader, batch: Batch, model: str, brings_template: bool, line: int
    ) -> str:
        """Return the name with which the host finds *model*, or report to *reader* why *line* may not ask it."""
        try:
            return await self._host.check(batch, model, brings_template=brings_template)
        except (errors.UpstreamUnavailable, errors.InvalidRequest, errors.ConfigurationError) as error:
            if isinstance(error, errors.UpstreamUnavailable) or error.retry_after is not None:
                # A batch that is about to end does not wait for Triton.
                if batch.status != "cancelling" and time.time() < batch.expires:
                    raise
            else:
                reader.report(error.code, error.message, "body.model", line)
        return model

    async def _add_rejected(self, running: RunningBatch, reader: InputReader) -> None:
        """
        Add the results of the lines whose parameters have wrong types.

        A line that has lost its result with this process is rejected again when it runs.
        """
        await self._store.lines.mark_stopped(running.batch, [rejected.line.number for rejected in reader.rejected])
        for rejected in reader.rejected:
            outcome = self._host.refusal(running.batch, rejected.error)
            await add_result(running, rejected.line, rejected.custom_id, outcome)

    # Lines

    async def _run_lines(self, running: RunningBatch) -> None:
        """Store the results that have come, and read further lines, until the batch has an outcome."""
        await self._store_results(running)
        batch = running.batch
        outcome = self._early_outcome(batch)
        if outcome is not None:
            running.drop_waiting()
            cancelled_at = batch.times.get("cancelling_at", 0)
            if outcome != "cancelled" or time.time() >= cancelled_at + timing.CANCEL:
                await cancel(*running.running.values())
            if not running.active:
                await self._store_results(running, at_once=True)
                await self._decide(running, outcome)
                return
        elif running.more and running.ready(self._away) < _WINDOW // 2 and running.window < _MAX_WINDOW:
            await self._read_lines(running)
        elif not batch.unfinished:
            await self._decide(running, "completed")
            return
        await wait_any(running.woken, timeout=timing.POLL)
        running.woken.clear()
        if running.done and (running.running or running.window) and not running.has_full_group:
            await wait_any(running.full, timeout=timing.GROUP)

    def _early_outcome(self, batch: Batch) -> _Outcome | None:
        """Return the outcome of a batch that ends before all its lines have results."""
        if self._host.problem(batch) is not None:
            return "failed"
        if batch.status == "cancelling":
            return "cancelled"
        if time.time() >= batch.expires:
            return "expired"
        return None

    async def _store_results(self, running: RunningBatch, *, at_once: bool = False) -> None:
        if await self._results.store(running, at_once=at_once):
            self._wake()

    async def _read_lines(self, running: RunningBatch) -> None:
        """Read the next lines that wait."""
        lines = await self._store.lines.waiting(running.batch, running.last, _WINDOW)
        running.more = len(lines) == _WINDOW
        was_quarantined = bool(running.quarantined)
        running.add_waiting(lines)
        if running.quarantined and not was_quarantined:
            number = len(running.quarantined)
            _log.warning("lines quarantined after the end of a process or Triton", batch=running.batch.id, lines=number)
        self._wake()

    # The end

    async def _decide(self, running: RunningBatch, outcome: _Outcome) -> None:
        """Decide the outcome of a batch, and the names of its files."""
        problem = self._host.problem(running.batch)

        def decide(batch: Batch) -> None:
            batch.outcome = outcome
            if batch.status != "cancelling":
                batch.set_status("finalizing")
            elif outcome == "completed":
                batch.outcome = "cancelled"
            if outcome == "failed" and problem is not None:
                batch.problems = [problem]
            if batch.succeeded or (batch.kind == "anthropic" and batch.total):
                batch.output = f"file-{os.urandom(16).hex()}"
            if batch.kind == "openai" and (batch.failed or batch.unfinished):
                batch.errors = f"file-{os.urandom(16).hex()}"

        running.batch = await self._store.batches.change_leased(running.batch, decide)

    async def _end(self, running: RunningBatch, sizes: Mapping[str, int]) -> None:
        """End a batch with its files, whose *sizes* are given by their ids."""
        batch = running.batch
        now = time.time()
        seconds = batch.output_seconds or self._files.settings.max_age * 86_400
        names = {batch.output: "output", batch.errors: "error"}
        files = [
            StoredFile(
                id=file_id,
                owner=batch.owner,
                purpose="batch_output",
                filename=f"{batch.id}_{names[file_id]}.jsonl",
                bytes=size,
                created=now,
                expires=now + seconds,
            )
            for file_id, size in sizes.items()
        ]

        def end(ended: Batch) -> None:
            ended.outcome = batch.outcome
            ended.problems = batch.problems
            if ended.outcome:
                ended.set_status(ended.outcome)

        running.phase = Phase.ENDING
        ended = await self._store.batches.end(batch, files, end)
        running.batch = ended
        self._series(BATCHES_ENDED, ended.status).inc()
        self._series(BATCH_LINES, "never_ran").inc(ended.unfinished)
        counts = {"total": ended.total, "completed": ended.succeeded, "failed": ended.failed}
        _log.info("batch ended", batch=ended.id, status=ended.status, **counts)
        with suppress(ServiceError):
            await self._files.clear(batch)
