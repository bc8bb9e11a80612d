"""
Lists the tests that failed at the very end of a run, a line each, also when the run ends with an internal error.

pytest leaves its summary out then. Each line goes to the file that the variable ``TEST_FAILURES`` names, too, as soon
as the test has failed: `.ci/run` prints that file last.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Characters of a line.
_WIDTH = 240


class _Failures:
    """What has failed so far, in the process that prints the results."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._lines: list[str] = []
        self._texts: list[str] = []
        self._internal = False

    def _add(self, line: str) -> None:
        self._lines.append(line)
        if path := os.environ.get("TEST_FAILURES"):
            with Path(path).open("a") as file:
                file.write(f"{line}\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take a test that has failed."""
        if report.failed:
            self._add(line_of(report.nodeid, report.longreprtext))
            self._texts.append(f"{report.nodeid}, {report.when}\n{report.longreprtext}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take a module that cannot be imported."""
        if report.failed:
            self._add(line_of(report.nodeid, report.longreprtext))
            self._texts.append(f"{report.nodeid}\n{report.longreprtext}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """Take an error of pytest itself, or of one of its workers."""
        self._internal = True
        self._add(line_of_internal(str(excrepr)))

    # First, since another one may raise an error.
    @pytest.hookimpl(tryfirst=True)
    def pytest_unconfigure(self) -> None:
        """Print the list, and in full what pytest does not print after an internal error."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or not self._lines:
            return
        if self._internal:
            for text in self._texts:
                reporter.write_sep("_")
                reporter.write_line(text)
        reporter.write_sep("=", f"{len(self._lines)} failed")
        for line in self._lines:
            reporter.write_line(line)


def line_of(name: str, text: str) -> str:
    """Return *name* and the first line of the error that the *text* of a report shows."""
    # That of a group of errors stands last, in a frame.
    lines = _marked(text) or [line.strip(" |+-") for line in reversed(text.splitlines())]
    return _short(name, next(filter(None, lines), ""))


def line_of_internal(text: str) -> str:
    """Return a line with the error that ended pytest: the last of *text*. That of a worker stands above its frame."""
    lines = [line for line in _marked(text) if line != "assert False"] or text.splitlines()
    return _short("internal error", next(filter(None, reversed(lines)), ""))


def _marked(text: str) -> list[str]:
    """Return the lines that pytest marks as those of the error itself."""
    return [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]


def _short(name: str, error: str) -> str:
    return f"{name}: {error.strip()}"[:_WIDTH]


def pytest_configure(config: pytest.Config) -> None:
    """Collect the failures in the process that prints them: workers send theirs to it."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(config))
