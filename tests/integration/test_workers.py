"""Several processes on one port, as an operator starts them: who answers, who is replaced, and what is left behind."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Service, exchange, serving, steered, until
from tests.scrape import Scrape
from tests.stopped import stop_process
from tests.triton_fixture import TestTriton
from triton_openai.cli import main
from triton_openai.demo.repository import build_repository

_BODY = {"model": "ensemble", "prompt": steered(text="one two three"), "max_tokens": 8}


def log_of(service: Service) -> list[dict[str, Any]]:
    """Return the lines of the log so far, without one that is just being written."""
    return [json.loads(line) for line in service.log_lines() if line.startswith("{")]


def pids(service: Service) -> dict[int, int]:
    """Return the newest process id of each worker."""
    return {line["worker"]: line["pid"] for line in log_of(service) if line["event"] == "worker started"}


def answered_by(service: Service) -> set[int]:
    """Return the workers that have answered a completion."""
    return {line["worker"] for line in log_of(service) if line.get("path") == "/v1/completions"}


def alive(pid: int) -> bool:
    """Whether there is such a process, one that has ended and was not waited for left out."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def engine_requests(events: list[dict[str, Any]], length: int) -> int:
    """Return how many requests for an answer of *length* tokens the engine has had."""
    return sum(
        event["event"] == "request" and event["inputs"].get("request_output_len", {}).get("value") == [length]
        for event in events
    )


def scrape(connection: http.client.HTTPConnection) -> Scrape:
    """Return the metrics as the worker that has *connection* answers them."""
    return Scrape(exchange(connection, "GET", "/metrics").body.decode())


def scrape_with(connection: http.client.HTTPConnection, value: int, name: str, **labels: str) -> Scrape:
    """Return what :func:`scrape` returns once the samples called *name* with these *labels* have the sum *value*."""
    seen: list[Scrape] = []

    def has_value() -> bool:
        seen.append(scrape(connection))
        return seen[-1].sum(name, **labels) == value

    until(has_value)
    return seen[-1]


def directories(folder: Path) -> list[Path]:
    return list(folder.glob("triton-openai-*"))


@contextlib.contextmanager
def workers(
    tmp_path: Path, triton: TestTriton, count: int, *arguments: str, settings: Mapping[str, Any] | None = None
) -> Iterator[Service]:
    """Run *count* workers, whose private directory lies in *tmp_path*, and wait until all of them serve."""
    with serving(
        tmp_path,
        *("--workers", str(count), "--triton-url", triton.http_url, *arguments),
        settings=settings,
        XDG_RUNTIME_DIR=str(tmp_path),
    ) as service:
        until(lambda: len([line for line in log_of(service) if line["event"] == "worker listens"]) == count)
        yield service


def test_all_of_them_answer_on_one_port(triton: TestTriton, tmp_path: Path) -> None:
    """
    The banner comes once, each line of the log has its worker, and hundreds of requests at once are served.

    Service managers send SIGTERM to every process of a service, which counts once: running streams finish all the same.
    """
    stream = _stream(62, repeat=5, delay_ms=50)
    with workers(tmp_path, triton, 2, "--shutdown-grace", "60") as service, ThreadPoolExecutor(64) as clients:
        (directory,) = directories(tmp_path)
        assert 0o700 == directory.stat().st_mode & 0o777
        assert list(directory.glob("*.db"))
        replies = clients.map(lambda _: service.post("/v1/completions", _BODY), range(200))
        statuses = {reply.status for reply in replies}
        until(lambda: answered_by(service) == {0, 1})
        processes = pids(service)
        older = engine_requests(triton.record.events(), 62)
        endings = [clients.submit(_whole, service.connect(), stream) for _ in range(8)]
        triton.record.wait_for(lambda events: engine_requests(events, 62) == older + 8, 120)
        for pid in (service.process.pid, *processes.values()):
            # A worker without a stream may have ended, because of the signal to its parent.
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        assert [True] * 8 == [ending.result(120) for ending in endings]
        out, _ = service.process.communicate(timeout=120)

    assert ({200}, 0, "") == (statuses, service.process.returncode, out)
    assert [] == service.complaints()
    assert [] == directories(tmp_path)
    assert not any(alive(pid) for pid in processes.values())


def test_a_worker_that_dies_is_replaced(triton: TestTriton, tmp_path: Path) -> None:
    """
    The streams of a worker that dies are cut; others go on, new requests are answered, and its successor has its
    number.

    One that is ended by hand is replaced too. The port stays open: at no moment is anybody turned away. The metrics are
    those of all workers; one that is killed takes along what it had running, not what it had counted.
    """
    with workers(tmp_path, triton, 2) as service:
        before = pids(service)
        connections = connections_to_all(service)
        of_worker = dict(connections)
        short = {**_stream(8, delay_ms=5), "stream_options": {"include_usage": True}}
        replies = [exchange(of_worker[worker], "POST", "/v1/completions", short) for worker in (0, 1, 1)]
        usages = [json.loads(reply.events[-2])["usage"] for reply in replies]
        prompts = sum(usage["prompt_tokens"] for usage in usages)
        tokens = sum(usage["completion_tokens"] for usage in usages)
        for connection in of_worker.values():
            # A stream is counted when its last byte has left, the prompt last: its client may ask before that.
            seen = scrape_with(connection, prompts, "triton_openai_tokens_total", type="input")
            assert 3 == seen.sum("triton_openai_requests_total", model="ensemble", outcome="answered")
            assert tokens == seen.sum("triton_openai_tokens_total", type="output")
            assert 3 == seen.sum("gen_ai_server_time_to_first_token_seconds_count")
            assert 3 == seen.sum("gen_ai_server_time_to_first_token_seconds_bucket", le="+Inf")
            assert (0, 2, 0) == (
                seen.sum("triton_openai_requests_running"),
                seen.sum("triton_openai_workers"),
                seen.sum("triton_openai_workers_replaced_total"),
            )
        # Those of the worker that is killed would take minutes, so that they are running then.
        streams = [_stream(61, repeat=10, delay_ms=50 if index else 3000) for index, _ in connections]
        older = engine_requests(triton.record.events(), 61)
        with ThreadPoolExecutor(len(connections)) as clients:
            endings = [
                clients.submit(_whole, connection, body)
                for (_, connection), body in zip(connections, streams, strict=True)
            ]
            triton.record.wait_for(lambda events: engine_requests(events, 61) == older + len(connections), 120)
            assert 0 < _metrics(service).sum("triton_openai_requests_running", model="ensemble")
            os.kill(before[0], signal.SIGKILL)
            statuses = {service.post("/v1/completions", _BODY).status for _ in range(10)}
            until(lambda: pids(service)[0] != before[0])
        whole = [ending.result() for ending in endings]
        # The successor counts itself.
        until(lambda: _metrics(service).sum("triton_openai_workers_replaced_total") == 1)
        until(lambda: not _metrics(service).sum("triton_openai_requests_running"))
        answered = {"model": "ensemble", "outcome": "answered"}
        with contextlib.closing(service.connect()) as connection:
            count = 3 + 10 + whole.count(True)
            counted = scrape_with(connection, count, "triton_openai_requests_total", **answered)
        (directory,) = directories(tmp_path)
        # One file of each kind for each worker, however often it was replaced.
        files = list(directory.glob("*.db"))
        after = pids(service)
        ended = [line for line in log_of(service) if line["event"] == "worker ended"]
        os.kill(after[1], signal.SIGTERM)
        while pids(service)[1] == after[1]:
            assert 200 == service.status("/health/live")
        os.kill(after[0], signal.SIGKILL)
        while pids(service)[0] == after[0]:
            assert 200 == service.status("/health/live")

    assert [(0, before[0], "killed by SIGKILL")] == [(line["worker"], line["pid"], line["how"]) for line in ended]
    assert {200} == statuses
    assert before[1] == after[1]
    assert [index == 1 for index, _ in connections] == whole
    assert tokens < counted.sum("triton_openai_tokens_total", type="output")
    assert 10 == len(files)


def test_a_worker_that_hangs_is_replaced(triton: TestTriton, tmp_path: Path) -> None:
    """
    A worker that hangs is replaced, though it cannot say that it does; the other one answers meanwhile.

    What it is asked first, where it is, an operator may ask too: who can answer goes on. When the parent is killed, the
    workers notice, end, and free the port; the directory goes with them.
    """
    # It holds for the other one too, which may get too little of a busy machine for seconds.
    with workers(tmp_path, triton, 2, settings={"server": {"worker_timeout": 15}}) as service:
        before = pids(service)
        os.kill(before[1], signal.SIGQUIT)
        until(lambda: "most recent call first" in service.log.read_text())
        stop_process(before[0])
        until(lambda: pids(service)[0] != before[0])
        statuses = {service.post("/v1/completions", _BODY).status for _ in range(10)}
        after = pids(service)
        ends = [(line["event"], line.get("how")) for line in log_of(service) if line.get("worker") == 0]
        service.process.kill()
        until(lambda: not any(alive(pid) for pid in after.values()))
        until(lambda: not directories(tmp_path))

        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((service.host, service.port))

    assert {200} == statuses
    assert before[1] == after[1]
    assert ("worker hangs and is killed", None) in ends
    assert ("worker ended", "killed by SIGKILL") in ends


def test_workers_divide_the_limits(triton: TestTriton, tmp_path: Path) -> None:
    """
    Each worker admits and queues its share, and the metrics of all are one sum.

    What still runs at the second signal is told so at once, and not after the grace.
    """
    limits = ("--max-running-requests", "3", "--max-queued-requests", "2")
    grace = ("--shutdown-grace", "600", "--shutdown-delay", "600")
    patient = {"server": {"queue_timeout": 600}}
    with workers(tmp_path, triton, 2, *limits, *grace, settings=patient) as service, contextlib.ExitStack() as opened:
        body = _stream(63, repeat=20, delay_ms=3000)
        older = engine_requests(triton.record.events(), 63)

        def connect(worker: int) -> http.client.HTTPConnection:
            found = connections_to_all(service)
            for _, connection in found:
                opened.callback(connection.close)
            return next(connection for index, connection in found if index == worker)

        def ask(worker: int) -> http.client.HTTPConnection:
            connection = connect(worker)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            return connection

        def count(name: str) -> float:
            return _metrics(service).sum(f"triton_openai_requests_{name}")

        running = [ask(0), ask(0), ask(1)]
        until(lambda: count("running") == 3)
        waiting = [ask(0), ask(1)]
        until(lambda: count("queued") == 2)
        for worker in (0, 1):
            refused = exchange(connect(worker), "POST", "/v1/completions", body)
            assert (503, "overloaded") == (refused.status, refused.error["code"])
        triton.record.wait_for(lambda events: engine_requests(events, 63) == older + 3, 120)

        for number, left in enumerate((running[0], running[2])):
            left.close()
            opened.enter_context(contextlib.closing(waiting[number].getresponse()))
            triton.record.wait_for(lambda events: engine_requests(events, 63) == older + 4 + number, 120)  # noqa: B023
        assert (3, 0) == (count("running"), count("queued"))

        service.process.terminate()
        until(lambda: service.status("/health/ready") == 503)
        service.process.terminate()
        with pytest.raises(http.client.IncompleteRead) as cut:
            running[1].getresponse().read()
        assert b'"service_stopping"' in cut.value.partial
        assert 0 == service.process.wait(120)


def connections_to_all(service: Service) -> list[tuple[int, http.client.HTTPConnection]]:
    """Return connections and the numbers of the workers that have them, at least one of each worker."""
    processes = {pid: index for index, pid in pids(service).items()}
    found: list[tuple[int, http.client.HTTPConnection]] = []
    while {index for index, _ in found} != set(processes.values()):
        connection = service.connect(60)
        connection.connect()
        (owner,) = until(partial(accepted_by, connection, processes))
        found.append((processes[owner], connection))
    return found


def accepted_by(connection: http.client.HTTPConnection, processes: Iterable[int]) -> list[int]:
    """Return those of *processes* that have accepted *connection*."""
    host, port = connection.sock.getsockname()
    remote = f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[2] == remote}
    return [pid for pid in processes if sockets & descriptors(pid)]


def descriptors(pid: int) -> set[str]:
    """Return what the open files of a process are, as ``socket:[123]``."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(link.readlink()))
    return found


def _metrics(service: Service) -> Scrape:
    return Scrape(service.send("GET", "/metrics").body.decode())


def _stream(length: int, **orders: Any) -> dict[str, Any]:
    """Return the body of a stream to be known in the record by its *length*, paced as *orders* say."""
    return {**_BODY, "stream": True, "prompt": steered(text="a b c d", **orders), "max_tokens": length}


def _whole(connection: http.client.HTTPConnection, body: dict[str, Any]) -> bool:
    """Whether a stream was answered to its end."""
    try:
        with contextlib.closing(connection):
            return exchange(connection, "POST", "/v1/completions", body).events[-1] == "[DONE]"
    except (OSError, AssertionError, http.client.HTTPException):
        return False


def test_settings_that_no_worker_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Settings that no worker can use end the command with one sentence and status 2, as with one process."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    status = main(["serve", "--port", "0", "--workers", "2", "--adapter", "none"])

    out, err = capfd.readouterr()
    problems = [line for line in err.splitlines() if line.startswith("triton-openai:")]
    assert (2, "", 1) == (status, out, len(problems))
    assert "none" in problems[0]
    assert "Traceback" not in err
    assert [] == directories(tmp_path)


def test_one_triton_for_all(tmp_path: Path) -> None:
    """The Triton that is started here is the parent's; the workers wait for it, and it goes with the service."""
    repository = build_repository(tmp_path / "repository", models=["text_embedding"])
    with serving(
        tmp_path,
        *("--workers", "2", "--model-repository", str(repository.path)),
        settings={"triton": {"refresh_interval": 0.2}},
        XDG_RUNTIME_DIR=str(tmp_path),
    ) as service:
        assert ["text_embedding"] == [model["name"] for model in service.banner["models"]]
        until(lambda: {line["worker"] for line in log_of(service) if line["event"] == "model is served"} == {0, 1})
        assert 200 == service.status("/health/ready")
        service.process.terminate()
        assert 0 == service.process.wait(120)
