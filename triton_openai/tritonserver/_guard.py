"""
The keeper of one Triton process: it starts the server, watches over it, and never lets it outlive its owner.

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
_SHARED_MEMORY = Path("/dev/shm")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _start(command: list[str]) -> int:
    """Start *command* as the leader of a process group of its own and return its pid."""
    pid = os.fork()
    if pid:
        with contextlib.suppress(OSError):  # the child does the same; whoever comes first wins
            os.setpgid(pid, pid)
        return pid
    try:
        os.setpgid(0, 0)
        # This process has one thread, so here the parent-death signal means what its name says.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error}\n")
        sys.stderr.flush()
    os._exit(127)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _reap(pid: int) -> int | None:
    """Collect every child that has ended; return the exit status of *pid* when it is among them."""
    status: int | None = None
    while True:
        try:
            ended, code = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if ended == 0:
            return status
        if ended == pid:
            status = os.waitstatus_to_exitcode(code)


def _watch(pid: int, owner: int, lifeline: int, wakeup: int) -> int | None:
    """Wait until the server has ended (its exit status) or the owner has gone (None)."""
    while True:
        ready, _, _ = select.select([lifeline, wakeup], [], [], _PARENT_CHECK_SECONDS)
        if wakeup in ready and os.read(wakeup, 64).strip(bytes([signal.SIGCHLD])):
            return None  # told to end by a signal
        if (status := _reap(pid)) is not None:
            return status
        # A forked sibling of the owner may still hold the pipe open, so the parent is asked for as well.
        if (lifeline in ready and not os.read(lifeline, 64)) or os.getppid() != owner:
            return None


def _clean(shared_memory_prefix: str, scratch: str) -> None:
    if shared_memory_prefix:
        for region in _SHARED_MEMORY.glob(f"{shared_memory_prefix}*"):
            with contextlib.suppress(OSError):
                region.unlink()
    if scratch:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """
    Run the command in *arguments* and return its exit status, 128 + n for one that signal n ended.

    Arguments: the owner's pid, a file descriptor that is told the server's pid, the prefix of the server's shared
    memory, a folder to remove when the owner has gone (may be empty), and the command.
    """
    owner, report, prefix, scratch, command = (
        int(arguments[0]), int(arguments[1]), arguments[2], arguments[3], arguments[4:],
    )  # fmt: skip
    wakeup, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    # The server's own children become ours when it dies, so that we can wait for them too.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    pid = _start(command)
    os.write(report, f"{pid}\n".encode())
    os.close(report)
    status = _watch(pid, owner, 0, wakeup)
    _kill_group(pid)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    _clean(prefix, scratch if status is None else "")
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
