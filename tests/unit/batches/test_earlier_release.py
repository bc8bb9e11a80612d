"""Batches that are in progress when the tables are migrated: those of the release that leased batches as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest

from tests.store_fixture import Place
from tests.unit.batches.test_batch_runner import NAMES, Process, process, request
from triton_openai.batches import timing
from triton_openai.batches.bucket import BucketFiles, file_key
from triton_openai.batches.host import Outcome
from triton_openai.batches.results import rendered
from triton_openai.storage.batch_records import Batch, StoredFile
from triton_openai.storage.batch_schema import MIGRATIONS
from triton_openai.storage.batch_tables import ROW_SIZE
from triton_openai.storage.postgresql import PostgresDatabase
from triton_openai.storage.sql import Database, Steps, missing
from triton_openai.storage.sqlite import SqliteDatabase

OWNER = "me"
_EARLIER = 3


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing."""
    for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS", "GROUP", "FAILURE_PAUSE", "RETRY", "FIRST_PAUSE"):
        monkeypatch.setattr(timing, name, 0.005)


def _earlier(place: Place) -> Database:
    """Return the database of *place* with the tables of the earlier release."""
    lacking = partial(missing, "batches", MIGRATIONS[:_EARLIER])
    kind, _, rest = place.batches.partition(":")
    if kind == "sqlite":
        return SqliteDatabase(Path(rest), lacking, synchronous="FULL")
    return PostgresDatabase(place.batches, lacking, namespace="openai_batches")


async def _run(database: Database, *statements: tuple[Any, ...]) -> Sequence[Sequence[Any]]:
    """Run statements in one transaction, and return the rows of the last one."""

    def steps() -> Steps[Sequence[Sequence[Any]]]:
        rows: Sequence[Sequence[Any]] = ()
        for statement in statements:
            rows = yield statement
        return rows

    return await database.run(steps(), timeout=120.0, write=True)


async def _in_progress(place: Place, generation: int, until: float) -> tuple[Batch, Database]:
    """
    Return a batch that a process of the earlier release runs until a time, and the database.

    Five lines have a result in its part, five run, and the others wait.
    """
    lines = [*map(request, NAMES)]
    now = time.time()
    batch = Batch(
        id="batch_old", owner=OWNER, kind="openai", endpoint="/x", input="file-old", created=now, window="24h",
        expires=now + 86_400, status="in_progress", times={"validated_at": 1, "in_progress_at": 1}, model="m",
        total=20, succeeded=5,
    )  # fmt: skip
    answers = [rendered(batch, number, NAMES[number - 1], Outcome(200, b'{"a":1}', "r")) for number in range(1, 6)]
    await _write(place, "file-old", b"".join(lines))
    await _write_part(place, f"{batch.id}-{generation}.part", f"batches/{batch.id}/{generation}-0", b"".join(answers))
    detail = {name: value for name, value in msgspec.to_builtins(batch).items() if name != "parts"}
    rows = []
    offset = 0
    place_in_part = 0
    for number, line in enumerate(lines, 1):
        if number <= 5:
            values: tuple[int | None, ...] = (2, 0, generation, place_in_part, len(answers[number - 1]))
            place_in_part += len(answers[number - 1])
        else:
            values = (int(number <= 10), int(number <= 10), None, None, None)
        rows.append((batch.id, number, offset, len(line), "m", *values))
        offset += len(line)
    database = _earlier(place)
    size = sum(map(len, lines))
    await _run(
        database,
        ("INSERT INTO file (id, owner, purpose, filename, bytes, created, expires, state) VALUES ($1, $2, 'batch', 'a',"
         " $3, $4, NULL, 'processed')", "file-old", OWNER, size, now),
        ("INSERT INTO file (id, owner, purpose, filename, bytes, created, expires, state) VALUES ('file-up', $1, '',"
         " '', 77, $2, 1, 'uploading')", OWNER, now),
        ("INSERT INTO batch (id, owner, kind, input, open, created, holder, generation, until, detail) VALUES"
         " ($1, $2, 'openai', 'file-old', 1, $3, 'earlier', $4, $5, $6)",
         batch.id, OWNER, now, generation, until, msgspec.json.encode(detail)),
        ("INSERT INTO line (batch, number, place, length, model, prefix, state, attempts, running, part, part_place,"
         " part_length) VALUES ($1, $2, $3, $4, $5, 0, $6, 0, $7, $8, $9, $10)", rows)
        if place.batches.startswith("postgres") else
        ("INSERT INTO line (batch, number, place, length, model, prefix, state, attempts, running, part, part_place,"
         " part_length) VALUES (?, ?, ?, ?, ?, 0, ?, 0, ?, ?, ?, ?)", rows),
    )  # fmt: skip
    return batch, database


async def _write(place: Place, name: str, content: bytes) -> None:
    await _write_part(place, name, file_key(name), content)


async def _write_part(place: Place, name: str, key: str, content: bytes) -> None:
    """Write a file, or the object *key* in a bucket."""
    files = Process(place).files
    if isinstance(files, BucketFiles):
        await obstore.put_async(files.bucket, key, content)
    else:
        files.folder.mkdir(exist_ok=True, parents=True)
        (files.folder / name).write_bytes(content)
    await files.store.close()


@pytest.mark.parametrize("generation", [1, 4])
async def test_a_batch_of_a_process_that_has_ended(place: Place, generation: int) -> None:
    """Its results are kept, its other lines run, and those that ran are quarantined first; each line is there once."""
    batch, database = await _in_progress(place, generation, 0.0)
    await database.close()
    async with process(place) as one:
        done = await one.ended(batch)
        assert {name: [200] for name in NAMES} == one.results(done)
        assert (20, 20, 0) == (done.total, done.succeeded, done.failed)
        assert dict.fromkeys(NAMES[5:], 1) == dict(one.host.calls)
        await one.leaves(done.input, done.output)


async def test_a_batch_that_an_earlier_release_still_runs(place: Place) -> None:
    """While a process of the earlier release has its lease, nobody else touches its lines; then they go on."""
    batch, database = await _in_progress(place, 1, time.time() + 3600)
    async with process(place) as one:
        other = await one.batch(["new"], name="batch_new")
        await one.ended(other)
        # It stores a result, as it does after the migration.
        await _run(database, ("UPDATE line SET running = 0 WHERE batch = $1 AND number = 6 AND state = 1", batch.id))
        assert {"new"} == one.host.calls.keys()
        await _run(database, ("UPDATE batch SET until = 0 WHERE id = $1", batch.id))
        done = await one.ended(batch)
        assert {name: [200] for name in NAMES} == one.results(done)
        # It is no one's of the earlier release any more.
        rows = await _run(database, ("SELECT until, holder FROM batch WHERE id = $1", batch.id))
        assert (1e18, "") == tuple(rows[0])
    await database.close()


async def test_bytes_of_owners_are_counted_at_the_migration(place: Place) -> None:
    """Files, batches and uploads of the earlier release count for the limit of their owner as before."""
    _, database = await _in_progress(place, 1, time.time() + 3600)
    size = sum(len(request(name)) for name in NAMES)
    one = Process(place)
    used = size + 2 * ROW_SIZE
    file = StoredFile(
        id="file-a", owner=OWNER, bytes=10, created=time.time(), expires=time.time() + 900, state="uploading"
    )
    assert not await one.files.store.files.reserve(file, used + 9)
    assert await one.files.store.files.reserve(file, used + 10)
    # What a process of the earlier release adds is counted by the next sweep.
    await _run(database, ("INSERT INTO file (id, owner, purpose, filename, bytes, created, expires, state) VALUES"
                          " ('file-b', $1, '', '', 100, 1, NULL, 'processed')", OWNER))  # fmt: skip
    await one.files.sweep()
    again = msgspec.structs.replace(file, id="file-c")
    assert not await one.files.store.files.reserve(again, used + 2 * ROW_SIZE + 119)
    assert await one.files.store.files.reserve(again, used + 2 * ROW_SIZE + 120)
    await asyncio.gather(one.files.store.close(), database.close())
