"""
A service that is killed while it runs a batch, again and again, and the disk that is full meanwhile.

``BATCH_KILLS=50`` makes the test the long one: 2,000 lines and as many kills.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openai import OpenAI

from tests.clients.service import Service, serving, steered, until
from tests.faults.surroundings import Own

KILLS = int(os.environ.get("BATCH_KILLS", "5"))
LINES = 40 * KILLS
MODEL = "vllm_model"


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


def request(number: int) -> bytes:
    """Return a line of the input; each seventh is refused."""
    text = steered(f"line {number}", text="one two", delay_ms=2)
    body = {"model": MODEL, "prompt": text, "max_tokens": -1 if number % 7 == 0 else 50}
    line = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def half_an_upload(service: Service) -> None:
    """Send a part of a file, whose rest never comes."""
    with socket.create_connection((service.host, service.port)) as sock:
        head = "POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n"
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
                stop(service, state, unmarked if turn < KILLS - 1 else finalizing)
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
        assert [] == service.complaints()
    assert LINES == len(output) + len(failed) == done.request_counts.total
    names = Counter(one["custom_id"] for one in output + failed)
    assert {f"id-{number}": 1 for number in range(1, LINES + 1)} == names
    assert (len(output), len(failed)) == (done.request_counts.completed, done.request_counts.failed)
    refused = {one["custom_id"] for one in failed if one["response"]["status_code"] == 400}
    assert refused <= {f"id-{number}" for number in range(7, LINES + 1, 7)}
    # The others ran when the service was killed for the third time.
    assert len(failed) - LINES // 7 <= KILLS
    after = calls(own)
    assert {} == {number: (count, after[number]) for number, count in before.items() if after[number] != count}
    left = {path.name for path in (state / "triton-openai" / "files").iterdir() if path.suffix == ".part"}
    assert not left


def kill(own: Own, service: Service, client: OpenAI, batch: str, asked: int) -> None:
    """Kill *service* when Triton has been *asked* so often, or the batch has ended."""
    until(lambda: sum(calls(own).values()) >= asked or client.batches.retrieve(batch).completed_at)
    service.process.send_signal(signal.SIGKILL)
    service.process.communicate()


def stop(service: Service, state: Path, condition: Callable[[Path], bool]) -> None:
    """Stop *service* at one moment after the other, until *condition* holds or the batch has ended."""
    while True:
        service.process.send_signal(signal.SIGSTOP)
        if condition(state) or not rows(state, "SELECT 1 FROM batch WHERE open = 1"):
            return
        service.process.send_signal(signal.SIGCONT)
        # It gets on meanwhile.
        time.sleep(0.001)


def rows(state: Path, query: str) -> list[Any]:
    """Return what the tables have."""
    with contextlib.closing(sqlite3.connect(state / "triton-openai" / "batches.sqlite")) as tables:
        return tables.execute(query).fetchall()


def unmarked(state: Path) -> bool:
    """Return whether results are in a part whose lines are not marked yet."""
    marked = dict(rows(state, "SELECT part, MAX(part_place + part_length) FROM line WHERE state > 1 GROUP BY part"))
    ((generation,),) = rows(state, "SELECT MAX(generation) FROM batch")
    parts = (state / "triton-openai" / "files").glob(f"*-{generation}.part")
    return any(part.stat().st_size > marked.get(generation, 0) for part in parts)


def finalizing(state: Path) -> bool:
    """Return whether the files of results are being made."""
    waiting = rows(state, "SELECT 1 FROM line WHERE state < 2 LIMIT 1")
    # The input is there as a whole. Half an upload is, too.
    return not waiting and len(list((state / "triton-openai" / "files").glob("*.new"))) > 1


def test_a_full_disk(own: Own, tmp_path: Path) -> None:
    """A batch waits while nothing can be written, uploads are refused, and then all goes on."""
    options = ("--triton-url", own.url("http"), "--tokenizer", str(own.repository.tokenizer))
    with (
        serving(tmp_path, *options) as service,
        OpenAI(base_url=service.base_url, api_key="none", max_retries=0) as client,
    ):
        content = b"".join(map(request, range(1, 200)))
        file = client.files.create(file=("in.jsonl", content), purpose="batch")
        limits = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
        batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        until(lambda: client.batches.retrieve(batch.id).status != "validating")
        room = service.log.stat().st_size + 20_000
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (room, limits[1]))
        form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 900_000
        form += b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        until(lambda: service.send("POST", "/v1/files", form, headers).status in (503, 507))
        until(lambda: any("a batch is paused" in line or "batches wait" in line for line in service.log_lines()))
        resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, limits)
        done = until(lambda: (found := client.batches.retrieve(batch.id)).completed_at and found)
        assert (199, 171, 28) == (
            done.request_counts.total,
            done.request_counts.completed,
            done.request_counts.failed,
        )
        assert [] == service.complaints()
