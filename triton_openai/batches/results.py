"""The results of lines: stored in parts while a batch runs, and copied into its files when it ends."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any

import msgspec

from triton_openai import offload
from triton_openai.batches.batch_steps import ResultsMissing
from triton_openai.batches.file_folder import Files, Writing, on_disk, write_at
from triton_openai.batches.host import Outcome
from triton_openai.batches.inputs import id_and_body
from triton_openai.batches.leased import RunningPart
from triton_openai.json_bytes import escape_line_breaks
from triton_openai.storage.batch_records import FAILED, SUCCEEDED, Batch, Done, Line, Part, Result
from triton_openai.telemetry.instruments import BATCH_LINES
from triton_openai.telemetry.metrics import Series

# Bytes or lines of results after which they become safe from the loss of this machine before a checkpoint is due.
_MAX_UNSAFE = 64 * 1024 * 1024
_MAX_UNSAFE_LINES = 10_000
# Rows that are read at once.
_CHUNK = 1000
# What Anthropic's API calls it, and code and message of OpenAI's.
_NEVER_RAN = {
    "cancelled": ("canceled", "batch_cancelled", "The batch was cancelled before this request could be executed."),
    "expired": ("expired", "batch_expired", "This request could not be executed before the completion window expired."),
    "failed": ("errored", "batch_failed", "The batch failed before this request could be executed."),
}


class Results:
    """Stores the results of batches in *files*, and counts them in the *series* of metrics."""

    def __init__(self, files: Files, series: Callable[..., Series]) -> None:
        self._files = files
        self._store = files.store
        self._series = series

    async def store(self, running: RunningPart, *, at_once: bool = False) -> bool:
        """
        Write the results that have come, and mark their lines; return whether anything was written.

        Results that are safe only when they have left this machine leave it from time to time, or *at_once*. Their
        lines are marked after that.
        """
        wrote = bool(running.done)
        if wrote:
            await self._write(running)
        if running.written and (at_once or self._is_due(running)):
            await self._mark(running)
            return True
        return wrote

    def _is_due(self, running: RunningPart) -> bool:
        """Return whether results that are written are to be made safe and marked now."""
        return (
            running.idle
            or time.monotonic() - running.safe_at >= self._files.checkpoint
            or running.size - running.safe >= _MAX_UNSAFE
            or len(running.written) >= _MAX_UNSAFE_LINES
        )

    async def _mark(self, running: RunningPart) -> None:
        await self._files.save_part(running.part, running.output, running.safe, running.size)
        running.batch = await self._store.lines.finish(running.part, running.written)
        states = Counter(line.state for line in running.written)
        self._series(BATCH_LINES, "succeeded").inc(states[SUCCEEDED])
        self._series(BATCH_LINES, "failed").inc(states[FAILED])
        running.written = []
        running.safe = running.size
        running.safe_at = time.monotonic()

    async def _write(self, running: RunningPart) -> None:
        ended = running.done[:]
        offset = running.size
        done: list[Done] = []
        for line, _ in ended:
            done.append(line._replace(offset=offset))
            offset += line.length

        def write() -> None:
            if running.output < 0:
                running.output = self._files.make_part(running.part)
            # This overwrites what a failed attempt has left there.
            write_at(running.output, b"".join([data for _, data in ended]), running.size)
            os.fdatasync(running.output)

        await on_disk(write)
        if self._files.checkpoint:
            await self._store.lines.mark_stopped(running.part, [line.number for line in done])
        running.written += done
        running.size = offset
        del running.done[: len(ended)]
        running.full.clear()

    async def make_files(self, batch: Batch, descriptor: int) -> Mapping[str, int]:
        """
        Write the files of all results of *batch* in the order of its input, and return the bytes of each by its id.

        *descriptor* is that of the input; -1 if all lines have results. Doing it again writes the same files. Raises
        :class:`ResultsMissing`.
        """
        writings: dict[str, Writing] = {}
        with ExitStack() as stack:
            for file_id in filter(None, (batch.output, batch.errors)):
                writings[file_id] = await self._files.write(file_id)
                stack.callback(writings[file_id].close)
            output = writings.get(batch.output or "")
            errors = writings.get(batch.errors or "") or output
            await self._copy_results(batch, output, errors, stack)
            await self._write_never_ran(batch, descriptor, errors)
            for writing in writings.values():
                await writing.end()
        return {file_id: writing.size for file_id, writing in writings.items()}

    async def _copy_results(
        self, batch: Batch, output: Writing | None, errors: Writing | None, stack: ExitStack
    ) -> None:
        """Copy the results from the parts of a batch. *stack* closes their files."""
        parts: dict[int, int] = {}

        def copy(rows: Sequence[Result]) -> None:
            for row in rows:
                target = errors
                if row.state == SUCCEEDED:
                    target = output
                assert target is not None
                data = os.pread(parts[row.part], row.length, row.offset)
                # Each result is a line. What was cut off and written to again has null bytes.
                if len(data) < row.length or not data.endswith(b"\n"):
                    raise ResultsMissing
                target.put(data)

        after = 0
        while rows := await self._store.lines.results(batch, after, _CHUNK):
            for part in {row.part for row in rows} - parts.keys():
                try:
                    parts[part] = await self._files.open_part(Part(batch.id, part))
                except FileNotFoundError as error:
                    raise ResultsMissing from error
                stack.callback(os.close, parts[part])
            await on_disk(copy, rows)
            after = rows[-1].number

    async def _write_never_ran(self, batch: Batch, descriptor: int, errors: Writing | None) -> None:
        """Write a result for each line that never ran."""

        def write(lines: Sequence[Line]) -> None:
            assert errors is not None
            for line in lines:
                custom_id, _ = id_and_body(os.pread(descriptor, line.length, line.offset))
                errors.put(never_ran(batch, line.number, custom_id))

        last = 0
        while lines := await self._store.lines.unfinished(batch, last, _CHUNK):
            await on_disk(write, lines)
            last = lines[-1].number


async def add_result(running: RunningPart, line: Line, custom_id: str, outcome: Outcome) -> None:
    """Add the *outcome* of a line to the results that are written next."""
    state = FAILED
    if outcome.error is None:
        state = SUCCEEDED
    cost = offload.BYTE * len(outcome.body)
    data = await offload.run(rendered, running.batch, line.number, custom_id, outcome, cost=cost)
    exonerated = state == SUCCEEDED and line.deaths > 0
    running.done.append((Done(line.number, state, -1, len(data), outcome.usage, exonerated), data))


def rendered(batch: Batch, number: int, custom_id: str, outcome: Outcome) -> bytes:
    """Return the line of a batch's file with the answer to a line."""
    body = msgspec.Raw(outcome.body)
    if outcome.error is None:
        kind = "succeeded"
        field = "message"
    else:
        kind = "errored"
        field = "error"
    response = {"status_code": outcome.status, "request_id": outcome.request_id, "body": body}
    return _line(batch, number, custom_id, {"type": kind, field: body}, response=response, error=None)


def never_ran(batch: Batch, number: int, custom_id: str) -> bytes:
    """Return the line of a batch's file for a line that never ran."""
    kind, code, message = _NEVER_RAN[batch.outcome]
    if batch.problems:
        message = f"{message} {batch.problems[0].message}"
    result: dict[str, Any] = {"type": kind}
    if kind == "errored":
        result["error"] = {"type": "error", "error": {"type": "api_error", "message": message}}
    return _line(batch, number, custom_id, result, response=None, error={"code": code, "message": message})


def _line(batch: Batch, number: int, custom_id: str, result: Mapping[str, Any], **openai: Any) -> bytes:
    """Return a line of a batch's file: for Anthropic's clients with a *result*, for *openai*'s with other fields."""
    if batch.kind == "openai":
        # The same id each time.
        digest = blake2b(f"{batch.id}:{number}".encode(), digest_size=16).hexdigest()
        line = {"id": f"batch_req_{digest}", "custom_id": custom_id, **openai}
    else:
        line = {"custom_id": custom_id, "result": result}
    return escape_line_breaks(msgspec.json.encode(line)) + b"\n"
