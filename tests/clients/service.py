"""The service as a process of its own, for tests that look at it from outside."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tests.clients.forked import Forked

# Tests steer and watch each adapter itself, so no engine answers in its place.
_ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith("TRITON_OPENAI_")},
    "TRITON_OPENAI_PREFER_TOKEN_LEVEL": "never",
    # Nothing is left behind in the home of whoever runs the tests.
    "TRITON_OPENAI_RESPONSES_STORE": "memory",
    # Nobody here has a certificate of a public authority. To read those of the system takes a tenth of a start.
    "SSL_CERT_FILE": os.devnull,
}
_POLL_SECONDS = 0.02


class Reply(msgspec.Struct, frozen=True):
    """One answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object of OpenAI's envelope, checked for its form."""
        body = self.json
        assert ["error"] == list(body), body
        error = body["error"]
        assert {"message", "type", "param", "code"} == error.keys()
        assert isinstance(error["message"], str)
        assert error["message"]
        assert isinstance(error["type"], str)
        assert error["param"] is None or isinstance(error["param"], str)
        assert error["code"] is None or isinstance(error["code"], str)
        return dict(error)

    @property
    def events(self) -> list[str]:
        """The data of every server-sent event, comments left out."""
        blocks = self.body.decode().split("\n\n")
        assert "" == blocks.pop(), "the body ends in the middle of an event"
        events = [block for block in blocks if not block.startswith(":")]
        events = [event.removeprefix("event: error\n") for event in events]
        assert all(event.startswith("data: ") for event in events)
        return [event.removeprefix("data: ") for event in events]


@dataclass(frozen=True)
class Service:
    """A running process, and ways to ask it."""

    process: subprocess.Popen[str] | Forked
    banner: Mapping[str, Any]
    log: Path

    @property
    def address(self) -> str:
        """Where it listens, ``http://host:port``."""
        return str(self.banner["address"])

    @property
    def base_url(self) -> str:
        """What an OpenAI client is given."""
        return str(self.banner["base_url"])

    @property
    def host(self) -> str:
        """The address that it listens on."""
        return str(urlsplit(self.address).hostname)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(urlsplit(self.address).port or 0)

    def connect(self, timeout: float = 120) -> http.client.HTTPConnection:
        """Return a connection."""
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout)

    def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout: float = 120,
    ) -> Reply:
        """Send one request over a connection of its own; a *body* that is no ``bytes`` is sent as JSON."""
        with contextlib.closing(self.connect(timeout)) as connection:
            return exchange(connection, method, path, body, headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """Send a POST."""
        return self.send("POST", path, body, headers)

    def status(self, path: str) -> int:
        """Return the status that a GET of *path* has."""
        return self.send("GET", path).status

    def memory(self) -> int:
        """Return how many bytes of memory the process holds now."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("the process has ended")

    def log_lines(self) -> list[str]:
        """Return the lines of the log so far, without one that is just being written."""
        return self.log.read_text().rpartition("\n")[0].splitlines()

    def complaints(self) -> list[str]:
        """Return the lines of the log that tell of an error that nobody expected, or that are no log lines at all."""
        found = []
        for line in self.log_lines():
            try:
                entry = json.loads(line)
            except ValueError:
                found.append(line)
                continue
            if entry.get("level") in ("error", "critical") or "exception" in entry:
                found.append(line)
        return found


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """Send one request over *connection* and read the whole answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
    given = {"Content-Type": "application/json"} if data is not None else {}
    connection.request(method, path, data, {**given, **(headers or {})})
    response = connection.getresponse()
    try:
        data = response.read()
    except http.client.IncompleteRead as error:
        # A stream that failed.
        data = error.partial
        assert b'event: error\ndata: {"error":' in data
    return Reply(response.status, dict(response.headers.items()), data)


@contextlib.contextmanager
def serving(
    folder: Path,
    *arguments: str,
    settings: Mapping[str, Any] | None = None,
    command: str = "serve",
    first: Callable[[], None] | None = None,
    fork: bool = True,
    **environ: str,
) -> Iterator[Service]:
    """
    Run ``triton-openai serve``, or another *command*, with *arguments* and *environ* on a free port.

    Its log goes to a file in *folder*.

    *settings* is what its YAML file holds.
    The process calls *first* before anything else. Without *fork* it is an interpreter of its own, see ``forked``.
    """
    log = folder / "service.log"
    line = [command, "--port", "0", "--log-format", "json", *arguments]
    if settings is not None:
        # JSON is YAML too.
        file = folder / "settings.yaml"
        file.write_text(json.dumps(settings))
        line += ["--config", str(file)]
    environ = {**_ENVIRONMENT, "XDG_STATE_HOME": str(folder / "state"), **environ}
    process: subprocess.Popen[str] | Forked
    # A file, because an unread pipe fills up and then holds the service.
    if fork:
        process = Forked(line, environ, log, first)
    else:
        line = [sys.executable, "-m", "triton_openai", *line]
        with log.open("w") as sink:
            process = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=sink, text=True)
    try:
        assert process.stdout is not None
        banner = process.stdout.readline()
        assert banner, log.read_text()
        yield Service(process, json.loads(banner), log)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Wait until *condition* gives something true, and return that."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(_POLL_SECONDS)
    return result


def steered(prompt: str = "Hello", **orders: Any) -> str:
    """Return a prompt that tells the demo's models what to do."""
    return f"{prompt} <<steer {json.dumps(orders)}>>"
