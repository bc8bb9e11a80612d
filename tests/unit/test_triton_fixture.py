"""What the tests do when the Triton that they share ends by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# Each test says in which of its runs Triton ends, and how, and in which one it passes itself.
_TESTS = """
import signal
from collections import Counter

import pytest
from tests import triton_fixture


class Server:
    http_url = "http://127.0.0.1:1"
    status = None
    hangs = False

    def poll(self):
        return self.status

    def log_tail(self):
        return "its last words"

    def kill(self):
        self.status = -signal.SIGKILL

    def start(self):
        assert self.status is not None, "it runs already"
        self.status = None
        self.hangs = False


server, runs = Server(), Counter()
triton_fixture._SHARED.append(server)
triton_fixture.wait_for_end = lambda server, timeout: server.poll()
triton_fixture._answers = lambda url: server.status is None and not server.hangs


@pytest.fixture
def triton_found_again():
    print("found again")


def run(name, ends, passes, status=6):
    runs[name] += 1
    server.status = status if runs[name] in ends else None
    assert runs[name] == passes


def test_once():
    run("once", ends=(1,), passes=2)


def test_twice():
    run("twice", ends=(1, 2), passes=3)


def test_dead_model():
    print("Stub process 'm_0_0' is not healthy.")
    run("dead model", ends=(), passes=2)


def test_hangs():
    server.hangs = not runs["hangs"]
    run("hangs", ends=(), passes=2)


def test_out_of_time():
    runs["out of time"] += 1
    if runs["out of time"] == 1:
        pytest.fail("Timeout (>9s) from pytest-timeout.")


def test_running():
    run("running", ends=(), passes=2)


def test_killed():
    run("killed", ends=(1,), passes=2, status=-signal.SIGKILL)


def test_after_it():
    assert server.status is None
"""


def _printed(folder: Path, tests: str) -> str:
    """Return what a run of *tests* prints."""
    file = folder / "test_it.py"
    file.write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "tests.triton_fixture", "-p", "no:cacheprovider", "-rP", file.name]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        [*command, "--rootdir=."], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def test_tests_are_run_once_more(tmp_path: Path) -> None:
    """
    If Triton ends by itself, the second result of a test counts; a third run there is not.

    The same if Triton hangs, or takes a model for dead. A test that fails while Triton runs, or that has killed its
    own, is not run again.
    """
    printed = _printed(tmp_path, _TESTS)

    assert "3 failed, 5 passed" in printed
    # One end of test_once, two of test_twice; a model that is dead counts as one, and a Triton that hangs.
    assert "Triton failed by itself 6 times; 5 tests were run again" in printed
    passed = ("once", "dead_model", "hangs", "out_of_time")
    for name, outcome in (("twice", "failed"), *((name, "passed") for name in passed)):
        assert f"{outcome} when run again: test_it.py::test_{name}\n" in printed
    assert "status 6" in printed
    assert "its last words" in printed
    assert "found again" in printed


def test_a_module_that_cannot_be_imported_is_reported(tmp_path: Path) -> None:
    """The error of a module that cannot be imported is what the run prints."""
    printed = _printed(tmp_path, "unknown_name")

    assert "1 error" in printed
    assert "unknown_name" in printed
    assert "AttributeError" not in printed
