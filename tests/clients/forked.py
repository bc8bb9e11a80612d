"""
The command as a process that is forked from one that has imported it all: what a start imports is most of its CPU time.

Tests of what an operator starts run an interpreter of their own.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from triton_openai.cli import main
from triton_openai.media import voice_activity
from triton_openai.serving import admission
from triton_openai.telemetry.streams import drain

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["triton_openai.cli.serve", __name__])
# Recordings of tests are tones, which are no speech to Silero's network.
voice_activity.silero_available = lambda: False


class Forked:
    """The part of :class:`subprocess.Popen` that tests use; *first* is called first, and stderr is the file *log*."""

    def __init__(
        self, arguments: Sequence[str], environ: Mapping[str, str], log: Path, first: Callable[[], None] | None
    ) -> None:
        reading, writing = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(arguments, dict(environ), writing, log, first))
        log.write_text("")
        with reading, writing:
            self.stdout = os.fdopen(os.dup(reading.fileno()))
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, if it has ended."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end and return the rest of what it has written to stdout."""
        self.wait(timeout)
        rest = "" if self.stdout.closed else self.stdout.read()
        self.stdout.close()
        return rest, None


def _run(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    stdout: Connection,
    log: Path,
    first: Callable[[], None] | None,
) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with stdout, log.open("w") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
    # How late its event loop is says how busy the machine is, and such a service refuses requests.
    admission._MAX_LOOP_LAG = math.inf
    if first is not None:
        first()
    # The arguments of the process: a service that owns its process also logs what native libraries print.
    sys.argv[1:] = arguments
    try:
        sys.exit(main())
    except Exception:  # noqa: BLE001 - Python would print it too, but only when nothing is written any more
        traceback.print_exc()
        sys.exit(1)
    finally:
        # At the end of such a process, Python calls nobody who has asked for it.
        drain()
