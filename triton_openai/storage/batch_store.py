"""
Files, batches and their lines in a database: the rows are the queue.

Whoever runs a batch has a lease of it, with a generation that grows with each claim. What it writes is refused once
another process has claimed the batch, so a process that was frozen changes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec

from triton_openai import errors
from triton_openai.storage.sql import Database, Steps, missing, operation
from triton_openai.tasks import cancel

_T = TypeVar("_T")
# Longest time for one operation, in seconds, and for one that inserts, changes or drops many lines.
_TIMEOUT = 5.0
_LONG_TIMEOUT = 30.0
#: The states of a line. One that waits or runs when its batch has ended never ran.
WAITING, RUNNING, SUCCEEDED, FAILED = range(4)

MIGRATIONS: Sequence[Sequence[str]] = (
    (
        "CREATE TABLE file (id TEXT PRIMARY KEY, owner TEXT NOT NULL, purpose TEXT NOT NULL, filename TEXT NOT NULL,"
        " bytes BIGINT NOT NULL, created DOUBLE PRECISION NOT NULL, expires DOUBLE PRECISION, state TEXT NOT NULL)",
        "CREATE INDEX file_owner ON file (owner, created, id)",
        # `open` is 1 until the batch has ended. What only programs look at is the JSON in `detail`.
        "CREATE TABLE batch (id TEXT PRIMARY KEY, owner TEXT NOT NULL, kind TEXT NOT NULL, input TEXT NOT NULL, open"
        " INTEGER NOT NULL, created DOUBLE PRECISION NOT NULL, holder TEXT NOT NULL, generation BIGINT NOT NULL,"
        " until DOUBLE PRECISION NOT NULL, detail BYTEA NOT NULL)",
        "CREATE INDEX batch_owner ON batch (owner, kind, created, id)",
        "CREATE INDEX batch_open ON batch (created) WHERE open = 1",
        "CREATE TABLE line (batch TEXT NOT NULL, number INTEGER NOT NULL, place BIGINT NOT NULL, length INTEGER NOT"
        " NULL, model TEXT NOT NULL, prefix BIGINT NOT NULL, state INTEGER NOT NULL, attempts INTEGER NOT NULL,"
        " part INTEGER, part_place BIGINT, part_length INTEGER, PRIMARY KEY (batch, number))",
        "CREATE INDEX line_waiting ON line (batch, number) WHERE state = 0",
        "CREATE INDEX line_running ON line (batch, number) WHERE state = 1",
    ),
    ("CREATE TABLE place (number INTEGER PRIMARY KEY, id TEXT NOT NULL)",),
    (
        # `running` is 1 while the line runs. `attempts`, which had another meaning, are process deaths from now on.
        "ALTER TABLE line ADD COLUMN running INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE line ADD COLUMN max_group INTEGER NOT NULL DEFAULT 0",
        "UPDATE line SET attempts = 0 WHERE attempts <> 0",
        "ALTER TABLE line ADD COLUMN triton_deaths INTEGER NOT NULL DEFAULT 0",
        # The process that runs quarantined lines.
        "CREATE TABLE quarantine (number INTEGER PRIMARY KEY, holder TEXT NOT NULL, until DOUBLE PRECISION NOT NULL)",
    ),
)
# What ran when something ended runs again in groups of this part of it.
_GROUP_DIVISOR = 8


lacking = partial(missing, "batches", MIGRATIONS)
#: The columns of each table that the statements use.
TABLES: Mapping[str, str] = {
    "file": "id, owner, purpose, filename, bytes, created, expires, state",
    "batch": "id, owner, kind, input, open, created, holder, generation, until, detail",
    "line": "batch, number, place, length, model, prefix, state, attempts, part, part_place, part_length, running,"
    " max_group, triton_deaths",
    "place": "number, id",
    "quarantine": "number, holder, until",
}


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file without its contents. Times are Unix times."""

    id: str
    owner: str
    #: Known once it is complete.
    purpose: str = ""
    #: The client's, and no path.
    filename: str = ""
    bytes: int
    created: float
    expires: float | None = None
    state: Literal["uploading", "processed"] = "processed"


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with a batch, or with a line of its input."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchUsage(msgspec.Struct):
    """The tokens of the lines that succeeded."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def add(self, other: BatchUsage) -> None:
        """Count *other* in."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
]

#: Those of batches that have not ended.
OPEN: Sequence[Status] = ("validating", "in_progress", "finalizing", "cancelling")


class Batch(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix times, by their names in OpenAI's API, such as ``in_progress_at``."""

    id: str
    owner: str
    kind: Literal["openai", "anthropic"]
    endpoint: str
    #: A file's id, or that of the batch itself.
    input: str
    created: float
    window: str
    expires: float
    status: Status = "validating"
    #: What it ends as, once that is decided.
    outcome: Literal["completed", "failed", "expired", "cancelled", ""] = ""
    times: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    #: The ``traceparent`` of the request that made it, if that was traced.
    trace: str = ""
    #: By restricted group: what shows that the request that made it was allowed to use the group.
    opened: dict[str, str] = {}
    #: Seconds that its files are kept; ``None`` for the usual time.
    output_seconds: int | None = None
    #: That of all lines, if they have the same.
    model: str | None = None
    problems: list[BatchError] = []
    output: str | None = None
    errors: str | None = None
    total: int = 0
    succeeded: int = 0
    failed: int = 0
    #: Lines that were answered although a process or a Triton had ended while they ran alone: they do not end it.
    exonerated: int = 0
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    generation: int = 0

    @property
    def open(self) -> bool:
        """Whether it has not ended."""
        return self.status in OPEN

    def enter(self, status: Status) -> None:
        """Have *status* from now on."""
        self.status = status
        self.times[f"{status}_at"] = int(time.time())


class Line(NamedTuple):
    """A line of an input: where it stands there, its model, and a number that lines with the same beginning share."""

    number: int
    place: int
    length: int
    model: str
    prefix: int
    #: How often a process of the service ended while the line ran alone.
    process_deaths: int = 0
    #: How often a Triton did.
    triton_deaths: int = 0
    #: The number of lines that may run at a time when this one does; 0 for any number. A line that ran when a process
    #: or a Triton ended is quarantined: it has such a limit.
    max_group: int = 0

    @property
    def deaths(self) -> int:
        """How often something ended while the line ran alone."""
        return self.process_deaths + self.triton_deaths


def next_group(size: int) -> int:
    """Return the largest group in which lines may run that ran in a group of *size* when something ended."""
    return max(1, size // _GROUP_DIVISOR)


class Done(NamedTuple):
    """A line that has ended, where its result stands in the part of the generation that ran it, and its usage."""

    number: int
    state: int
    place: int
    length: int
    usage: BatchUsage
    #: Whether it was answered although something had ended while it ran alone.
    exonerated: bool = False


class Result(NamedTuple):
    """Where the result of a line stands."""

    number: int
    state: int
    #: A generation.
    part: int
    place: int
    length: int


class LeaseLost(Exception):
    """Another process has claimed the batch, or it has ended."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Batch).decode
_FILE = "id, owner, purpose, filename, bytes, created, expires, state"
_BATCH = "detail, generation"
# What looks at all files or batches of an owner, or at both, does it alone.
_ALONE = "LOCK TABLE file IN SHARE ROW EXCLUSIVE MODE"
# Bytes that a file or a batch counts besides its contents, so that a limit on bytes bounds their number, too.
ROW_SIZE = 4096


class BatchStore:
    """
    Files, batches and lines in *database*.

    Every method raises :class:`StorageFull` or :class:`StoreUnavailable` when it cannot; what names a generation raises
    :class:`LeaseLost`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        # Whether the tables are those of this release, and what sees to it.
        self._prepared = False
        self._preparing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Disconnect."""
        if self._preparing is not None:
            await cancel(self._preparing)
        await self._database.close()

    async def verify(self) -> None:
        """Raise :class:`ConfigurationError` for a database that this release cannot use."""
        try:
            await self._database.verify(TABLES, timeout=_LONG_TIMEOUT)
        except (OSError, sqlite3.Error) as error:
            raise failed_write(error) from error

    async def _run(self, steps: Steps[_T], *, write: bool = False, long: bool = False) -> _T:
        if long:
            timeout = _LONG_TIMEOUT
        else:
            timeout = _TIMEOUT
        try:
            if not self._prepared:
                await self._prepare(timeout)
            return await self._database.run(steps, timeout=timeout, write=write)
        except (OSError, sqlite3.Error) as error:
            raise failed_write(error) from error

    async def _prepare(self, seconds: float) -> None:
        """
        Connect, and change tables of an older release; wait for it so many *seconds*.

        It goes on after that: to change many lines takes longer than an operation may.
        """
        if self._preparing is None or self._preparing.done():
            self._preparing = asyncio.create_task(self._database.run(_nothing(), timeout=_LONG_TIMEOUT))
            self._preparing.add_done_callback(_note_failure)
        preparing = self._preparing
        done, _ = await asyncio.wait([preparing], timeout=seconds)
        if not done:
            raise TimeoutError
        preparing.result()
        self._prepared = True

    @operation(write=True)
    def place(self, new: str | None = None) -> Steps[str | None]:
        """Return the name of the place that has the files; it is *new* if there was none."""
        if new is not None:
            yield "INSERT INTO place (number, id) VALUES (1, $1) ON CONFLICT DO NOTHING", new
        found = yield ("SELECT id FROM place",)
        return found[0][0] if found else None

    # Files

    @operation(write=True)
    def reserve(self, file: StoredFile, most: int) -> Steps[bool]:
        """
        Add a *file* that is to be written, unless its owner's files would have more than *most* bytes with it.

        It counts until it expires, unless :meth:`renew_upload` is called before. Returns whether it was added.
        """
        yield (_ALONE,)
        if (yield from _kept(file.owner)) + file.bytes > most:
            return False
        yield from _insert_file(file)
        return True

    @operation(write=True)
    def renew_upload(self, file_id: str, until: float) -> Steps[None]:
        """Let a file that is still being written count *until* a time; nothing happens if it is not."""
        yield "UPDATE file SET expires = $2 WHERE id = $1 AND state = 'uploading'", file_id, until

    @operation(write=True)
    def written(self, file: StoredFile) -> Steps[None]:
        """Note that a *file* that was reserved is complete."""
        yield "DELETE FROM file WHERE id = $1", file.id
        yield from _insert_file(file)

    @operation()
    def file(self, file_id: str, owner: str) -> Steps[StoredFile | None]:
        """Return a complete file of *owner*."""
        found = yield (
            f"SELECT {_FILE} FROM file WHERE id = $1 AND owner = $2 AND state = 'processed'"
            " AND (expires IS NULL OR expires > $3)",
            *(file_id, owner, time.time()),
        )
        if found:
            return _file(found[0])
        return None

    @operation()
    def files(
        self, owner: str, *, purpose: str | None, after: str | None, limit: int, reverse: bool
    ) -> Steps[Sequence[StoredFile] | None]:
        """Return files of *owner*, the oldest first unless *reverse*; ``None`` if there is no file *after*."""
        condition = "state = 'processed' AND (expires IS NULL OR expires > $5) AND ($6 = '' OR purpose = $6)"
        values = (time.time(), purpose or "")
        found = yield from _listed("file", _FILE, condition, owner, after, limit, reverse, values)
        if found is None:
            return None
        return [_file(row) for row in found]

    @operation(write=True)
    def hide_file(self, file_id: str) -> Steps[bool]:
        """Let a file have expired, unless an open batch reads it; return whether none does."""
        yield (_ALONE,)
        if (yield "SELECT 1 FROM batch WHERE open = 1 AND input = $1", file_id):
            return False
        yield "UPDATE file SET expires = 0 WHERE id = $1", file_id
        return True

    @operation()
    def expired(self, *, uploads_before: float) -> Steps[Sequence[str]]:
        """Return files and uploads that have expired, and uploads that began before a time and never ended."""
        files = yield (
            "SELECT id FROM file WHERE (expires < $1 OR (state = 'uploading' AND created < $2))"
            " AND id NOT IN (SELECT input FROM batch WHERE open = 1)",
            *(time.time(), uploads_before),
        )
        return [row[0] for row in files]

    @operation(write=True, long=True)
    def drop(self, files: Sequence[str], *, batches_before: float = 0.0) -> Steps[None]:
        """Drop *files*, whose contents are gone, and batches that were made before a time, and have ended."""
        yield "DELETE FROM file WHERE id IN EACH($1)", json.dumps(files)
        yield "DELETE FROM batch WHERE open = 0 AND created < $1", batches_before

    @operation()
    def open_batches(self) -> Steps[Collection[str]]:
        """Return the ids of the batches that have not ended."""
        return {row[0] for row in (yield ("SELECT id FROM batch WHERE open = 1",))}

    # Batches

    @operation(write=True)
    def add(
        self, batch: Batch, *, most: int, most_bytes: int
    ) -> Steps[Literal["added", "too many", "no room", "no file"]]:
        """Add a *batch* whose input is there, unless its owner has *most* open ones, or files of *most_bytes*."""
        yield (_ALONE,)
        found = yield "SELECT COUNT(*) FROM batch WHERE open = 1 AND owner = $1", batch.owner
        if found[0][0] >= most:
            return "too many"
        if (yield from _kept(batch.owner)) > most_bytes:
            return "no room"
        there = "SELECT 1 FROM file WHERE id = $1 AND (expires IS NULL OR expires > $2)"
        if batch.input != batch.id and not (yield there, batch.input, batch.created):
            return "no file"
        yield (
            "INSERT INTO batch (id, owner, kind, input, open, created, holder, generation, until, detail)"
            " VALUES ($1, $2, $3, $4, 1, $5, '', 0, 0, $6)",
            *(batch.id, batch.owner, batch.kind, batch.input, batch.created, _encode(batch)),
        )
        return "added"

    @operation()
    def batch(self, batch_id: str, owner: str, kind: str) -> Steps[Batch | None]:
        """Return a batch of *owner*."""
        found = yield (
            f"SELECT {_BATCH} FROM batch WHERE id = $1 AND owner = $2 AND kind = $3",
            *(batch_id, owner, kind),
        )
        if found:
            return _batch(found[0])
        return None

    @operation()
    def batches(
        self, owner: str, kind: str, *, after: str | None, limit: int, reverse: bool = True
    ) -> Steps[Sequence[Batch] | None]:
        """Return batches of *owner*, the newest first if *reverse*; ``None`` if there is none *after*."""
        found = yield from _listed("batch", _BATCH, "kind = $5", owner, after, limit, reverse, (kind,))
        if found is None:
            return None
        return [_batch(row) for row in found]

    @operation()
    def figures(self) -> Steps[tuple[Sequence[tuple[Batch, bool]], float]]:
        """Return the batches that have not ended, each with whether lines of it wait, and the bytes of all files."""
        found = yield (
            "SELECT detail, generation, EXISTS (SELECT 1 FROM line WHERE line.batch = b.id AND line.state = 0)"
            " FROM batch b WHERE b.open = 1",
        )
        size = yield ("SELECT COALESCE(SUM(bytes), 0) FROM file",)
        return [(_batch(row), bool(row[2])) for row in found], float(size[0][0])

    @operation(write=True)
    def change(
        self, batch_id: str, change: Callable[[Batch], None], *, generation: int | None = None
    ) -> Steps[Batch | None]:
        """Apply *change* to an open batch, and return it; ``None`` if there is none. It may be called again."""
        batch = yield from _locked(batch_id, generation)
        if batch is not None:
            change(batch)
            yield from _replace(batch)
        return batch

    @operation(write=True)
    def drop_batch(self, batch_id: str) -> Steps[None]:
        """Drop a batch that has ended."""
        yield "DELETE FROM batch WHERE id = $1 AND open = 0", batch_id

    @operation(write=True, long=True)
    def claim(
        self, holder: str, seconds: float, *, max_running: int, full: Collection[str] = ()
    ) -> Steps[Batch | None]:
        """
        Give *holder* the lease of a batch that nobody runs, for *seconds*; ``None`` if there is none.

        Owners of whom less runs come first, then older batches; those in *full* have to wait. Lines that ran when the
        last holder was lost wait again, quarantined. A death is counted for one that ran alone. Of a model,
        *max_running* lines run at a time: others among them had an answer that was not kept yet.
        """
        found = yield (
            "SELECT b.id FROM batch b LEFT JOIN (SELECT owner, COUNT(*) AS number FROM batch WHERE open = 1"
            " AND until >= CLOCK() GROUP BY owner) h ON h.owner = b.owner WHERE b.open = 1 AND b.until < CLOCK()"
            " AND b.owner NOT IN EACH($1) ORDER BY COALESCE(h.number, 0), b.created, b.id LIMIT 1"
            " FOR UPDATE OF b SKIP LOCKED",
            json.dumps([*full]),
        )
        if not found:
            return None
        claimed = yield (
            "UPDATE batch SET holder = $2, until = CLOCK() + $3, generation = generation + 1 WHERE id = $1"
            f" RETURNING {_BATCH}",
            *(found[0][0], holder, seconds),
        )
        batch = _batch(claimed[0])
        ran = yield "SELECT COUNT(*) FROM line WHERE batch = $1 AND state = 1 AND running = 1", batch.id
        yield (
            "UPDATE line SET running = 0, max_group = $2, attempts = attempts + CASE WHEN max_group = 1 THEN 1 ELSE 0"
            " END WHERE batch = $1 AND state = 1 AND running = 1",
            *(batch.id, next_group(min(ran[0][0], max_running))),
        )
        yield "UPDATE line SET state = 0 WHERE batch = $1 AND state = 1", batch.id
        return batch

    @operation()
    def held(self, holder: str) -> Steps[Mapping[str, Batch]]:
        """Return the open batches of which *holder* has had the last lease."""
        found = yield f"SELECT {_BATCH} FROM batch WHERE open = 1 AND holder = $1", holder
        return {batch.id: batch for batch in map(_batch, found)}

    @operation(write=True)
    def renew(self, holder: str, seconds: float) -> Steps[None]:
        """Let the leases of *holder* last *seconds* from now."""
        yield "UPDATE batch SET until = CLOCK() + $2 WHERE open = 1 AND holder = $1", holder, seconds
        yield "UPDATE quarantine SET until = CLOCK() + $2 WHERE holder = $1 AND until >= CLOCK()", holder, seconds

    @operation()
    def holders(self) -> Steps[Collection[str]]:
        """Return those who have leases now."""
        found = yield ("SELECT DISTINCT holder FROM batch WHERE open = 1 AND until >= CLOCK()",)
        return {row[0] for row in found}

    @operation(write=True)
    def bury(self, holder: str) -> Steps[None]:
        """End all leases of *holder*, who has died."""
        yield "UPDATE batch SET until = 0 WHERE open = 1 AND holder = $1", holder
        yield "UPDATE quarantine SET until = 0 WHERE holder = $1", holder

    @operation(write=True)
    def enter_quarantine(self, holder: str, seconds: float) -> Steps[bool]:
        """
        Give *holder* the lease to run quarantined lines, for *seconds*; return whether it has it.

        One process has it at a time: lines that run alone in two processes could ask the same Triton.
        """
        entered = yield (
            "INSERT INTO quarantine (number, holder, until) VALUES (1, $1, CLOCK() + $2) ON CONFLICT (number) DO UPDATE"
            " SET holder = $1, until = CLOCK() + $2 WHERE quarantine.until < CLOCK() OR quarantine.holder = $1"
            " RETURNING holder",
            *(holder, seconds),
        )
        return bool(entered)

    @operation(write=True)
    def leave_quarantine(self, holder: str) -> Steps[None]:
        """End that lease of *holder*."""
        yield "UPDATE quarantine SET until = 0 WHERE holder = $1", holder

    @operation(write=True, long=True)
    def release(self, batch: Batch) -> Steps[None]:
        """End the lease of *batch*; lines that still run wait again."""
        yield from _locked(batch.id, batch.generation)
        yield "UPDATE line SET state = 0, running = 0 WHERE batch = $1 AND state = 1", batch.id
        yield "UPDATE batch SET until = 0, holder = '' WHERE id = $1", batch.id

    # Lines

    @operation(write=True, long=True)
    def clear_lines(self, batch: Batch) -> Steps[None]:
        """Drop all lines of *batch*."""
        yield from _locked(batch.id, batch.generation)
        yield "DELETE FROM line WHERE batch = $1", batch.id

    @operation(write=True, long=True)
    def add_lines(self, batch: Batch, lines: Sequence[Line]) -> Steps[None]:
        """Add lines that wait."""
        yield from _locked(batch.id, batch.generation)
        yield (
            "INSERT INTO line (batch, number, place, length, model, prefix, state, attempts)"
            " VALUES ($1, $2, $3, $4, $5, $6, 0, 0)",
            [(batch.id, *line[:5]) for line in lines],
        )

    async def waiting(self, batch: Batch, after: int, limit: int) -> Sequence[Line]:
        """Return *limit* lines that wait, in the order of their numbers, behind the line *after*."""
        return await self._lines(batch, "state = 0", after, limit)

    async def never_ran(self, batch: Batch, after: int, limit: int) -> Sequence[Line]:
        """Return *limit* lines that have not ended, in the order of their numbers, behind the line *after*."""
        return await self._lines(batch, "state < 2", after, limit)

    @operation()
    def _lines(self, batch: Batch, condition: str, after: int, limit: int) -> Steps[Sequence[Line]]:
        found = yield (
            "SELECT number, place, length, model, prefix, attempts, triton_deaths, max_group FROM line"
            f" WHERE batch = $1 AND {condition} AND number > $2 ORDER BY number LIMIT $3",
            *(batch.id, after, limit),
        )
        return [Line(*row) for row in found]

    async def begin(self, batch: Batch, lines: Collection[int]) -> None:
        """Note that *lines* run from now on: they are quarantined if the process dies."""
        await self._set_running(batch, lines, 1)

    async def stopped(self, batch: Batch, lines: Collection[int]) -> None:
        """Note that *lines* have no result yet, and do not run: if the process dies, they are not to blame."""
        await self._set_running(batch, lines, 0)

    @operation(write=True, long=True)
    def _set_running(self, batch: Batch, lines: Collection[int], running: int) -> Steps[None]:
        yield from _locked(batch.id, batch.generation)
        yield (
            "UPDATE line SET state = 1, running = $3 WHERE batch = $1 AND number = $2 AND state < 2",
            [(batch.id, number, running) for number in lines],
        )

    @operation(write=True)
    def quarantine(self, batch: Batch, lines: Collection[Line]) -> Steps[None]:
        """Note that *lines* do not run, their deaths, and their largest groups: their Triton ended while they ran."""
        yield from _locked(batch.id, batch.generation)
        yield (
            "UPDATE line SET state = 1, running = 0, triton_deaths = $3, max_group = $4 WHERE batch = $1"
            " AND number = $2 AND state < 2",
            [(batch.id, line.number, line.triton_deaths, line.max_group) for line in lines],
        )

    @operation(write=True, long=True)
    def end(self, batch: Batch, done: Sequence[Done]) -> Steps[Batch]:
        """Note that lines are *done*, once if it is called again; return the batch with its new counts."""
        found = yield from _locked(batch.id, batch.generation)
        assert found is not None
        running = {row[0] for row in (yield "SELECT number FROM line WHERE batch = $1 AND state = 1", batch.id)}
        new = [one for one in done if one.number in running]
        yield (
            "UPDATE line SET state = $3, part = $4, part_place = $5, part_length = $6 WHERE batch = $1 AND number = $2",
            [(batch.id, one.number, one.state, batch.generation, one.place, one.length) for one in new],
        )
        for one in new:
            found.usage.add(one.usage)
        found.succeeded += sum(one.state == SUCCEEDED for one in new)
        found.failed += sum(one.state == FAILED for one in new)
        found.exonerated += sum(one.exonerated for one in new)
        yield from _replace(found)
        return found

    @operation()
    def results(self, batch: Batch, after: tuple[int, int], limit: int) -> Steps[Sequence[Result]]:
        """Return results of lines in the order in which they ended, behind a part and a place in it."""
        found = yield (
            "SELECT number, state, part, part_place, part_length FROM line WHERE batch = $1 AND state > 1"
            " AND (part, part_place) > ($2, $3) ORDER BY part, part_place LIMIT $4",
            *(batch.id, *after, limit),
        )
        return [Result(*row) for row in found]

    @operation(write=True, long=True)
    def finish(self, batch: Batch, files: Sequence[StoredFile], change: Callable[[Batch], None]) -> Steps[Batch]:
        """End *batch* with its *files* by a *change*, and drop its lines, all or nothing; return it."""
        found = yield from _locked(batch.id, batch.generation)
        assert found is not None
        for file in files:
            yield from _insert_file(file)
        change(found)
        yield from _replace(found)
        yield "DELETE FROM line WHERE batch = $1", batch.id
        return found


def _kept(owner: str) -> Steps[int]:
    """
    Return the bytes that count for *owner*: of files and of batches.

    Files that are being deleted do not count, nor do uploads that nobody renews: their process has ended.
    """
    found = yield (
        f"SELECT (SELECT COALESCE(SUM(bytes + {ROW_SIZE}), 0) FROM file WHERE owner = $1 AND COALESCE(expires, 1) > 0"
        " AND (state <> 'uploading' OR expires IS NULL OR expires > $2))"
        f" + {ROW_SIZE} * (SELECT COUNT(*) FROM batch WHERE owner = $1)",
        *(owner, time.time()),
    )
    return int(found[0][0])


def _nothing() -> Steps[None]:
    yield ("SELECT 1",)


def _note_failure(task: asyncio.Task[None]) -> None:
    """Take the exception of a *task* that nobody may wait for any more: asyncio would log it."""
    if not task.cancelled():
        task.exception()


def failed_write(error: Exception) -> errors.ServiceError:
    """Return the error for what a disk or a database cannot do."""
    detail = f"{type(error).__name__}: {error}"
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if full or (isinstance(error, sqlite3.Error) and error.sqlite_errorcode == sqlite3.SQLITE_FULL):
        return errors.StorageFull("There is no room for more files.", detail=detail)
    return errors.StoreUnavailable("Files and batches cannot be used at the moment.", detail=detail, retry_after=2)


def _file(row: Sequence[Any]) -> StoredFile:
    return StoredFile(**dict(zip(_FILE.split(", "), row, strict=True)))


def _insert_file(file: StoredFile) -> Steps[None]:
    yield (
        f"INSERT INTO file ({_FILE}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        *msgspec.structs.astuple(file),
    )


def _batch(row: Sequence[Any]) -> Batch:
    batch = _decode(bytes(row[0]))
    batch.generation = row[1]
    return batch


def _locked(batch_id: str, generation: int | None) -> Steps[Batch | None]:
    """Return an open batch, locked. Raises :class:`LeaseLost` if it is not of this *generation*."""
    found = yield f"SELECT {_BATCH} FROM batch WHERE id = $1 AND open = 1 FOR UPDATE", batch_id
    if generation is not None and not (found and found[0][1] == generation):
        raise LeaseLost
    if found:
        return _batch(found[0])
    return None


def _replace(batch: Batch) -> Steps[None]:
    yield "UPDATE batch SET detail = $2, open = $3 WHERE id = $1", batch.id, _encode(batch), int(batch.open)


def _listed(
    table: str,
    columns: str,
    condition: str,
    owner: str,
    after: str | None,
    limit: int,
    reverse: bool,
    values: Sequence[Any],
) -> Steps[Sequence[Sequence[Any]] | None]:
    """Return rows of *owner* in the order of their creation; ``None`` if *after* is none of them."""
    place: tuple[float, str] = (1e18, "") if reverse else (0.0, "")
    if after is not None:
        found = yield f"SELECT created, id FROM {table} WHERE id = $1 AND owner = $2", after, owner
        if not found:
            return None
        place = found[0][0], found[0][1]
    if reverse:
        way = "<"
        order = "DESC"
    else:
        way = ">"
        order = "ASC"
    return (
        yield (
            f"SELECT {columns} FROM {table} WHERE owner = $1 AND (created, id) {way} ($2, $3) AND {condition}"
            f" ORDER BY created {order}, id {order} LIMIT $4",
            *(owner, *place, limit, *values),
        )
    )
