"""How tests freeze the server of a store."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests import store_fixture
from tests.store_fixture import Server

_CHILDREN = 3


@pytest.fixture
def main() -> Iterator[int]:
    """A process with children, as a server has them."""
    command = ["sh", "-c", "for number in 1 2 3; do sleep 600 & done; echo; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def server(main: int) -> Server:
    """The server whose main process that is."""

    def nothing() -> None:
        pass

    return Server(str, nothing, nothing, lambda: main)


def _states(main: int) -> list[str]:
    """Return the states of the process *main* and of its children."""
    states = []
    for pid in (main, *_children(main)):
        # It may have ended.
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0])
    return states


def _children(main: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{main}/task/{main}/children").read_text().split()]


def _wait_for(main: int, states: set[str]) -> None:
    while not set(_states(main)) <= states:
        pass


def test_all_processes_stop_and_continue(server: Server, main: int) -> None:
    """Within the block, all of them stand still."""
    with server.frozen():
        _wait_for(main, {"T"})
        assert 1 + _CHILDREN == len(_states(main))
    _wait_for(main, {"S"})


def test_a_process_that_ends_meanwhile(server: Server, main: int) -> None:
    """The others continue all the same: a child may end before or while the server is frozen."""
    children = _children(main)
    os.kill(children[0], signal.SIGKILL)
    with server.frozen():
        os.kill(children[1], signal.SIGKILL)
    _wait_for(main, {"S"})
    assert 2 == len(_states(main))


def test_the_end_of_a_test_continues_what_it_left(server: Server, main: int) -> None:
    """A test that fails while the server is frozen leaves it running to those behind it."""
    server.freeze()
    store_fixture.pytest_runtest_teardown()
    _wait_for(main, {"S"})
