"""What ends tests that hang, and what keeps the worker that runs them alive."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# It waits for processes for some seconds.
pytestmark = pytest.mark.extended

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = """
import asyncio
import signal
import time

import pytest


def wait():
    while True:
        time.sleep(60)


@pytest.mark.timeout(0.5)
async def test_callback():
    asyncio.get_running_loop().call_soon(wait)
    await asyncio.sleep(60)


@pytest.mark.timeout(0.5)
async def test_task():
    async def other():
        wait()

    task = asyncio.create_task(other())
    await asyncio.sleep(0)
    await asyncio.sleep(60)


@pytest.fixture
def hangs():
    yield
    wait()


@pytest.mark.timeout(0.5)
def test_teardown(hangs):
    assert not "the call fails"


def test_hook():
    pass


def test_half_a_character():
    print("\\ud800")
    assert "\\ud801" == "\\ud802"


@pytest.mark.timeout(0.5)
def test_process():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    wait()


def test_after():
    pass
"""
_CONFTEST = """
import pytest

from tests import timeouts


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item):
    # However slow the machine is, no other one ends its process.
    timeouts._GRACE = 600
    if item.name == "test_process":
        timeouts._GRACE = 0.5


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item, call):
    if item.name == "test_hook" and call.when == "call":
        pytest.fail("as a timer does")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run of tests that hang prints."""
    folder = tmp_path_factory.mktemp("hanging")
    (folder / "test_it.py").write_text(_TESTS)
    (folder / "conftest.py").write_text(_CONFTEST)
    plugins = [
        "xdist.plugin",
        "xdist.looponfail",
        "pytest_timeout",
        "pytest_asyncio.plugin",
        "tests.timeouts",
        "tests.scheduling",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", *(f"-p{plugin}" for plugin in plugins), "--asyncio-mode=auto"]
    command += ["--numprocesses=1", "--max-worker-restart=9", "--dist=loadfile", "--rootdir=.", "-rfEp"]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(_ROOT),
        "TEST_AGAIN": "0.1",
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["callback", "task", "teardown", "hook", "half_a_character", "process"])
def test_tests_that_hang(printed: str, name: str) -> None:
    """Each of them fails, however it hangs."""
    assert f"test_it.py::test_{name}" in printed.partition("short test summary info")[2], printed


def test_the_run_goes_on(printed: str) -> None:
    """What comes after them runs, once each, and the run ends without an internal error."""
    assert 1 == printed.count("replacing crashed worker")
    assert "PASSED test_it.py::test_after\n" in printed
    assert "INTERNALERROR" not in printed
