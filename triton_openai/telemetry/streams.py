"""
Standard streams on which writes of Python and of native libraries never block or fail.

Their reader may end, stop reading, or run out of disk. So a thread writes, and lines that it cannot write are dropped
and counted.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import math
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TextIO, cast

# The longest queue of lines; only its last line may exceed the bytes.
_MAX_LINES = 10_000
_MAX_BYTES = 16 * 1024 * 1024
# Lines gather this long after each write: a thread that wakes for every line costs more than the line.
_GATHER_SECONDS = 0.02
#: How long the end of a process waits for its last lines.
DRAIN_SECONDS = 1.0

#: Lines a minute of native libraries that are logged.
MAX_NATIVE_LINES = 20
# Bytes of each of them.
_MAX_NATIVE_LINE = 500


class BackgroundWriter(io.RawIOBase):
    """Writes to *stream* in a thread. Each call of :meth:`write` is one line."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        #: Called with the number of lines that were just lost, and why: in any thread, but one call at a time.
        self.lost: Callable[[int, str], object] = lambda *_: None
        #: Returns the line about the number of lost lines, when lines can be written again.
        self.restored: Callable[[int, str], bytes] = lambda *_: b""
        #: How many lines were lost in all.
        self.total = 0
        self._stream = stream
        # Not through Python's buffer, which keeps what could not be written, and holds the end of the process.
        self._output: Any = getattr(stream.buffer, "raw", stream.buffer)
        self._lines: deque[bytes] = deque()
        self._size = 0
        # Reentrant: the garbage collector may have something to log while a line is added.
        self._lock = threading.RLock()
        self._awake = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._untold = 0
        self._reason = ""
        # Whether the last line that was written has no end.
        self._cut = False
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def write(self, data: Any) -> int:
        """Add a line to those that wait, or drop it if there are too many; return its length."""
        line = bytes(data)
        with self._lock:
            if len(self._lines) < _MAX_LINES and self._size < _MAX_BYTES:
                self._size += len(line)
                self._lines.append(line)
                if not self._awake:
                    self._awake = True
                    self._wake.put(None)
            else:
                self._lose(1, "lines are written faster than they are read")
        return len(line)

    @property
    def pending(self) -> bool:
        """Whether a line is neither written nor lost yet."""
        return self._size > 0

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        super().close()
        self._wake.put(None)

    def use_duplicate(self) -> int:
        """Write to a duplicate of the stream's descriptor from now on, and return it."""
        descriptor = os.dup(self._stream.fileno())
        self._stream = os.fdopen(descriptor, "w", encoding=self._stream.encoding)
        self._output = getattr(self._stream.buffer, "raw", self._stream.buffer)
        return descriptor

    def _run(self) -> None:
        while not self.closed:
            self._wake.get()
            while self._awake:
                while self._lines:
                    self._pass_on()
                time.sleep(_GATHER_SECONDS)
                with self._lock:
                    self._awake = bool(self._lines)

    def _pass_on(self) -> None:
        """Write the first lines: as many as other processes' lines do not come between where the stream is a pipe."""
        lines = [self._lines.popleft()]
        size = len(lines[0])
        while self._lines and size + len(self._lines[0]) <= select.PIPE_BUF:
            lines.append(self._lines.popleft())
            size += len(lines[-1])
        reason = self._written(b"".join(lines))
        with self._lock:
            if reason is not None:
                self._lose(len(lines), reason)
            if reason is not None or self._lines:
                untold = 0
                self._untold = self._untold
            else:
                untold = self._untold
                self._untold = 0
        if untold and self._written(self.restored(untold, self._reason)) is not None:
            with self._lock:
                self._untold += untold
        with self._lock:
            self._size -= size

    def _written(self, data: bytes) -> str | None:
        """Write *data*; return why not all of it could be written."""
        rest = memoryview(b"\n" + data if self._cut else data)
        try:
            while rest:
                count = self._output.write(rest)
                if count is None:
                    # Another process made it non-blocking.
                    select.select((), (self._output,), ())
                else:
                    self._cut = rest[count - 1] != ord("\n")
                    rest = rest[count:]
        except (OSError, ValueError) as error:
            # ValueError: it is closed.
            return getattr(error, "strerror", None) or str(error)
        self._cut = False
        return None

    def _lose(self, count: int, reason: str) -> None:
        self.total += count
        self._untold += count
        self._reason = reason
        self.lost(count, reason)


def write_in_background(name: Literal["stdout", "stderr"]) -> BackgroundWriter:
    """Write the lines of a standard stream of this process by a :class:`BackgroundWriter`, and return it."""
    # One that is closed is None. Opened here, its number does not become that of a client's connection.
    stream: TextIO = getattr(sys, name) or Path(os.devnull).open("w")  # noqa: SIM115 - to the end
    writer = background_writer(stream)
    if writer is None:
        writer = BackgroundWriter(stream)
        atexit.register(drain)
        buffer = io.BufferedWriter(writer)
        setattr(sys, name, io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True))
    return writer


# The descriptors of the standard streams as they were before :func:`redirect_native_output`.
_originals: dict[str, int] = {}


def original_descriptor(name: Literal["stdout", "stderr"]) -> int | None:
    """Return the descriptor of a standard stream for a child process; ``None`` if it inherits the right one."""
    return _originals.get(name)


def redirect_native_output(log: Callable[[str], object]) -> None:
    """
    Call *log* with the lines that native libraries write to the standard streams.

    Libraries in C write to descriptors 1 and 2, and block there if the reader stops: libmpg123 prints for each damaged
    file, while it holds a lock that decoding needs. Those descriptors become a pipe that refuses what does not fit, and
    a thread reads it. A few lines a minute are logged, since clients can cause many. Tracebacks of crashes go to the
    original standard error.
    """
    if _originals:
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for number, name in ((1, "stdout"), (2, "stderr")):
        writer = write_in_background(cast(Literal["stdout", "stderr"], name))
        drain()
        _originals[name] = writer.use_duplicate()
        os.dup2(writing, number)
    os.close(writing)
    faulthandler.enable(file=_originals["stderr"])
    threading.Thread(target=_log_lines, args=(reading, log), name="native-output", daemon=True).start()


def _log_lines(reading: int, log: Callable[[str], object]) -> None:
    """Log what can be read, and drop lines beyond the limit of a minute."""
    rest = b""
    logged = 0
    minute = 0
    while data := os.read(reading, select.PIPE_BUF):
        *lines, rest = (rest + data).split(b"\n")
        rest = rest[-_MAX_NATIVE_LINE:]
        now = int(time.monotonic() // 60)
        if now != minute:
            logged = 0
            minute = now
        for line in lines:
            text = line[:_MAX_NATIVE_LINE].decode("utf-8", "replace").strip()
            if text and logged < MAX_NATIVE_LINES:
                logged += 1
                log(text)


def background_writer(stream: TextIO) -> BackgroundWriter | None:
    """Return the writer of *stream*, if :func:`write_in_background` has made one."""
    writer = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(writer, BackgroundWriter):
        return writer
    return None


def drain() -> None:
    """
    Wait until all lines of the standard streams are written or lost, for :data:`DRAIN_SECONDS` at most.

    The wait is divided into short steps: time in which the whole process stands still does not count.
    """
    step = _GATHER_SECONDS / 4
    writers = [background_writer(stream) for stream in (sys.stdout, sys.stderr)]
    for _ in range(math.ceil(DRAIN_SECONDS / step)):
        if not any(writer is not None and writer.pending for writer in writers):
            return
        time.sleep(step)
