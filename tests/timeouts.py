"""
Ends tests that hang, and keeps a worker of pytest-xdist alive whatever happens between tests.

pytest-timeout raises its error once. An event loop only logs what one of its callbacks raises, so the test may hang on.
After the first error of a test, pytest-timeout stops, so the teardown may hang. An error in a hook, outside of the
setup, the call and the teardown of a test, ends a worker and the tests that it has still to run; so does a report that
cannot be sent, such as one with half of a surrogate pair.

Here, the error is raised again every few seconds, and each teardown has a limit too. When nothing of that helps, the
process ends, and pytest-xdist starts another worker. Errors in hooks fail the test, and each report can be sent.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_timeout

# Seconds between an error and the next one. The environment changes them for the tests of this module.
_AGAIN = float(os.environ.get("TEST_AGAIN", "5"))
# Seconds from the first error to the end of the process. The tests of this module change them.
_GRACE = 60.0
_SETTINGS = pytest.StashKey[Any]()
# Whether its setup, its call or its teardown runs.
_RUNNING = pytest.StashKey[bool]()
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the real stderr, in place of which there is a file while a test runs."""
    config.stash[_STDERR] = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Close it."""
    faulthandler.cancel_dump_traceback_later()
    os.close(config.stash[_STDERR])


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """Set a timer that raises the error of pytest-timeout again and again, in place of one that raises it once."""
    item.stash[_SETTINGS] = settings
    if settings.method != "signal" or threading.current_thread() is not threading.main_thread():
        return None

    def fail(*_: object) -> None:
        # Between the parts of a test, nothing would take it for an error of the test. It comes again.
        if item.stash.get(_RUNNING, False):
            pytest_timeout.timeout_sigalrm(item, settings)

    def cancel() -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    # pytest-timeout calls it.
    item.cancel_timeout = cancel  # type: ignore[attr-defined]
    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, _AGAIN)
    if not pytest_timeout.is_debugging():
        faulthandler.dump_traceback_later(settings.timeout + _GRACE, file=item.config.stash[_STDERR], exit=True)
    return True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let the setup and the call take the whole time, also when the test runs once more (`tests/triton_fixture.py`)."""
    _start_timer(item)
    with _running(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let the timer raise its error."""
    with _running(item):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Let the teardown take the whole time again, also after an error, with which pytest-timeout ends the timer."""
    _start_timer(item)
    try:
        with _running(item):
            return (yield)
    finally:
        # What looks after Triton behind it has limits of its own.
        item.config.hook.pytest_timeout_cancel_timer(item=item)


def _start_timer(item: pytest.Item) -> None:
    settings = item.stash.get(_SETTINGS, None)
    if settings is not None and not settings.func_only:
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)


@contextmanager
def _running(item: pytest.Item) -> Iterator[None]:
    item.stash[_RUNNING] = True
    try:
        yield
    finally:
        item.stash[_RUNNING] = False


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Let an error of a hook fail the test, where it would end the worker."""
    try:
        return (yield)
    except (KeyboardInterrupt, SystemExit, pytest.exit.Exception):
        raise
    except BaseException:  # noqa: BLE001 - the error of a timer is no Exception
        said = traceback.format_exc()
    # What the test has set up, if it is still there.
    try:
        item.session._setupstate.teardown_exact(nextitem)
    except BaseException:  # noqa: BLE001
        said += traceback.format_exc()
    report = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="failed",
        longrepr=said,
        when="teardown",
    )
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Return what pytest-xdist can send to the process that prints it."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    """Return *value* with only such values in it as pytest-xdist takes, and others as a text."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if value is None or isinstance(value, bool | int | float | bytes):
        return value
    if isinstance(value, dict):
        return {_sendable(key): _sendable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_sendable(part) for part in value]
    if isinstance(value, tuple):
        return tuple(_sendable(part) for part in value)
    return _sendable(repr(value))
