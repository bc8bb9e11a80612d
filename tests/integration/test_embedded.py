"""The embedded Triton as a process: it starts, says why when it does not, ends, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from triton_openai.demo.repository import build_repository
from triton_openai.errors import ConfigurationError
from triton_openai.triton import _interpreter, _runtime
from triton_openai.triton.embedded import EmbeddedTriton


def until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
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


def is_ready(server: EmbeddedTriton, timeout: float = 20.0) -> bool:
    """Return whether the server answers within *timeout* seconds that it is ready."""
    try:
        with urllib.request.urlopen(f"{server.http_url}/v2/health/ready", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_repository(tmp_path_factory.mktemp("embedded"), models=["text_embedding"]).path


@pytest.fixture
def server(repository: Path) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(model_repository=repository, environment=os.environ)
    yield server
    server.stop(timeout=1.0)


def test_it_starts_ready_and_stops(server):
    """A started server is ready on three ports of its own; a stopped one leaves no process and no memory."""
    server.start()
    group = server.pid
    assert is_ready(server)
    with urllib.request.urlopen(server.metrics_url) as answer:
        assert b"nv_inference_request_success" in answer.read()
    assert server.grpc_url.startswith("grpc://127.0.0.1:")
    assert server.poll() is None
    assert len(group_members(group)) >= 2
    assert shared_memory(server._shared_memory)
    work_dir = server.log_path.parent

    server.stop()

    assert server.poll() == 0
    assert group_members(group) == set()
    assert not shared_memory(server._shared_memory)
    assert not work_dir.exists()


def test_killed_and_started_again_it_has_the_same_ports(server):
    """After a crash the same object starts the server again where clients expect it."""
    server.start()
    url, group = server.http_url, server.pid

    server.kill()

    assert server.poll() == -signal.SIGKILL
    assert not is_ready(server)
    assert group_members(group) == set()
    server.start()
    assert server.http_url == url
    assert is_ready(server)
    server.restart()
    assert server.http_url == url
    assert is_ready(server)


def test_a_paused_server_answers_nothing_until_resumed(server):
    """Pausing freezes the server without closing anything, and stopping a frozen one works too."""
    server.start()
    server.pause()
    assert not is_ready(server, timeout=0.5)
    server.resume()
    until(lambda: is_ready(server))
    server.pause()
    server.stop()
    assert server.poll() is not None


def test_a_taken_port_is_reported(repository):
    """A port that was asked for and is taken ends the start at once, with the server's own words."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedTriton(model_repository=repository, environment=os.environ, http_port=port)
        with pytest.raises(ConfigurationError) as caught:
            server.start()
        server.stop()
    assert f"Port {port} of 127.0.0.1 is not free" in caught.value.message


def test_a_port_lost_to_someone_else_is_replaced(repository, monkeypatch):
    """When a chosen port is taken before the server binds it, the start goes on with others."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedTriton(model_repository=repository, environment=os.environ)
        choose = server._choose_ports
        answers = iter([(taken.getsockname()[1], *choose()[1:])])
        monkeypatch.setattr(server, "_choose_ports", lambda: next(answers, None) or choose())
        server.start()
        try:
            assert is_ready(server)
        finally:
            server.stop(timeout=1.0)


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
        work_dir=tmp_path / "work",
        extra_args=["--log-verbose=1"],
    )
    with pytest.raises(ConfigurationError, match="status 3"):
        server.start()
    said = server.log_tail().splitlines()
    assert "marker=kept" in said
    assert "--http-address=127.0.0.1" in said
    assert "--log-verbose=1" in said
    assert {path.name for path in (tmp_path / "work" / "backends").iterdir()} == {"own", "added"}


def test_a_repository_may_be_named_from_here(repository, monkeypatch):
    """A path that is not absolute is one from the folder in which the service was started."""
    monkeypatch.chdir(repository.parent)
    path = Path(repository.name)
    with EmbeddedTriton(model_repository=path, environment=os.environ, model_control_mode="explicit") as server:
        assert is_ready(server)


def test_models_can_be_loaded_on_demand(repository):
    """In explicit mode only the models that are named are loaded, and others on request."""
    server = EmbeddedTriton(model_repository=repository, environment=os.environ, model_control_mode="explicit")
    with server:
        ready = f"{server.http_url}/v2/models/text_embedding/ready"
        with pytest.raises(urllib.error.HTTPError):
            urllib.request.urlopen(ready)
        load = f"{server.http_url}/v2/repository/models/text_embedding/load"
        urllib.request.urlopen(urllib.request.Request(load, data=b"{}")).close()
        urllib.request.urlopen(ready).close()


def test_paths_from_where_we_are(repository, monkeypatch):
    """A relative path means the same to the server, which runs elsewhere."""
    monkeypatch.chdir(repository.parent)
    server = EmbeddedTriton(
        model_repository=Path(repository.name), environment=os.environ, model_control_mode="explicit"
    )
    server.start()
    server.stop(timeout=1.0)


def test_two_servers_live_side_by_side(server, repository):
    """Two servers over the same repository do not meet, in ports or in shared memory."""
    server.start()
    with EmbeddedTriton(model_repository=repository, environment=os.environ) as other:
        assert is_ready(other)
        other.kill()
        assert is_ready(server)


OWNER = """
import os, sys, threading
from pathlib import Path
from triton_openai.triton import _interpreter, _runtime
from triton_openai.triton.embedded import EmbeddedTriton
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


def test_nothing_outlives_a_killed_server(server):
    """When tritonserver itself dies, its Python processes go with it and the status says how it died."""
    server.start()
    group = server.pid
    os.kill(group, signal.SIGKILL)
    assert server.wait(20.0) == -signal.SIGKILL
    assert group_members(group) == set()


class TestModelPython:
    """The choice of the Python that Triton's models run in."""

    @pytest.fixture
    def stubs(self, tmp_path):
        own = f"{sys.version_info[0]}.{sys.version_info[1]}"
        for version in {"3.10", "3.11", "3.12", own}:
            folder = tmp_path / "stubs" / version
            folder.mkdir(parents=True)
            (folder / "triton_python_backend_stub").touch()
        return tmp_path / "stubs"

    def test_a_private_environment_is_built_once(self, stubs, tmp_path, monkeypatch):
        """When the service's NumPy does not fit, an environment is built in the cache and found there next time."""
        built = []

        def build(interpreter, target, environment):
            built.append(interpreter.version)
            (target / "bin").mkdir(parents=True)
            (target / "bin" / "python3").touch()

        monkeypatch.setattr(_interpreter, "_has_requirements", lambda: False)
        monkeypatch.setattr(_interpreter, "_build", build)
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        bundled = ["3.10", "3.11", "3.12"]
        first = _interpreter.model_python(stubs, environment, tmp_path / "work", bundled)
        second = _interpreter.model_python(stubs, environment, tmp_path / "work", bundled)
        assert built == [first.version]
        assert first == second
        assert first.bin.is_relative_to(tmp_path / "cache" / "triton-openai")

    def test_a_failed_build_is_explained_and_leaves_nothing(self, stubs, tmp_path, monkeypatch):
        """Without a package index the sentence says what failed and what to install; no half-made folder stays."""
        monkeypatch.setattr(_interpreter, "_has_requirements", lambda: False)
        monkeypatch.setattr(_interpreter, "_ALTERNATIVES", ("3.10", "3.11", "3.12"))
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
        environment |= {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
        with pytest.raises(ConfigurationError, match="numpy<2") as caught:
            _interpreter.model_python(stubs, environment, tmp_path / "work", ["3.10", "3.11", "3.12"])
        assert "pip install 'triton-openai[demo]'" in caught.value.message
        cache = tmp_path / "cache" / "triton-openai"
        assert not [path for path in (cache.iterdir() if cache.exists() else ()) if path.is_dir()]

    def test_missing_stubs_and_libraries_are_named(self, tmp_path, monkeypatch):
        """An interpreter without a stub is not used, and the sentence says so."""
        with pytest.raises(ConfigurationError, match="no stub for Python"):
            _interpreter.model_python(tmp_path, {"PATH": ""}, tmp_path)

    def test_a_missing_package_or_platform_is_named(self, tmp_path, monkeypatch):
        """Without nvidia-pytriton, or elsewhere than on Linux, a sentence says what to do."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ConfigurationError, match="nvidia-pytriton, which is not installed"):
            _runtime.packaged_runtime(os.environ, tmp_path)
        monkeypatch.setattr("platform.machine", lambda: "arm64")
        with pytest.raises(ConfigurationError, match="x86_64 only"):
            _runtime.packaged_runtime(os.environ, tmp_path)
