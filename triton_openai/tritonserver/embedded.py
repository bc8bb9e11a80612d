"""
A real Triton, started and stopped by us.

Three uses share this class: the demo, the tests, and a service that launches the server it stands in front of. The
server binds to 127.0.0.1, and nothing of it outlives this process: a small guard process keeps it (see ``_guard``).
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.triton.client import check_name
from triton_openai.tritonserver import _guard
from triton_openai.tritonserver._runtime import Runtime, installed_runtime, packaged_runtime

#: Instead of a model's name: load all that are there.
ALL_MODELS = "*"
_HOST = "127.0.0.1"
_METRICS_SECONDS = 5.0
_POLL_SECONDS = 0.03
_FREEZE_SECONDS = 5.0
# Somebody else may take a port between our choosing it and Triton's binding it; then other ports are tried.
_ATTEMPTS = 5
_PORT_TAKEN = re.compile(r"Socket '.*' already in use")
_FAILED_TO_LOAD = re.compile(r"^E.*(failed to load|Poll failed|failed to start|Model '.*' loading failed)")
# Triton waits this long for requests in flight; whoever asks for less time than that gets a kill at the deadline.
_EXIT_SECONDS = 5


class EmbeddedTriton:
    """
    One ``tritonserver`` process with its own runtime folder, ports and log.

    *environment* is the environment to start from (callers pass ``os.environ``); *backends* a folder with further
    Python-based backends; *binary* an installed ``tritonserver``, instead of the one inside ``nvidia-pytriton``.
    Ports that are not given are chosen free. The object can be started again after it has ended, on the same ports.
    """

    def __init__(
        self,
        *,
        model_repository: Path | Sequence[Path],
        environment: Mapping[str, str],
        backends: Path | None = None,
        binary: Path | None = None,
        work_dir: Path | None = None,
        model_control_mode: str = "none",
        load_models: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        http_port: int | None = None,
        grpc_port: int | None = None,
        metrics_port: int | None = None,
    ) -> None:
        given = [model_repository] if isinstance(model_repository, Path) else model_repository
        # The server runs in a folder of its own.
        self._repositories = [path.absolute() for path in given]
        self._environment = dict(environment)
        self._extra_backends = None if backends is None else backends.absolute()
        self._binary = None if binary is None else binary.absolute()
        self._model_control_mode = model_control_mode
        self._load_models = list(load_models)
        self._extra_args = list(extra_args)
        self._given_ports = (http_port, grpc_port, metrics_port)
        work_dir = None if work_dir is None else work_dir.absolute()
        self._given_work_dir = work_dir
        self._shared_memory = f"triton-openai-{uuid.uuid4().hex[:12]}"

        # Since the first start
        self._work_dir = work_dir
        self._runtime: Runtime | None = None
        self._ports: tuple[int, int, int] | None = None

        # Per process
        self._guard: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._paused = False

    def start(self, timeout: float = 240.0) -> None:
        """
        Start the server and return when it and all its models are ready.

        Raises `ConfigurationError`, with the end of the server's log, when it ends before or is not ready in time.
        """
        if self.poll() is None and self._guard is not None:
            raise RuntimeError("the server runs already")
        self._collect()
        deadline = time.monotonic() + timeout
        runtime = self._prepare()
        for port in self._ports or self._given_ports:
            _check_free(port)
        for attempt in range(_ATTEMPTS):
            ports = self._ports or self._choose_ports()
            begin = self.log_path.stat().st_size if self.log_path.exists() else 0
            self._launch(runtime, ports)
            ready = self._wait_ready(ports[0], deadline, begin)
            if ready and self._wait_metrics(ports[2]):
                self._ports = ports
                return
            # Triton goes on without its metrics when somebody has taken their port, and says nothing.
            ended, taken = self.poll(), ready or self._port_taken(begin)
            self.kill()
            # Triton 2.51 now and then aborts while it starts many models at once on a busy machine.
            crashed = ended is not None and ended < 0
            if attempt < _ATTEMPTS - 1 and (crashed or (taken and self._ports is None)):
                continue
            if ended is None and not taken:
                raise ConfigurationError(f"Triton was not ready within {timeout:g} s.{self._log_excerpt()}")
            raise ConfigurationError(f"Triton ended with status {ended} while starting.{self._log_excerpt()}")

    def stop(self, timeout: float = 15.0) -> None:
        """Ask the server to end, kill it when it has not ended within *timeout* seconds, and tidy up."""
        self._end(timeout)
        if self._given_work_dir is None and self._work_dir is not None:
            shutil.rmtree(self._work_dir, ignore_errors=True)
            self._work_dir = self._runtime = None

    def kill(self) -> None:
        """End the server and all its processes at once, as a crash of the machine would; `start` works again."""
        self._signal_group(signal.SIGKILL)
        self._collect()

    def pause(self) -> None:
        """Freeze the server: connections stay open and nothing answers."""
        self._signal_group(signal.SIGSTOP)
        self._paused = True
        deadline = time.monotonic() + _FREEZE_SECONDS
        while not self._frozen() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS / 10)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._signal_group(signal.SIGCONT)
        self._paused = False

    def restart(self, timeout: float = 240.0) -> None:
        """End the server as `stop` does and start it again on the same ports."""
        self._end(15.0)
        self.start(timeout)

    def poll(self) -> int | None:
        """Return None while the server runs or was never started, else its exit status (-n: killed by signal n)."""
        if self._guard is None or (status := self._guard.poll()) is None:
            return None
        return 128 - status if status > 128 else status

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the server has ended and return its exit status; raises `TimeoutError`."""
        if self._guard is None:
            raise RuntimeError("the server was not started")
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"the server still runs after {timeout} s") from error
        return self.poll() or 0

    def __enter__(self) -> EmbeddedTriton:
        if self._guard is None:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def http_url(self) -> str:
        """The address of the HTTP endpoint, ``http://127.0.0.1:port``."""
        return f"http://{_HOST}:{self._bound()[0]}"

    @property
    def grpc_url(self) -> str:
        """The address of the gRPC endpoint, ``grpc://127.0.0.1:port``."""
        return f"grpc://{_HOST}:{self._bound()[1]}"

    @property
    def metrics_url(self) -> str:
        """The address of the metrics, ``http://127.0.0.1:port/metrics``."""
        return f"http://{_HOST}:{self._bound()[2]}/metrics"

    @property
    def pid(self) -> int | None:
        """The process id of ``tritonserver`` itself, None before the first start."""
        return self._pid

    @property
    def log_path(self) -> Path:
        """The file that holds what the server has written; it is kept over restarts and removed by `stop`."""
        if self._work_dir is None:
            raise RuntimeError("the server was not started")
        return self._work_dir / "tritonserver.log"

    def log_tail(self, lines: int = 40) -> str:
        """Return the last *lines* lines of the server's log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except (FileNotFoundError, RuntimeError):
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _prepare(self) -> Runtime:
        for repository in self._repositories:
            if not repository.is_dir():
                raise ConfigurationError(f"There is no model repository at {repository}.")
        for name in self._load_models:
            if name != ALL_MODELS and not any(_is_model(repository, name) for repository in self._repositories):
                # Triton would only say that not all models could be loaded.
                where = " or ".join(map(str, self._repositories))
                raise ConfigurationError(f"There is no model {name[:200]!r} in {where}.")
        if self._work_dir is None:
            self._work_dir = Path(tempfile.mkdtemp(prefix="triton-openai-"))
        self._work_dir.mkdir(parents=True, exist_ok=True)
        if self._runtime is None:
            if self._binary is not None:
                self._runtime = installed_runtime(self._binary, self._environment, self._work_dir, self._extra_backends)
            else:
                self._runtime = packaged_runtime(self._environment, self._work_dir, self._extra_backends)
        return self._runtime

    def _choose_ports(self) -> tuple[int, int, int]:
        with contextlib.ExitStack() as held:
            chosen = []
            for given in self._given_ports:
                if given is not None:
                    chosen.append(given)
                    continue
                holder = held.enter_context(socket.socket())
                holder.bind((_HOST, 0))
                chosen.append(holder.getsockname()[1])
        return chosen[0], chosen[1], chosen[2]

    def _command(self, runtime: Runtime, ports: tuple[int, int, int]) -> list[str]:
        command = [str(runtime.binary)]
        command += [f"--model-repository={repository}" for repository in self._repositories]
        if runtime.backends is not None:
            command.append(f"--backend-directory={runtime.backends}")
        command += [f"--http-address={_HOST}", f"--grpc-address={_HOST}", f"--metrics-address={_HOST}"]
        command += [f"--http-port={ports[0]}", f"--grpc-port={ports[1]}", f"--metrics-port={ports[2]}"]
        command += [f"--model-control-mode={self._model_control_mode}"]
        command += [f"--load-model={name}" for name in self._load_models]
        command += [
            # Two servers on one machine must not meet in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
            f"--exit-timeout-secs={_EXIT_SECONDS}",
            "--model-load-thread-count=8",
        ]
        return command + self._extra_args

    def _launch(self, runtime: Runtime, ports: tuple[int, int, int]) -> None:
        report, report_write = os.pipe()
        scratch = "" if self._given_work_dir is not None else str(self._work_dir)
        told = [str(os.getpid()), str(report_write), self._shared_memory, scratch]
        try:
            with self.log_path.open("ab") as log:
                self._guard = subprocess.Popen(
                    [sys.executable, "-I", "-S", _guard.__file__, *told, *self._command(runtime, ports)],
                    env=dict(runtime.environment),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(report_write,),
                    cwd=self._work_dir,
                    # Ctrl-C in a terminal is for the owner to handle, which then stops the server in order.
                    start_new_session=True,
                )
            os.close(report_write)
            report_write = -1
            line = os.read(report, 32)
        finally:
            os.close(report)
            if report_write >= 0:
                os.close(report_write)
        self._pid = int(line) if line else None
        self._paused = False

    def _wait_ready(self, port: int, deadline: float, begin: int) -> bool:
        """Return True when the server is ready, False when it has ended, lacks a port, or *deadline* has passed."""
        assert self._guard is not None
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection(_HOST, port, timeout=1)
                try:
                    connection.request("GET", "/v2/health/ready")
                    # Another program could answer on this port; only our own server counts.
                    if connection.getresponse().status == 200 and self._guard.poll() is None:
                        return True
                finally:
                    connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_POLL_SECONDS)
                return False
            # Triton takes its time to end after that.
            if self._port_taken(begin):
                return False
        return False

    def _wait_metrics(self, port: int) -> bool:
        """Return whether the metrics answer soon after the server is ready: they are the last that it starts."""
        assert self._guard is not None
        deadline = time.monotonic() + _METRICS_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
                return True
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_POLL_SECONDS)
                return False
        return False

    def _end(self, timeout: float) -> None:
        if self._guard is None:
            return
        if self._paused:
            self.resume()
        if self._guard.poll() is None and self._pid is not None:
            # Only the server itself: it ends its Python processes in order.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout)
        if self._guard.poll() is None:
            self._signal_group(signal.SIGKILL)
        self._collect()

    def _signal_group(self, number: signal.Signals) -> None:
        if self._guard is not None and self._guard.poll() is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid, number)

    def _frozen(self) -> bool:
        """Whether every thread of the server has stopped: the signal only asks for it."""
        states = []
        for thread in Path(f"/proc/{self._pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):
                states.append(thread.read_text().rpartition(")")[2].split()[0])
        return all(state in "TtZX" for state in states)

    def _collect(self) -> None:
        """Wait for the guard, which ends when the whole process group has ended."""
        if self._guard is None:
            return
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()

    def _bound(self) -> tuple[int, int, int]:
        if self._ports is None:
            raise RuntimeError("the server was not started")
        return self._ports

    def _port_taken(self, begin: int) -> bool:
        with self.log_path.open("rb") as log:
            log.seek(begin)
            return _PORT_TAKEN.search(log.read().decode(errors="replace")) is not None

    def _log_excerpt(self) -> str:
        tail = self.log_tail()
        if not tail:
            return " It has written nothing."
        # What went wrong stands far above the end: Triton unloads everything else before it gives up.
        wrong = [line for line in self.log_tail(10_000).splitlines() if _FAILED_TO_LOAD.search(line)]
        return "".join(f"\n{line}" for line in wrong) + f"\nThe end of its log:\n{tail}"


def _is_model(repository: Path, name: str) -> bool:
    try:
        check_name(name)
    except InvalidRequest:
        return False
    return (repository / name).is_dir()


def _check_free(port: int | None) -> None:
    """Raise `ConfigurationError` when *port* was asked for and is taken; Triton itself says so late, or not at all."""
    if port is None:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigurationError(f"Port {port} of {_HOST} is not free for Triton: {error.strerror}.") from error
