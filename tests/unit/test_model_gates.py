"""The gates of models: who runs, who is refused, who is waited for; in one process and in several of a service."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_openai.config.tree import ServerSettings
from triton_openai.draining import Draining
from triton_openai.errors import ModelConflict, ModelUnloading, ServiceError
from triton_openai.model_gates import ModelGates
from triton_openai.server.admission import Admission
from triton_openai.shared_gates import SharedGates
from triton_openai.telemetry.observation import Observation


class Process:
    """The gates of one process, and the requests that run in it."""

    def __init__(self, directory: Path | None) -> None:
        self.draining = Draining()
        self.gates = ModelGates(self.draining, directory)
        self._watch = asyncio.create_task(self.gates.watch())

    def close(self) -> None:
        """Stop watching."""
        self._watch.cancel()


class Visitor:
    """A request that stays until it is told to leave."""

    def __init__(self, process: Process, model: str = "m") -> None:
        self.told: ServiceError | None = None
        self.inside = False
        self._process = process
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(model))

    async def _visit(self, model: str) -> None:
        task = self._process.draining.enter()
        try:
            with self._process.gates.entered(model):
                self.inside = True
                await self._leave.wait()
        except asyncio.CancelledError:
            self.told = self._process.draining.reason()
        except ServiceError as error:
            self.told = error
        finally:
            self._process.draining.leave(task)
            self.inside = False

    def leave(self) -> None:
        """End."""
        self._leave.set()


@pytest.fixture(params=["one process", "two processes"])
async def pair(request, tmp_path):
    """Who unloads, and where requests come; with one process it is the same."""
    unloading = Process(None if request.param == "one process" else tmp_path)
    serving = unloading if request.param == "one process" else Process(tmp_path)
    yield unloading, serving
    unloading.close()
    serving.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - what happens in tasks sets no event here
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 10)


async def unload(process: Process, *models: str, grace: float) -> None:
    """Do what an unload does, but for asking Triton."""
    with process.gates.claim(models):
        async with process.gates.closed(models, grace):
            pass


async def test_what_runs_is_waited_for(pair):
    """The gate is closed at once, and open again after what ran has ended and the model is gone."""
    unloading, serving = pair
    running, other = Visitor(serving), Visitor(serving, "other")
    await until(lambda: running.inside and other.inside)
    task = asyncio.create_task(unload(unloading, "m", grace=30))
    await until(lambda: refused(serving, "m"))
    late = Visitor(serving)
    await late.task
    assert isinstance(late.told, ModelUnloading)
    assert not task.done()
    assert not refused(serving, "other")

    running.leave()
    await asyncio.wait_for(task, 10)
    assert running.told is None
    assert not refused(serving, "m")
    again = Visitor(serving)
    await until(lambda: again.inside)
    for visitor in (again, other):
        visitor.leave()
        await visitor.task


def refused(process: Process, model: str) -> bool:
    """Return whether requests for *model* are refused."""
    try:
        process.gates.check(model)
    except ModelUnloading:
        return True
    return False


async def test_what_runs_too_long_is_ended(pair):
    """After the grace it is told why, wherever it runs; requests for other models know nothing of it."""
    unloading, serving = pair
    running, other = Visitor(serving), Visitor(serving, "other")
    await until(lambda: running.inside and other.inside)
    await asyncio.wait_for(unload(unloading, "m", grace=0.01), 10)
    await running.task

    assert isinstance(running.told, ModelUnloading)
    assert other.inside
    other.leave()
    await other.task


async def test_who_waits_is_turned_away(pair):
    """A request in the queue does not wait for a model that will be gone; those for other models do."""
    unloading, serving = pair
    admission = Admission(ServerSettings(max_running_requests_per_model=1), lambda: 0.0, gates=serving.gates)
    began, ended = [], []
    leave = asyncio.Event()

    async def ask(model: str) -> None:
        try:
            async with admission.enter(model, Observation(request_id="r", method="POST", path="/")):
                began.append(model)
                await leave.wait()
        except ModelUnloading:
            ended.append(model)

    asked = [asyncio.create_task(ask(model)) for model in ("m", "other", "m", "m", "other")]
    await until(lambda: admission.queued == 3)
    task = asyncio.create_task(unload(unloading, "m", grace=30))
    await until(lambda: len(ended) == 2)
    assert (["m", "other"], ["m", "m"], 1) == (began, ended, admission.queued)
    assert not task.done()
    leave.set()
    await asyncio.wait_for(asyncio.gather(task, *asked), 10)
    assert ["m", "other", "other"] == began


async def test_one_winner(pair):
    """A model that is claimed cannot be claimed again, and a claim of several leaves nothing behind when it fails."""
    unloading, serving = pair
    with unloading.gates.claim(["m"]):
        with pytest.raises(ModelConflict) as caught, serving.gates.claim(["a", "m"]):
            pass
        with serving.gates.claim(["a"]):
            pass
    with serving.gates.claim(["a", "m"]):
        pass

    assert "model_busy" == caught.value.code


async def test_changes_are_seen(tmp_path):
    """A process learns that another has changed what Triton has."""
    one, two = Process(tmp_path), Process(tmp_path)
    before = two.gates.version
    one.gates.changed()
    assert two.gates.version != before
    alone = Process(None)
    alone.gates.changed()
    assert 0 == alone.gates.version
    for process in (one, two, alone):
        process.close()


def test_a_process_that_dies(tmp_path):
    """What it had claimed and closed is free again, as is what ran in it."""
    code = (
        "import os, sys; from pathlib import Path; from triton_openai.shared_gates import SharedGates\n"
        "gates = SharedGates(Path(sys.argv[1])); gates.hold('m'); gates.claim('m'); gates.close(['m'])\n"
        "print('done', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert b"done\n" == process.stdout.readline()
    gates = SharedGates(tmp_path)
    assert (True, False, False) == (gates.is_closed("m"), gates.is_idle("m"), gates.claim("m"))
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()

    assert (False, True, True) == (gates.is_closed("m"), gates.is_idle("m"), gates.claim("m"))
    assert not gates.is_closed("m")
    gates.disclaim("m")


@given(name=st.text(min_size=1, max_size=300))
@settings(deadline=None, max_examples=50)
def test_any_name_is_one_file(tmp_path_factory, name):
    """A model's name never becomes a path."""
    folder = tmp_path_factory.mktemp("gates")
    gates = SharedGates(folder)
    assert gates.hold(name)
    gates.release(name)

    assert {folder / "models"} == set(folder.iterdir())
    assert 2 == len(list((folder / "models").iterdir()))


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.booleans()), max_size=40))
@settings(deadline=None, max_examples=30)
def test_locks_are_given_back(tmp_path_factory, steps):
    """Whatever comes and goes, what is counted in the end is what is still there, and no descriptor stays open."""

    async def play() -> None:
        before = descriptors()
        one, two = Process(folder), Process(folder)
        inside: dict[str, list[Visitor]] = {"a": [], "b": []}
        for model, comes in steps:
            if comes:
                inside[model].append(Visitor(one, model))
            elif inside[model]:
                visitor = inside[model].pop()
                await until(partial(getattr, visitor, "inside"))
                visitor.leave()
                await visitor.task
        for model, visitors in inside.items():
            for visitor in visitors:
                await until(partial(getattr, visitor, "inside"))
            assert bool(visitors) != SharedGates(folder).is_idle(model)
            for visitor in visitors:
                visitor.leave()
                await visitor.task
            assert SharedGates(folder).is_idle(model)
        one.close()
        two.close()
        assert descriptors() == before

    folder = tmp_path_factory.mktemp("gates")
    asyncio.run(play())
