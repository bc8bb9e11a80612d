"""Connections that are cut without a word, and a process that has no room for more of them."""

from __future__ import annotations

import contextlib
import http.client
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.clients.service import Reply, steered
from tests.faults.relay import Relay
from tests.faults.surroundings import (
    COMPLETIONS,
    QUICK,
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


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_open(own: Own, transport: str, tmp_path: Path) -> None:
    """A way that carries nothing any more ends streams as silence does; those that idled on it are not used again."""
    address = urlsplit(own.url(transport))
    with contextlib.ExitStack() as opened:
        relay = opened.enter_context(Relay((str(address.hostname), int(address.port or 0))))
        arguments = [f"--{name}={value}" for name, value in QUICK.items()]
        arguments += ["--triton-url", f"{transport}://127.0.0.1:{relay.port}"]
        arguments += ["--tokenizer", str(own.repository.tokenizer)]
        service = opened.enter_context(watched(tmp_path, *arguments))
        assert_works(service)
        with service.back_to_level():
            with Stream(service, "vllm_model", steered(text=WORDS, eos=False, delay_ms=50)) as stream:
                stream.chunk()
                relay.freeze()
                events = stream.rest()
            assert "upstream_silent" == failure(events[-1])["code"]
            if transport == "http":
                reply = service.post(COMPLETIONS, body("vllm_model", steered(text=WORDS)))
                assert (200, WORDS) == (reply.status, reply.json["choices"][0]["text"])
            # What does not stream, and gRPC's one connection, are found dead by their own timeouts and pings, after
            # longer than a test is to take.
            relay.reset()
            assert_works(service)
        assert [] == service.complaints()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_descriptors_used_up(own: Own, transport: str, tmp_path: Path) -> None:
    """Who finds no room is not let in, or refused with a 503; who is let in is served to the end, and the next too."""
    arguments = ["--triton-url", own.url(transport), "--tokenizer", str(own.repository.tokenizer)]
    request = body("vllm_model", steered(text=WORDS * 20, delay_ms=10), stream=True, max_tokens=500)

    def ask(service: Watched) -> Reply | None:
        try:
            return service.post(COMPLETIONS, request)
        except (ConnectionError, http.client.HTTPException):
            return None

    with watched(tmp_path, *arguments) as service:
        assert_works(service)
        with service.back_to_level():
            _, hard = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
            resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE, (service.level().descriptors + 13, hard))
            with ThreadPoolExecutor(24) as threads:
                replies = list(threads.map(ask, [service] * 24))
            served = [reply for reply in replies if reply is not None and reply.status == 200]
            refused = [reply for reply in replies if reply is not None and reply.status != 200]
            assert served
            assert len(served) < len(replies)
            assert all("[DONE]" == reply.events[-1] for reply in served)
            assert {(503, "upstream_unavailable")} >= {(reply.status, reply.error["code"]) for reply in refused}
            assert_works(service)
