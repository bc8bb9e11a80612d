"""
The workers of a forked service, which come from the same process as the service: see ``forked``.

Each gets what the interpreter of a worker gets: its descriptors, its environment and a session of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import multiprocessing
import os
import resource
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.context import ForkServerProcess
from typing import Any

from triton_openai.cli import worker_process
from triton_openai.serving import admission
from triton_openai.telemetry.streams import drain, original_descriptor

# Above all descriptors that a worker is given, and all that it has at its start.
_FREE = 500


class ForkedWorker:
    """The part of :class:`asyncio.subprocess.Process` that the pool uses."""

    def __init__(self, process: ForkServerProcess, stdin: Input) -> None:
        assert process.pid is not None
        self.pid = process.pid
        self.stdin = stdin
        self._process = process
        self._status: int | None = None

    def send_signal(self, number: int) -> None:
        """Send it a signal. Raises :class:`ProcessLookupError` if it has ended."""
        if self._status is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for its end and return its exit status."""
        if self._status is None:
            loop = asyncio.get_running_loop()
            ended = asyncio.Event()
            loop.add_reader(self._process.sentinel, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._process.sentinel)
            self._process.join()
            assert self._process.exitcode is not None
            self._status = self._process.exitcode
            self._process.close()
        return self._status


class Input:
    """The standard input of a worker. What one that has ended does not read is dropped."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Write all of *data*."""
        left = memoryview(data)
        with contextlib.suppress(BrokenPipeError):
            while left:
                left = left[self._file.write(left) :]

    def close(self) -> None:
        """Close it."""
        self._file.close()


async def start_process(channel: int, sockets: Sequence[int], environment: Mapping[str, str]) -> Any:
    """Start a worker as :func:`triton_openai.serving.workers.pool.start_process` does."""
    # The process that forks the service forks its workers too, and is no child of the service.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    reading, writing = os.pipe()
    try:
        standard = {0: reading, 1: original_descriptor("stdout") or 1, 2: original_descriptor("stderr") or 2}
        given = {**standard, **{number: number for number in (channel, *sockets)}}
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        process = multiprocessing.get_context("forkserver").Process(
            target=_run, args=(channel, _Descriptors(given), dict(environment), limit)
        )
        process.start()
    except BaseException:
        os.close(writing)
        raise
    finally:
        os.close(reading)
    return ForkedWorker(process, Input(writing))


class _Descriptors:
    """Descriptors that are sent to the new process, by the numbers that they shall have there."""

    def __init__(self, given: Mapping[int, int]) -> None:
        self._given = given

    def __reduce__(self) -> Any:
        return _Descriptors._received, ({number: reduction.DupFd(fd) for number, fd in self._given.items()},)

    @staticmethod
    def _received(sent: Mapping[int, Any]) -> _Descriptors:
        return _Descriptors({number: each.detach() for number, each in sent.items()})

    def take(self) -> None:
        """Give them their numbers."""
        moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _FREE) for number, fd in self._given.items()}
        for fd in self._given.values():
            os.close(fd)
        for number, fd in moved.items():
            os.dup2(fd, number)
            os.close(fd)


def _run(channel: int, descriptors: _Descriptors, environ: Mapping[str, str], limit: tuple[int, int]) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    os.environ.clear()
    os.environ.update(environ)
    descriptors.take()
    # As in the service itself.
    admission._MAX_LOOP_LAG = math.inf
    sys.stdin = os.fdopen(0)
    sys.argv[1:] = [str(channel)]
    try:
        sys.exit(worker_process.main())
    except Exception:  # noqa: BLE001 - Python would print it too, but only when nothing is written any more
        traceback.print_exc()
        sys.exit(1)
    finally:
        # At the end of such a process, Python calls nobody who has asked for it.
        drain()
