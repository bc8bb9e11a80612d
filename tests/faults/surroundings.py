"""A Triton that is not treated well, the service in front of it as a process to look into, and its clients."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.clients.service import Reply, Service, serving, steered, until
from tests.faults import probed
from triton_openai.demo.record import Event, Record
from triton_openai.demo.repository import DemoRepository
from triton_openai.tritonserver.embedded import EmbeddedTriton

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "one two three four five"
TRANSPORTS = ("http", "grpc")
#: The models that write the record of what becomes of a request, by the model that is asked.
ENGINES = {"ensemble": "tensorrt_llm", "vllm_model": "vllm_model"}
ENDS = ("finished", "cancelled", "stopped", "failed")
#: With room for a busy machine; who is to wait in vain says with :data:`IMPATIENT` for how long.
PATIENT = {
    "first_token_timeout": 30,
    "idle_timeout": 30,
    "request_timeout": 40,
}
#: Where the service has to find out for itself, for all requests, that nothing comes any more.
QUICK = {**PATIENT, "first_token_timeout": 5, "idle_timeout": 4, "request_timeout": 6}
#: The headers of a client that waits for an answer which never comes.
IMPATIENT = {"x-first-token-timeout": "2", "x-idle-timeout": "2", "x-request-timeout": "3"}
MEBIBYTE = 1024 * 1024
#: Until the connection of the client that was last is gone from everywhere.
_SETTLE_SECONDS = 120
# In MiB. The allocator keeps some 9 after a crowd of clients; answers that were kept for slow ones would be 22 or more.
_MOST_GROWTH = 18


class Own:
    """The folder's Triton and what its models write down."""

    def __init__(self, server: EmbeddedTriton, repository: DemoRepository, record: Record) -> None:
        self.server = server
        self.repository = repository
        self.record = record
        #: The ids of requests of earlier tests, whose end nobody has written down: Triton was killed.
        self.lost: set[str] = set()

    def url(self, transport: str) -> str:
        """Return the address for *transport*."""
        return self.server.http_url if transport == "http" else self.server.grpc_url

    def begun(self, model: str, prompt: str) -> Event:
        """Wait until *model* works on the steered *prompt*, like no other, and return the record's line of it."""

        def asks(event: Event) -> bool:
            texts = [tensor["value"] for tensor in event["inputs"].values() if tensor["dtype"] == "BYTES"]
            return any(f"{prompt} <<" in text for text in itertools.chain(*texts))

        def find() -> Event | None:
            return next(filter(asks, reversed(self.record.events(model=model, event="request"))), None)

        found: Event = until(find)
        return found

    def end(self, model: str, id: str, timeout: float = 120) -> str:
        """Wait until *model* is done with the request *id* and return how it ended."""
        (event,) = self.record.wait_for(
            lambda events: any(event["event"] in ENDS for event in events), timeout, id=id, model=model
        )[-1:]
        return str(event["event"])


class Level(msgspec.Struct, frozen=True):
    """How much of everything a service has while nothing is asked of it; see ``probed``."""

    tasks: list[str]
    running: int
    streams: int
    used: int
    idle: int
    records: int
    ended: int
    descriptors: list[str]
    memory: int = 0

    @property
    def held(self) -> int:
        """The descriptors without those of connections to Triton that are idle, or that a call uses for a moment."""
        return len(self.descriptors) - self.idle - self.used

    def above(self, before: Level) -> list[str]:
        """Return what there is more of than *before*; connections that wait to be used again are no leak."""
        new = Counter(self.tasks) - Counter(before.tasks)
        more = {"requests": self.running, "streams": self.streams, "connections in use": self.used}
        more["records of requests"] = self.records - before.records
        more["connections of clients that have left"] = self.ended - before.ended
        more["descriptors"] = self.held - before.held
        found = [f"{name}: {count}" for name, count in more.items() if count > 0]
        if more["descriptors"] > 0:
            found += map(str, (Counter(self.descriptors) - Counter(before.descriptors)).items())
        return [*found, *(f"task {name}: {count}" for name, count in new.items())]


@dataclass(frozen=True)
class Watched(Service):
    """A service whose process tells how it is inside."""

    probe: Path

    def level(self) -> Level:
        """Return how it is now."""
        self.probe.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        until(self.probe.exists)
        told = msgspec.json.decode(self.probe.read_bytes(), type=Level)
        return msgspec.structs.replace(told, memory=self.memory())

    def usual_level(self) -> Level:
        """Return how it is; some tasks are over and made anew all the time: of what lasts, a look shows nearly all."""
        looks = [self.level() for _ in range(3)]
        tasks: Counter[str] = Counter()
        for look in looks:
            tasks |= Counter(look.tasks)
        return msgspec.structs.replace(looks[-1], tasks=list(tasks.elements()))

    @contextlib.contextmanager
    def back_to_level(self) -> Iterator[None]:
        """
        Assert that what happens meanwhile leaves nothing behind: no request, task, stream, connection or descriptor,
        and no memory to speak of.
        """
        before = self.usual_level()
        yield
        deadline = time.monotonic() + _SETTLE_SECONDS
        while left := (after := self.level()).above(before):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        grown = (after.memory - before.memory) / MEBIBYTE
        assert grown < _MOST_GROWTH, f"grown by {grown:.0f} MiB"


@contextlib.contextmanager
def watched(
    folder: Path,
    *arguments: str,
    triton: Mapping[str, float] | None = None,
    strict: bool = True,
    stderr: Path | None = None,
    further: Mapping[str, Any] | None = None,
) -> Iterator[Watched]:
    """
    Run the service with *arguments*, settings of *triton* and *further* ones, so that it can be looked into; see
    ``probed``.

    What it writes to stderr goes to the pipe *stderr*, if there is one.
    """
    probe = folder / "probe.json"
    settings = {
        "triton": {"refresh_interval": 0.2, **(triton or {})},
        "server": {"heartbeat_interval": 0.2},
        **(further or {}),
    }
    with serving(folder, *arguments, settings=settings, first=partial(_first, probe, strict, stderr)) as service:
        yield Watched(service.process, service.banner, service.log, probe)


def _first(probe: Path, strict: bool, stderr: Path | None) -> None:
    if stderr is not None:
        os.dup2(os.open(stderr, os.O_WRONLY), 2)
    probed.watch(probe, strict=strict)


def body(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """Return a request for a completion."""
    return {"model": model, "prompt": prompt, **fields}


class Stream:
    """A streamed answer that is read event by event."""

    def __init__(
        self, service: Service, model: str, prompt: str, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        self._connection = service.connect()
        data = json.dumps(body(model, prompt, stream=True, **fields))
        self._connection.request("POST", COMPLETIONS, data, {"Content-Type": "application/json", **(headers or {})})
        self.response: http.client.HTTPResponse | None = None

    def event(self) -> str:
        """Return the data of the next event, or the text of a comment with its colon; empty at the end."""
        if self.response is None:
            self.response = self._connection.getresponse()
            assert 200 == self.response.status, self.response.read()
        line = self.response.readline().decode()
        if line == "event: error\n":
            line = self.response.readline().decode()
        assert line == "" or self.response.readline() == b"\n"
        return line.rstrip("\n").removeprefix("data: ")

    def chunk(self) -> dict[str, Any]:
        """Return the next chunk; comments are skipped."""
        while (event := self.event()).startswith(":"):
            pass
        return dict(json.loads(event))

    def rest(self) -> list[str]:
        """Return the data of all further events."""
        return [event for event in iter(self.event, "") if not event.startswith(":")]

    def close(self) -> None:
        """Leave."""
        if self.response is not None:
            self.response.close()
        self._connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def asking(
    service: Service, path: str, request: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Iterator[Future[Reply]]:
    """Send a request from a thread and yield its answer to come."""
    with ThreadPoolExecutor(1) as threads:
        yield threads.submit(service.send, "POST", path, request, headers, timeout=120)


def assert_works(service: Service) -> None:
    """Assert that the service answers, streamed or not, and embeds, as soon as it has found its Triton."""
    vector = {"model": "text_embedding", "input": "a"}
    # It may still think that it is ready when Triton has just come back, and that Triton is gone right after.
    until(lambda: service.status("/health/ready") == 200 and service.post("/v1/embeddings", vector).status == 200)
    for model in ENGINES:
        answer = service.post(COMPLETIONS, body(model, steered(text=WORDS)))
        assert 200 == answer.status, answer.json
        assert WORDS == answer.json["choices"][0]["text"]
        with Stream(service, model, steered(text=WORDS)) as stream:
            assert "[DONE]" == stream.rest()[-1]
    assert 200 == service.post("/v1/embeddings", {"model": "text_embedding", "input": "a"}).status


def left(own: Own, *engines: str) -> set[str]:
    """Return the ids of the requests that one of *engines* works on, all of them if none is named."""
    events = [event for event in own.record.events() if event["model"] in (engines or ENGINES.values())]
    begun = {event["id"] for event in events if event["event"] == "request" and "stop" not in event["inputs"]}
    return begun - {event["id"] for event in events if event["event"] in ENDS} - own.lost


def failure(event: str) -> dict[str, Any]:
    """Return the error of an error event."""
    content = json.loads(event)
    assert ["error"] == list(content)
    assert {"message", "type", "param", "code"} == content["error"].keys()
    return dict(content["error"])
