"""
A real Triton, started and stopped by us, for the demo, the tests, and a service that starts the server behind it.

The server binds to 127.0.0.1 unless *listen* names another host. Nothing of it outlives this process: a small guard
process ends it (``_guard``).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver import _guard
from triton_openai.tritonserver._runtime import Runtime, installed_runtime, packaged_runtime

# Instead of a model's name: load all that are there.
_ALL_MODELS = "*"
_HOST = "127.0.0.1"
_KINDS = ("http", "grpc", "metrics")
_METRICS_SECONDS = 5.0
_POLL_SECONDS = 0.03
# Another process may take a port before Triton binds it; then other ports are tried.
_ATTEMPTS = 5
_PORT_TAKEN = re.compile(rb"Socket '.*' already in use")
_FAILED_TO_LOAD = re.compile(r"^E.*(failed to load|Poll failed|failed to start|Model '.*' loading failed)")
_WHY_NOT_LOADED = re.compile(
    r"^E.*\"(?:Poll failed for model directory|failed to load(?: model)?) '([^']+)'[^:]*: (.*)\"$", re.MULTILINE
)
# Triton waits this long for requests in flight; a stop with a shorter timeout kills it.
_EXIT_SECONDS = 5


class EmbeddedTriton:
    """
    One ``tritonserver`` process with its own runtime folder, ports and log.

    *environment* is the environment to start from (callers pass ``os.environ``); *backends* a folder with further
    Python-based backends; *binary* an installed ``tritonserver``, instead of the one inside ``nvidia-pytriton``.
    *listen* is the host, and the ports for HTTP and gRPC, 0 for free ones, at which clients reach it. Free ports are
    chosen, at the latest by the start. After its end it can be started again, on the same ports.

    Raises :class:`ConfigurationError` if it cannot listen there.
    """

    def __init__(
        self,
        *,
        model_repository: Path | Sequence[Path],
        environment: Mapping[str, str],
        backends: Path | None = None,
        binary: Path | None = None,
        model_control_mode: str = "none",
        load_models: Sequence[str] = (),
        extra_args: Sequence[str] = (),
        listen: tuple[str, int, int] | None = None,
    ) -> None:
        repositories = [model_repository] if isinstance(model_repository, Path) else model_repository
        # The server runs in a folder of its own.
        self._repositories = [path.absolute() for path in repositories]
        self._environment = dict(environment)
        self._extra_backends = backends
        self._binary = binary
        self._model_control_mode = model_control_mode
        self._load_models = load_models
        self._extra_args = extra_args
        # The metrics stay on this machine: the service exports them.
        self._hosts = [_HOST, _HOST, _HOST]
        self._ports: Sequence[int] | None = None
        if listen is not None:
            host = _ipv4(listen[0])
            self._hosts = [host, host, _HOST]
            self._ports = _available_ports(host, listen[1:])
        self._shared_memory = f"triton-openai-{uuid.uuid4().hex[:12]}"
        # From the first start to the stop
        self._runtime: Runtime | None = None
        self._work_dir: Path | None = None
        # Of the last process
        self._guard: subprocess.Popen[bytes] | None = None
        # Held while a process starts, so that `kill` in another thread waits until its process id is set.
        self._launching = threading.Lock()
        #: The process id of ``tritonserver`` itself, None before the first start.
        self.pid: int | None = None

    def start(self, timeout: float = 240.0) -> None:
        """
        Start the server and return when it and all its models are ready.

        Raises `ConfigurationError`, with the end of the server's log, when it ends before or is not ready in time.
        """
        if self.poll() is None and self._guard is not None:
            raise RuntimeError("the server runs already")
        self.kill()
        deadline = time.monotonic() + timeout
        runtime = self._prepare()
        for attempt in range(_ATTEMPTS):
            ports = self._ports or free_ports()
            if self.log_path.exists():
                begin = self.log_path.stat().st_size
            else:
                begin = 0
            with self._launching:
                self._launch(runtime, ports)
            ready = self._wait_ready(ports[0], deadline, begin)
            if ready and self._wait_metrics(ports[2]):
                self._ports = ports
                return
            # Triton goes on without metrics, silently, if their port is in use.
            ended = self.poll()
            taken = ready or self._port_taken(begin)
            self.kill()
            # Triton 2.51 now and then aborts while it starts many models at once on a busy machine.
            crashed = ended is not None and ended < 0
            if attempt == _ATTEMPTS - 1 or not (crashed or (taken and self._ports is None)):
                late = ended is None and not taken
                if late:
                    what = f"was not ready within {timeout:g} s"
                else:
                    what = f"ended with status {ended} while starting"
                raise ConfigurationError(f"Triton {what}.{self._log_excerpt()}")

    def stop(self, timeout: float = 15.0) -> None:
        """Ask the server to end, kill it when it has not ended within *timeout* seconds, and tidy up."""
        if self._guard is not None:
            # Only the server itself: it ends its Python processes in order.
            self._signal(os.kill, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(timeout)
        self.kill()
        if self._work_dir is not None:
            shutil.rmtree(self._work_dir, ignore_errors=True)
            self._work_dir = None
        self._runtime = None

    def kill(self) -> None:
        """End the server and all its processes at once, as a crash of the machine would; `start` works again."""
        with self._launching:
            guard = self._guard
            if guard is None:
                return
            self._signal(os.killpg, signal.SIGKILL)
        # It ends when the whole process group has ended.
        guard.wait()
        if guard.stdin is not None:
            guard.stdin.close()

    def _signal(self, send: Callable[[int, int], None], number: int) -> None:
        if self.poll() is None and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)

    def poll(self) -> int | None:
        """Return None while the server runs or was never started, else its exit status (-n: killed by signal n)."""
        if self._guard is None or (status := self._guard.poll()) is None:
            return None
        if status > 128:
            return 128 - status
        return status

    def failed_models(self) -> tuple[Mapping[str, str], bool]:
        """
        Return why models of the running server could not be loaded, by name, and whether any model is ready.

        Its index has no reason for a configuration that it could not read, and lacks models without a version; its log
        has. Raises :class:`OSError`, or :class:`ValueError` for an answer that is no index.
        """
        with contextlib.closing(http.client.HTTPConnection(self._address(0), timeout=_METRICS_SECONDS)) as connection:
            connection.request("POST", "/v2/repository/index", body=b"{}")
            index = json.loads(connection.getresponse().read())
        ready = {entry["name"] for entry in index if entry.get("state") == "READY"}
        logged = _WHY_NOT_LOADED.findall(self.log_path.read_text(errors="replace").replace("\\n", " "))
        indexed = [(entry["name"], entry.get("reason", "")) for entry in index if entry.get("state") == "UNAVAILABLE"]
        failed = {name: " ".join(reason.split()) for name, reason in (*logged, *indexed) if name not in ready}
        return failed, bool(ready)

    @property
    def http_url(self) -> str:
        """The address of the HTTP endpoint for this machine, ``http://127.0.0.1:port``."""
        return f"http://{self._address(0)}"

    @property
    def grpc_url(self) -> str:
        """The address of the gRPC endpoint for this machine, ``grpc://127.0.0.1:port``."""
        return f"grpc://{self._address(1)}"

    @property
    def metrics_url(self) -> str:
        """The address of the metrics, ``http://127.0.0.1:port/metrics``."""
        return f"http://{self._address(2)}/metrics"

    def _address(self, kind: int) -> str:
        # From the first call on, the ports stay the same.
        self._ports = self._ports or free_ports()
        return f"{_reached(self._hosts[kind])}:{self._ports[kind]}"

    @property
    def log_path(self) -> Path:
        """The file that holds what the server has written; it is kept over restarts and removed by `stop`."""
        if self._work_dir is None:
            raise RuntimeError("the server was not started")
        return self._work_dir / "tritonserver.log"

    def log_tail(self, lines: int = 40) -> str:
        """Return the last *lines* lines of the server's log."""
        if self._work_dir is None or not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def _prepare(self) -> Runtime:
        for repository in self._repositories:
            if not repository.is_dir():
                # Such as s3://…, whose slashes a path does not keep.
                hint = ""
                if ":/" in str(repository):
                    hint = " For one that is no folder, start Triton yourself and write --triton-url."
                raise ConfigurationError(f"There is no model repository at {repository}.{hint}")
        known: set[str] = set()
        for repository in self._repositories:
            known.update(path.name for path in repository.iterdir() if path.is_dir())
        for name in self._load_models:
            if name not in (_ALL_MODELS, *known):
                # Triton would only report that not all models could be loaded.
                where = " or ".join(map(str, self._repositories))
                raise ConfigurationError(f"There is no model {name[:200]!r} in {where}.")
        if self._runtime is None or self._work_dir is None:
            folder = Path(tempfile.mkdtemp(prefix="triton-openai-"))
            if self._binary is None:
                make = packaged_runtime
            else:
                make = partial(installed_runtime, self._binary)
            try:
                self._runtime = make(self._environment, folder, self._extra_backends)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._work_dir = folder
        return self._runtime

    def _command(self, runtime: Runtime, ports: Sequence[int]) -> list[str]:
        return [
            str(runtime.binary.absolute()),
            *(f"--model-repository={repository}" for repository in self._repositories),
            *([] if runtime.backends is None else [f"--backend-directory={runtime.backends}"]),
            *(f"--{kind}-address={host}" for kind, host in zip(_KINDS, self._hosts, strict=True)),
            *(f"--{kind}-port={port}" for kind, port in zip(_KINDS, ports, strict=True)),
            f"--model-control-mode={self._model_control_mode}",
            *(f"--load-model={name}" for name in self._load_models),
            # Two servers on one machine must not meet in /dev/shm.
            f"--backend-config=python,shm-region-prefix-name={self._shared_memory}",
            f"--exit-timeout-secs={_EXIT_SECONDS}",
            "--model-load-thread-count=8",
            *self._extra_args,
        ]

    def _launch(self, runtime: Runtime, ports: Sequence[int]) -> None:
        report, report_write = os.pipe()
        guarded = [str(os.getpid()), str(report_write), self._shared_memory, str(self._work_dir)]
        with os.fdopen(report) as reported:
            try:
                with self.log_path.open("ab") as log:
                    self._guard = subprocess.Popen(
                        [sys.executable, "-I", "-S", _guard.__file__, *guarded, *self._command(runtime, ports)],
                        env=dict(runtime.environment),
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=(report_write,),
                        cwd=self._work_dir,
                        # Ctrl-C in a terminal is for the owner to handle, which then stops the server in order.
                        start_new_session=True,
                    )
            finally:
                os.close(report_write)
            line = reported.readline()
        if line:
            self.pid = int(line)
        else:
            self.pid = None

    def _wait_ready(self, port: int, deadline: float, begin: int) -> bool:
        """Return True when the server is ready, False when it has ended, lacks a port, or *deadline* has passed."""
        assert self._guard is not None
        while time.monotonic() < deadline:
            with (
                contextlib.suppress(OSError, http.client.HTTPException),
                contextlib.closing(http.client.HTTPConnection(_reached(self._hosts[0]), port, timeout=1)) as connection,
            ):
                connection.request("GET", "/v2/health/ready")
                # Another program could answer on this port; only our own server counts.
                if connection.getresponse().status == 200 and self._guard.poll() is None:
                    return True
            # Triton takes its time to end when a port is taken.
            if self._guard.poll() is not None or self._port_taken(begin):
                return False
            time.sleep(_POLL_SECONDS)
        return False

    def _wait_metrics(self, port: int) -> bool:
        """Return whether the metrics answer soon after the server is ready: they are the last that it starts."""
        assert self._guard is not None
        deadline = time.monotonic() + _METRICS_SECONDS
        while time.monotonic() < deadline and self._guard.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((_HOST, port), timeout=1):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def _port_taken(self, begin: int) -> bool:
        return _PORT_TAKEN.search(self.log_path.read_bytes(), begin) is not None

    def _log_excerpt(self) -> str:
        # The cause is far above the end: Triton unloads all other models before it ends.
        wrong = [line for line in self.log_tail(10_000).splitlines() if _FAILED_TO_LOAD.search(line)]
        return "\n".join(["", *wrong, "The end of its log:", self.log_tail() or "(nothing)"])


def _ipv4(host: str) -> str:
    """Return the IPv4 address of *host*: how Triton takes others depends on the protocol."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigurationError(f"Triton cannot listen on {host}: it needs an IPv4 address (--host).") from error


def _reached(host: str) -> str:
    """Return where this machine reaches what listens on *host*."""
    if host == "0.0.0.0":
        return _HOST
    return host


def _available_ports(host: str, requested: Sequence[int]) -> list[int]:
    """Return the *requested* ports for HTTP and gRPC, and one for metrics. Raises :class:`ConfigurationError`."""
    ports = []
    with contextlib.ExitStack() as sockets:
        for port, flag in zip(requested, ("--kserve-http-port", "--kserve-grpc-port"), strict=True):
            try:
                listening_socket = sockets.enter_context(socket.create_server((host, port)))
            except OSError as error:
                # Its own words repeat the address.
                reason = os.strerror(error.errno) if error.errno else error
                raise ConfigurationError(
                    f"Triton cannot listen on {host} port {port}: {reason}. Choose another with {flag}."
                ) from error
            ports.append(listening_socket.getsockname()[1])
        return [*ports, *free_ports(1)]


def free_ports(count: int = 3) -> list[int]:
    """Return ports of 127.0.0.1 that are free at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server((_HOST, 0))) for _ in range(count)]
        return [listening_socket.getsockname()[1] for listening_socket in sockets]
