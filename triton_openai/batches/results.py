"""The results of lines: kept in parts while a batch runs, and copied into its files when it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from typing import Any, NamedTuple

import msgspec

from triton_openai.batches.file_folder import Files, Writing, on_disk, write_at
from triton_openai.batches.inputs import id_and_body
from triton_openai.batches.running_batch import RunningBatch
from triton_openai.errors import ServiceError
from triton_openai.json_lines import escape_line_breaks
from triton_openai.storage.batch_store import SUCCEEDED, Batch, BatchUsage, Done, Line, Result
from triton_openai.telemetry.instruments import BATCH_LINES
from triton_openai.telemetry.metrics import Series

# Results that become safe from the loss of this machine together, though no checkpoint is due: bytes, or lines.
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


class Outcome(NamedTuple):
    """The answer to a line."""

    status: int
    #: JSON.
    body: bytes
    request_id: str = ""
    #: Why there is no better answer.
    error: ServiceError | None = None
    usage: BatchUsage = BatchUsage()


class Results:
    """Keeps the results of batches in *files*, and counts them in the *series* of metrics."""

    def __init__(self, files: Files, series: Callable[..., Series]) -> None:
        self._files = files
        self._store = files.store
        self._series = series

    async def keep(self, held: RunningBatch, *, at_once: bool = False) -> bool:
        """
        Write the results of lines that have ended, and then mark the lines; return whether anything was written.

        What has to leave this machine to be safe does so now and then, or *at_once*; lines are marked after that.
        """
        wrote = bool(held.done)
        if wrote:
            await self._write(held)
        unsafe = held.size - held.safe
        due = at_once or held.idle or time.monotonic() - held.safe_at >= self._files.checkpoint
        if not held.written or not (due or unsafe >= _MAX_UNSAFE or len(held.written) >= _MAX_UNSAFE_LINES):
            return wrote
        await self._files.keep_part(held.batch, held.output, held.safe, held.size)
        before = held.batch
        held.batch = await self._store.end(before, held.written)
        self._series(BATCH_LINES, "succeeded").inc(held.batch.succeeded - before.succeeded)
        self._series(BATCH_LINES, "failed").inc(held.batch.failed - before.failed)
        held.written = []
        held.safe = held.size
        held.safe_at = time.monotonic()
        return True

    async def _write(self, held: RunningBatch) -> None:
        ended = held.done[:]
        place = held.size
        done = list[Done]()
        for one, _ in ended:
            done.append(one._replace(place=place))
            place += one.length

        def write() -> None:
            if held.output < 0:
                held.output = self._files.make_part(held.batch)
            # What a failed attempt has left there is overwritten.
            write_at(held.output, b"".join([data for _, data in ended]), held.size)
            os.fdatasync(held.output)

        await on_disk(write)
        if self._files.checkpoint:
            await self._store.stopped(held.batch, [one.number for one in done])
        held.written += done
        held.size = place
        del held.done[: len(ended)]
        held.full.clear()

    async def make_files(self, held: RunningBatch) -> Mapping[str, int]:
        """
        Make the files of all results, and return the bytes of each by its id.

        Doing it again makes the same ones.
        """
        batch = held.batch
        writings = dict[str, Writing]()
        parts = dict[int, int]()
        with ExitStack() as stack:
            for file_id in filter(None, (batch.output, batch.errors)):
                writings[file_id] = await self._files.write(file_id)
                stack.callback(writings[file_id].close)
            succeeded = writings.get(batch.output or "")
            failed = writings.get(batch.errors or "") or succeeded

            def copy(rows: Sequence[Result]) -> None:
                for row in rows:
                    if row.state == SUCCEEDED:
                        into = succeeded
                    else:
                        into = failed
                    assert into is not None
                    into.put(os.pread(parts[row.part], row.length, row.place))

            def tell(lines: Sequence[Line]) -> None:
                for line in lines:
                    custom_id, _ = id_and_body(os.pread(held.input, line.length, line.place))
                    assert failed is not None
                    failed.put(never_ran(batch, line.number, custom_id))

            after = (0, -1)
            while rows := await self._store.results(batch, after, _CHUNK):
                for part in {row.part for row in rows} - parts.keys():
                    parts[part] = await self._files.open_part(batch, part)
                    stack.callback(os.close, parts[part])
                await on_disk(copy, rows)
                after = rows[-1].part, rows[-1].place
            last = 0
            while lines := await self._store.never_ran(batch, last, _CHUNK):
                await on_disk(tell, lines)
                last = lines[-1].number
            for writing in writings.values():
                await writing.end()
        return {file_id: writing.size for file_id, writing in writings.items()}


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
    error = {"error": {"type": "error", "error": {"type": "api_error", "message": message}}}
    result = {"type": kind, **(error if kind == "errored" else {})}
    return _line(batch, number, custom_id, result, response=None, error={"code": code, "message": message})


def _line(batch: Batch, number: int, custom_id: str, result: Mapping[str, Any], **openai: Any) -> bytes:
    """Return a line of a batch's file: for Anthropic's clients with a *result*, for *openai*'s with other fields."""
    line: dict[str, Any] = {"custom_id": custom_id, "result": result}
    if batch.kind == "openai":
        # It is the same each time.
        digest = blake2b(f"{batch.id}:{number}".encode(), digest_size=16).hexdigest()
        line = {"id": f"batch_req_{digest}", "custom_id": custom_id, **openai}
    return escape_line_breaks(msgspec.json.encode(line)) + b"\n"
