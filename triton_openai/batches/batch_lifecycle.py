"""
The life of a batch: it is validated, any process runs its lines, and it is ended with its files.

One process takes a batch through its life. What survives the death of this process is in the tables and the files: the
process that claims the batch next goes on where this one ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial

import structlog

from triton_openai import errors
from triton_openai.batches import timing
from triton_openai.batches.batch_steps import early_outcome, run_steps
from triton_openai.batches.enqueued import enqueue, fail_with_results, max_inputs_of
from triton_openai.batches.file_folder import Files, on_disk
from triton_openai.batches.host import Host
from triton_openai.batches.inputs import InputReader
from triton_openai.batches.leased import LeasedBatch, Phase, RunningPart
from triton_openai.batches.results import Results, add_result
from triton_openai.errors import ServiceError
from triton_openai.storage.batch_records import Batch, BatchError, FinalStatus, Part, StoredFile
from triton_openai.tasks import wait_any
from triton_openai.telemetry.instruments import BATCH_LINES, BATCHES_ENDED
from triton_openai.telemetry.metrics import Series

_log = structlog.get_logger(__name__)
# Lines that are added to the table together.
_CHUNK = 1000


class BatchLifecycle:
    """
    Takes batches from their validation to their end. *holder* is the name of this process for leases.

    *add_part* adds a part of a batch to those that this process runs. *announce* is called when other processes can go
    on.
    """

    def __init__(
        self,
        files: Files,
        host: Host,
        holder: str,
        results: Results,
        series: Callable[..., Series],
        add_part: Callable[[Batch, Part], RunningPart],
        announce: Callable[[], None],
    ) -> None:
        self._files = files
        self._store = files.store
        self._host = host
        self._holder = holder
        self._results = results
        self._series = series
        self._add_part = add_part
        self._announce = announce

    async def run(self, leased: LeasedBatch) -> None:
        """Take a batch to its end, or until it is lost."""

        async def advance() -> bool:
            await self._advance(leased)
            return not leased.batch.open

        async def fail(problem: BatchError) -> None:
            leased.problems = [problem]

        await run_steps(leased, advance, fail)

    async def _advance(self, leased: LeasedBatch) -> None:
        """Take the next step, or wait until there is one."""
        if leased.phase is Phase.PAUSED:
            # What failed may have been done nevertheless.
            leased.batch = await self._store.batches.reload(leased.batch)
        batch = leased.batch
        if batch.problems and not batch.outcome:
            # A process that runs lines has reported them.
            leased.problems = batch.problems
        if leased.problems:
            ended = await self._fail(leased)
        elif batch.outcome:
            ended = await self._end(leased, await self._make_files(leased))
        elif "validated_at" not in batch.times:
            await self._open_input(leased)
            await self._validate(leased)
            return
        else:
            ended = await self._decide(leased)
        if not ended:
            await wait_any(leased.woken, timeout=timing.POLL)
            leased.woken.clear()

    async def _open_input(self, leased: LeasedBatch) -> None:
        if leased.input < 0:
            leased.input = await self._files.open_input(leased.batch)

    async def _make_files(self, leased: LeasedBatch) -> Mapping[str, int]:
        """Write the files of a batch whose outcome is decided; return the bytes of each by its id."""
        batch = leased.batch
        if not (batch.output or batch.errors):
            return {}
        if batch.unfinished:
            # Lines that never ran have their names there.
            await self._open_input(leased)
        return await self._results.make_files(batch, leased.input)

    # Validation

    async def _validate(self, leased: LeasedBatch) -> None:
        """Check the input, and add its lines to the table."""
        batch = leased.batch
        problem = self._host.problem(batch)
        if problem is not None:
            leased.problems = [problem]
            return
        await self._store.lines.end_parts(batch)
        await self._store.lines.delete(batch.id, batch.generation)
        make = partial(
            InputReader,
            leased.input,
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
        with closing(await on_disk(make)) as reader:
            checked = 0
            while lines := await on_disk(reader.read, _CHUNK):
                for (model, brings_template), number in list(reader.asked.items())[checked:]:
                    name = await self._check_model(reader, leased, model, brings_template, number)
                    names.setdefault(model, name)
                checked = len(reader.asked)
                if not reader.problems:
                    lines = [line._replace(model=names[line.model]) for line in lines]
                    await self._store.lines.add(batch, lines)
        refused = reader.problems or await enqueue(self._store.enqueued, self._host, batch, reader, names)
        if refused and (reader.problems or batch.kind == "openai"):
            leased.problems = refused
            return
        if reader.total >= _CHUNK:
            await self._store.lines.analyze()
        part = await self._claim_rejected(batch, reader)

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

        leased.batch = await self._store.batches.change_leased(batch, begin)
        # Until its end.
        leased.close_input()
        if part is not None and not refused:
            await self._add_rejected(leased.batch, part, reader)
        self._announce()

    async def _check_model(
        self, reader: InputReader, leased: LeasedBatch, model: str, brings_template: bool, line: int
    ) -> str:
        """Return the name with which the host finds *model*, or report to *reader* why *line* may not ask it."""
        batch = leased.batch
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

    async def _claim_rejected(self, batch: Batch, reader: InputReader) -> Part | None:
        """Claim the lines whose parameters have wrong types before other processes can; ``None`` without any."""
        if not reader.rejected:
            return None
        part = await self._store.lines.open_part(batch, self._holder, self._host.settings.lease)
        await self._store.lines.assign(part, [rejected.line.number for rejected in reader.rejected])
        return part

    async def _add_rejected(self, batch: Batch, part: Part, reader: InputReader) -> None:
        """
        Add the results of the lines whose parameters have wrong types.

        A line that has lost its result with this process is rejected again when it runs.
        """
        running = self._add_part(batch, part)
        for rejected in reader.rejected:
            outcome = self._host.refusal(batch, rejected.error)
            await add_result(running, rejected.line, rejected.custom_id, outcome)
        running.woken.set()

    # The end

    async def _decide(self, leased: LeasedBatch) -> bool:
        """
        Decide the outcome of a batch, and the names of its files; return whether there is a next step.

        Nothing is decided while a process runs lines.
        """
        outcome: FinalStatus | None = "completed"
        if leased.batch.unfinished:
            outcome = early_outcome(self._host, leased.batch)
        if outcome is None:
            return False
        problem = self._host.problem(leased.batch)

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

        decided = await self._store.batches.decide(leased.batch, decide)
        if decided is not None:
            leased.batch = decided
        return decided is not None

    async def _fail(self, leased: LeasedBatch) -> bool:
        """End a batch as failed, without files; return ``False`` while a process runs lines."""
        problems = list(leased.problems)
        # Those that were made before the batch failed.
        files = [file_id for file_id in (leased.batch.output, leased.batch.errors) if file_id]

        def fail(batch: Batch) -> None:
            batch.outcome = "failed"
            batch.problems = problems
            batch.output = None
            batch.errors = None

        decided = await self._store.batches.decide(leased.batch, fail)
        if decided is None:
            # The processes that run lines see it.
            await self._store.batches.report(leased.batch.id, problems)
            self._announce()
            return False
        leased.batch = decided
        await self._files.unlink(*files)
        return await self._end(leased, {})

    async def _end(self, leased: LeasedBatch, sizes: Mapping[str, int]) -> bool:
        """End a batch with its files, whose *sizes* are given by their ids."""
        batch = leased.batch
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
            if ended.outcome:
                ended.set_status(ended.outcome)

        leased.phase = Phase.ENDING
        ended = await self._store.batches.end(batch, files, end)
        leased.batch = ended
        self._announce()
        self._series(BATCHES_ENDED, ended.status).inc()
        self._series(BATCH_LINES, "never_ran").inc(ended.unfinished)
        counts = {"total": ended.total, "completed": ended.succeeded, "failed": ended.failed}
        _log.info("batch ended", batch=ended.id, status=ended.status, **counts)
        # What remains is swept.
        with suppress(ServiceError):
            await self._files.clear(ended)
            await self._store.lines.delete(ended.id)
        return True
