"""What a run says at its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.cases import every_case
from tests.failures import line_of, line_of_internal

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = """
import pytest


@pytest.fixture
def broken():
    raise ValueError("no fixture")


def test_one():
    assert 1 == 2, "one is not two"


def test_two(broken):
    pass


def test_three():
    pass
"""
# As an error in a hook of a worker.
_CONFTEST = """
def pytest_runtest_logreport(report):
    if report.nodeid.endswith("three"):
        raise RuntimeError("no worker is left")
"""
_FAILED = [
    "test_it.py::test_one: AssertionError: one is not two",
    "test_it.py::test_two: ValueError: no fixture",
]


def _run(folder: Path, *files: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return the lines that a run of *files* prints, and those of the file."""
    for name, content in files:
        (folder / name).write_text(content)
    command = [sys.executable, "-m", "pytest", "-p", "tests.failures", "-p", "no:cacheprovider", "--rootdir=."]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(_ROOT),
        "TEST_FAILURES": str(folder / "failures"),
    }
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.splitlines(), (folder / "failures").read_text().splitlines()


def test_failed_tests_are_listed_last(tmp_path: Path) -> None:
    """The last lines name each test that failed, with the first line of its error."""
    printed, written = _run(tmp_path, ("test_it.py", _TESTS))

    assert _FAILED == printed[-2:]
    assert _FAILED == written


def test_an_internal_error_hides_no_failed_test(tmp_path: Path) -> None:
    """The run prints in full what failed before the internal error, and then the list."""
    printed, written = _run(tmp_path, ("test_it.py", _TESTS), ("conftest.py", _CONFTEST))

    listed = [*_FAILED, "internal error: RuntimeError: no worker is left"]
    assert listed == printed[-3:]
    assert listed == written
    assert "E       AssertionError: one is not two" in printed


@every_case("text, line", [
    ("x\nE   ValueError: a\nE   more\n\nfile.py:3: ValueError", "n: ValueError: a"),
    ("Traceback:\n  File\nRuntimeError: b\n", "n: RuntimeError: b"),
    ("  | ExceptionGroup: two\n  +-+--- 1 ---\n    | OSError: c\n    +------\n", "n: OSError: c"),
    ("", "n: "),
    ("E   " + "x" * 999, "n: " + "x" * 237),
])  # fmt: skip
def test_a_line(text: str, line: str) -> None:
    """It has the first line of the error, and is short."""
    assert line == line_of("n", text)


@every_case("text, line", [
    ("Traceback:\n  File\nRuntimeError: b\n", "internal error: RuntimeError: b"),
    # That of a worker.
    (
        ">  assert False, formatted_error\nE  AssertionError: Traceback\nE    OSError: a\nE  assert False\n\nx:1: y",
        "internal error: OSError: a",
    ),
])  # fmt: skip
def test_a_line_for_an_internal_error(text: str, line: str) -> None:
    """It has the last error."""
    assert line == line_of_internal(text)
