"""The end of the service while it answers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.service import Reply, Service, serving, until
from tests.loops import on_uvloop
from tests.scrape import Scrape
from tests.stopped import stop_process
from tests.triton_fixture import TestTriton
from triton_openai.cli.serve import Stop, listening
from triton_openai.config.tree import Settings

ENDLESS = {"text": "one two three", "eos": False, "delay_ms": 50}
BODY = {"model": "ensemble", "prompt": f"<<steer {json.dumps(ENDLESS)}>>", "max_tokens": 2000}


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_what_still_runs_is_told(triton: TestTriton, tmp_path: Path, transport: str) -> None:
    """After the grace a stream ends with an error event, and a request that waits gets a 503; the exit status is 0."""
    url = triton.http_url if transport == "http" else triton.grpc_url
    before = len(asked(triton.record.events()))
    with serving(tmp_path, "--triton-url", url, "--shutdown-grace", "0.5") as service:
        with contextlib.closing(service.connect()) as streaming, ThreadPoolExecutor(1) as threads:
            whole = threads.submit(service.post, "/v1/completions", BODY)
            body = json.dumps({**BODY, "stream": True})
            streaming.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            response = streaming.getresponse()
            first = response.readline()
            # The other one is at work when its engine's request is on record.
            triton.record.wait_for(lambda events: len(asked(events)) >= before + 2, 120)
            service.process.send_signal(signal.SIGTERM)
            with pytest.raises(http.client.IncompleteRead) as broken:
                response.read()
            *_, last, _ = broken.value.partial.decode().split("\n\n")
            refused = whole.result(120)
        status = service.process.wait(120)

    assert first.startswith(b"data: ")
    assert ("service_stopping", 503, "service_stopping", 0) == (
        json.loads(last.removeprefix("event: error\ndata: "))["error"]["code"],
        refused.status,
        refused.error["code"],
        status,
    )


# Two workers end behind a real balancer in `test_rolling.py`.
@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.extended)])
def test_balancers_can_notice(triton: TestTriton, tmp_path: Path, workers: str) -> None:
    """
    During the delay the service says that it is not ready, and serves; every answer closes its connection.

    Then nobody can connect, and a stream that runs is answered to its end. SIGHUP comes too late to change anything.
    """
    several = ("--workers", workers, "--shutdown-delay", "5", "--shutdown-grace", "120")
    # It begins before the delay does, and lasts for more than twice as long.
    text = {"text": "one two three ", "repeat": 26, "delay_ms": 160}
    body = {"model": "ensemble", "prompt": f"<<steer {json.dumps(text)}>>", "max_tokens": 111, "stream": True}
    replies: list[Reply] = []
    before = len(asked(triton.record.events(), 111))
    with serving(tmp_path, "--triton-url", triton.http_url, *several, XDG_RUNTIME_DIR=str(tmp_path)) as service:
        thread = threading.Thread(target=lambda: replies.append(service.post("/v1/completions", body)))
        thread.start()
        triton.record.wait_for(lambda events: len(asked(events, 111)) > before, 120)
        assert "Connection" not in service.send("GET", "/health/live").headers
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.status("/health/ready") == 503)
        service.process.send_signal(signal.SIGHUP)
        served = service.post("/v1/completions", {"model": "ensemble", "prompt": "Hello", "max_tokens": 1})
        until(lambda: not _can_connect(service))
        assert not replies
        thread.join(120)
        status = service.process.wait(120)

    assert (200, "close", 0) == (served.status, served.headers["Connection"], status)
    assert "[DONE]" == replies[0].events[-1]


def _can_connect(service: Service) -> bool:
    try:
        return service.status("/health/live") == 200
    except OSError:
        return False


def test_nobody_at_a_terminal_waits_for_balancers(triton: TestTriton, tmp_path: Path) -> None:
    """SIGINT ends it without the delay."""
    with serving(tmp_path, "--triton-url", triton.http_url, "--shutdown-delay", "600") as service:
        service.process.send_signal(signal.SIGINT)
        assert 0 == service.process.wait(120)


def test_a_second_signal_cuts_it_short(triton: TestTriton, tmp_path: Path) -> None:
    """What runs is told so at once, and the service ends in order."""
    replies: list[Reply] = []
    before = len(asked(triton.record.events()))
    patience = ("--shutdown-delay", "600", "--shutdown-grace", "600")
    with serving(tmp_path, "--triton-url", triton.http_url, *patience) as service:
        stream = {**BODY, "stream": True}
        thread = threading.Thread(target=lambda: replies.append(service.post("/v1/completions", stream)))
        thread.start()
        triton.record.wait_for(lambda events: len(asked(events)) > before, 120)
        service.process.send_signal(signal.SIGTERM)
        until(lambda: service.status("/health/ready") == 503)
        service.process.send_signal(signal.SIGTERM)
        thread.join(120)
        assert 0 == service.process.wait(120)
        assert [] == service.complaints()

    # As an event of the stream, or as the whole answer where it had not begun.
    assert b'"service_stopping"' in replies[0].body


def test_idle_connections_are_closed(triton: TestTriton, tmp_path: Path) -> None:
    """
    What a client or a balancer keeps open is closed while others are still answered: nothing is sent there any more.

    A request that came there would not be answered.
    """
    before = len(asked(triton.record.events()))
    with serving(tmp_path, "--triton-url", triton.http_url, "--shutdown-grace", "600") as service:
        with contextlib.ExitStack() as closing:
            running, kept, new = (closing.enter_context(contextlib.closing(service.connect())) for _ in range(3))
            running.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            triton.record.wait_for(lambda events: len(asked(events)) > before, 120)
            kept.request("GET", "/health/live")
            kept.getresponse().read()
            new.connect()
            service.process.send_signal(signal.SIGTERM)
            assert [b"", b""] == [connection.sock.recv(1) for connection in (kept, new)]
            service.process.send_signal(signal.SIGTERM)
            assert 503 == running.getresponse().status
        assert 0 == service.process.wait(120)


@pytest.mark.parametrize("expect", [False, True])
def test_bodies_that_still_come_are_read(triton: TestTriton, tmp_path: Path, expect: bool) -> None:
    """A request that has begun to arrive before the end is answered, though the rest of it comes after idle clients."""
    body = json.dumps({"model": "ensemble", "prompt": "Hello", "max_tokens": 2}).encode()
    with serving(tmp_path, "--triton-url", triton.http_url, "--shutdown-grace", "600") as service:
        with contextlib.ExitStack() as closing:
            running, idle = (closing.enter_context(contextlib.closing(service.connect())) for _ in range(2))
            running.putrequest("POST", "/v1/completions")
            running.putheader("Content-Type", "application/json")
            running.putheader("Content-Length", str(len(body)))
            if expect:
                running.putheader("Expect", "100-continue")
            running.endheaders(body[:10])
            idle.request("GET", "/health/live")
            idle.getresponse().read()
            service.process.send_signal(signal.SIGTERM)
            assert b"" == idle.sock.recv(1)
            running.send(body[10:])
            assert 200 == running.getresponse().status
        assert 0 == service.process.wait(120)


def test_who_waits_is_told_too(triton: TestTriton, tmp_path: Path) -> None:
    """A request that was not let in yet is served when there is room in time, and else gets a 503 like the others."""
    limits = ("--max-running-requests", "1", "--shutdown-grace", "600")
    before = len(asked(triton.record.events()))
    with serving(tmp_path, "--triton-url", triton.http_url, *limits) as service:
        with contextlib.closing(service.connect()) as running, ThreadPoolExecutor(2) as threads:
            running.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
            triton.record.wait_for(lambda events: len(asked(events)) > before, 120)
            first = threads.submit(service.post, "/v1/completions", {**BODY, "stream": True})
            until(lambda: _queued(_metrics(service)) == 1)
            second = threads.submit(service.post, "/v1/completions", BODY)
            until(lambda: _queued(_metrics(service)) == 2)
            service.process.send_signal(signal.SIGINT)
            # The one that runs leaves, the next one takes its place, and then there is no time for the last.
            running.close()
            triton.record.wait_for(lambda events: len(asked(events)) > before + 1, 120)
            service.process.send_signal(signal.SIGINT)
            told = first.result(120), second.result(120)
        assert 0 == service.process.wait(120)

    assert b'"service_stopping"' in told[0].body
    assert (503, "service_stopping", "1") == (told[1].status, told[1].error["code"], told[1].headers["Retry-After"])


def _metrics(service: Service) -> str:
    return service.send("GET", "/metrics").body.decode()


def _queued(text: str) -> float:
    return Scrape(text).sum("triton_openai_requests_queued")


def asked(events: list[dict[str, Any]], length: int = 2000) -> list[dict[str, Any]]:
    """Return the requests for answers of *length* tokens among *events*."""
    return [
        event
        for event in events
        if event["event"] == "request" and [length] == event["inputs"].get("request_output_len", {}).get("value")
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_who_waits_to_be_accepted_is_answered(tmp_path: Path, workers: int) -> None:
    """A service that has had no time for its clients when the signal comes resets none of them."""
    arguments = ("--triton-url", "http://127.0.0.1:9", "--workers", str(workers))
    # It takes the service some time to answer.
    request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with (
        serving(tmp_path, *arguments, XDG_RUNTIME_DIR=str(tmp_path)) as service,
        contextlib.ExitStack() as closing,
    ):

        def connected(count: int) -> list[socket.socket]:
            made = [socket.create_connection((service.host, service.port)) for _ in range(count)]
            return [closing.enter_context(one) for one in made]

        processes = [service.process.pid, *_children(service.process.pid)] if workers > 1 else [service.process.pid]
        clients = connected(5)
        assert 200 == service.status("/health/live")
        for pid in processes:
            stop_process(pid)
        clients += connected(40)
        for client in clients:
            client.sendall(request)
        service.process.send_signal(signal.SIGTERM)
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
        for client in clients:
            client.settimeout(120)
        answers = [http.client.HTTPResponse(client) for client in clients]
        for answer in answers:
            answer.begin()
            assert 200 == answer.status
            json.loads(answer.read())
        assert 0 == service.process.wait(120)
        assert [] == service.complaints()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@on_uvloop
async def test_a_second_signal_resets_nobody() -> None:
    """Whoever has connected is answered all the same."""
    with contextlib.ExitStack() as closing:
        listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
        stop = Stop()
        stop.hurry()
        async with listening(Settings(), [listener], stop):
            # Nothing is awaited in between, so that they are with the kernel when it ends.
            clients = [closing.enter_context(socket.create_connection(listener.getsockname())) for _ in range(40)]
            for client in clients:
                client.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = [client.recv(4096) for client in clients]
        assert all(answer.startswith(b"HTTP/1.1 200 ") and b"\r\nConnection: close" in answer for answer in answers)


@on_uvloop
async def test_who_has_not_asked_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that connected last is answered, though its request comes only then; for it alone nobody is kept."""
    monkeypatch.setattr("triton_openai.serving.server._LAST_REQUESTS_SECONDS", 600.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        ending = asyncio.create_task(_ends_at_once(listener, connected := asyncio.Event(), begun := asyncio.Event()))
        await begun.wait()
        reader, writer = await asyncio.open_connection(*address)
        connected.set()
        while await _accepts(address):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        # Longer than it takes to close a connection that nobody waits for.
        for _ in range(100):
            await asyncio.sleep(0)
        writer.write(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
        await asyncio.wait_for(ending, 120)
        writer.close()

    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close" in head


async def _ends_at_once(listener: socket.socket, connected: asyncio.Event, begun: asyncio.Event) -> None:
    """Serve until somebody is *connected*."""
    async with listening(Settings(), [listener], Stop()):
        begun.set()
        await connected.wait()


async def _accepts(address: tuple[str, int]) -> bool:
    try:
        _, writer = await asyncio.open_connection(*address)
    except ConnectionError:
        # Refused, or reset when the listener closed while this connection was in its queue.
        return False
    writer.close()
    return True
