"""
What runs batches: results that are there once, whatever ends the process, and lines that are tried again.

A process that dies is one whose tasks are cancelled wherever they are, and that nobody closes.
"""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import obstore
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.cases import every_case
from tests.clock import Clock
from tests.extended import examples
from tests.store_fixture import Bucket, Place, Server, local
from triton_openai import errors
from triton_openai.access.rate_limits import RateLimit, RateLimits, Reservation
from triton_openai.app import create_app
from triton_openai.batches import claims, inputs, quarantine, timing
from triton_openai.batches import file_folder as files_module
from triton_openai.batches import results as results_module
from triton_openai.batches.batch_runner import BatchRunner
from triton_openai.batches.bucket import BucketFiles, file_key
from triton_openai.batches.changes import Changes
from triton_openai.batches.file_folder import Files
from triton_openai.batches.first_tokens import FirstTokens
from triton_openai.batches.host import Outcome
from triton_openai.batches.inputs import InputReader
from triton_openai.batches.line_limits import Limit, is_open
from triton_openai.batches.process_locks import ProcessLocks
from triton_openai.config.tree import BatchesSettings, FilesSettings, Settings
from triton_openai.config.worker import Worker
from triton_openai.storage.batch_records import Batch, BatchError, BatchUsage, LeaseLost, StoredFile
from triton_openai.storage.batch_tables import ROW_SIZE, failed_write
from triton_openai.telemetry.metrics import Metrics

OWNER = "me"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing wait."""
    for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS", "GROUP", "FAILURE_PAUSE", "RETRY", "FIRST_PAUSE"):
        monkeypatch.setattr(timing, name, 0.005)


class Host:
    """Answers lines: by *answers* of their ids, each in turn, else well. It waits while *may_answer* is not set."""

    def __init__(self) -> None:
        self.settings = BatchesSettings()
        self.stopping = False
        self.max_running = 4
        self.max_line_size = 10_000
        self.calls: Counter[str] = Counter()
        self.running: set[str] = set()
        self.most_seen = 0
        self.order: list[tuple[str, str]] = []
        self.answers: dict[str, list[errors.ServiceError]] = {}
        self.refused: set[str] = set()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.owners = {OWNER, "you"}
        self.served = {"m": "M", "n": "N"}
        self.busy = False
        #: What a key may use; lines wait once it is used up.
        self.limits, self.limit = RateLimits(), RateLimit()
        self.away, self.checks = False, 0
        self.silent: set[str] = set()
        self.untemplated: set[str] = set()
        self.probes: list[str] = []

    def problem(self, batch: Batch) -> BatchError | None:
        return None if batch.owner in self.owners else BatchError(code="key_revoked", message="It was removed.")

    def check_line(self, line: bytes) -> None:
        if b"too much" in line:
            raise errors.PayloadTooLarge("The request has too much text.", code="string_above_max_length")

    def target(self, model: str) -> str | None:
        return self.served.get(model)

    def has_room(self, target: str, running: int) -> bool:
        return not self.busy

    share = 1.0

    def live(self, target: str) -> int | None:
        return None

    def capacity(self, target: str) -> float:
        return math.inf

    def tritons(self, target: str) -> int:
        return max(1, len(self.endpoints(target)))

    def slots_of(self, target: str) -> str:
        return target

    def endpoints(self, target: str) -> Sequence[str]:
        return ()

    def metrics_urls(self, target: str) -> Mapping[str, str]:
        return {}

    def queue_models(self, target: str) -> Sequence[str]:
        return [target]

    def body_checker(self, batch: Batch) -> Callable[[bytes], None]:
        def check(body: bytes) -> None:
            if b"wrong type" in body:
                raise errors.InvalidRequest("A wrong type.", param="prompt")

        return check

    def input_tokens(self, body: bytes) -> int:
        return len(body)

    def max_enqueued_tokens(self, model: str) -> tuple[str, int] | None:
        return None

    async def check(self, batch: Batch, model: str, *, brings_template: bool) -> str:
        if self.away:
            self.checks += 1
            raise errors.UpstreamUnavailable("away")
        if model not in self.served:
            raise errors.ModelNotFound(model)
        if model in self.untemplated and not brings_template:
            raise errors.ConfigurationError("no template")
        return model

    async def probe(self, batch: Batch, model: str) -> None:
        self.probes.append(model)
        if model not in self.served:
            raise errors.ModelNotFound(model)
        if model in self.silent:
            raise errors.UpstreamTimeout("silent")

    def refusal(self, batch: Batch, error: errors.ServiceError) -> Outcome:
        return Outcome(error.status, error.envelope(), error=error)

    async def admit(self, owner: str) -> Reservation | None:
        if not self.limit.limits_live_requests:
            return None
        return Reservation(self.limits, owner, self.limit, await self.limits.admit(owner, self.limit))

    async def answer(
        self, batch: Batch, custom_id: str, body: bytes, reservation: Reservation | None, endpoint: str = ""
    ) -> Outcome:
        self.calls[custom_id] += 1
        self.order.append((batch.owner, custom_id))
        self.running.add(custom_id)
        self.most_seen = max(self.most_seen, len(self.running))
        try:
            await asyncio.sleep(0)
            await self.may_answer.wait()
        finally:
            self.running.discard(custom_id)
            if reservation is not None:
                reservation.close(10)
        if custom_id in self.refused:
            error = errors.InvalidRequest("no")
            return Outcome(error.status, error.envelope(), "r", error)
        if planned := self.answers.get(custom_id):
            refusal = planned.pop(0)
            return Outcome(refusal.status, refusal.envelope(), "r", refusal)
        return Outcome(200, b'{"a":1}', "r", usage=BatchUsage(input_tokens=2, output_tokens=1))


class Process:
    """A process of the service, with what it runs batches with; each has a machine of its own where it can."""

    def __init__(self, place: Place | Path, host: Host | None = None, *, checkpoint: float = 0.001) -> None:
        place = local(place) if isinstance(place, Path) else place
        settings = FilesSettings(store=place.files), BatchesSettings(store=place.batches, checkpoint=checkpoint)
        self.files = Files(*settings)
        if place.files.startswith("s3:"):
            self.files = BucketFiles(*settings)
            self.files.folder = Path(tempfile.mkdtemp(dir=place.folder))
            self.files.locks = ProcessLocks(self.files.folder)
            self.files.changes = Changes(self.files.folder)
        self.host = host or Host()
        self.metrics = Metrics(Worker())
        self.runner = BatchRunner(self.files, self.host, FirstTokens(), self.metrics)
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run batches."""
        self.task = asyncio.create_task(self.runner.run())

    async def stop(self) -> None:
        """End as the service ends."""
        self.host.stopping = True
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        await self.runner.close()
        await self.files.store.close()

    async def die(self) -> None:
        """End at once: nothing is kept that is not on the disk, and locks are gone."""
        tasks = [
            self.task,
            self.runner._sweeping,
            self.runner._congestion._reading,
            self.runner._notifications._checking,
            *(leased.task for leased in self.runner._claims.leased_batches.values()),
            *self.runner._away._checks,
            *self.runner._away._probes.values(),
            *(
                task
                for running in self.runner._batches.values()
                for task in (running.task, running.starting, *running.running.values())
            ),
        ]
        for task in tasks:
            if task is not None:
                task.cancel()
        await asyncio.wait([task for task in tasks if task is not None])
        if self.runner._claims._lock >= 0:
            os.close(self.runner._claims._lock)
        self.files.changes.close()
        if isinstance(self.files, BucketFiles):
            # Other machines do not see the lock: they wait until the leases have ended.
            await self.files.store.leases.expire_leases(self.runner._claims._holder)
        await self.files.store.close()

    async def batch(
        self, lines: Sequence[Any] | bytes, *, owner: str = OWNER, name: str = "batch_1", hours: float = 24
    ) -> Batch:
        """Make a batch of *lines*: the names of requests, or what is in the file."""
        content = lines if isinstance(lines, bytes) else b"".join(map(request, lines))
        now = time.time()
        file = StoredFile(
            id=f"file-{name}", owner=owner, purpose="batch", filename="a", bytes=len(content), created=now, expires=None
        )
        writing = await self.files.write(file.id)
        await writing.add(content)
        await writing.end()
        await self.files.store.files.complete(file)
        batch = Batch(
            id=name, owner=owner, kind="openai", endpoint="/x", input=file.id, created=now, window="24h",
            expires=now + hours * 3600,
        )  # fmt: skip
        assert "added" == await self.files.store.batches.add(batch, max_open=100, max_total=10**9)
        self.runner.wake()
        return batch

    async def seen(self, batch: Batch) -> Batch:
        """Return *batch* as it is in the tables."""
        found = await self.files.store.batches.find(batch.id, batch.owner, "openai")
        assert found is not None
        return found

    async def until(self, batch: Batch, condition: Callable[[Batch], object]) -> Batch:
        """Return *batch* when *condition* holds for it."""
        async with asyncio.timeout(120):
            while not condition(found := await self.seen(batch)):  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)
        return found

    async def ended(self, batch: Batch) -> Batch:
        """Return *batch* when it has ended."""
        return await self.until(batch, lambda found: not found.open)

    def content(self, file_id: str) -> bytes:
        """Return what is in a file."""
        if isinstance(self.files, BucketFiles):
            return bytes(obstore.get(self.files.bucket, file_key(file_id)).bytes())
        return (self.files.folder / file_id).read_bytes()

    async def leaves(self, *expected: str | None) -> None:
        """Wait until *expected* are the names of all files; the last are deleted when the batch has ended."""
        async with asyncio.timeout(120):
            while set(expected) != self.left():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)

    def left(self) -> set[str]:
        """Return the names of all files, but for the locks of processes."""
        names = {path.name for path in self.files.folder.iterdir()}
        if isinstance(self.files, BucketFiles):
            names |= {one["path"].removeprefix("files/") for page in obstore.list(self.files.bucket) for one in page}
        return {name for name in names if not (name.endswith(".lock") or name.startswith("shared-"))}

    def results(self, batch: Batch) -> dict[str, list[Any]]:
        """Return what is in the files of *batch* by id: the status, or the code of a line that never ran."""
        found: dict[str, list[Any]] = {}
        for file_id in (batch.output, batch.errors):
            if file_id is not None:
                for text in self.content(file_id).splitlines():
                    one = json.loads(text)
                    answer = one["response"]
                    result = one["error"]["code"] if answer is None else answer["status_code"]
                    found.setdefault(one["custom_id"], []).append(result)
        return found


def checks(batch: Batch) -> dict[str, Any]:
    """Return what an input reader checks lines of *batch* with."""
    return {"check_line": Host().check_line, "check_body": Host().body_checker(batch)}


def request(name: str, model: object = "m", **fields: Any) -> bytes:
    """Return a line of an input."""
    line = {"custom_id": name, "method": "POST", "url": "/x", "body": {"model": model, "prompt": "p"}, **fields}
    return json.dumps(line).encode() + b"\n"


@asynccontextmanager
async def process(place: Place | Path, host: Host | None = None) -> Any:
    """Run a process for the block."""
    made = Process(place, host)
    made.start()
    try:
        yield made
    finally:
        await made.stop()


NAMES = [f"id-{number}" for number in range(20)]


async def test_all_lines_are_answered_once(place: Place) -> None:
    """A batch ends with a result of each line, its counts and its usage, and nothing is left beside its files."""
    async with process(place) as one:
        done = await one.ended(await one.batch(NAMES))
        assert {name: [200] for name in NAMES} == one.results(done)
        assert ("completed", 20, 20, 0) == (done.status, done.total, done.succeeded, done.failed)
        assert (40, 20, "m") == (done.usage.input_tokens, done.usage.output_tokens, done.model)
        assert one.host.most_seen <= 4
        await one.leaves(done.input, done.output)
        assert [] == await one.files.store.lines.unfinished(done, 0, 10)


class Counting(Host):
    """Notes in which turn of the event loop each line begins, while others run too."""

    def __init__(self) -> None:
        super().__init__()
        self.max_running = len(NAMES)
        self.turn = 0
        self.begun: list[int] = []

    async def count_turns(self) -> None:
        """Count turns until it is cancelled."""
        while True:
            self.turn += 1
            await asyncio.sleep(0)

    async def answer(self, *args: Any, **options: Any) -> Outcome:
        """Note the turn, and answer."""
        self.begun.append(self.turn)
        return await super().answer(*args, **options)


async def test_live_requests_have_turns_between_lines(tmp_path: Path) -> None:
    """Of lines that start together, at most 16 begin in one turn."""
    host = Counting()
    async with process(tmp_path, host) as one:
        counting = asyncio.create_task(host.count_turns())
        await one.ended(await one.batch(NAMES))
        counting.cancel()
    assert len(NAMES) == len(host.begun)
    assert max(Counter(host.begun).values()) <= 16


WRONG = {
    "invalid_json_line": (b"{", request("a")[:-2] + b"\n", b'{"custom_id": "\xff"}\n', b"[]\n", b"\0\n"),
    "missing_required_parameter": (b'{"method": "POST", "url": "/x", "body": {}}\n',),
    "invalid_type": (b'{"custom_id": 1, "method": "POST", "url": "/x", "body": {}}\n', request("a", model=7)),
    "duplicate_custom_id": (request("a") + request("b") * 200 + request("a"),),
    "invalid_custom_id": (request(""), request("a" * 513)),
    "invalid_method": (request("a", method="GET"),),
    "invalid_url": (request("a", url="/y"),),
    "stream_not_supported": (request("a", body={"model": "m", "stream": True}),),
    "background_not_supported": (request("a", body={"model": "m", "background": True}),),
    "model_not_found": (request("a", model="unknown"),),
    "too_many_requests": (b"".join(map(request, NAMES)),),
    "too_many_blank_lines": (b"\n" * 20, request("a") + b" \r\n" * 20),
    "line_too_long": (request("a" * 5_000_000),),
    "string_above_max_length": (request("a") + b"too much, and no JSON\n", request("too much")),
    "empty_file": (b"", b"\n\r\n", b"\xef\xbb\xbf"),
}


async def test_wrong_inputs_fail_as_a_whole(tmp_path: Path) -> None:
    """A batch with a wrong line fails before any line runs, and says which lines are wrong, up to a hundred."""
    host = Host()
    host.settings = BatchesSettings(max_requests=19)
    async with process(tmp_path, host) as one:
        cases = [(code, content) for code, contents in WRONG.items() for content in contents]
        made = [await one.batch(content, name=f"batch_{number}") for number, (_, content) in enumerate(cases)]
        for (code, content), batch in zip(cases, made, strict=True):
            if code == "duplicate_custom_id":
                continue
            done = await one.ended(batch)
            assert ("failed", code) == (done.status, done.problems[0].code), (code, content[:80], done.problems)
        many = await one.ended(made[[code for code, _ in cases].index("duplicate_custom_id")])
        assert "failed" == many.status
        assert {"duplicate_custom_id", "too_many_requests"} >= {one.code for one in many.problems}
        assert 3 == many.problems[0].line
        assert not host.calls


async def test_parameters_of_wrong_types_cost_only_their_line(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines with wrong parameters fail in validation, before any line runs; the others are answered."""
    # Further ones fail when they run.
    monkeypatch.setattr(inputs, "_MAX_REJECTED", 3)
    wrong = [f"wrong type {number}" for number in range(3)]
    late = "wrong type, late"
    async with process(place) as one:
        one.host.busy = True
        one.host.refused.add(late)
        body = {"model": "m", "prompt": "wrong type"}
        content = [request(name, body=body) for name in wrong] + [*map(request, NAMES)] + [request(late, body=body)]
        batch = await one.batch(b"".join(content))
        await one.until(batch, lambda found: found.failed == 3)
        assert not one.host.calls
        one.host.busy = False
        done = await one.ended(batch)
        assert ("completed", 24, 20, 4) == (done.status, done.total, done.succeeded, done.failed)
        expected = {name: [400] for name in (*wrong, late)} | {name: [200] for name in NAMES}
        assert expected == one.results(done)
        assert {*NAMES, late} == one.host.calls.keys()


async def test_wrong_parameters_of_a_process_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that was rejected has its result once, although the process died before it was stored."""
    one = Process(tmp_path)

    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(one.files.store.lines, "finish", never)
    one.host.busy = True
    one.start()
    batch = await one.batch(request("wrong", body={"model": "m", "prompt": "wrong type"}) + request("right"))
    async with asyncio.timeout(120):
        while not any(running.written for running in one.runner._batches.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await one.die()
    other = Host()
    other.refused.add("wrong")
    async with process(tmp_path, other) as next_one:
        done = await next_one.ended(batch)
        assert {"wrong": [400], "right": [200]} == next_one.results(done)


@pytest.mark.sampled
def test_names_that_are_far_apart(tmp_path: Path) -> None:
    """In 50,000 lines, the last one may not have the name of the first one; no more than some lines are in memory."""
    path = tmp_path / "input"
    count = examples(50_000, few=5_000)
    path.write_bytes(b"".join(request(f"id-{number % (count - 1)}") for number in range(count)))
    batch = Batch(
        id="batch_1", owner=OWNER, kind="openai", endpoint="/x", input="file-1", created=0, window="24h", expires=1
    )  # fmt: skip
    descriptor = os.open(path, os.O_RDONLY)
    reader = InputReader(descriptor, batch, max_requests=count, max_line_size=10_000, **checks(batch))
    most = 0
    while lines := reader.read(1000):
        most = max(most, len(lines))
    reader.close()
    os.close(descriptor)
    assert (1000, count) == (most, reader.total)
    assert [("duplicate_custom_id", count)] == [(one.code, one.line) for one in reader.problems]


def test_a_database_on_a_shared_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite on NFS is refused."""
    files = Process(tmp_path).files
    assert files.unusable() is None
    assert files_module.file_system(tmp_path) not in ("", "nfs")
    mounts = f"1 2 0:1 / / rw - ext4 a b\n3 1 0:2 / {tmp_path} rw shared:1 - nfs4 server:/a rw\n"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: mounts)
    assert f"{tmp_path / 'db'} is on nfs4, where SQLite loses data" == files.unusable()


def test_names_of_models_have_a_length(tmp_path: Path) -> None:
    """What is too long for the name of a model is not kept: thousands of lines could hold all that a file may."""
    path = tmp_path / "in"
    path.write_bytes(b"".join([request(name, name * 1000) for name in NAMES]))
    batch = Batch(id="b", owner="", kind="openai", endpoint="/x", input="i", created=0, window="24h", expires=1)
    with path.open("rb") as file:
        reader = InputReader(file.fileno(), batch, max_requests=100, max_line_size=10_000, **checks(batch))
        assert [] == reader.read(100)
        reader.close()
    assert (20, {}) == (len(reader.problems), reader.asked)
    assert {"model_not_found"} == {one.code for one in reader.problems}


def test_errors_of_wrong_parameters_have_a_size(tmp_path: Path) -> None:
    """An error may repeat what a client has sent: those of thousands of lines are not held in memory."""

    def check_body(body: bytes) -> None:
        raise errors.InvalidRequest("x" * 600_000)

    path = tmp_path / "in"
    path.write_bytes(b"".join(map(request, NAMES)))
    batch = Batch(id="b", owner="", kind="openai", endpoint="/x", input="i", created=0, window="24h", expires=1)
    with path.open("rb") as file:
        reader = InputReader(
            file.fileno(),
            batch,
            max_requests=100,
            max_line_size=10_000,
            check_line=Host().check_line,
            check_body=check_body,
        )
        assert 20 == len(reader.read(100))
        reader.close()
    assert (1, []) == (len(reader.rejected), reader.problems)


@every_case("store", ["dir", "dir:/somewhere"])
def test_a_folder_that_replicas_share(store: str) -> None:
    """Who has a folder with PostgreSQL learns at the start that replicas need a bucket."""
    settings = Settings(
        files=FilesSettings(store=store), batches=BatchesSettings(store="postgresql://nobody@127.0.0.1:1/none")
    )
    with pytest.raises(errors.ConfigurationError, match=r"--files-store: .* bucket.* s3://BUCKET.* not supported"):
        create_app(settings)


async def test_services_with_different_buckets(shared: Place, s3: Callable[[], Bucket]) -> None:
    """With another bucket than the others on its PostgreSQL, a service takes no batch and no file."""
    other = Process(shared._replace(files=s3().url))
    async with process(shared) as one:
        done = await one.ended(await one.batch(NAMES[:1]))
        with pytest.raises(errors.ConfigurationError, match="not the bucket"):
            await other.files.write(done.input)
        assert isinstance(other.files, BucketFiles)
        assert await one.files.store.files.bucket_id() == other.files._bucket_id
    await other.files.store.close()


def test_locks_of_processes(tmp_path: Path) -> None:
    """A process is dead when nobody has its lock; one of another machine, which has none here, is not."""
    locks = Process(tmp_path).files.locks
    lock = locks.lock("a")
    assert not locks.is_stale("a")
    os.close(lock)
    assert locks.is_stale("a")
    assert not locks.is_stale("of another machine")
    assert ["a.lock"] == list(locks.stale_before(time.time() + 1))


async def test_small_oddities_of_inputs(tmp_path: Path) -> None:
    """A byte order mark, carriage returns and empty lines are no errors, and a last line needs no end."""
    async with process(tmp_path) as one:
        content = b"\xef\xbb\xbf" + request("a").rstrip() + b"\r\n\r\n" + request("b").rstrip()
        assert {"a": [200], "b": [200]} == one.results(await one.ended(await one.batch(content)))


async def test_a_cancelled_batch_keeps_its_results(place: Place) -> None:
    """Lines that run end, the others never run, and each has one result."""
    async with process(place) as one:
        one.host.may_answer.clear()
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: one.host.running)
        await one.files.store.batches.change(batch.id, lambda found: found.set_status("cancelling"))
        one.runner.wake()
        await one.until(batch, lambda _: one.runner._batches[batch.id].batch.status == "cancelling")
        running = set(one.host.running)
        one.host.may_answer.set()
        done = await one.ended(batch)
        assert "cancelled" == done.status
        expected = {name: [200] if name in running else ["batch_cancelled"] for name in NAMES}
        assert expected == one.results(done)


async def test_an_expired_batch_aborts_what_runs(place: Place) -> None:
    """At the end of its window a batch ends; what ran then has no result but that."""
    async with process(place) as one:
        one.host.may_answer.clear()
        batch = await one.batch(NAMES, hours=0.05 / 3600)
        done = await one.ended(batch)
        assert "expired" == done.status
        assert {name: ["batch_expired"] for name in NAMES} == one.results(done)
        assert not one.host.running


async def test_a_batch_that_is_to_end_does_not_wait_for_triton(tmp_path: Path) -> None:
    """A batch whose models cannot be checked waits, but not when it is cancelled or expires."""
    async with process(tmp_path) as one:
        one.host.away = True
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: one.host.checks > 1)
        await one.files.store.batches.change(batch.id, lambda found: found.set_status("cancelling"))
        done = await one.ended(batch)
        assert {name: ["batch_cancelled"] for name in NAMES} == one.results(done)
        late = await one.ended(await one.batch(NAMES, name="batch_2", hours=0.05 / 3600))
        assert {name: ["batch_expired"] for name in NAMES} == one.results(late)


async def test_failing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that fails while the tables cannot be written fails as soon as they can."""
    one = Process(tmp_path)
    refusals, finish = 0, one.files.store.batches.end

    async def refused(*given: Any) -> Any:
        nonlocal refusals
        refusals += 1
        if refusals < 3:
            raise errors.ServiceOverloaded("no")
        return await finish(*given)

    monkeypatch.setattr(one.files.store.batches, "end", refused)
    batch = await one.batch(NAMES)
    (one.files.folder / batch.input).unlink()
    # Not earlier: a file that is open can be read on.
    one.start()
    done = await one.ended(batch)
    assert ("failed", "input_file_missing") == (done.status, done.problems[0].code)
    assert 3 == refusals
    await one.stop()


async def test_lines_are_tried_again(place: Place) -> None:
    """What another attempt may change is tried three times more; what it cannot change is not."""
    async with process(place) as one:
        host = one.host
        host.answers = {
            "id-0": [errors.UpstreamError("no")] * 3,
            "id-1": [errors.UpstreamTimeout("no")] * 4,
            "id-2": [errors.InvalidRequest("no")],
            "id-3": [errors.ServiceOverloaded("no")] * 6,
            "id-4": [errors.UpstreamUnavailable("no")],
        }
        done = await one.ended(await one.batch(NAMES[:6]))
        found = one.results(done)
        assert [[200], [504], [400], [200], [200], [200]] == [found[name] for name in NAMES[:6]]
        assert [4, 4, 1, 7, 2, 1] == [host.calls[name] for name in NAMES[:6]]


async def test_live_requests_that_take_the_room_are_no_overload(tmp_path: Path) -> None:
    """A line that finds its room taken waits again, and no fewer lines run for that."""
    async with process(tmp_path) as one:
        one.host.answers = {"id-0": [errors.ServiceOverloaded("no")] * 9}
        assert 20 == (await one.ended(await one.batch(NAMES))).succeeded
        assert (10, 4) == (one.host.calls["id-0"], one.runner._limits.allowed()["M"])


async def test_a_model_that_is_away_pauses_its_lines(tmp_path: Path) -> None:
    """Lines wait while their model is not served, and others go on."""
    async with process(tmp_path) as one:
        one.host.busy = True
        batch = await one.batch(b"".join(request(name, "n" if name == "id-0" else "m") for name in NAMES))
        await one.until(batch, lambda found: found.status == "in_progress")
        del one.host.served["n"]
        one.host.busy = False
        await one.until(batch, lambda found: found.succeeded == 19)
        assert "id-0" not in one.host.calls
        one.host.served["n"] = "N"
        assert 20 == (await one.ended(batch)).succeeded


def _may_start(one: Process, batch: Batch) -> bool:
    """Return whether lines of a batch are claimed, and its input is open: they start when there is room."""
    running = one.runner._batches.get(batch.id)
    return running is not None and running.window > 0 and running.input >= 0


async def test_owners_take_turns(tmp_path: Path) -> None:
    """A small batch of one owner does not wait for a large one of another."""
    async with process(tmp_path) as one:
        one.host.busy, one.host.max_running = True, 1
        large = await one.batch([f"large-{number}" for number in range(100)], name="batch_1")
        small = await one.batch(["small-0", "small-1"], name="batch_2", owner="you")
        for batch in (large, small):
            await one.until(batch, lambda found: _may_start(one, found))
        one.host.busy = False
        assert "completed" == (await one.ended(small)).status
        last = [name for _, name in one.host.order].index("small-1")
        assert last < 10
        assert 100 == (await one.ended(large)).succeeded


async def test_each_owner_has_every_other_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the runner finds no room, two owners have their turns in order, and batches of one by age."""
    async with process(tmp_path) as one:
        one.host.busy, one.host.max_running = True, 1
        mine = [await one.batch([f"{name}-{line}" for line in range(2)], name=f"batch_{name}") for name in "ab"]
        yours = await one.batch([f"c-{line}" for line in range(3)], name="batch_c", owner="you")
        for batch in [*mine, yours]:
            await one.until(batch, lambda found: _may_start(one, found))
        await one.until(yours, lambda _: sum(running.window for running in one.runner._batches.values()) == 7)
        pick = one.runner._schedule.pick

        async def pick_at_the_second_look() -> Any:
            one.host.busy = True
            assert {} == await pick()
            one.host.busy = False
            return await pick()

        monkeypatch.setattr(one.runner._schedule, "pick", pick_at_the_second_look)
        for batch in [*mine, yours]:
            await one.ended(batch)
        assert ["a-0", "c-0", "a-1", "c-1", "b-0", "c-2", "b-1"] == [name for _, name in one.host.order]


async def test_a_removed_key_ends_its_batches(place: Place) -> None:
    """A batch whose key is gone fails."""
    async with process(place) as one:
        one.host.busy = True
        batch = await one.batch(NAMES)
        await one.until(batch, lambda found: found.status == "in_progress")
        one.host.owners.clear()
        done = await one.ended(batch)
        assert ("failed", "key_revoked") == (done.status, done.problems[0].code)


@every_case("limit, at_once", [
    (RateLimit(requests_per_minute=3), 3),
    (RateLimit(tokens_per_minute=30), 4),
    (RateLimit(concurrent_requests=2), 2),
])  # fmt: skip
async def test_lines_wait_for_the_limits_of_their_key(limit: RateLimit, at_once: int, clock: Clock) -> None:
    """
    No more lines of a key begin in a minute, or run at the same time, than its limits allow; the others wait.

    Lines of another key go on meanwhile. Waiting costs no attempt, and every line succeeds in the end.
    """
    clock.run()
    with tempfile.TemporaryDirectory() as folder:
        async with process(Path(folder)) as one:
            one.host.limit, one.host.limits = limit, RateLimits(clock)
            # What lines use is known when they have ended.
            one.host.max_running = 2
            names = [f"mine-{number}" for number in range(5)]
            mine = await one.batch(names)
            yours = await one.batch(["yours"], owner="you", name="batch_2")
            await one.ended(yours)
            per_minute = limit.concurrent_requests is None
            if per_minute:
                # Those that were admitted together with one that has to wait may not have begun yet.
                await one.until(mine, lambda _: one.runner._keys.must_wait(OWNER) and _begun(one.host, "mine") >= 3)
                assert _begun(one.host, "mine") <= at_once + 1
            while (await one.seen(mine)).open:
                if per_minute and not one.host.running:
                    # Less than an operation of the store may take.
                    clock.advance(4)
                await asyncio.sleep(0.002)
            done = await one.seen(mine)
            assert (5, 0) == (done.succeeded, done.failed)
            assert dict.fromkeys(names, 1) == {name: one.host.calls[name] for name in names}
            assert one.host.most_seen <= max(at_once, 1) + 1


def _begun(host: Host, beginning: str) -> int:
    """Return how many lines with such names have begun."""
    return sum(name.startswith(beginning) for _, name in host.order)


def _asks(host: Host, name: str, _: Batch) -> bool:
    return name in host.running


async def _interrupted(
    place: Place, names: Sequence[str], times: int, end: Callable[[Process], Awaitable[None]]
) -> Batch:
    """Return a batch of *names* whose process ended in the way *end* for so many *times*, while its first line ran."""
    batch: Batch | None = None
    for _ in range(times):
        one = Process(place)
        one.host.may_answer.clear()
        one.start()
        batch = batch or await one.batch(names)
        await one.until(batch, partial(_asks, one.host, names[0]))
        await end(one)
    assert batch is not None
    return batch


@pytest.mark.parametrize("table, step", [("lines", "finish"), ("batches", "end")])
async def test_a_process_that_dies_before_it_commits(
    tmp_path: Path, table: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written and never marked counts for nothing: the next process does it again, and it is there once."""
    one, reached = Process(tmp_path), asyncio.Event()
    if table == "lines":
        one.host.may_answer.clear()

    async def never(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    one.start()
    batch = await one.batch(NAMES)
    monkeypatch.setattr(getattr(one.files.store, table), step, never)
    one.host.may_answer.set()
    async with asyncio.timeout(120):
        await reached.wait()
    written = [path for path in one.files.folder.iterdir() if path.suffix == ".part" and path.stat().st_size]
    assert written
    await one.die()
    async with process(tmp_path) as other:
        done = await other.ended(batch)
        assert {name: [200] for name in NAMES} == other.results(done)
        # None of them had ended, or all.
        assert (20 if table == "lines" else 0) == other.host.calls.total()


async def test_a_line_that_ends_processes(place: Place) -> None:
    """A line that ran alone when three processes died is an error; those that ran beside it at first are answered."""
    batch = await _interrupted(place, NAMES[:1], 4, Process.die)
    async with process(place) as last:
        done = await last.ended(batch)
        found = last.results(done)
        assert {"id-0": [500]} == found
        assert "id-0" not in last.host.calls


async def test_a_service_that_stops_counts_no_attempt(place: Place) -> None:
    """Lines that run when the service ends wait again, as often as it does."""
    batch = await _interrupted(place, NAMES[:2], 5, Process.stop)
    async with process(place) as last:
        assert 2 == (await last.ended(batch)).succeeded


async def test_whoever_finds_a_dead_process_may_die_too(tmp_path: Path) -> None:
    """When a process dies between finding another one dead and taking its batches, the next one still takes them."""
    batch = await _interrupted(local(tmp_path), NAMES[:2], 1, Process.die)
    second = Process(tmp_path)
    (dead,) = await second.files.store.leases.holders()
    assert second.files.locks.is_stale(dead)
    await second.files.store.close()
    async with process(tmp_path) as third:
        assert 2 == (await third.ended(batch)).succeeded
        assert not third.files.locks.is_stale(dead)


async def test_leases_have_the_clock_of_the_database(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine whose clock is ahead takes no batch that another one runs."""
    async with process(shared) as one:
        one.host.may_answer.clear()
        batch = await one.batch(NAMES)
        await one.until(batch, lambda _: one.host.running)
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", partial(float, time.time() + 3600))
            assert {one.runner._claims._holder} == set(await one.files.store.leases.holders())
            now = (await one.files.store.leases.overview("other")).clock
            assert await one.files.store.leases.claim("other", 60, now=now) is None
            assert {} == await one.files.store.leases.end_expired_parts(now)
        one.host.may_answer.set()
        assert 20 == (await one.ended(batch)).succeeded


async def test_a_frozen_process_writes_nothing(place: Place) -> None:
    """Whoever wakes up after another process has taken over changes nothing."""
    frozen = Process(place)
    frozen.host.may_answer.clear()
    frozen.start()
    batch = await frozen.batch(NAMES)
    await frozen.until(batch, lambda _: frozen.host.running)
    held = frozen.runner._batches[batch.id]
    assert frozen.task is not None
    frozen.task.cancel()
    async with process(place) as other:
        # As if its lease had ended.
        await other.files.store.leases.expire_leases(frozen.runner._claims._holder)
        done = await other.ended(batch)
        assert {name: [200] for name in NAMES} == other.results(done)
        assert 20 == done.succeeded
        frozen.host.may_answer.set()
        await asyncio.wait([task for task in [held.task] if task is not None], timeout=120)
        with pytest.raises(LeaseLost):
            await frozen.files.store.lines.mark_running(held.part, [1])
        assert done == await other.seen(batch)
        assert {name: [200] for name in NAMES} == other.results(done)
    await frozen.die()


def _has_written(one: Process, lines: int, batch: Batch) -> bool:
    held = one.runner._batches.get(batch.id)
    return held is not None and len(held.written) == lines


async def _with_a_line_that_waits(place: Place, checkpoint: float) -> tuple[Process, Batch]:
    """Return a process, and its batch, of which the last line does not begin: its model is gone."""
    one = Process(place, checkpoint=checkpoint)
    one.host.busy = True
    one.start()
    batch = await one.batch(b"".join(request(name, "n" if name == "id-19" else "m") for name in NAMES))
    await one.until(batch, lambda found: found.status == "in_progress")
    del one.host.served["n"]
    one.host.busy = False
    return one, batch


async def test_answers_that_are_not_uploaded_are_asked_for_again(shared: Place) -> None:
    """With a bucket, lines whose answers are lost with the machine run again, and are not to blame for its death."""
    one, batch = await _with_a_line_that_waits(shared, 1000)
    for _ in range(4):
        await one.until(batch, partial(_has_written, one, 19))
        assert 0 == (await one.seen(batch)).succeeded
        await one.die()
        one = Process(shared, checkpoint=1000)
        del one.host.served["n"]
        one.start()
    one.host.served["n"] = "N"
    done = await one.ended(batch)
    assert {name: [200] for name in NAMES} == one.results(done)
    assert 20 == one.host.calls.total()
    await one.stop()


async def test_uploaded_answers_are_kept(shared: Place) -> None:
    """With a bucket, what was uploaded before the machine was lost is not asked for again."""
    first, batch = await _with_a_line_that_waits(shared, 0.001)
    await first.until(batch, lambda found: found.succeeded == 19)
    await first.die()
    async with process(shared) as last:
        done = await last.ended(batch)
        assert {name: [200] for name in NAMES} == last.results(done)
        assert {"id-19"} == last.host.calls.keys()
        await last.leaves(done.input, done.output)


async def test_a_line_that_waits_for_another_attempt(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not run when the process dies is not to blame, however often that is."""
    batch: Batch | None = None
    with monkeypatch.context() as patch:
        patch.setattr(timing, "RETRY", 1000)
        for _ in range(4):
            one = Process(place)
            one.host.answers = {"id-0": [errors.ServiceOverloaded("no")]}
            one.start()
            batch = batch or await one.batch(NAMES[:1])
            async with asyncio.timeout(120):
                while not one.host.calls or (await one.files.store.lines.unfinished(batch, 0, 1))[0].deaths:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            await one.die()
    assert batch is not None
    async with process(place) as last:
        assert {"id-0": [200]} == last.results(await last.ended(batch))


async def test_a_service_that_stops_while_a_line_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No death counts against a line that waits for another attempt."""
    monkeypatch.setattr(timing, "RETRY", 1000)
    one = Process(tmp_path)
    one.host.answers = {"id-0": [errors.ServiceOverloaded("no")]}
    one.start()
    batch = await one.batch(NAMES[:1])
    async with asyncio.timeout(120):
        while not one.host.calls or (await one.files.store.lines.unfinished(batch, 0, 1))[0].deaths:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    await one.stop()
    files = Process(tmp_path).files
    assert [(0, 0)] == [(line.deaths, line.max_group) for line in await files.store.lines.unfinished(batch, 0, 1)]
    await files.store.close()


async def test_two_processes_share_batches(place: Place) -> None:
    """Batches of two processes that run at the same time are answered once, whoever has them."""
    async with process(place) as one, process(place, one.host) as other:
        made = [await one.batch([f"{name}-{number}" for number in range(5)], name=f"batch_{name}") for name in range(6)]
        for batch in made:
            done = await other.ended(batch)
            assert ("completed", 5) == (done.status, done.succeeded)
            assert {f"{batch.id[6:]}-{number}": [200] for number in range(5)} == other.results(done)
        assert 30 == one.host.calls.total()


async def test_limits_hold_over_processes(place: Place) -> None:
    """Uploads and batches that two processes take at the same time exceed no limit together."""
    one, other = Process(place), Process(place)
    # Both are connected, and the tables are there.
    assert [] == [*await one.files.store.batches.open_ids(), *await other.files.store.batches.open_ids()]
    made = StoredFile(id="", owner=OWNER, purpose="", filename="", bytes=10, created=1, expires=None)
    reserved = [
        store.files.store.files.reserve(msgspec.structs.replace(made, id=f"file-{number}"), 35 + 2 * ROW_SIZE)
        for number, store in enumerate([one, other] * 5)
    ]
    assert 3 == sum(await asyncio.gather(*reserved))
    batch = Batch(
        id="", owner=OWNER, kind="anthropic", endpoint="/x", input="", created=1, window="24h", expires=1
    )  # fmt: skip
    added = [
        store.files.store.batches.add(
            msgspec.structs.replace(batch, id=f"batch_{number}", input=f"batch_{number}"), max_open=3, max_total=10**9
        )
        for number, store in enumerate([one, other] * 5)
    ]
    assert {"added": 3, "too many": 7} == Counter(await asyncio.gather(*added))
    # What is kept of them counts, too.
    last = msgspec.structs.replace(batch, id="batch_x", input="batch_x", owner="you")
    assert "no room" == await one.files.store.batches.add(
        msgspec.structs.replace(last, owner=OWNER), max_open=9, max_total=30
    )
    assert "added" == await one.files.store.batches.add(last, max_open=9, max_total=0)
    assert "no room" == await one.files.store.batches.add(
        msgspec.structs.replace(last, id="batch_y"), max_open=9, max_total=4095
    )
    for store in (one, other):
        await store.files.store.close()


@pytest.mark.parametrize("library, extra", [("obstore", "s3"), ("asyncpg", "postgresql")])
async def test_a_library_that_is_not_installed(
    library: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A store whose extra is not installed ends the start, with how to get it."""
    for name in {library, *(name for name in sys.modules if name.partition(".")[0] == library)}:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("triton_openai.batches.bucket", "triton_openai.storage.postgresql"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    files, batches = ("s3://bucket", "sqlite") if extra == "s3" else (f"dir:{tmp_path}", "postgresql://nobody@x/y")
    settings = Settings(files=FilesSettings(store=files), batches=BatchesSettings(store=batches))
    with pytest.raises(errors.ConfigurationError, match=rf"pip install 'triton-openai\[{extra}\]'"):
        create_app(settings)


async def test_a_bucket_that_is_away_pauses_batches(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing can be uploaded, batches wait; then they end, each line answered once."""
    async with process(shared) as one:
        upload, refusals = BucketFiles.upload, 0
        batch = await one.batch(NAMES)

        async def refused(*given: Any) -> None:
            nonlocal refusals
            refusals += 1
            if refusals < 4:
                raise errors.StoreUnavailable("no")
            await upload(*given)

        monkeypatch.setattr(BucketFiles, "upload", refused)
        done = await one.ended(batch)
        assert {name: [200] for name in NAMES} == one.results(done)
        assert 20 == one.host.calls.total()
        assert refusals > 4


async def test_a_batch_that_ends_while_leases_are_read(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that has ended is not among the open ones, which does not mean that another process has it."""
    async with process(place) as one:
        held, finish, looks = one.files.store.leases.overview, one.files.store.batches.end, 0

        async def counted(holder: str) -> Any:
            nonlocal looks
            found = await held(holder)
            looks += 1
            return found

        async def late(*given: Any) -> Batch:
            done: Batch = await finish(*given)
            before = looks
            while looks < before + 3:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.002)
            return done

        monkeypatch.setattr(one.files.store.leases, "overview", counted)
        monkeypatch.setattr(one.files.store.batches, "end", late)
        done = await one.ended(await one.batch(NAMES))
        assert {name: [200] for name in NAMES} == one.results(done)
        await one.leaves(done.input, done.output)


async def test_what_no_batch_needs_is_swept_from_the_bucket(shared: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired files, and what processes that were lost have left below a batch that has ended, are deleted."""
    async with process(shared) as one:
        done = await one.ended(await one.batch(NAMES))
        await one.leaves(done.input, done.output)
        assert isinstance(one.files, BucketFiles)
        await obstore.put_async(one.files.bucket, "batches/batch_1/7-0", b"late")
        one.host.busy = True
        waiting = await one.batch(NAMES[:1], name="batch_2", hours=24 * 365)
        await obstore.put_async(one.files.bucket, "batches/batch_2/7-0", b"of an open one")
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 31 * 86_400)
        await one.files.sweep()
        assert {done.input, waiting.input, "batches/batch_2/7-0"} == one.left()


def _full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("phase", ["validating", "claiming", "beginning", "writing", "marking", "finalizing", "ending"])
async def test_a_full_disk_pauses_batches(phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a batch is when the disk is full, it waits until there is room, and then each line is there once."""
    async with process(tmp_path) as one:
        store, full, refusals = one.files.store, True, 0
        owner, name = {
            "validating": (store.lines, "add"),
            "claiming": (store.leases, "claim"),
            "beginning": (store.lines, "mark_running"),
            "writing": (results_module, "write_at"),
            "marking": (store.lines, "finish"),
            "finalizing": (files_module, "write_at"),
            "ending": (store.batches, "end"),
        }[phase]
        usual: Callable[..., Any] = getattr(owner, name)

        def refuse() -> None:
            nonlocal refusals
            if full:
                refusals += 1
                raise _full() if name == "write_at" else failed_write(_full())

        def write_at(*given: Any) -> None:
            refuse()
            usual(*given)

        async def operation(*given: Any, **options: Any) -> Any:
            refuse()
            return await usual(*given, **options)

        # Its lines do not begin by then.
        one.host.busy = True
        batch = await one.batch(NAMES)
        monkeypatch.setattr(owner, name, write_at if name == "write_at" else operation)
        one.host.busy = False
        if phase in ("claiming", "validating"):
            batch = await one.batch(NAMES, name="batch_2")
        await one.until(batch, lambda found: refusals > 1)
        assert (await one.seen(batch)).open
        full = False
        done = await one.ended(batch)
        assert {name: [200] for name in NAMES} == one.results(done)
        assert 20 <= one.host.calls.total() <= 40


async def counted(one: Process, **expected: float) -> None:
    """Wait until metrics of *one* are as *expected*: names without their prefix, and values of labels behind them."""

    def found() -> dict[str, float]:
        samples = [sample for metric in one.metrics.collect() for sample in metric.samples]
        prefix = "triton_openai_batch"
        names = [
            "_".join([sample.name.removeprefix(prefix), *sample.labels.values()]).lstrip("_") for sample in samples
        ]
        return {name: sample.value for name, sample in zip(names, samples, strict=True)}

    async with asyncio.timeout(120):
        while not expected.items() <= found().items():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)


async def test_an_operator_sees_batches_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that run, the limit, results by their kind, ends by their status, and batches that wait for the disk."""
    async with process(tmp_path) as one:
        one.host.refused, full = {"id-1"}, False

        def write_at(*given: Any) -> None:
            if full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            files_module.write_at(*given)

        monkeypatch.setattr(results_module, "write_at", write_at)
        one.host.may_answer.clear()
        batch = await one.batch(NAMES[:3])
        await one.until(batch, lambda _: len(one.host.running) == 3)
        await counted(one, running=3, limit_M=4, es_paused=0)
        full = True
        one.host.may_answer.set()
        await counted(one, running=0, es_paused=1)
        assert 0 == (await one.seen(batch)).succeeded
        full = False
        await one.ended(batch)
        lines = {"lines_total_succeeded": 2.0, "lines_total_failed": 1.0}
        await counted(one, **lines, es_ended_total_completed=1, es_paused=0)
        one.host.busy = True
        other = await one.batch(NAMES[:5], name="batch_2")
        await one.until(other, lambda found: found.status == "in_progress")
        await one.files.store.batches.change(other.id, lambda found: found.set_status("cancelling"))
        one.runner.wake()
        await one.ended(other)
        await counted(one, **lines, lines_total_never_ran=5, es_ended_total_cancelled=1)


async def test_an_input_that_is_gone(tmp_path: Path) -> None:
    """A batch whose file somebody removed from the disk fails and says so."""
    async with process(tmp_path) as one:
        one.host.busy = True
        batch = await one.batch(NAMES)
        (one.files.folder / batch.input).unlink()
        one.host.busy = False
        done = await one.ended(batch)
        assert done.status in ("failed", "completed")


def test_limits(clock: Clock) -> None:
    """The number of lines grows by one for each window without a refusal, and is halved by one."""
    limit = Limit(64)
    limit.running = 64
    assert 8 == limit.allowed
    for _ in range(16):
        limit.succeeded()
    assert 24 == limit.allowed
    began = clock()
    clock.advance(1)
    limit.overloaded(began)
    limit.overloaded(began)
    assert 12 == limit.allowed
    limit.running = 12
    for _ in range(12):
        limit.succeeded()
    assert 13 == limit.allowed
    for _ in range(4):
        clock.advance(1)
        limit.overloaded(clock())
    assert 1 == limit.allowed
    limit.running = 0
    assert limit.has_room


@pytest.mark.parametrize(
    "hours, now, expected",
    [("20:00-06:00", "23:00", True), ("20:00-06:00", "06:00", False), ("08:00-09:00", "08:30", True)],
)
def test_hours(hours: str, now: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hours may pass midnight."""
    monkeypatch.setattr(time, "strftime", lambda _: now)
    assert expected is is_open(hours)


class Life(RuleBasedStateMachine):
    """
    A batch is made, cancelled, runs out of time, and its process dies and another one goes on, in any order.

    By the contract, each line then has one result: what it was answered, or that it never ran. No line that was marked
    as ended runs again.
    """

    def __init__(self, shared: Place | None = None) -> None:
        super().__init__()
        self._loop = asyncio.Runner()
        self._patch = pytest.MonkeyPatch()
        for name in ("POLL", "NOTIFIED_POLL", "WATCH", "SLOTS", "GROUP", "FAILURE_PAUSE", "RETRY", "FIRST_PAUSE"):
            self._patch.setattr(timing, name, 0.001)
        # After a leap of the clock, nothing is claimed for a while.
        self._patch.setattr(claims, "_RENEWALS", 1000)
        # Processes die often here, and lines are not to blame.
        self._patch.setattr(quarantine, "_MAX_PROCESS_DEATHS", 1000)
        self._now = time.time
        self._ahead = 0.0
        self._patch.setattr(time, "time", lambda: self._now() + self._ahead)
        self._folder = tempfile.TemporaryDirectory()
        self._place = shared or local(Path(self._folder.name))
        self._made: list[Batch] = []
        self._names: dict[str, list[str]] = {}
        self._may_cancel: set[str] = set()
        self._may_expire: set[str] = set()
        #: Calls of lines by processes that have died, and lines that had ended by then.
        self._ended_before: dict[str, set[int]] = {}
        self._loop.run(self._begin())

    async def _begin(self) -> None:
        self.process = Process(self._place)
        self.process.start()

    @initialize()
    def first(self) -> None:
        """Make a batch."""
        self._loop.run(self._create(7, 24))

    async def _create(self, lines: int, hours: float) -> None:
        number = len(self._made)
        names = [f"{number}-{line}" for line in range(lines)]
        # Each third line is refused. Lines may run before the call that makes their batch returns.
        self.process.host.refused.update(names[::3])
        batch = await self.process.batch(names, name=f"batch_{number}", hours=hours)
        self._made.append(batch)
        self._names[batch.id] = names

    @precondition(lambda self: len(self._made) < 4)
    @rule(lines=st.integers(1, 12), hours=st.sampled_from([1, 24]))
    def create(self, lines: int, hours: float) -> None:
        """Make another batch."""
        self._loop.run(self._create(lines, hours))

    @rule(turns=st.integers(0, 40), answers=st.booleans())
    def work(self, turns: int, answers: bool) -> None:
        """Let the service work for a while; what it asks may have no answer yet."""

        async def work() -> None:
            host = self.process.host
            (host.may_answer.set if answers else host.may_answer.clear)()
            for _ in range(turns):
                await asyncio.sleep(0.0005)

        self._loop.run(work())

    @rule(number=st.integers(0, 3))
    def cancel(self, number: int) -> None:
        """Cancel a batch, as the API does."""

        async def cancel() -> None:
            def change(found: Batch) -> None:
                if found.status in ("validating", "in_progress"):
                    found.set_status("cancelling")
                    self._may_cancel.add(found.id)

            if number < len(self._made):
                await self.process.files.store.batches.change(self._made[number].id, change)
                self.process.runner.wake()

        self._loop.run(cancel())

    @rule()
    def expire(self) -> None:
        """Let two hours pass."""
        self._ahead += 7200
        self._may_expire |= {batch.id for batch in self._made if batch.window and batch.expires < time.time()}

    @rule(kills=st.booleans())
    def restart(self, kills: bool) -> None:
        """End the process, in one way or the other, and start another one."""

        async def restart() -> None:
            old = self.process
            await (old.die() if kills else old.stop())
            self.process = Process(self._place)
            self.process.host.refused = old.host.refused
            for batch in self._made:
                if (await self.process.seen(batch)).open:
                    ended = {row.number for row in await self.process.files.store.lines.results(batch, 0, 1000)}
                    self._ended_before[batch.id] = ended
            self.process.start()

        self._loop.run(restart())
        self._check_calls()

    def _check_calls(self) -> None:
        """No line that had ended when the process began has run in it."""
        for batch in self._made:
            for number in self._ended_before.get(batch.id, ()):
                name = self._names[batch.id][number - 1]
                assert name not in self.process.host.calls

    def teardown(self) -> None:
        """Let all end, and look at the files."""

        async def end() -> None:
            host = self.process.host
            host.may_answer.set()
            for batch in self._made:
                done = await self.process.ended(batch)
                found = self.process.results(done)
                names = self._names[batch.id]
                outcomes = {"completed"}
                if batch.id in self._may_cancel:
                    outcomes.add("cancelled")
                if batch.id in self._may_expire:
                    outcomes.add("expired")
                assert done.status in outcomes
                if done.total:
                    assert set(names) == found.keys()
                code = "batch_cancelled" if done.status == "cancelled" else "batch_expired"
                for place, name in enumerate(names):
                    answered = [400] if place % 3 == 0 else [200]
                    never = [[code]] if done.status != "completed" else []
                    assert not done.total or found[name] in [answered, *never]
                results = [result for many in found.values() for result in many]
                assert (done.succeeded, done.failed) == (results.count(200), results.count(400))
            await self.process.stop()

        try:
            self._loop.run(end())
            self._check_calls()
        finally:
            self._patch.undo()
            self._loop.close()
            self._folder.cleanup()


LIVES = settings(max_examples=examples(15, few=5), stateful_step_count=15, deadline=None, phases=[Phase.generate])


@pytest.mark.sampled
def test_life() -> None:
    """On one machine, batches are as the contract says whatever happens."""
    run_state_machine_as_test(Life, settings=LIVES)


def test_life_on_several_machines(postgresql: Server, s3: Callable[[], Bucket], bucket: Bucket, tmp_path: Path) -> None:
    """With a bucket and PostgreSQL, so they are."""

    class SharedLife(Life):
        def __init__(self) -> None:
            super().__init__(Place(tmp_path, s3().url, postgresql.url()))

    run_state_machine_as_test(SharedLife, settings=settings(LIVES, max_examples=5))
