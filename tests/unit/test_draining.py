"""Draining of models: what runs, is refused and is waited for; in one process and in several of a service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.serving.test_shared import Workers, settled
from triton_openai.config.tree import ServerSettings
from triton_openai.draining import Draining, ModelDraining
from triton_openai.errors import ModelConflict, ModelUnloading, ServiceError
from triton_openai.serving.admission import Admission
from triton_openai.serving.workers.shared import SharedClient
from triton_openai.telemetry.process import LoopLag
from triton_openai.telemetry.request_record import RequestRecord


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process wait for the others, however busy the machine is."""
    monkeypatch.setattr("triton_openai.draining._ANSWER_SECONDS", 120.0)


class Process:
    """One process of the service."""

    def __init__(self, shared: SharedClient | None = None) -> None:
        self.draining = Draining()
        self.models = ModelDraining(self.draining, shared)
        self.admission = Admission(ServerSettings(), LoopLag(lambda _: None), model_draining=self.models)
        if shared is not None:
            shared.listen(self.models.apply)


class Visitor:
    """A request that runs until it is let go."""

    def __init__(self, process: Process, model: str = "m") -> None:
        self.error: ServiceError | None = None
        self.inside = False
        self._process = process
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(model))

    async def _visit(self, model: str) -> None:
        task = self._process.draining.enter()
        try:
            await self._process.admission.enter(model, RequestRecord(request_id="r", method="POST", path="/"))
            try:
                self.inside = True
                await self._leave.wait()
            finally:
                self._process.admission.leave(model, task)
        except asyncio.CancelledError:
            self.error = self._process.draining.reason()
        except ServiceError as error:
            self.error = error
        finally:
            self._process.draining.leave(task)
            self.inside = False

    def leave(self) -> None:
        """End."""
        self._leave.set()


@pytest.fixture(params=["one process", "two processes"])
async def pair(request):
    """Who unloads, and where requests come; with one process it is the same."""
    if request.param == "one process":
        alone = Process()
        return alone, alone
    service = Workers()
    return Process(service.start(0)), Process(service.start(1))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for *condition*; the deadline only ends a test that has failed already."""

    async def wait() -> None:
        while not condition():  # noqa: ASYNC110 - what happens in tasks sets no event here
            await asyncio.sleep(0.005)

    await asyncio.wait_for(wait(), 120)


async def unload(process: Process, *models: str, grace: float) -> None:
    """Do what an unload does, but for asking Triton."""
    async with process.models.claim(models), process.models.drained(models, grace):
        pass


async def test_what_runs_is_waited_for(pair):
    """New requests are refused at once, and taken again after what ran has ended and the model is gone."""
    unloading, serving = pair
    running, other = Visitor(serving), Visitor(serving, "other")
    await until(lambda: running.inside and other.inside)
    task = asyncio.create_task(unload(unloading, "m", grace=600))
    await until(lambda: refused(serving, "m"))
    late = Visitor(serving)
    await late.task
    assert isinstance(late.error, ModelUnloading)
    assert not task.done()
    assert not refused(serving, "other")

    running.leave()
    await asyncio.wait_for(task, 120)
    assert running.error is None
    assert not refused(serving, "m")
    again = Visitor(serving)
    await until(lambda: again.inside)
    for visitor in (again, other):
        visitor.leave()
        await visitor.task


def refused(process: Process, model: str) -> bool:
    """Return whether requests for *model* are refused."""
    try:
        process.models.check(model)
    except ModelUnloading:
        return True
    return False


async def test_the_service_ends_when_nothing_runs():
    """The service waits for what runs, and no longer than that, before it ends."""
    process = Process()
    running = Visitor(process)
    await until(lambda: running.inside)
    draining = asyncio.create_task(process.draining.drain(600))
    await asyncio.sleep(0)
    running.leave()
    await asyncio.wait_for(draining, 120)
    assert running.error is None


async def test_what_runs_too_long_is_ended(pair):
    """After the grace it is cancelled with a reason, wherever it runs; requests for other models know nothing of it."""
    unloading, serving = pair
    running, other = Visitor(serving), Visitor(serving, "other")
    await until(lambda: running.inside and other.inside)
    await asyncio.wait_for(unload(unloading, "m", grace=0.01), 120)
    await running.task

    assert isinstance(running.error, ModelUnloading)
    assert other.inside
    other.leave()
    await other.task


async def test_who_waits_is_turned_away(pair):
    """A request in the queue does not wait for a model that will be gone; those for other models do."""
    unloading, serving = pair
    admission = Admission(
        ServerSettings(max_running_requests_per_model=1), LoopLag(lambda _: None), model_draining=serving.models
    )
    began, ended = [], []
    leave = asyncio.Event()

    async def ask(model: str) -> None:
        try:
            task = await admission.enter(model, RequestRecord(request_id="r", method="POST", path="/"))
            began.append(model)
            await leave.wait()
            admission.leave(model, task)
        except ModelUnloading:
            ended.append(model)

    asked = [asyncio.create_task(ask(model)) for model in ("m", "other", "m", "m", "other")]
    await until(lambda: len(admission.queue) == 3)
    task = asyncio.create_task(unload(unloading, "m", grace=600))
    await until(lambda: len(ended) == 2)
    assert (["m", "other"], ["m", "m"], 1) == (began, ended, len(admission.queue))
    assert not task.done()
    leave.set()
    await asyncio.wait_for(asyncio.gather(task, *asked), 120)
    assert ["m", "other", "other"] == began


async def test_one_winner(pair):
    """A model that is claimed cannot be claimed again, and a claim of several leaves nothing behind when it fails."""
    unloading, serving = pair
    async with unloading.models.claim(["m"]):
        with pytest.raises(ModelConflict) as caught:
            async with serving.models.claim(["a", "m"]):
                pass
        async with serving.models.claim(["a"]):
            pass
    await settled()
    async with serving.models.claim(["a", "m"]):
        pass

    assert "model_busy" == caught.value.code


async def test_changes_are_seen():
    """A process learns that another has changed what Triton has, before that goes on."""
    service = Workers()
    one, two, alone = Process(service.start(0)), Process(service.start(1)), Process()
    before = two.models.version
    await one.models.changed()
    await alone.models.changed()
    assert (True, 0) == (two.models.version != before, alone.models.version)


async def unloading() -> tuple[Workers, Process, Visitor, asyncio.Task[None]]:
    """Return two processes, of which the first unloads a model: the second one, a request that runs there, the task."""
    service = Workers()
    first, second = Process(service.start(0)), Process(service.start(1))
    running = Visitor(second)
    await until(lambda: running.inside)
    task = asyncio.create_task(unload(first, "m", grace=600))
    await until(lambda: refused(second, "m"))
    return service, second, running, task


async def test_a_process_that_dies_while_it_unloads():
    """The models that it closed are open again, and what it had claimed is free."""
    service, serving, running, task = await unloading()
    service.kill(0)
    await until(lambda: not refused(serving, "m"))
    running.leave()
    await asyncio.wait_for(unload(serving, "m", grace=600), 120)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_process_that_dies_is_not_waited_for():
    """What ran in it has ended with it."""
    service, _, running, task = await unloading()
    assert not task.done()
    service.kill(1)
    await asyncio.wait_for(task, 120)
    running.leave()
    await running.task


async def test_a_process_that_starts_while_a_model_is_unloaded():
    """A process that starts while a model is unloaded takes no requests for it, until the end of that."""
    service, _, running, task = await unloading()
    late = Process(service.start(2))
    await until(lambda: refused(late, "m"))
    running.leave()
    await asyncio.wait_for(task, 120)
    await until(lambda: not refused(late, "m"))


async def test_a_process_that_hangs_holds_an_unload_up_no_longer_than_the_grace(monkeypatch):
    """A process that hangs gets the message, and holds an unload up no longer than the grace."""
    monkeypatch.setattr("triton_openai.draining._ANSWER_SECONDS", 0.01)
    service = Workers()
    unloading = Process(service.start(0))
    Process(service.start(1))
    service.hang(1)
    await asyncio.wait_for(unload(unloading, "m", grace=0.01), 120)
    await asyncio.wait_for(unloading.models.changed(), 120)
    assert not refused(unloading, "m")


@given(steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.booleans()), max_size=40))
@settings(deadline=None, max_examples=30)
def test_an_unload_waits_for_what_runs(steps):
    """Whatever comes and goes: an unload waits for exactly the requests on its model, in both processes."""

    async def play() -> None:
        service = Workers()
        processes = [Process(service.start(index)) for index in range(2)]
        inside: dict[str, list[Visitor]] = {"a": [], "b": []}
        for model, index, comes in steps:
            if comes:
                inside[model].append(Visitor(processes[index], model))
                await until(partial(getattr, inside[model][-1], "inside"))
            elif inside[model]:
                visitor = inside[model].pop()
                visitor.leave()
                await visitor.task
        for model, visitors in inside.items():
            task = asyncio.create_task(unload(processes[0], model, grace=600))
            for visitor in visitors:
                await asyncio.wait({task}, timeout=0)
                assert not task.done()
                visitor.leave()
                await visitor.task
            await asyncio.wait_for(task, 120)
            assert not any(refused(process, model) for process in processes)

    asyncio.run(play())
