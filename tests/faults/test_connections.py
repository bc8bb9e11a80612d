"""Connections that are cut without a word, and a process that has no room for more of them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.service import Reply, steered
from tests.faults.relay import Relay
from tests.faults.surroundings import (
    COMPLETIONS,
    ENGINES,
    IMPATIENT,
    PATIENT,
    TRANSPORTS,
    WORDS,
    Own,
    Stream,
    Watched,
    assert_works,
    body,
    failure,
    watched,
)
from triton_openai.errors import UpstreamTimeout
from triton_openai.triton.client import TritonClient
from triton_openai.triton.connection import ConnectionSettings
from triton_openai.triton.grpc import GrpcClient
from triton_openai.triton.http import HttpClient


def test_half_open(own: Own, tmp_path: Path) -> None:
    """
    A way that carries nothing any more ends streams as silence does; nothing that idled on it is used again.

    A call that does not stream finds it out by its own timeout, and for all others.
    """
    # Both wait most of the time.
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda transport: check_half_open(own, transport, tmp_path / transport), TRANSPORTS))


def check_half_open(own: Own, transport: str, folder: Path) -> None:
    """Cut the way of a stream, and that of a call."""
    folder.mkdir()
    with half_open(own, transport, folder) as (relay, service):
        with service.back_to_level():
            endless = steered(text=WORDS, eos=False, delay_ms=50)
            silence = {"x-idle-timeout": IMPATIENT["x-idle-timeout"]}
            with Stream(service, "vllm_model", endless, headers=silence, max_tokens=2000) as stream:
                stream.chunk()
                relay.freeze()
                events = stream.rest()
            assert "upstream_silent" == failure(events[-1])["code"]
            assert_served(service)
            relay.reset()
            assert_works(service)
        with service.back_to_level():
            relay.freeze()
            # Longer than a connection may take to be made: else it says nothing about the one that it used.
            limit = {"x-request-timeout": "6"}
            lost = service.post("/v1/embeddings", {"model": "text_embedding", "input": "a"}, **limit)
            assert (504, "upstream_timeout") == (lost.status, lost.error["code"])
            assert_served(service)
            relay.reset()
            assert_works(service)
        assert [] == service.complaints()


async def test_half_open_while_nobody_asks(own: Own, transport: str) -> None:
    """The service itself asks Triton for its models, and finds it out for all: once, and not call by call."""
    address = urlsplit(own.url(transport))
    settings = ConnectionSettings(connect_timeout=60, control_timeout=60)
    with Relay((str(address.hostname), int(address.port or 0))) as relay:
        url = f"{transport}://127.0.0.1:{relay.port}"
        client: TritonClient = HttpClient(url, settings) if transport == "http" else GrpcClient(url, settings)
        try:
            # Several connections, where a call has one of its own.
            await asyncio.gather(*(client.repository_index() for _ in range(5)))
            relay.freeze()
            # Only the call that is not answered waits for so short a time.
            settings.control_timeout = 1.5
            with pytest.raises(UpstreamTimeout):
                await client.repository_index()
            settings.control_timeout = 60
            await asyncio.gather(*(client.repository_index() for _ in range(5)))
        finally:
            await client.close()


@contextlib.contextmanager
def half_open(own: Own, transport: str, folder: Path) -> Iterator[tuple[Relay, Watched]]:
    """Run a service that reaches Triton over a relay, both in use."""
    address = urlsplit(own.url(transport))
    with contextlib.ExitStack() as opened:
        relay = opened.enter_context(Relay((str(address.hostname), int(address.port or 0))))
        arguments = ["--triton-url", f"{transport}://127.0.0.1:{relay.port}"]
        arguments += ["--tokenizer", str(own.repository.tokenizer)]
        service = opened.enter_context(watched(folder, *arguments, triton=PATIENT))
        assert_works(service)
        yield relay, service


def assert_served(service: Watched) -> None:
    """Assert that the first request of each kind is answered, whatever the service thinks of its Triton."""
    assert 200 == service.post("/v1/embeddings", {"model": "text_embedding", "input": "a"}).status
    for model in ENGINES:
        reply = service.post(COMPLETIONS, body(model, steered(text=WORDS)))
        assert (200, WORDS) == (reply.status, reply.json["choices"][0]["text"])


def test_descriptors_used_up(own: Own, transport: str, tmp_path: Path) -> None:
    """Who finds no room is not let in, or refused with a 503; who is let in is served to the end, and the next too."""
    arguments = ["--triton-url", own.url(transport), "--tokenizer", str(own.repository.tokenizer)]
    request = body("vllm_model", steered(text=WORDS * 20, delay_ms=10), stream=True, max_tokens=500)

    def ask(service: Watched) -> Reply | None:
        try:
            # Some wait until others have been served.
            return service.send("POST", COMPLETIONS, request, timeout=100)
        except (ConnectionError, http.client.HTTPException):
            return None

    with watched(tmp_path, *arguments) as service:
        assert_works(service)
        with service.back_to_level():
            _, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (len(service.level().descriptors) + 13, hard))
            with ThreadPoolExecutor(24) as threads:
                replies = list(threads.map(ask, [service] * 24))
            served = [reply for reply in replies if reply is not None and reply.status == 200]
            refused = [reply for reply in replies if reply is not None and reply.status != 200]
            assert served
            assert len(served) < len(replies)
            assert all("[DONE]" == reply.events[-1] for reply in served)
            assert {(503, "upstream_unavailable")} >= {(reply.status, reply.error["code"]) for reply in refused}
            assert "few file descriptors are left" in service.log.read_text()
            assert_works(service)
