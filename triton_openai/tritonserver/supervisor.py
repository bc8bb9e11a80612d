"""A Triton that is started with the service."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path

import structlog

from triton_openai.config.tree import Settings, TracesSettings
from triton_openai.errors import ConfigurationError
from triton_openai.tasks import Backoff
from triton_openai.tritonserver.embedded import EmbeddedTriton

log = structlog.get_logger(__name__)

# A model may take many minutes to load; a Triton that ends while it loads is noticed at once all the same.
_START_SECONDS = 3600.0
# How long the process of a model of Triton's Python backend may take to start.
_MODEL_START_SECONDS = 1800
#: Between two looks at the process; and the pauses before a new start.
POLL_SECONDS = 0.5
FIRST_PAUSE = 1.0
MAX_PAUSE = 30.0


class Supervisor:
    """
    Runs one server for as long as ``run`` does.

    A server that ends by itself is started again on the same ports, after a pause that doubles each time. Its methods
    block, and run in threads.
    """

    def __init__(self, server: EmbeddedTriton) -> None:
        self._server = server
        self._backoff = Backoff(first=FIRST_PAUSE, max_pause=MAX_PAUSE, stable_after=60.0)
        self.started = asyncio.Event()

    async def run(self) -> None:
        """
        Keep the server running until cancelled, then stop it.

        Raises :class:`ConfigurationError` when the first start fails, or every model does: that is for the operator to
        put right.
        """
        try:
            await self._start()
            await self._report()
            # Triton logs to a file of its own.
            log.info("triton runs", its_log=str(self._server.log_path))
            self.started.set()
            while True:
                began = time.monotonic()
                # A thread that waits could not be cancelled.
                while (status := self._server.poll()) is None:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS)
                log.error("triton ended", status=status, log_tail=self._server.log_tail(20))
                await self._restart(self._backoff.after(time.monotonic() - began))
        finally:
            await asyncio.to_thread(self._server.stop)

    async def _report(self) -> None:
        """Log which models could not be loaded. Raises :class:`ConfigurationError` if no other is there."""
        try:
            failed, others = await asyncio.to_thread(self._server.failed_models)
        except (OSError, HTTPException, ValueError):
            # A server this busy has models, and ones that are missing show in the list of models too.
            return
        if failed and not others:
            reasons = "".join(f"\n{name}: {reason}" for name, reason in failed.items())
            raise ConfigurationError(f"Triton could not load its models.{reasons}")
        for name, reason in failed.items():
            log.error("model could not be loaded", model=name, reason=reason)

    async def _restart(self, pause: float) -> None:
        """Start the server again after *pause* seconds, as often as it takes."""
        while True:
            await asyncio.sleep(pause)
            try:
                await self._start()
            except ConfigurationError as error:
                pause = self._backoff.after(0)
                # Without the traceback, which does not help an operator.
                log.error("triton did not start again", reason=error.message, next_try_in=pause)  # noqa: TRY400
            else:
                log.info("triton runs again")
                return

    async def _start(self) -> None:
        starting = asyncio.ensure_future(asyncio.to_thread(self._server.start, _START_SECONDS))
        try:
            await asyncio.shield(starting)
        finally:
            # Cancelled while a thread still starts it. Killing what it has launched so far makes the thread give up.
            while not starting.done():
                await asyncio.to_thread(self._server.kill)
                await asyncio.wait([starting], timeout=0.1)
            with contextlib.suppress(ConfigurationError, asyncio.CancelledError):
                starting.result()


def triton_for(settings: Settings, environment: Mapping[str, str], *, backends: Path | None = None) -> EmbeddedTriton:
    """Return the Triton that *settings* describe, on ports that are known before it runs."""
    server = settings.server
    listen = (server.host, server.kserve_http_port, server.kserve_grpc_port)
    binary = shutil.which("tritonserver", path=environment.get("PATH"))
    return EmbeddedTriton(
        model_repository=settings.triton.model_repository,
        environment=environment,
        backends=backends,
        binary=Path(binary) if binary else None,
        model_control_mode=settings.triton.model_control_mode,
        load_models=settings.triton.load_model,
        listen=listen if server.enable_kserve_frontends else None,
        extra_args=[
            # A model that cannot be loaded must not take the others away.
            *("--exit-on-error=false", "--strict-readiness=false"),
            # A model of Triton's Python backend that starts an engine needs minutes, and Triton's default is 30 s.
            f"--backend-config=python,stub-timeout-seconds={_MODEL_START_SECONDS}",
            *trace_options(settings.traces),
        ],
    )


def trace_options(traces: TracesSettings) -> list[str]:
    """
    Return the flags with which Triton sends its own spans to the same collector: none where it cannot.

    It records only what the service requests (a rate of 0), and supports OTLP over HTTP only. Source:
    Triton's ``trace.md``; its exporter takes headers and certificates from ``OTEL_EXPORTER_OTLP_*`` as ours does.
    """
    if traces.exporter_url is None or traces.protocol == "grpc":
        return []
    options = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=0", f"opentelemetry,url={traces.exporter_url}")
    return [f"--trace-config={option}" for option in options]
