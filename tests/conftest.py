"""Fixtures of the whole suite."""

from __future__ import annotations

import compileall
import contextlib
import functools
import gc
import importlib
import logging
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from triton_openai.demo import standins
from triton_openai.media import decode, voice_activity

pytest_plugins = [
    "tests.timeouts",
    "tests.failures",
    "tests.scheduling",
    "tests.clock",
    "tests.ports",
    "tests.extended",
    "tests.programs",
    "tests.triton_fixture",
    "tests.proxy_fixture",
    "tests.demo_fixture",
    "tests.store_fixture",
]

# How the names of tests begin, in the order in which they run.
_FIRST = (
    "tests/fleet/",
    "tests/faults/",
    "tests/integration/",
    "tests/unit/batches/",
    "tests/clients/",
    "tests/conformance/",
    "tests/unit/test_",
)


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a state folder of its own, which its workers and the processes that tests start share."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell's job in the background ignores it, and so would the processes that tests interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        return
    # Triton's Python processes write no bytecode: each repository gets a copy of this one with the modules.
    compileall.compile_dir(Path(standins.__file__).parent, quiet=1)
    folder = tempfile.TemporaryDirectory(prefix="triton-openai-state-", ignore_cleanup_errors=True)
    environ = pytest.MonkeyPatch()
    environ.setenv("XDG_STATE_HOME", folder.name)
    config.add_cleanup(environ.undo)
    config.add_cleanup(folder.cleanup)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Put what takes longest first and the other unit tests, whose files are short, last.

    With several processes, a file goes to one of them as a whole, and so do files that share processes: a long one at
    the end would have it work alone.
    """

    def rank(item: pytest.Item) -> int:
        for number, beginning in enumerate(_FIRST):
            if item.nodeid.startswith(beginning):
                return number
        return len(_FIRST)

    items.sort(key=rank)


def pytest_collection(session: pytest.Session) -> None:
    """
    Import the tests without looking for garbage, and in each worker another part of them first.

    In a fresh clone the workers then compile each file once, where all would compile all of them in the same order.
    """
    gc.disable()
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    root = session.config.rootpath
    files = [file for given in session.config.args for file in sorted((root / given).rglob("test_*.py"))]
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        # One that cannot be imported is reported when it is collected.
        with contextlib.suppress(Exception):
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Set what stays until the end aside, so that the garbage collector does not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Look for garbage once; pytest and the interpreter would walk through all that is left half a dozen times more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _tones_are_speech() -> Iterator[None]:
    """Let the level of audio decide what is speech: the words of :mod:`tones` are none to Silero's network."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(voice_activity, "silero_available", lambda: False)
        yield


@pytest.fixture(autouse=True, scope="session")
def _files_take_their_time() -> Iterator[None]:
    """Wait for the process that opens a file of audio: a machine that stands still refuses none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_OPEN_SECONDS", 120.0)
        yield


@pytest.fixture
def silero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Silero's network decide what is speech, as it does where the extra ``vad`` is installed."""
    monkeypatch.setattr(voice_activity, "silero_available", lambda: True)


@pytest.fixture(autouse=True)
def _own_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """
    Undo what a test that runs a command in this process does to its logging, so that the next one starts afresh.

    Loggers are modules' own, and one that keeps its first configuration would write to a stream that is gone by then.
    """
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    configure = functools.partial(_configure_uncached, structlog.configure)
    monkeypatch.setattr(structlog, "configure", configure)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def _configure_uncached(configure: Callable[..., None], **settings: Any) -> None:
    configure(**{**settings, "cache_logger_on_first_use": False})
