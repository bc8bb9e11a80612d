"""
The guard of one Triton process: it starts the server, and kills it when its owner ends.

Run as a script of its own, because only a separate process survives the owner's SIGKILL. The owner holds the write end
of the pipe on this process's standard input; when that closes, or the owner is gone, the server and every process it
has started are killed, and what they left in shared memory is removed. The kernel's parent-death signal alone would not
do: it is tied to the owner's *thread* and does not reach the server's own children.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_SECONDS = 0.5
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Start *command* as the leader of a process group of its own and return its pid."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does the same, and may be first
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        # The signal comes when the parent *thread* ends; this process has only one.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error}\n".encode())
    os._exit(127)


def _reap(pid: int) -> int | None:
    """Collect every child that has ended; return the exit status of *pid* when it is among them."""
    status: int | None = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _watch(pid: int, owner: int, lifeline: int, wakeup: int) -> int | None:
    """Wait until the server has ended (its exit status) or the owner has gone (None)."""
    while True:
        ready, _, _ = select.select([lifeline, wakeup], [], [], _PARENT_CHECK_SECONDS)
        if wakeup in ready and os.read(wakeup, 64).strip(bytes([signal.SIGCHLD])):
            return None  # ended by a signal
        if (status := _reap(pid)) is not None:
            return status
        # A forked sibling of the owner may still hold the pipe open, so the parent is asked for as well.
        if (lifeline in ready and not os.read(lifeline, 64)) or os.getppid() != owner:
            return None


def main(arguments: list[str]) -> int:
    """
    Run the command in *arguments* and return its exit status, 128 + n for one that signal n ended.

    Arguments: the owner's pid, a file descriptor to which the server's pid is written, the prefix of the server's
    shared memory, a folder to remove when the owner has gone, and the command.
    """
    owner = int(arguments[0])
    report = int(arguments[1])
    prefix = arguments[2]
    scratch = arguments[3]
    command = arguments[4:]
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    # The server's own children become ours when it dies, so that we can wait for them too.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command)
    os.write(report, f"{pid}\n".encode())
    os.close(report)
    status = _watch(pid, owner, 0, wakeup)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            region.unlink()
    if status is None:
        shutil.rmtree(scratch, ignore_errors=True)
        return 128 + signal.SIGKILL
    if status >= 0:
        return status
    return 128 - status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
