"""Batches after answers of the database that were lost, leaps of a clock, dead connections and missing files."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import obstore
import pytest

from tests.cases import every_case
from tests.unit.batches.test_batch_runner import NAMES, OWNER, Host, Process, process, request
from tests.unit.batches.test_width import Sharing
from triton_openai.batches import claims, timing
from triton_openai.batches.bucket import BucketFiles
from triton_openai.batches.changes import Changes
from triton_openai.batches.inputs import InputReader
from triton_openai.errors import StoreUnavailable
from triton_openai.storage import line_table, postgresql
from triton_openai.storage.batch_records import Batch, BatchError, Line
from triton_openai.storage.lease_table import Overview
from triton_openai.storage.postgresql import PostgresDatabase


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for nothing."""
    for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS", "GROUP", "FAILURE_PAUSE", "RETRY", "FIRST_PAUSE"):
        monkeypatch.setattr(timing, name, 0.005)


def lose_answer(one: Process, operation: str) -> list[str]:
    """Let the first answer to *operation*, which the database has done, be lost; return what was lost."""
    database = one.files.store._database
    run = database.run
    lost: list[str] = []

    async def lossy(steps: Any, *, timeout: float, write: bool = False) -> Any:
        result = await run(steps, timeout=timeout, write=write)
        if steps.__qualname__ == operation and not lost:
            lost.append(operation)
            raise TimeoutError
        return result

    database.run = lossy  # type: ignore[method-assign]
    return lost


@every_case("operation", [
    "LeaseTable.claim", "LineTable.add", "LineTable.join", "LineTable.claim", "LineTable._set_running",
    "LineTable.finish", "BatchTable.change_leased", "BatchTable.decide", "BatchTable.end", "LeaseTable.release_part",
])  # fmt: skip
async def test_an_answer_of_the_database_is_lost(operation: str, tmp_path: Path) -> None:
    """Whatever was done although it seemed to fail: the batch ends, with each line once, and no lease remains."""
    names = [f"id-{number}" for number in range(40)]
    async with process(tmp_path / operation) as one:
        lost = lose_answer(one, operation)
        batch = await one.batch(names)
        async with asyncio.timeout(120):
            done = await one.ended(batch)
        assert ("completed", 40) == (done.status, done.succeeded)
        assert {name: [200] for name in names} == one.results(done)
        assert [operation] == lost


async def test_an_answer_is_lost_when_lines_are_given_back(tmp_path: Path) -> None:
    """Lines that were given back, or not, run once."""
    async with process(tmp_path) as one:
        lost = lose_answer(one, "LineTable.give_back")
        batch = await _with_surplus(one)
        await one.until(batch, lambda _: lost)
        one.host.busy = False
        assert 200 == (await one.ended(batch)).succeeded
        assert 1 == max(one.host.calls.values())


async def _with_surplus(one: Process) -> Batch:
    """Let a process claim many lines, and then run few."""
    one.host.max_running = 100
    one.host.capacity = lambda target: 100.0  # type: ignore[method-assign]
    one.host.busy = True
    batch = await one.batch([f"id-{number}" for number in range(200)])
    await one.until(batch, lambda found: found.id in one.runner._batches)
    (limit,) = one.runner._limits.of("M")
    await one.until(batch, lambda _: one.runner._batches[batch.id].window > 80)
    limit.allowed = 4
    one.host.capacity = lambda target: 4.0  # type: ignore[method-assign]
    return batch


async def test_lines_that_are_too_many_are_given_back(tmp_path: Path) -> None:
    """A process whose limit shrinks leaves lines to others, also while it runs some."""
    async with process(tmp_path) as one:
        batch = await _with_surplus(one)
        one.host.may_answer.clear()
        one.host.busy = False
        await one.until(batch, lambda _: one.host.running)
        await one.until(batch, lambda _: one.runner._batches[batch.id].window <= 32)
        one.host.may_answer.set()
        assert 200 == (await one.ended(batch)).succeeded


async def test_few_lines_wait_near_the_end(tmp_path: Path) -> None:
    """A process that runs all that it may claims a few lines in advance: others may run the rest."""
    host = Sharing(set())
    host.max_running = 40
    host.capacity = lambda target: 40.0  # type: ignore[method-assign]
    host.may_answer.clear()
    async with process(tmp_path, host) as one:
        batch = await one.batch([f"id-{number}" for number in range(100)])
        await one.until(batch, lambda _: len(host.running) == 40)
        for _ in range(5):
            await asyncio.sleep(0.005)
            assert one.runner._batches[batch.id].window <= 20
        host.may_answer.set()
        assert 100 == (await one.ended(batch)).succeeded


async def test_lines_that_are_given_back_wait_for_any_process(tmp_path: Path) -> None:
    """Also those that are marked as running, because the write that they have stopped had failed."""
    async with process(tmp_path) as one:
        batch = await _with_surplus(one)
        running = one.runner._batches[batch.id]
        numbers = [line.number for line in running.idle_lines()]
        lines = one.files.store.lines
        await lines.mark_running(running.part, numbers)
        await lines.give_back(running.part, numbers)
        assert [] == await lines.unfinished_in(running.part)
        one.host.busy = False
        running.drop(numbers)
        assert 200 == (await one.ended(batch)).succeeded


async def test_a_part_that_is_claimed_while_leases_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the lines that validation rejects is no lost claim, although it comes during the overview."""
    one = Process(tmp_path)
    leases = one.files.store.leases
    overview = leases.overview
    release = leases.release_unknown
    released: list[Any] = []
    held_back: list[str] = []

    async def slow(holder: str) -> Any:
        if one.runner._claims.leased_batches and not held_back:
            held_back.append(holder)
            # Until the batch is validated, and its part is here.
            while not one.runner._batches:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        return await overview(holder)

    async def noted(part: Any, holder: str) -> None:
        released.append(part)
        await release(part, holder)

    monkeypatch.setattr(leases, "overview", slow)
    monkeypatch.setattr(leases, "release_unknown", noted)
    one.host.busy = True
    one.start()
    batch = await one.batch(request("wrong", body={"model": "m", "prompt": "wrong type"}) + request("right"))
    await one.until(batch, lambda found: found.failed == 1)
    one.host.busy = False
    assert 1 == (await one.ended(batch)).succeeded
    assert (1, []) == (len(held_back), released)
    await one.stop()


async def test_a_late_answer_is_no_leap_of_the_clock(tmp_path: Path) -> None:
    """The clock of the database seems to be behind then, and as far ahead as before with the next answer."""
    one = Process(tmp_path)
    own = one.runner._claims
    for late, expected in ((0.0, False), (30.0, False), (0.0, False), (-100.0, True)):
        own._note_clock(time.monotonic() + 1e9 - late)
        assert expected == (own._distrusted_until > 0)
    await one.files.store.close()


async def test_a_renewal_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are renewed at the next step, and not after a fourth of their time."""
    async with process(tmp_path) as one:
        one.host.may_answer.clear()
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: one.host.running)
        renewed = 0
        renew = one.files.store.leases.renew

        async def fails_once(holder: str, seconds: float) -> None:
            nonlocal renewed
            renewed += 1
            if renewed == 1:
                raise StoreUnavailable("busy")
            await renew(holder, seconds)

        monkeypatch.setattr(one.files.store.leases, "renew", fails_once)
        one.runner._claims._next_renewal = 0.0
        async with asyncio.timeout(120):
            await one.until(batch, lambda _: renewed == 2)
        one.host.may_answer.set()
        await one.ended(batch)


@pytest.mark.parametrize("during_a_look", [False, True])
async def test_a_clock_that_leaps_ahead(during_a_look: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All leases seem to have expired: no line that runs in another process is taken from it, or quarantined."""
    names = [f"id-{number}" for number in range(40)]
    hosts = [Host(), Host()]
    for host in hosts:
        host.max_running = 64
        host.may_answer.clear()
    async with process(tmp_path, hosts[0]) as one, process(tmp_path, hosts[1]) as other:
        batch = await one.batch(names)
        await one.until(batch, lambda _: hosts[0].running and hosts[1].running)
        now = time.time

        def leap() -> None:
            monkeypatch.setattr(time, "time", lambda: now() + 3600)

        if during_a_look:
            leases = one.files.store.leases
            overview = leases.overview

            async def leaps(holder: str) -> Overview:
                seen: Overview = await overview(holder)
                leap()
                return seen

            monkeypatch.setattr(leases, "overview", leaps)
        else:
            leap()
        for each in (one, other):
            await one.until(batch, lambda _: each.runner._claims._distrusted_until > 0)  # noqa: B023
        for host in hosts:
            host.may_answer.set()
        done = await one.ended(batch)
        assert {name: [200] for name in names} == one.results(done)
    assert dict.fromkeys(names, 1) == dict(hosts[0].calls + hosts[1].calls)
    assert claims._RENEWALS > 2


async def test_the_lines_of_a_large_batch_are_deleted_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transaction deletes more than a bound; what a process leaves that ends meanwhile is swept."""
    monkeypatch.setattr(line_table, "_MAX_DELETED", 3)
    async with process(tmp_path) as one:
        database = one.files.store._database
        run = database.run
        deleted = 0

        async def counted(steps: Any, *, timeout: float, write: bool = False) -> Any:
            nonlocal deleted
            if steps.__qualname__ == "LineTable._delete_some":
                deleted += 1
                if deleted == 3:
                    raise OSError("gone")
            return await run(steps, timeout=timeout, write=write)

        database.run = counted
        # The test sweeps.
        one.runner._next_sweep = math.inf
        # The first call finds that a new batch has no lines.
        batch = await one.batch(NAMES)
        done = await one.ended(batch)
        assert 20 == done.succeeded
        await one.until(batch, lambda _: deleted >= 3)
        assert [batch.id] == await one.files.store.lines.ended_batches()
        await one.files.sweep()
        assert [] == await one.files.store.lines.ended_batches()
        assert deleted > 7


async def test_an_input_that_nobody_needs_any_more(tmp_path: Path) -> None:
    """A batch whose lines all have results ends well without its input."""
    async with process(tmp_path) as one:
        one.host.max_running = 64
        one.host.capacity = lambda target: 64.0
        one.host.may_answer.clear()
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: len(one.host.running) == 20)
        (one.files.folder / batch.input).unlink()
        one.host.may_answer.set()
        done = await one.ended(batch)
        assert ("completed", 20) == (done.status, done.succeeded)


async def test_a_process_dies_before_a_failed_batch_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch ends with the reason for which it failed."""
    one = Process(tmp_path)
    one.start()
    one.host.max_running = 1
    one.host.capacity = lambda target: 1.0  # type: ignore[method-assign]
    # So it does not end before it fails.
    one.host.answers["id-19"] = [StoreUnavailable("wait") for _ in range(1000)]
    batch = await one.batch(NAMES)
    await one.until(batch, lambda found: found.succeeded)

    async def fails(*_: object) -> Batch:
        raise StoreUnavailable("away")

    monkeypatch.setattr(one.files.store.batches, "end", fails)
    await one.files.store.batches.report(batch.id, [BatchError(code="reason", message="m")])
    await one.until(batch, lambda found: found.outcome)
    await one.die()
    async with process(tmp_path) as other:
        done = await other.ended(batch)
        assert ("failed", ["reason"]) == (done.status, [problem.code for problem in done.problems])


@every_case("damage", [Path.unlink, lambda path: os.truncate(path, 10)])
async def test_results_that_are_gone(damage: Callable[[Path], None], tmp_path_factory: pytest.TempPathFactory) -> None:
    """A batch whose results are lost fails and says so: no answer is left out in silence."""
    folder = tmp_path_factory.mktemp("files")
    async with process(folder) as one:
        one.host.max_running = 5
        one.host.answers["id-19"] = [StoreUnavailable("wait") for _ in range(1000)]
        batch = await one.batch(NAMES)
        await one.until(batch, lambda found: found.succeeded == 19)
        (part,) = one.files.folder.glob("*.part")
        damage(part)
        one.host.answers.clear()
        done = await one.ended(batch)
        assert ("failed", None) == (done.status, done.output)
        assert ["results_missing"] == [problem.code for problem in done.problems]


async def test_a_lost_batch_closes_no_file_that_a_thread_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread could read from another file, or a connection, that has the same descriptor then."""
    reads = threading.Event()
    over = threading.Event()
    open_then: list[bool] = []
    read = InputReader.read

    def slow(self: InputReader, count: int) -> Any:
        reads.set()
        over.wait(120)
        try:
            os.fstat(self._file.fileno())
            open_then.append(True)
        except (OSError, ValueError):
            open_then.append(False)
        return read(self, count)

    monkeypatch.setattr(InputReader, "read", slow)
    async with process(tmp_path) as one:
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: reads.is_set())
        leased = one.runner._claims.leased_batches[batch.id]
        leased.lose()
        await asyncio.sleep(0.01)
        over.set()
        await one.until(batch, lambda _: open_then)
        assert open_then[0]


async def test_an_upload_that_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library may still read the file that it sends, and never one that has the same descriptor later."""
    sent: list[Any] = []

    async def hangs(bucket: object, key: str, content: Any, **_: Any) -> None:
        sent.append(content)
        await asyncio.Event().wait()

    monkeypatch.setattr(obstore, "put_async", hangs)
    files = BucketFiles.__new__(BucketFiles)
    files.bucket = None  # type: ignore[assignment]
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    descriptor = os.open(path, os.O_RDONLY)
    uploading = asyncio.create_task(files.upload("key", descriptor))
    while not sent:  # noqa: ASYNC110 - nothing notifies of it
        await asyncio.sleep(0)
    uploading.cancel()
    await asyncio.wait([uploading])
    os.close(descriptor)
    assert b"mine" == sent[0].read()
    sent[0].close()


async def test_a_database_that_takes_no_further_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches run without notifications."""
    async with process(tmp_path) as one:

        async def fails(_: object) -> bool:
            raise StoreUnavailable("too many clients")

        monkeypatch.setattr(one.files.store, "listen", fails)
        async with asyncio.timeout(120):
            assert 20 == (await one.ended(await one.batch(NAMES))).succeeded


class Connection:
    """A connection for notifications, which answers or not."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers
        self.closed = False

    def is_closed(self) -> bool:
        return self.closed

    async def execute(self, _: str, timeout: float) -> None:
        assert timeout == postgresql._PING_SECONDS
        if not self._answers:
            raise TimeoutError

    async def add_listener(self, *_: object) -> None:
        pass

    def terminate(self) -> None:
        self.closed = True


async def test_a_connection_for_notifications_that_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that nobody has closed, and that does not answer, is replaced."""
    made = [Connection(False), Connection(True)]
    connections = list(made)

    async def connect(*_: object, **__: object) -> Connection:
        return connections.pop(0)

    async def pool() -> None:
        pass

    monkeypatch.setattr("asyncpg.connect", connect)
    database = PostgresDatabase("postgresql://x", lambda _: [])
    monkeypatch.setattr(database, "_pool", pool)
    notified: list[None] = []
    for expected in (1, 2, 2):
        assert await database.listen("c", lambda: notified.append(None))
        assert expected == len(notified)
    assert [True, False] == [connection.closed for connection in made]
    await database.close()


async def test_one_sweep_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep that takes longer than the time between two is not joined by another one."""
    monkeypatch.setattr(timing, "SWEEP", 0.0)
    over = asyncio.Event()
    sweeps = 0
    one = Process(tmp_path)

    async def slow() -> None:
        nonlocal sweeps
        sweeps += 1
        await over.wait()

    monkeypatch.setattr(one.files, "sweep", slow)
    one.start()
    assert 20 == (await one.ended(await one.batch(NAMES))).succeeded
    assert 1 == sweeps
    over.set()
    await one.stop()


def test_the_file_of_changes_is_deleted(tmp_path: Path) -> None:
    """A poller whose file somebody has deleted makes another one, and stays the only poller."""
    first, second = Changes(tmp_path), Changes(tmp_path)
    assert first.look().polls
    (tmp_path / "poller.lock").unlink()
    assert (True, False) == (first.look().polls, second.look().polls)
    first.close()
    second.close()


async def test_slots_of_models_that_nobody_asks(tmp_path: Path) -> None:
    """The sweep deletes the slots of processes that have ended, also of Tritons that are gone."""
    one = Process(tmp_path)
    slots = one.files.store.slots
    await slots.take("gone", "a", -1.0, wanted=1, running=0, total=4)
    await slots.take("m", "b", 60.0, wanted=1, running=0, total=4)
    await slots.delete_expired()

    def rows() -> Any:
        return (yield ("SELECT model, holder FROM slot ORDER BY model, holder",))

    assert [("m", ""), ("m", "b")] == await one.files.store._database.run(rows(), timeout=120)
    await one.files.store.close()


async def test_lines_of_a_batch_that_another_process_has(tmp_path: Path) -> None:
    """A process that was frozen while it deleted lines deletes none of those that another one has added."""
    from triton_openai.storage.batch_records import LeaseLost

    async with process(tmp_path) as one:
        one.host.stopping = True
        batch = await one.batch(NAMES)
        leased = await one.files.store.leases.claim("h", 60, now=time.time())
        assert leased is not None
        await one.files.store.lines.add(leased, [Line(1, 0, 1, "m", 0)])
        with pytest.raises(LeaseLost):
            await one.files.store.lines.delete(batch.id, leased.generation - 1)
        assert 1 == len(await one.files.store.lines.unfinished(leased, 0, 9))
    assert OWNER == batch.owner
