"""
A service that is killed while it runs a batch, again and again, and the disk that is full meanwhile.

Workers that share batches, of which one is killed, and services that do, of which one is frozen.

``BATCH_KILLS=50`` makes the test the long one: 2,000 lines and as many kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import sqlite3
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
from openai import OpenAI

from tests.clients.service import Service, serving, steered, until
from tests.faults.surroundings import Own
from tests.faults.test_workers import workers
from tests.stopped import stop_process
from tests.store_fixture import Bucket, Server
from tests.triton_fixture import frozen

KILLS = int(os.environ.get("BATCH_KILLS", "5"))
LINES = 40 * KILLS
MODEL = "vllm_model"
# Lines of a batch that takes many seconds.
_MANY = 200


def ended(state: Path) -> set[int]:
    """Return the numbers of the lines that the tables say have ended."""
    with contextlib.closing(sqlite3.connect(state / "triton-openai" / "batches.sqlite")) as tables:
        return {number for (number,) in tables.execute("SELECT number FROM line WHERE state > 1")}


def calls(own: Own) -> Counter[int]:
    """Return how often Triton was asked for each line."""
    found: Counter[int] = Counter()
    for event in own.record.events(model=MODEL, event="request"):
        for tensor in event["inputs"].values():
            if tensor["dtype"] == "BYTES":
                for text in tensor["value"]:
                    if isinstance(text, str) and text.startswith("line "):
                        found[int(text.split()[1])] += 1
    return found


def request(number: int, delay: int = 2) -> bytes:
    """Return a line of the input, whose words take *delay* milliseconds each; each seventh is refused."""
    text = steered(f"line {number}", text="one two", delay_ms=delay)
    body = {"model": MODEL, "prompt": text, "max_tokens": -1 if number % 7 == 0 else 50}
    line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def half_an_upload(service: Service) -> None:
    """Send a part of a file, whose rest never comes."""
    with socket.create_connection((service.host, service.port)) as sock:
        head = "POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n"
        sock.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
        sock.sendall(b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 300_000)
        files = Path(service.log).parent / "state" / "triton-openai" / "files"
        until(lambda: files.exists() and [path for path in files.iterdir() if path.suffix == ".new"])


def test_kills(own: Own, tmp_path: Path) -> None:
    """Each line is in the files once whenever the service is killed; none that had ended runs again."""
    draw = random.Random(7)
    state = tmp_path / "state"
    options = ("--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer))
    before: dict[int, int] = {}
    with serving(tmp_path, *options) as service, OpenAI(base_url=service.base_url, api_key="none") as client:
        half_an_upload(service)
        file = client.files.create(file=("in", b"".join(map(request, range(1, LINES + 1)))), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        service.process.send_signal(signal.SIGKILL)
    for turn in range(KILLS):
        # Some kills come at once: while it reads the input, or goes on.
        asked = sum(calls(own).values()) + draw.choice((0, 0, draw.randrange(LINES // KILLS)))
        with serving(tmp_path, *options) as service, OpenAI(base_url=service.base_url, api_key="none") as client:
            if turn % 5 == 2 or turn == KILLS - 1:
                stop_when(service, state, unmarked if turn < KILLS - 1 else finalizing)
                service.process.send_signal(signal.SIGKILL)
                service.process.communicate()
            else:
                kill(own, service, client, batch.id, asked)
        found = calls(own)
        for number in ended(state):
            before.setdefault(number, found[number])
    with serving(tmp_path, *options) as service, OpenAI(base_url=service.base_url, api_key="none") as client:
        done: Any = until(lambda: (found := client.batches.retrieve(batch.id)).completed_at and found, LINES)
        output, failed = (
            [json.loads(line) for line in client.files.content(one).text.splitlines()]
            for one in (done.output_file_id, done.error_file_id)
        )
        # They are deleted when the batch has ended.
        until(lambda: not [path for path in (state / "triton-openai" / "files").iterdir() if path.suffix == ".part"])
        assert [] == service.complaints()
    assert LINES == len(output) + len(failed) == done.request_counts.total
    names = Counter(one["custom_id"] for one in output + failed)
    assert {f"id-{number}": 1 for number in range(1, LINES + 1)} == names
    assert (len(output), len(failed)) == (done.request_counts.completed, done.request_counts.failed)
    # No line pays for the kills.
    assert {f"id-{number}": 400 for number in range(7, LINES + 1, 7)} == {
        one["custom_id"]: one["response"]["status_code"] for one in failed
    }
    after = calls(own)
    assert {} == {number: (count, after[number]) for number, count in before.items() if after[number] != count}


def change(own: Own, what: str) -> None:
    """Have Triton load or unload the model of the lines."""
    url = f"{own.url('http')}/v2/repository/models/{MODEL}/{what}"
    with urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=120) as response:
        assert 200 == response.status


def test_a_model_that_is_unloaded_for_a_while(own: Own, tmp_path: Path) -> None:
    """Lines whose model is away wait, however many run at that moment, and all are answered when it is back."""
    options = ("--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer))
    # As by default: the list of models is older than what happens.
    settings = {"triton": {"refresh_interval": 60}, "batches": {"max_running": 16}}
    with (
        serving(tmp_path, *options, settings=settings) as service,
        OpenAI(base_url=service.base_url, api_key="none") as client,
    ):
        # Some of them have to be left when the first one has been seen, also on a busy machine.
        batch = started(client, 200_001, _MANY, 300)
        until(lambda: _counted(client, batch.id))
        change(own, "unload")
        until(lambda: any("model away, lines wait" in line for line in service.log_lines()))
        change(own, "load")
        done: Any = until(partial(_completed, client, batch.id), 120)
        numbers = range(200_001, 200_001 + _MANY)
        refused = sum(number % 7 == 0 for number in numbers)
        assert (_MANY - refused, refused) == (done.request_counts.completed, done.request_counts.failed)
        assert {f"id-{number}": 1 for number in numbers} == results(client, done)
        assert [] == service.complaints()


def results(client: OpenAI, batch: Any) -> Counter[str]:
    """Return how often each ``custom_id`` is in the files of *batch*."""
    files = [client.files.content(one).text for one in (batch.output_file_id, batch.error_file_id) if one is not None]
    return Counter(json.loads(line)["custom_id"] for text in files for line in text.splitlines())


def started(client: OpenAI, first: int, lines: int, delay: int = 2) -> Any:
    """Make a batch of *lines* that begin with the number *first*."""
    content = b"".join([request(number, delay) for number in range(first, first + lines)])
    file = client.files.create(file=("in", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")


def held(state: Path, pid: int) -> Mapping[str, Mapping[int, int]]:
    """Return the batches of which the process *pid* has lines, by its lock, and those lines with their states."""
    names = [Path(os.path.realpath(one)) for one in Path(f"/proc/{pid}/fd").iterdir()]
    found: dict[str, dict[int, int]] = {}
    with contextlib.closing(sqlite3.connect(state / "triton-openai" / "batches.sqlite")) as tables:
        query = (
            "SELECT line.batch, line.number, line.state FROM lease JOIN line ON line.batch = lease.batch"
            " AND line.part = lease.part WHERE lease.holder = ? AND line.state = 1"
        )
        for name in (one.stem for one in names if one.suffix == ".lock"):
            for batch, number, line in tables.execute(query, (name,)):
                found.setdefault(batch, {})[number] = line
    return found


def _busy(state: Path, pids: Sequence[int], client: OpenAI, batches: Sequence[str]) -> Sequence[int]:
    """Return the processes that have lines, or all when *batches* have ended."""
    busy = [pid for pid in pids if held(state, pid)]
    return busy or (pids if all(_completed(client, batch) for batch in batches) else [])


def test_workers_share_batches(own: Own, tmp_path: Path) -> None:
    """When a worker is killed, another one runs its lines; no line runs again but those that ran then."""
    state, lines = tmp_path / "state", 60
    options = ("--workers", "2", "--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer))
    with serving(tmp_path, *options) as service, OpenAI(base_url=service.base_url, api_key="none") as client:
        already = calls(own)
        made: dict[str, int] = {}
        lost: Mapping[str, Mapping[int, int]] = {}
        while not lost:
            for _ in range(4):
                first = 10_000 + lines * len(made)
                made[started(client, first, lines, 20).id] = first
            pids = [*workers(service).values()]
            pid = until(partial(_busy, state, pids, client, [*made]))[0]
            stop_process(pid)
            # They may all have ended by now.
            lost = held(state, pid)
            os.kill(pid, signal.SIGKILL if lost else signal.SIGCONT)
        for batch, first in made.items():
            done: Any = until(partial(_completed, client, batch), LINES)
            assert {f"id-{one}": 1 for one in range(first, first + lines)} == results(client, done)
        ran = {made[batch] + number - 1 for batch, found in lost.items() for number, line in found.items() if line == 1}
        assert {number for number, times in (calls(own) - already).items() if times > 1} <= ran
        until(lambda: any("leases of an ended process expired" in line for line in service.log_lines()))
        assert all('"event":"worker ended"' in line for line in service.complaints())


def _completed(client: OpenAI, batch: str) -> Any:
    found = client.batches.retrieve(batch)
    return found if found.completed_at else None


async def _fetch(url: str, batch: str) -> tuple[bool, set[int]]:
    """Return whether *batch* is open in PostgreSQL, and the numbers of its lines that have ended."""
    connection = await asyncpg.connect(url)
    try:
        ended_ones = "SELECT number FROM openai_batches.line WHERE batch = $1 AND state > 1"
        opened = await connection.fetchval("SELECT open = 1 FROM openai_batches.batch WHERE id = $1", batch)
        return opened, {row[0] for row in await connection.fetch(ended_ones, batch)}
    finally:
        await connection.close()


def _running(services: Sequence[Service], batch: str) -> Sequence[int]:
    """Return which of *services* have answered a line of *batch*."""
    mark = f'"batch":"{batch}","custom_id"'
    return [number for number, one in enumerate(services) if any(mark in line for line in one.log_lines())]


def _counted(client: OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return counts.completed if counts else 0


def test_a_frozen_replica(own: Own, postgresql: Server, bucket: Bucket, tmp_path: Path) -> None:
    """Of two services that share batches, one is frozen: the other one goes on, and nothing is twice or lost."""
    url, lines = postgresql.url(), 200
    options = ["--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer)]
    options += ["--batches-store", url, "--files-store", bucket.url]
    settings = {"batches": {"lease": 5, "checkpoint": 0.5}}
    folders, environ = [tmp_path / name for name in ("one", "other")], dict[str, Any](bucket.environ)
    with contextlib.ExitStack() as stack:
        services = []
        for folder in folders:
            folder.mkdir()
            services.append(stack.enter_context(serving(folder, *options, settings=settings, **environ)))
        clients = [stack.enter_context(OpenAI(base_url=one.base_url, api_key="none")) for one in services]
        first, already = 100_000, calls(own)
        while True:
            # Long enough for several uploads of results.
            batch = started(clients[0], first, lines, 400).id
            place = until(partial(_running, services, batch))[0]
            other = clients[1 - place]
            until(partial(_counted, other, batch))
            stop_process(services[place].process.pid)
            opened, kept = asyncio.run(_fetch(url, batch))
            if opened:
                break
            # It was over before.
            services[place].process.send_signal(signal.SIGCONT)
            first += lines
        before = {number: calls(own)[number + first - 1] for number in kept}
        done: Any = until(partial(_completed, other, batch), 120)
        services[place].process.send_signal(signal.SIGCONT)
        # The frozen one may have had no lines at that moment.
        until(lambda: done == clients[place].batches.retrieve(batch), 120)
        expected = {f"id-{number}": 1 for number in range(first, first + lines)}
        assert [expected] * 2 == [results(client, done) for client in clients]
        counts = done.request_counts
        assert lines == counts.total == counts.completed + counts.failed
        assert before == {number: calls(own)[number + first - 1] for number in kept}
        asked = calls(own) - already
        assert all(asked[number] for number in range(first, first + lines) if number % 7)
        assert [] == [line for service in services for line in service.complaints()]


def kill(own: Own, service: Service, client: OpenAI, batch: str, asked: int) -> None:
    """Kill *service* when Triton has been *asked* so often, or the batch has ended."""
    until(lambda: sum(calls(own).values()) >= asked or client.batches.retrieve(batch).completed_at)
    service.process.send_signal(signal.SIGKILL)
    service.process.communicate()


def stop_when(service: Service, state: Path, condition: Callable[[Path], bool]) -> None:
    """Stop *service* at one moment after the other, until *condition* holds or the batch has ended."""
    while True:
        stop_process(service.process.pid)
        # While it opens what a killed one has left, nobody else can read that.
        with contextlib.suppress(sqlite3.OperationalError):
            if condition(state) or not rows(state, "SELECT 1 FROM batch WHERE open = 1"):
                return
        before = cpu_time(service.process.pid)
        service.process.send_signal(signal.SIGCONT)
        # It gets on meanwhile, also on a busy machine; while it waits for Triton, it uses no CPU time.
        for _ in range(20):
            time.sleep(0.001)
            if cpu_time(service.process.pid) - before > 500_000:
                break


def cpu_time(pid: int) -> int:
    """Return the nanoseconds of CPU time that the main thread of a process has used."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def rows(state: Path, query: str) -> list[Any]:
    """Return what the tables have."""
    with contextlib.closing(sqlite3.connect(state / "triton-openai" / "batches.sqlite")) as tables:
        return tables.execute(query).fetchall()


def unmarked(state: Path) -> bool:
    """Return whether results are in a part whose lines are not marked yet."""
    marked = dict(rows(state, "SELECT part, MAX(part_place + part_length) FROM line WHERE state > 1 GROUP BY part"))
    leased = {part for (part,) in rows(state, "SELECT part FROM lease WHERE part > 0")}
    paths = {int(path.stem.rpartition("-")[2]): path for path in (state / "triton-openai" / "files").glob("*.part")}
    return any(path.stat().st_size > marked.get(part, 0) for part, path in paths.items() if part in leased)


def finalizing(state: Path) -> bool:
    """Return whether the files of results are being made."""
    waiting = rows(state, "SELECT 1 FROM line WHERE state < 2 LIMIT 1")
    # The input is there as a whole. Half an upload is, too.
    return not waiting and len(list((state / "triton-openai" / "files").glob("*.new"))) > 1


def test_a_full_disk(own: Own, tmp_path: Path) -> None:
    """A batch waits while nothing can be written, uploads are refused, and then all goes on."""
    options = ("--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer))
    settings = {"batches": {"max_running": 4}}
    with (
        serving(tmp_path, *options, settings=settings) as service,
        OpenAI(base_url=service.base_url, api_key="none", max_retries=0) as client,
    ):
        content = b"".join([request(number, delay=20) for number in range(1, 200)])
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        limits = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
        # Until the disk is full, no line is answered.
        with frozen(own.server):
            batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            until(lambda: client.batches.retrieve(batch.id).status != "validating")
            room = service.log.stat().st_size + 20_000
            resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (room, limits[1]))
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 900_000
        form += b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        until(lambda: service.send("POST", "/v1/files", form, headers).status in (503, 507))
        until(lambda: any("batch paused" in line or "batch runner paused" in line for line in service.log_lines()))
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, limits)
        done = until(lambda: (found := client.batches.retrieve(batch.id)).completed_at and found)
        assert (199, 171, 28) == (
            done.request_counts.total,
            done.request_counts.completed,
            done.request_counts.failed,
        )
        assert [] == service.complaints()
