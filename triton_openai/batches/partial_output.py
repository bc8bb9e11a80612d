"""The answers of a batch that runs, read from the parts of its results."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Sequence

from triton_openai.batches.file_folder import Files, on_disk
from triton_openai.errors import StoreUnavailable
from triton_openai.storage.batch_records import SUCCEEDED, Batch, Part, Result

# Rows that are read at once, and bytes that are sent at once.
_ROWS = 1000
_PIECE = 1024 * 1024


async def partial_output(files: Files, batch: Batch) -> AsyncGenerator[bytes, None]:
    """
    Yield the lines of the answers that *batch* has, in the order of the input.

    Answers that come meanwhile may be left out. Raises :class:`ServiceError`, also if the batch ends meanwhile: then
    its output file has all answers.
    """
    parts: dict[int, int] = {}
    # How many bytes each part had when it was opened.
    sizes: dict[int, int] = {}
    after = 0
    try:
        while rows := await files.store.lines.results(batch, after, _ROWS):
            answers = [row for row in rows if row.state == SUCCEEDED]
            for part in {row.part for row in answers} - parts.keys():
                parts[part] = await files.open_part(Part(batch.id, part))
                sizes[part] = os.fstat(parts[part]).st_size
            for group in _groups([row for row in answers if row.offset + row.length <= sizes[row.part]]):
                yield await on_disk(_read, parts, group)
            after = rows[-1].number
    except FileNotFoundError as error:
        raise _ended() from error
    finally:
        for descriptor in parts.values():
            os.close(descriptor)
    # The end of a batch deletes its rows: those that are missing would be answers that an earlier request has got.
    now = await files.store.batches.find(batch.id, batch.owner, batch.kind)
    if now is None or not now.open:
        raise _ended()


def _ended() -> StoreUnavailable:
    return StoreUnavailable("The batch has ended meanwhile. Ask again: its output has all answers.", retry_after=1)


def _groups(rows: Sequence[Result]) -> Sequence[Sequence[Result]]:
    """Return *rows* in groups that are sent at once."""
    groups: list[list[Result]] = []
    size = _PIECE
    for row in rows:
        if size >= _PIECE:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += row.length
    return groups


def _read(parts: dict[int, int], rows: Sequence[Result]) -> bytes:
    """Return the bytes of *rows*. Runs in a thread."""
    return b"".join([os.pread(parts[row.part], row.length, row.offset) for row in rows])
