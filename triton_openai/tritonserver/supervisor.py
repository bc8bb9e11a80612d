"""A Triton that is started with the service."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from triton_openai.config import Settings
from triton_openai.config.observability import TracesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.tritonserver.backoff import Pauses
from triton_openai.tritonserver.embedded import EmbeddedTriton


def trace_options(traces: TracesSettings) -> list[str]:
    """
    Return the flags with which Triton sends its own spans to the same collector: none where it cannot.

    It records what the service asks for and nothing else (a rate of 0), and speaks OTLP over HTTP only. Source:
    Triton's ``trace.md``; its exporter takes headers and certificates from ``OTEL_EXPORTER_OTLP_*`` as ours does.
    """
    if traces.exporter_url is None or traces.protocol == "grpc":
        return []
    options = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={traces.exporter_url}")
    return [f"--trace-config={option}" for option in options]


log = structlog.get_logger(__name__)

# A model may take many minutes to load; a Triton that ends while it loads is noticed at once all the same.
_START_SECONDS = 3600.0


class SupervisedServer(Protocol):
    """What the supervisor needs of a server; its methods block, and run in threads."""

    def start(self, timeout: float = ...) -> None:
        """Start, and return when it is ready; raises ConfigurationError when it does not become so."""

    def stop(self, timeout: float = ...) -> None:
        """End in order, and remove what was left behind."""

    def kill(self) -> None:
        """End at once."""

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""

    def log_tail(self, lines: int = ...) -> str:
        """Return the end of its log."""

    @property
    def log_path(self) -> Path:
        """The file that is its log, once it was started."""


class Supervisor:
    """
    Runs one server for as long as ``run`` does.

    A server that ends by itself is started again on the same ports, after a pause that doubles up to *longest_pause*
    and falls back to *first_pause* once the server has lived for *stable_after* seconds.
    """

    def __init__(
        self,
        server: SupervisedServer,
        *,
        start_timeout: float = _START_SECONDS,
        poll_interval: float = 0.5,
        first_pause: float = 1.0,
        longest_pause: float = 30.0,
        stable_after: float = 60.0,
    ) -> None:
        self._server = server
        self._start_timeout = start_timeout
        self._poll_interval = poll_interval
        self._pauses = Pauses(first=first_pause, longest=longest_pause, stable_after=stable_after)
        self.started = asyncio.Event()

    async def run(self) -> None:
        """
        Keep the server running until cancelled, then stop it.

        :raises ConfigurationError: when the first start fails, since that is for the operator to put right.
        """
        try:
            await self._start()
            # A file of its own, which nobody would look for.
            log.info("triton runs", its_log=str(self._server.log_path))
            self.started.set()
            while True:
                began = time.monotonic()
                status = await self._ended()
                log.error("triton ended", status=status, log_tail=self._server.log_tail(20))
                await self._restart(self._pauses.after(time.monotonic() - began))
        finally:
            await asyncio.to_thread(self._server.stop)

    async def _restart(self, pause: float) -> None:
        """Start the server again after *pause* seconds, as often as it takes."""
        while True:
            await asyncio.sleep(pause)
            try:
                await self._start()
            except ConfigurationError as error:
                pause = self._pauses.after(0)
                # The message says it all; where it was raised says nothing to an operator.
                log.error("triton did not start again", reason=error.message, next_try_in=pause)  # noqa: TRY400
            else:
                log.info("triton runs again")
                return

    async def _ended(self) -> int:
        # A thread that waits instead of looking could not be cancelled.
        while (status := self._server.poll()) is None:  # noqa: ASYNC110
            await asyncio.sleep(self._poll_interval)
        return status

    async def _start(self) -> None:
        starting = asyncio.ensure_future(asyncio.to_thread(self._server.start, self._start_timeout))
        try:
            await asyncio.shield(starting)
        finally:
            # Cancelled while a thread still starts it. Killing what it has launched so far makes the thread give up.
            while not starting.done():
                await asyncio.to_thread(self._server.kill)
                await asyncio.wait([starting], timeout=0.1)
            with contextlib.suppress(ConfigurationError, asyncio.CancelledError):
                starting.result()


class LaunchedTriton:
    """A Triton to be launched on ports that are known before it runs, so that the service can listen meanwhile."""

    def __init__(
        self,
        repositories: Sequence[Path],
        environment: Mapping[str, str],
        *,
        backends: Path | None = None,
        model_control_mode: str = "none",
        load_models: Sequence[str] = (),
        extra_args: Sequence[str] = (),
    ) -> None:
        found = shutil.which("tritonserver", path=environment.get("PATH"))
        http_port, grpc_port, metrics_port = _free_ports(3)
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.grpc_url = f"grpc://127.0.0.1:{grpc_port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.server = EmbeddedTriton(
            model_repository=repositories,
            environment=environment,
            backends=backends,
            extra_args=extra_args,
            binary=Path(found) if found else None,
            model_control_mode=model_control_mode,
            load_models=load_models,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
        )

    def settings(self, settings: Settings) -> Settings:
        """Return *settings* for a service in front of this Triton."""
        return settings.with_triton(self.http_url, self.grpc_url, metrics_url=self.metrics_url)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
