"""The embedded Triton as a process: it starts, says why when it does not, ends, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
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
from triton_openai.tritonserver import _interpreter, _runtime
from triton_openai.tritonserver.embedded import EmbeddedTriton


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
from triton_openai.tritonserver import _interpreter, _runtime
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
        for version in {"3.11", "3.12", own}:
            folder = tmp_path / "stubs" / version
            folder.mkdir(parents=True)
            (folder / "triton_python_backend_stub").touch()
        return tmp_path / "stubs"

    @pytest.fixture
    def other(self, tmp_path):
        """A Python 3.12 on ``PATH`` with NumPy 1."""
        facts = {
            "version": "3.12",
            "executable": "/usr/bin/python3.12",
            "base": "/usr/bin",
            "libraries": [],
            "packages": ["/usr/lib/python3/dist-packages"],
            "numpy": "1.26.4",
            "tokenizers": True,
        }
        (tmp_path / "bin").mkdir()
        program = tmp_path / "bin" / "python3.12"
        program.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\n")
        program.chmod(0o755)
        return {**os.environ, "PATH": str(program.parent)}

    @pytest.fixture
    def own(self, monkeypatch):
        """What the service's own interpreter says of itself is changed to something that does not fit."""
        probe = _interpreter.probe

        def changed(**facts):
            def answer(executable, environment):
                found = probe(executable, environment)
                if found is None or str(executable) != sys.executable:
                    return found
                return dataclasses.replace(found, **facts)

            monkeypatch.setattr(_interpreter, "probe", answer)

        return changed

    def test_another_python_on_the_path(self, stubs, tmp_path, own, other):
        """When the service's NumPy does not fit, a Python on ``PATH`` that does runs the models, with its packages."""
        own(version="3.11", numpy="2.1.0")
        found = _interpreter.model_python(stubs, other, tmp_path / "work", ["3.11", "3.12"])

        assert found.version == "3.12"
        lent = next((found.bin.parent / "lib" / "python3.12" / "site-packages").glob("*.pth"))
        assert lent.read_text() == "/usr/lib/python3/dist-packages\n"

    @pytest.mark.parametrize(
        "facts, problem",
        [
            ({"numpy": "2.1.0"}, "has NumPy 2.1.0, not 'numpy<2'"),
            ({"numpy": None}, "has no NumPy, not 'numpy<2'"),
            ({"tokenizers": False}, "has no package tokenizers"),
            ({"libraries": ()}, "has no libpython3.11.so.1.0"),
        ],
    )
    def test_what_does_not_fit_is_named(self, stubs, tmp_path, own, facts, problem):
        """Without an interpreter that fits, the sentence says what is wrong and what to install; nothing is built."""
        own(version="3.11", **{"numpy": "1.26.4", **facts})
        bundled = [] if "libraries" in facts else ["3.11"]
        with pytest.raises(ConfigurationError) as caught:
            _interpreter.model_python(stubs, {"PATH": ""}, tmp_path / "work", bundled)
        assert f"Python 3.11 {problem} ({sys.executable})" in caught.value.message
        assert "pip install 'triton-openai[demo]'" in caught.value.message
        assert not (tmp_path / "work").exists()

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
