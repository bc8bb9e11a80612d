"""Clients that leave, do not read, read slowly, or come all at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import uuid
from contextlib import ExitStack

import aiohttp

from tests.clients.service import Service, steered, until
from tests.faults.surroundings import (
    CHAT,
    COMPLETIONS,
    ENGINES,
    MEBIBYTE,
    WORDS,
    Own,
    Stream,
    Watched,
    assert_works,
    body,
    failure,
    left,
)


def flood(own: Own, service: Service, tokens: int) -> tuple[int, int, bytes]:
    """
    Ask for a flood of *tokens*, read nothing until the engine has made all of them, then read it all.

    Return by how many bytes the service had grown meanwhile, the size of the answer, and its end.
    """
    mark = f"flood {uuid.uuid4()}"
    prompt = steered(mark, text=" particular" * 20, eos=False, tokens_per_response=500)
    request = json.dumps(body("ensemble", prompt, stream=True, max_tokens=tokens)).encode()
    # The engine takes longer than the idle timeout: the time for which a client does not read is not held against it.
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nx-idle-timeout: 1\r\n"
    before = service.memory()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(120)
        client.connect((service.host, service.port))
        client.sendall(f"{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
        id = own.begun("preprocessing", mark)["id"]
        # The engine does not wait for anybody: in the end all of the answer lies between it and the client.
        assert "finished" == own.end("tensorrt_llm", id)
        assert_works(service)
        grown = service.memory() - before
        size = 0
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(MEBIBYTE)
            assert data, tail
            size += len(data)
            tail = (tail + data)[-500:]
    return grown, size, tail


def test_a_client_that_does_not_read(own: Own, service: Watched) -> None:
    """
    A flood for a client that reads nothing is held back, not collected; and nothing of it is lost.

    It comes first, because what a service kept of earlier clients would be room for it.
    """
    grown, size, tail = flood(own, service, 1_200_000)

    assert b"data: [DONE]" in tail, tail
    assert size > 12 * MEBIBYTE
    assert grown < 8 * MEBIBYTE


def test_clients_that_leave(own: Own, service: Watched) -> None:
    """The work for a client that is gone is stopped, whether or not it had seen a token or wanted a stream."""
    leaving = []
    for model, stream, orders in itertools.product(
        ENGINES, (False, True), ({"delay_ms": 50}, {"delay_ms": 50, "first_delay_ms": 1500})
    ):
        mark = f"leaving {service.port} {stream} {'first' in str(orders)}"
        prompt = steered(mark, text=WORDS, eos=False, **orders)
        connection = service.connect()
        request = json.dumps(body(model, prompt, stream=stream, max_tokens=2000))
        connection.request("POST", COMPLETIONS, request, {"Content-Type": "application/json"})
        first = "preprocessing" if model == "ensemble" else model
        id = own.begun(first, mark)["id"]
        own.record.wait_for(id=id, model=ENGINES[model], event="request")
        if stream and "first_delay_ms" not in orders:
            assert connection.getresponse().readline()
        connection.close()
        leaving.append((model, stream, orders, id))

    for model, stream, orders, id in leaving:
        assert own.end(ENGINES[model], id) in ("cancelled", "stopped"), (model, stream, orders)
    assert_works(service)


def test_comments_while_nothing_comes(service: Service) -> None:
    """A stream that waits for its first token is open and sends comments, which clients skip."""
    with Stream(service, "vllm_model", steered(text=WORDS, first_delay_ms=2000)) as stream:
        events = list(iter(stream.event, ""))

    assert [": keep-alive"] * 2 == events[:2]
    # On a busy machine there may be one between two tokens, too.
    *chunks, done = [event for event in events if event != ": keep-alive"]
    assert WORDS == "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)
    assert "[DONE]" == done


def test_256_clients_at_once(service: Service) -> None:
    """As many connections in the same moment are all accepted and all answered in full."""

    async def one(session: aiohttp.ClientSession, number: int, gate: asyncio.Event) -> str:
        await gate.wait()
        # Over HTTP, a Triton that gets too little of a busy machine drops responses: they do not come all at once.
        request = body("vllm_model", steered(text=f"answer {number} {WORDS}", delay_ms=50), stream=True)
        async with session.post(f"{service.base_url}/completions", json=request) as response:
            assert 200 == response.status
            *events, done, end = (await response.text()).split("\n\n")
        assert ("data: [DONE]", "") == (done, end)
        chunks = [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    async def together() -> list[str]:
        gate = asyncio.Event()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asked = [asyncio.create_task(one(session, number, gate)) for number in range(256)]
            gate.set()
            return await asyncio.gather(*asked)

    assert [f"answer {number} {WORDS}" for number in range(256)] == asyncio.run(together())
    assert_works(service)


def test_clients_that_leave_at_random(own: Own, service: Watched) -> None:
    """Whenever they leave, the backend stops work that would have gone on for half an hour."""
    # Triton 2.51 now and then ends when calls are cancelled, which says nothing about us.
    assert any(nobody_is_left(own, service, turn) for turn in range(3)), "Triton ended each time"


def nobody_is_left(own: Own, service: Watched, turn: int) -> bool:
    """Have clients come and leave, and wait until the backend works for none of them; return False if Triton ended."""
    chance = random.Random(4 + turn)
    with ExitStack() as clients:
        stays = []
        for number in range(40):
            mark = f"random {service.port} {turn} {number}"
            model, delay, n = chance.choice(list(ENGINES)), chance.choice([0, 0, 300]), chance.choice([1, 1, 2])
            prompt = steered(mark, text=WORDS, eos=False, delay_ms=60, first_delay_ms=delay)
            stream = clients.enter_context(Stream(service, model, prompt, max_tokens=100_000, n=n))
            for _ in range(0 if delay else chance.randrange(4)):
                stream.chunk()
            if chance.random() < 0.5:
                stream.close()
            else:
                stays.append((model, mark))
        for model, mark in stays:
            own.begun("preprocessing" if model == "ensemble" else model, mark)
    until(lambda: not service.level().running)
    until(lambda: not left(own) or own.server.poll() is not None)
    if own.server.poll() is None:
        return True
    own.server.start()
    own.lost |= left(own)
    until(lambda: 200 == service.post(COMPLETIONS, body("ensemble", steered(text=WORDS))).status)
    return False


def test_no_request_waits_for_the_collector(service: Watched) -> None:
    """However a request ends, nothing of it is left in a cycle; see what ``probed`` counts."""
    failing = steered(text=WORDS, fail_at=0)
    for streamed in (False, True):
        assert 502 == service.post(COMPLETIONS, body("ensemble", failing, stream=streamed)).status
        assert 404 == service.post(COMPLETIONS, body("nobody", "Hello", stream=streamed)).status
        assert 400 == service.post(COMPLETIONS, body("ensemble", "Hello", stream=streamed, max_tokens="x")).status
    with Stream(service, "vllm_model", steered(text=WORDS, fail_at=2, delay_ms=20)) as stream:
        assert "upstream_error" == failure(stream.rest()[-1])["code"]
    chat = {"model": "ensemble", "messages": [{"role": "user", "content": steered(text=WORDS)}], "n": 2}
    for streamed in (False, True):
        assert 200 == service.post(CHAT, {**chat, "stream": streamed}).status
    assert 404 == service.status("/nowhere")


def test_levels_tell_what_runs(service: Watched) -> None:
    """What all of these tests compare in the end shows a stream while it is there."""
    # A look for models, several times a second, has connections too.
    before = min((service.level() for _ in range(5)), key=lambda level: level.held)
    with Stream(service, "vllm_model", steered(text=WORDS, eos=False, delay_ms=50)) as stream:
        stream.chunk()
        above = service.level().above(before)

    assert {"requests: 1", "streams: 1", "records of requests: 2"} <= set(above)
    assert any(each.startswith("task ") for each in above)
    assert any(each.startswith("descriptors") for each in above)
