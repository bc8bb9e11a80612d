"""A Triton that was started here is watched, started again when it ends, and stopped with the service."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from triton_openai.config.tree import Settings, TritonSettings
from triton_openai.errors import ConfigurationError
from triton_openai.tasks import Backoff
from triton_openai.tritonserver import supervisor
from triton_openai.tritonserver.embedded import EmbeddedTriton
from triton_openai.tritonserver.supervisor import Supervisor, triton_for


def test_models_have_time_to_start(tmp_path: Path) -> None:
    """A model of Triton's Python backend may start an engine, such as a companion model does: that takes minutes."""
    binary = tmp_path / "tritonserver"
    binary.write_text('#!/bin/sh\necho "$@"\nexit 1\n')
    binary.chmod(0o755)
    (tmp_path / "models").mkdir()
    settings = Settings(triton=TritonSettings(model_repository=(tmp_path / "models",)))
    server = triton_for(settings, {"PATH": f"{tmp_path}:/bin:/usr/bin"})
    try:
        with pytest.raises(ConfigurationError):
            server.start()
        assert "--backend-config=python,stub-timeout-seconds=1800" in server.log_path.read_text()
    finally:
        server.stop()


class Server(EmbeddedTriton):
    """A server of no process: it records what is asked of it, and ends or fails to start when told so."""

    def __init__(
        self, *, failing_starts: tuple[int, ...] = (), blocks: bool = False, failed: tuple[str, ...] = ()
    ) -> None:
        self.calls: list[str] = []
        self._failed = failed
        self.status: int | None = None
        self._failing_starts = failing_starts
        self._killed = None if not blocks else threading.Event()

    def start(self, timeout: float = 0) -> None:
        self.calls.append("start")
        if self._killed is not None:
            self._killed.wait(120)
            raise ConfigurationError("It was killed.")
        if self.calls.count("start") in self._failing_starts:
            raise ConfigurationError("It does not start.")
        self.status = None

    def stop(self, timeout: float = 0) -> None:
        self.calls.append("stop")

    def kill(self) -> None:
        if self._killed is not None:
            self._killed.set()

    def poll(self) -> int | None:
        return self.status

    def failed_models(self) -> tuple[dict[str, str], bool]:
        return dict.fromkeys(self._failed, "a reason"), not self._failed

    def log_tail(self, lines: int = 0) -> str:
        return "the end"

    @property
    def log_path(self) -> Path:
        return Path("/somewhere/its.log")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_SECONDS", 0.005), ("FIRST_PAUSE", 0.005), ("MAX_PAUSE", 0.02)):
        monkeypatch.setattr(supervisor, name, seconds)


async def _until(condition) -> None:
    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - what it waits for happens in threads
            await asyncio.sleep(0.002)

    await asyncio.wait_for(look(), 120)


@contextlib.asynccontextmanager
async def _running(supervisor: Supervisor):
    task = asyncio.create_task(supervisor.run())
    yield task
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_triton_without_any_model_that_loads() -> None:
    """A Triton without any model that loads ends the service with the reasons, as a Triton does that does not start."""
    server = Server(failed=("a", "b"))
    with pytest.raises(ConfigurationError, match=r"could not load its models\.\na: a reason\nb: a reason"):
        await Supervisor(server).run()
    assert ["start", "stop"] == server.calls


async def test_the_place_of_the_log_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's log is not the service's own; its place is told, and its folder is a new one with each service."""
    said: list[tuple[str, object]] = []
    monkeypatch.setattr(
        "triton_openai.tritonserver.supervisor.log",
        SimpleNamespace(info=lambda event, **fields: said.append((event, fields))),
    )
    supervised = Supervisor(Server())
    async with _running(supervised):
        await asyncio.wait_for(supervised.started.wait(), 120)

    assert [("triton runs", {"its_log": "/somewhere/its.log"})] == said


async def test_triton_is_stopped_with_the_service() -> None:
    """Cancelling ends the server in order."""
    server = Server()
    supervised = Supervisor(server)
    async with _running(supervised):
        await asyncio.wait_for(supervised.started.wait(), 120)

    assert ["start", "stop"] == server.calls


async def test_triton_is_started_again() -> None:
    """A server that ends is started again, as often as it takes."""
    server = Server(failing_starts=(2, 3))
    supervised = Supervisor(server)
    async with _running(supervised):
        await asyncio.wait_for(supervised.started.wait(), 120)
        server.status = -9
        await _until(lambda: server.status is None)

    assert ["start"] * 4 + ["stop"] == server.calls


async def test_a_first_start_that_fails_is_the_operators() -> None:
    """The first failure is reported and not tried again, and nothing is left behind."""
    server = Server(failing_starts=(1,))

    with pytest.raises(ConfigurationError, match="It does not start"):
        await Supervisor(server).run()

    assert ["start", "stop"] == server.calls


async def test_triton_can_be_stopped_while_it_starts() -> None:
    """A server that takes its time to start does not hold up the end of the service."""
    server = Server(blocks=True)
    async with _running(Supervisor(server)):
        await _until(lambda: server.calls)

    assert ["start", "stop"] == server.calls


def test_pauses_grow_up_to_the_longest() -> None:
    """Each is twice the one before; what has lived long enough is started again soon, and they grow from there."""
    pauses = Backoff(first=1, max_pause=5, stable_after=60)

    assert [1, 2, 4, 5, 5] == [pauses.after(lived) for lived in (0, 10, 59, 0, 0)]
    assert [1, 2] == [pauses.after(60), pauses.after(0)]
