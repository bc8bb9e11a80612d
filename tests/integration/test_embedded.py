"""The embedded Triton as a process: it starts, says why when it does not, ends, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.triton_fixture import frozen, wait_for_end
from triton_openai.demo.repository import build_repository
from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver import embedded
from triton_openai.tritonserver.embedded import EmbeddedTriton


def until(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def group_members(group: int) -> set[int]:
    """Return the processes of a process group that are not zombies."""
    members = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            members.add(int(entry.name))
    return members


def shared_memory(prefix: str) -> set[str]:
    """Return the names of the regions that one server has in shared memory."""
    return {path.name for path in Path("/dev/shm").glob(f"{prefix}*")}


def is_ready(server: EmbeddedTriton, timeout: float = 120.0) -> bool:
    """Return whether the server answers within *timeout* seconds that it is ready."""
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/health/ready", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextlib.contextmanager
def started(server: EmbeddedTriton) -> Iterator[EmbeddedTriton]:
    """Start *server* for the block."""
    try:
        server.start()
        yield server
    finally:
        server.stop(timeout=0.1)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tmp_path_factory.mktemp("embedded"), models=["text_embedding"]).path


@pytest.fixture
def server(repository: Path) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(model_repository=repository, environment=os.environ)
    yield server
    server.stop(timeout=0.1)


def test_a_server_starts_ready_and_stops(server, monkeypatch):
    """A started server is ready on three ports of its own; a stopped one leaves no process and no memory."""
    # It ends with another status when its time is over.
    monkeypatch.setattr(embedded, "_EXIT_SECONDS", 120)
    server.start()
    group = server.pid
    assert is_ready(server)
    with urllib.request.urlopen(server.metrics_url) as answer:
        assert b"nv_inference_request_success" in answer.read()
    assert server.grpc_url.startswith("grpc://127.0.0.1:")
    assert server.poll() is None
    assert len(group_members(group)) >= 2
    assert shared_memory(server._shared_memory)
    work_dir, url = server.log_path.parent, server.http_url

    server.stop(timeout=120)

    assert server.poll() == 0
    assert group_members(group) == set()
    assert not shared_memory(server._shared_memory)
    assert not work_dir.exists()

    server.start()
    assert server.http_url == url
    assert is_ready(server)


def test_frozen_killed_and_started_again(server):
    """
    A frozen server closes nothing. After a crash the same object starts the server again where clients expect it.

    Stopping a frozen one works too.
    """
    server.start()
    url, group = server.http_url, server.pid
    with frozen(server):
        assert not is_ready(server, timeout=0.5)
    until(lambda: is_ready(server))

    server.kill()

    assert server.poll() == -signal.SIGKILL
    assert not is_ready(server)
    assert group_members(group) == set()
    server.start()
    assert server.http_url == url
    assert is_ready(server)
    with frozen(server):
        server.stop(timeout=0.1)
    assert server.poll() is not None


def test_a_taken_port_is_reported(server):
    """A port that somebody knows cannot be another one: when it is taken, the start ends with the server's words."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(server.http_url.rpartition(":")[2])))
        taken.listen()
        with pytest.raises(ConfigurationError, match="already in use"):
            server.start()


def test_a_port_lost_to_someone_else_is_replaced(repository, monkeypatch):
    """When a chosen port is taken before the server binds it, the start goes on with others."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedTriton(model_repository=repository, environment=os.environ)
        choose = embedded.free_ports
        answers = iter([(taken.getsockname()[1], *choose(2))])
        monkeypatch.setattr(embedded, "free_ports", lambda: next(answers, None) or choose())
        server.start()
        try:
            assert is_ready(server)
        finally:
            server.stop(timeout=0.1)


def test_a_broken_model_is_reported_with_the_log(tmp_path):
    """A model that cannot be loaded ends the start at once, and the message holds the reason."""
    version = tmp_path / "models" / "broken" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text("raise RuntimeError('this model is broken on purpose')\n")
    (version.parent / "config.pbtxt").write_text('name: "broken"\nbackend: "python"\n')
    server = EmbeddedTriton(model_repository=tmp_path / "models", environment=os.environ)
    with pytest.raises(ConfigurationError) as caught:
        server.start()
    server.stop()
    assert "this model is broken on purpose" in caught.value.message


def test_what_is_missing_is_named(tmp_path):
    """What is not there is named before anything is started."""
    missing = tmp_path / "nothing"
    for arguments in (
        {"model_repository": missing},
        {"model_repository": tmp_path, "binary": missing},
        {"model_repository": tmp_path, "backends": missing},
        {"model_repository": tmp_path, "load_models": ["nothing"]},
        {"model_repository": tmp_path, "load_models": ["../nothing"]},
    ):
        server = EmbeddedTriton(environment=os.environ, **arguments)
        with pytest.raises(ConfigurationError, match="nothing"):
            server.start()
        server.stop()


def test_an_installed_binary_is_started_the_same_way(tmp_path, repository):
    """A given tritonserver runs in the environment as it is, with our addresses, and backends added to its own."""
    installed = tmp_path / "opt"
    (installed / "bin").mkdir(parents=True)
    (installed / "backends" / "own").mkdir(parents=True)
    extra = tmp_path / "extra"
    (extra / "added").mkdir(parents=True)
    binary = installed / "bin" / "tritonserver"
    binary.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "marker=$MARKER"\nexit 3\n')
    binary.chmod(0o755)
    server = EmbeddedTriton(
        model_repository=repository,
        environment={**os.environ, "MARKER": "kept"},
        binary=binary,
        backends=extra,
        extra_args=["--log-verbose=1"],
    )
    with pytest.raises(ConfigurationError, match="status 3"):
        server.start()
    said = server.log_tail().splitlines()
    assert "marker=kept" in said
    assert "--http-address=127.0.0.1" in said
    assert "--log-verbose=1" in said
    assert {path.name for path in (server.log_path.parent / "backends").iterdir()} == {"own", "added"}
    server.stop()


def test_models_can_be_loaded_on_demand(repository, monkeypatch):
    """
    In explicit mode only the models that are named are loaded, and others on request.

    A path that is not absolute is one from the folder in which the service was started, though the server runs
    elsewhere.
    """
    monkeypatch.chdir(repository.parent)
    path = Path(repository.name)
    server = EmbeddedTriton(model_repository=path, environment=os.environ, model_control_mode="explicit")
    with started(server):
        ready = f"{server.http_url}/v2/models/text_embedding/ready"
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(ready)
        refused.value.close()
        load = f"{server.http_url}/v2/repository/models/text_embedding/load"
        urllib.request.urlopen(urllib.request.Request(load, data=b"{}")).close()
        urllib.request.urlopen(ready).close()


def test_two_servers_live_side_by_side(server, repository):
    """
    Two servers over the same repository do not meet, in ports or in shared memory.

    When tritonserver itself dies, its Python processes go with it and the status says how it died.
    """
    server.start()
    with started(EmbeddedTriton(model_repository=repository, environment=os.environ)) as other:
        assert is_ready(other)
        group = other.pid
        assert group is not None
        os.kill(group, signal.SIGKILL)
        assert wait_for_end(other, 120.0) == -signal.SIGKILL
        assert group_members(group) == set()
        assert is_ready(server)


OWNER = """
import os, sys, threading
from pathlib import Path
from triton_openai.tritonserver.embedded import EmbeddedTriton
server = EmbeddedTriton(model_repository=Path(sys.argv[1]), environment=os.environ)
# A thread that ends: whatever is tied to the starting thread must not take the server with it.
starter = threading.Thread(target=server.start)
starter.start()
starter.join()
print(server.pid, server.log_path.parent, server._shared_memory, server.poll(), flush=True)
sys.stdin.read()
"""


def test_nothing_outlives_an_owner_that_is_killed(repository):
    """SIGKILL for the owner ends the server and its Python processes, and their traces are removed."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(repository)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    pid, work_dir, prefix, status = owner.stdout.readline().split()
    assert status == "None"
    assert shared_memory(prefix)
    assert len(group_members(int(pid))) >= 2

    owner.kill()
    owner.wait()
    owner.stdout.close()
    owner.stdin.close()

    until(lambda: not group_members(int(pid)))
    until(lambda: not shared_memory(prefix))
    until(lambda: not Path(work_dir).exists())


class _KilledAtOnce(EmbeddedTriton):
    """A server that another thread kills as soon as its process exists, before its process id is known."""

    def __init__(self, repository: Path) -> None:
        self.killers: list[threading.Thread] = []
        super().__init__(model_repository=repository, environment=os.environ)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_guard" and value is not None:
            killer = threading.Thread(target=self.kill, daemon=True)
            killer.start()
            # Time to get as far as it can.
            killer.join(0.05)
            self.killers.append(killer)


def test_a_server_is_killed_while_it_is_launched(tmp_path: Path) -> None:
    """A stop that comes between the start of the process and its first words still ends it."""
    server = _KilledAtOnce(tmp_path)
    try:
        with pytest.raises(ConfigurationError, match="ended with status -9 while starting"):
            server.start(120)
        for killer in server.killers:
            killer.join(120)
        assert server.killers != []
        assert not any(killer.is_alive() for killer in server.killers)
    finally:
        server.stop()
