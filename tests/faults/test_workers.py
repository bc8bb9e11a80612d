"""A worker that is killed under load: what becomes of its clients, of the others', and of what it had counted."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.clients.service import Service, serving, steered, until
from tests.faults.surroundings import COMPLETIONS, ENGINES, WORDS, Own, Stream, body, left
from tests.scrape import Scrape

_KEY = "sk-faults"
_STREAMS = 12
_WORKERS = 2


def workers(service: Service) -> dict[int, int]:
    """Return the newest process id of each worker."""
    lines = [json.loads(line) for line in service.log_lines() if line.startswith("{")]
    return {line["worker"]: line["pid"] for line in lines if line["event"] == "worker started"}


def descriptors(service: Service) -> int:
    """Return how many files the parent has open."""
    return len(list(Path(f"/proc/{service.process.pid}/fd").iterdir()))


def ask(service: Service, model: str) -> tuple[int, Any]:
    """Ask for a short answer with the key; return its status and what is in it."""
    headers = {"Authorization": f"Bearer {_KEY}"}
    reply = service.send("POST", COMPLETIONS, body(model, steered(text=WORDS)), headers)
    return reply.status, reply.json


class Reading:
    """A stream that outlasts the test, read in a thread until it ends."""

    def __init__(self, service: Service, model: str) -> None:
        self.model = model
        prompt = steered(text=WORDS, eos=False, delay_ms=100)
        self._stream = Stream(service, model, prompt, headers={"Authorization": f"Bearer {_KEY}"}, max_tokens=2000)
        self._stream.chunk()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether there will be no more of it."""
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()
        self._thread.join()
        self._stream.close()

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException, AssertionError):
            while self._stream.event() and not self._left.is_set():
                pass


def test_a_worker_killed_under_load(own: Own, transport: str, tmp_path: Path) -> None:
    """
    The streams of a worker that is killed are cut, and stopped where Triton does that; others go on, and counts are
    right.
    """
    keys = tmp_path / "keys.yaml"
    keys.write_text(json.dumps({"keys": [{"name": "faults", "key": _KEY, "concurrent_requests": _STREAMS}]}))
    arguments = ["--workers", str(_WORKERS), "--api-keys-file", str(keys), "--triton-url", own.url(transport)]
    arguments += ["--tokenizer", str(own.repository.tokenizer)]
    settings = {"triton": {"refresh_interval": 0.2}}
    with (
        serving(tmp_path, *arguments, settings=settings, XDG_RUNTIME_DIR=str(tmp_path)) as service,
        ExitStack() as clients,
    ):
        until(lambda: all(ask(service, model)[0] == 200 for model in ENGINES for _ in range(8)))

        def opened(count: int) -> list[Reading]:
            found = [Reading(service, model) for model in (list(ENGINES) * count)[:count]]
            for each in found:
                clients.callback(each.leave)
            return found

        def running() -> float:
            text = service.send("GET", "/metrics", headers={"Authorization": f"Bearer {_KEY}"}).body.decode()
            return Scrape(text).sum("triton_openai_requests_running")

        before, had = workers(service), descriptors(service)
        streams = opened(_STREAMS)
        assert 429 == ask(service, "vllm_model")[0]
        os.kill(before[0], signal.SIGKILL)
        until(lambda: workers(service)[0] != before[0])
        until(lambda: running() == len(kept(streams)))
        lost = _STREAMS - len(kept(streams))
        # What else runs there is an ensemble's engine: Triton does not tell it, and who would is dead.
        until(lambda: len(left(own, "vllm_model")) == [each.model for each in kept(streams)].count("vllm_model"))

        # As many as were lost are let in again, and no more.
        until(lambda: ask(service, "vllm_model")[0] == (200 if lost else 429))
        opened(lost)
        assert 429 == ask(service, "vllm_model")[0]
        assert _STREAMS == running()
        clients.close()
        until(lambda: not left(own, "vllm_model"))
        until(lambda: not running())
        assert all(ask(service, model)[0] == 200 for model in ENGINES)
        until(lambda: descriptors(service) == had)
        assert before[1] == workers(service)[1]
        assert ["worker ended"] == [json.loads(line)["event"] for line in service.complaints()]


def kept(streams: list[Reading]) -> list[Reading]:
    """Return those that go on."""
    return [each for each in streams if not each.ended]
