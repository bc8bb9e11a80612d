"""Processes that end with this one, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HOST = "127.0.0.1"
_PR_SET_PDEATHSIG = 1


class BenchError(Exception):
    """The measurement cannot go on; the message says why."""


def free_port() -> int:
    """Return a port that is free at this moment."""
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        port: int = holder.getsockname()[1]
    return port


def die_with_parent() -> None:
    """Run in a child before its program: have it end when this process is killed and cannot tidy up."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> Iterator[int]:
    """Run *command* inside the block and yield its process id; it is asked to end, then killed."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
            # Ctrl-C is for this process to handle.
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_answers(port: int, path: str, log: Path, seconds: float = 120.0) -> None:
    """Wait for a 200 to a GET of *path*. Raises `BenchError` with the end of *log*."""
    deadline = time.monotonic() + seconds
    request = f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n\r\n".encode()
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1) as probe:
            probe.sendall(request)
            if probe.recv(64).startswith(b"HTTP/1.1 200"):
                return
        time.sleep(0.05)
    raise BenchError(f"Nothing good came from port {port} in {seconds:g} s:\n{log.read_text(errors='replace')[-2000:]}")


def make_room(descriptors: int) -> None:
    """
    Let this process and those that it starts open as many files. Raises `BenchError` where the system does not let it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptors:
        if hard != resource.RLIM_INFINITY and hard < descriptors:
            raise BenchError(f"The case 'crowd' needs {descriptors} open files, and {hard} are allowed (ulimit -Hn).")
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, hard))
