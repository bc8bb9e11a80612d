"""Standard streams whose readers leave, stop reading, or run out of disk."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.clients.service import until
from triton_openai.telemetry import streams
from triton_openai.telemetry.streams import MAX_NATIVE_LINES, BackgroundWriter

# More than a pipe holds.
_MUCH = 1024 * 1024


class Pipe:
    """A pipe, what writes into it, and what that has lost."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.reader: BinaryIO = os.fdopen(reading, "rb")
        self.stream = io.TextIOWrapper(os.fdopen(writing, "wb"))
        self.writer = BackgroundWriter(self.stream)
        self.lost: list[tuple[int, str]] = []
        self.writer.lost = lambda lines, reason: self.lost.append((lines, reason))
        self.writer.restored = lambda lines, reason: f"lost {lines}: {reason}\n".encode()

    def lines_until(self, end: bytes) -> list[bytes]:
        """Read to the first line that begins with *end*."""
        found = []
        for line in self.reader:
            found.append(line)
            if line.startswith(end):
                return found
        raise AssertionError("the line did not come")

    def write(self, line: bytes) -> None:
        """Write a line, and return when it is written or lost."""
        self.writer.write(line)
        until(lambda: not self.writer.pending)

    def close(self) -> None:
        """End the thread."""
        self.writer.close()
        self.reader.close()
        until(lambda: not self.writer.pending)
        self.stream.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    """A pipe that nobody reads yet."""
    made = Pipe()
    yield made
    made.close()


def test_nobody_waits_for_a_reader_that_does_not_read(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What finds no room is dropped and counted; once it is read, everything else comes, and how many are missing."""
    monkeypatch.setattr(streams, "_MAX_LINES", 3000)
    for number in range(5000):
        pipe.writer.write(f"{number:099}\n".encode())
    *lines, last = pipe.lines_until(b"lost ")

    numbers = [int(line) for line in lines]
    assert numbers == sorted(set(numbers))
    assert numbers[:3000] == list(range(3000))
    assert sum(count for count, _ in pipe.lost) == 5000 - len(numbers) == pipe.writer.total
    assert f"lost {pipe.writer.total}: lines are written faster than they are read\n".encode() == last
    pipe.writer.write(b"next\n")
    assert b"next\n" == pipe.reader.readline()


def test_what_waits_has_a_bound_in_bytes(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is larger than that is written all the same, if it has not to wait for others."""
    monkeypatch.setattr(streams, "_MAX_BYTES", _MUCH)
    pipe.writer.write(b"a" * _MUCH + b"\n")
    pipe.writer.write(b"b\n")
    found = pipe.lines_until(b"lost ")

    assert [_MUCH + 1, 1] == [len(found[0]), len(pipe.lost)]
    assert found[1].startswith(b"lost 1:")


def test_a_reader_that_has_left(pipe: Pipe, tmp_path: Path) -> None:
    """Lines are lost until somebody reads again."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with fifo.open("w") as stream:
        os.dup2(stream.fileno(), pipe.stream.fileno())
    os.close(reading)
    pipe.write(b"one\n")
    pipe.write(b"two\n")
    assert [(1, "Broken pipe")] * 2 == pipe.lost

    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    pipe.write(b"three\n")
    assert b"three\nlost 2: Broken pipe\n" == os.read(reading, 100)
    os.close(reading)


def test_a_disk_that_is_full(pipe: Pipe, tmp_path: Path) -> None:
    """A line that was cut off ends before the next one begins."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "log").open("w") as stream:
        os.dup2(stream.fileno(), pipe.stream.fileno())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
        for line in (b"first\n", b"second\n", b"third\n"):
            pipe.write(line)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    pipe.write(b"fourth\n")

    assert "first\nse\nfourth\nlost 2: File too large\n" == (tmp_path / "log").read_text()


def test_a_pipe_that_its_owner_does_not_wait_for(pipe: Pipe) -> None:
    """Whoever starts the service may have made it non-blocking, as Node.js does: nothing is lost."""
    os.set_blocking(pipe.stream.fileno(), False)
    pipe.writer.write(b"a" * _MUCH + b"\n")
    pipe.writer.write(b"b\n")

    assert [b"a" * _MUCH + b"\n", b"b\n"] == pipe.lines_until(b"b")
    assert [] == pipe.lost


def test_lines_of_processes_stay_whole() -> None:
    """Workers write into the same pipe."""
    program = (
        "import sys; from triton_openai.telemetry import streams\n"
        "streams.DRAIN_SECONDS = 120\n"
        "writer = streams.write_in_background('stderr')\n"
        "for _ in range(500): writer.write(sys.argv[1].encode() * 150 + b'\\n')\n"
        "streams.drain()"
    )
    reading, writing = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", program, letter], stderr=writing) for letter in "abc"]
    os.close(writing)
    with os.fdopen(reading) as reader:
        lines = reader.read().splitlines()

    assert [0, 0, 0] == [process.wait() for process in processes]
    assert sorted(letter * 150 for letter in "abc" * 500) == sorted(lines)


def test_a_process_that_stood_still_writes_its_last_lines(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time to write them is that in which it runs: the clock goes on while it is stopped."""
    hours = itertools.count(step=3600)
    monkeypatch.setattr("time.monotonic", lambda: float(next(hours)))
    monkeypatch.setattr(streams, "DRAIN_SECONDS", 60)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BufferedWriter(pipe.writer)))
    pipe.writer.write(b"a" * _MUCH + b"\n")
    # Nobody has read it yet.
    pending = [pipe.writer.pending]
    reading = threading.Thread(target=pipe.lines_until, args=[b"a"])
    reading.start()
    streams.drain()
    pending.append(pipe.writer.pending)
    reading.join()
    monkeypatch.undo()
    assert [True, False] == pending


# Whoever writes to stderr, and an exception that nobody catches. It takes no import of ours but one.
_LAST = """
import logging, sys, threading, warnings
from triton_openai.telemetry.streams import write_in_background
write_in_background("stderr")

class Failing:
    def __del__(self):
        raise ValueError("unraisable")

print("print", file=sys.stderr)
logging.getLogger("x").warning("logging")
warnings.warn("warnings")
Failing()
thread = threading.Thread(target=lambda: 1 / 0, name="of a thread")
thread.start()
thread.join()
raise ValueError("uncaught")
"""


def test_the_last_lines_arrive() -> None:
    """Whoever writes them, the process ends when they are written, or cannot be."""
    command = [sys.executable, "-c", _LAST]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert 1 == done.returncode
    for written in ("print\n", "logging\n", "UserWarning: warnings\n", "unraisable\n", "of a thread", "uncaught\n"):
        assert written in done.stderr

    reading, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * select.PIPE_BUF)
    os.set_blocking(full, True)
    with os.fdopen(reading), os.fdopen(full, "w") as pipe, Path("/dev/full").open("w") as disk:
        for stderr in (pipe, disk):
            assert 1 == subprocess.run(command, stderr=stderr, check=False).returncode
    # As of a daemon that has closed everything.
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    assert 1 == subprocess.run(shell, check=False).returncode


# A library in C that prints to both streams, in a process that goes on and may crash. What is printed without an end of
# the line, or in a line that is too long, is a part of it.
_NATIVE = """
import ctypes, os, subprocess, sys, threading
from triton_openai.telemetry.streams import drain, write_in_background, original_descriptor, redirect_native_output

times, crashes = int(sys.argv[1]), sys.argv[2] == "crash"
writer = write_in_background("stderr")
one_is_there = threading.Event()
all_are_there = threading.Event()

def log(line):
    writer.write(f"logged: {line}\\n".encode())
    one_is_there.set()
    if line == "the last one":
        all_are_there.set()

redirect_native_output(log)
redirect_native_output(log)
library = ctypes.CDLL(None)
for number in range(times):
    library.dprintf(2, b"native %d " + b"x" * 1000 + b"\\n", number)
print("printed")
sys.stdout.flush()
subprocess.run([sys.executable, "-c", "print('a child')"], check=True, stdout=original_descriptor("stdout"))
if times == 1:
    library.dprintf(1, b"the last ")
    library.dprintf(1, b"one\\n")
    all_are_there.wait()
# A thread logs what was printed.
one_is_there.wait()
if crashes:
    drain()
    os.abort()
"""


def test_native_libraries_print_to_the_log() -> None:
    """What they write without Python is logged, and children and crashes have the streams as they were."""
    command = [sys.executable, "-c", _NATIVE, "1"]
    done = subprocess.run([*command, "ends"], capture_output=True, text=True, check=True)
    assert ["a child", "printed"] == sorted(done.stdout.splitlines())
    first, last = done.stderr.splitlines()
    assert first.startswith("logged: native 0 xxx")
    assert len(first) < 600
    assert "logged: the last one" == last
    done = subprocess.run([*command, "crash"], capture_output=True, text=True, check=False)
    assert -signal.SIGABRT == done.returncode
    assert "\nFatal Python error: Aborted\n" in done.stderr


def test_native_libraries_do_not_wait_for_a_reader() -> None:
    """With nobody reading, what they print is dropped, and of much that they print a few lines are logged."""
    command = [sys.executable, "-c", _NATIVE, "5000", "ends"]
    reading, full = os.pipe()
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(full, False)
        while True:
            os.write(full, b"x" * select.PIPE_BUF)
    os.set_blocking(full, True)
    with os.fdopen(reading), os.fdopen(full, "w") as pipe:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=pipe, text=True, check=True, timeout=120)
    assert ["a child", "printed"] == sorted(done.stdout.splitlines())
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 1 <= len(done.stderr.splitlines()) <= 2 * MAX_NATIVE_LINES
