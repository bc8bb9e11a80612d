"""What the tests do when the Triton that they share ends by itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import pytest
from tests import triton_fixture

ends = {ends}
runs = 0


class Server:
    http_url = "http://127.0.0.1:1"

    def wait(self, timeout):
        pass

    def poll(self):
        return {status} if runs in ends else None

    def log_tail(self):
        return "its last words"

    def start(self):
        pass


triton_fixture._SHARED.append(Server())
triton_fixture.wait_for_end = lambda server, timeout: server.poll()


@pytest.fixture
def triton_found_again():
    print("found again")


def test_one():
    global runs
    runs += 1
    print({said!r})
    assert runs == {passes}
"""


def run(folder: Path, ends: tuple[int, ...] | str, passes: int, status: int = 6, said: str = "") -> str:
    """
    Return what is printed if Triton ends with *status* in the runs *ends* of a test that passes in run *passes*.

    Every run of the test prints *said*.
    """
    file = folder / "test_it.py"
    file.write_text(TESTS.format(ends=ends, passes=passes, status=status, said=said))
    command = [sys.executable, "-m", "pytest", "-p", "tests.triton_fixture", "-p", "no:cacheprovider", "-rP", file.name]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [*command, "--rootdir=."], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_a_test_is_run_once_more(tmp_path: Path) -> None:
    """The second result counts; a third run there is not."""
    once = run(tmp_path, ends=(1,), passes=2)
    assert "1 passed" in once
    assert "Triton failed by itself 1 times; 1 tests were run again" in once
    assert "passed when run again: test_it.py::test_one" in once
    assert "status 6" in once
    assert "found again" in once

    twice = run(tmp_path, ends=(1, 2), passes=3)
    assert "1 failed" in twice
    assert "Triton failed by itself 2 times; 1 tests were run again" in twice
    assert "failed when run again: test_it.py::test_one" in twice


def test_a_test_is_run_once_more_where_triton_takes_a_model_for_dead(tmp_path: Path) -> None:
    """That is no end of Triton: the backend starts the model again by itself."""
    output = run(tmp_path, ends=(), passes=2, said="Stub process 'm_0_0' is not healthy.")
    assert "1 passed" in output
    assert "passed when run again: test_it.py::test_one" in output


def test_other_failures_stand(tmp_path: Path) -> None:
    """A test that fails while Triton runs, or that has killed its own, is not run again."""
    for ends in ((), (1,)):
        output = run(tmp_path, ends=ends, passes=2, status=-signal.SIGKILL)
        assert "1 failed" in output
        assert "failed by itself" not in output


def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    """The error of a module that cannot be imported is what the run prints."""
    output = run(tmp_path, ends="unknown_name", passes=1)

    assert "1 error" in output
    assert "unknown_name" in output
    assert "AttributeError" not in output
