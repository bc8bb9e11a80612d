"""What requests get while Triton loads a model again whose process has died."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every_case
from tests.clock import Clock, turns
from tests.conformance.fake_triton import FakeTriton, config_of
from tests.proxy_fixture import serving
from triton_openai.config.tree import ApiSettings, ModelSettings, Settings, TritonSettings
from triton_openai.errors import ModelNotFound, ServiceError, UpstreamUnavailable
from triton_openai.triton.carrier import Carriers
from triton_openai.triton.endpoint import Endpoint
from triton_openai.triton.engine_capacity import EngineCapacity
from triton_openai.triton.reloading import reload_lock, reloading_error
from triton_openai.triton.revival import Revivals
from triton_openai.triton.status import classify
from triton_openai.triton.tensors import InferRequest, Tensor

MODEL = "revived"
RELOADING = f"The process of the model '{MODEL}' has died, and the model is being loaded again."


@pytest.fixture(autouse=True)
def _own_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Share the locks of models that are loaded again with no other process of this machine that runs tests."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


class Loading:
    """A Triton that loads a model until the test lets it end."""

    def __init__(self, error: ServiceError | None = None) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self._error = error

    async def unload_model(self, model: str) -> None:
        """Take it."""

    async def load_model(self, model: str) -> None:
        self.begun.set()
        await self.may_end.wait()
        if self._error is not None:
            raise self._error


@asynccontextmanager
async def reviving(error: ServiceError | None = None) -> AsyncIterator[Loading]:
    """Have a Triton load the model again, which fails with *error*, for as long as the context is open."""
    loading = Loading(error)
    client: Any = loading
    revivals = Revivals()
    revivals.start(client, MODEL)
    await loading.begun.wait()
    try:
        yield loading
    finally:
        revivals.close()
        await turns()


class Refusing:
    """A Triton that does not have the model, and answers a request for it as Triton does."""

    def stream(self, request: InferRequest, receiver: Any) -> Any:
        error = classify(f"Request for unknown model: '{request.model}' is not found", request.model)
        asyncio.get_running_loop().call_soon(receiver.end, error)
        return self

    def close(self, *, silent: bool = False) -> None:
        """Take it."""


class Reader:
    """Receives the end of a stream."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def receive(self, responses: Sequence[Any]) -> None:
        """Take them."""

    def end(self, error: Exception | None) -> None:
        self.ended.set_result(error)


def request(**fields: Any) -> InferRequest:
    """Return a request to the model."""
    body = Tensor("request", "BYTES", (1,), ('{"v":1,"kind":"generate"}',))
    return InferRequest(model=MODEL, id="x", inputs=(body,), **fields)


async def carried() -> Exception | None:
    """Return the error of a stream of a carrier."""
    carriers = Carriers(EngineCapacity())
    client: Any = Refusing()
    reader = Reader()
    carriers.stream(client, request(stream=True, carried=True), reader)
    error = await reader.ended
    carriers.close()
    return error


async def inferred() -> Exception | None:
    """Return the error of a request with one answer."""
    async with FakeTriton() as triton:
        endpoint = Endpoint([triton.url])
        try:
            await endpoint.infer(request())
        except ServiceError as error:
            return error
        finally:
            await endpoint.close()
    return None


async def looked_up(name: str = MODEL) -> Exception | None:
    """Return the error of a request that finds no model of that name."""
    settings = ModelSettings(aliases=("other",), loras=("adapter",))
    async with FakeTriton(config_of("m")) as triton:
        triton.waiting = {MODEL: "unloaded"}
        tree = Settings(
            triton=TritonSettings(url=(triton.url,)), api=ApiSettings(lora_separator=":"), models={MODEL: settings}
        )
        async with serving(tree) as proxy:
            await proxy.ready()
            try:
                await proxy.models.find(name)
            except ServiceError as error:
                return error
    return None


async def looked_up_by_alias() -> Exception | None:
    """Return the error of a request for another name of the model."""
    return await looked_up("other")


async def looked_up_by_adapter() -> Exception | None:
    """Return the error of a request for a LoRA adapter of the model."""
    return await looked_up(f"{MODEL}:adapter")


_REQUESTS = {
    "a stream of a carrier": carried,
    "one answer": inferred,
    "a model that is not listed": looked_up,
    "its alias": looked_up_by_alias,
    "its LoRA adapter": looked_up_by_adapter,
}


@every_case("name", list(_REQUESTS))
async def test_a_request_while_the_model_is_loaded_again(name: str) -> None:
    """Triton does not have the model meanwhile: clients try again after a 503, and give up after a 404."""
    ask = _REQUESTS[name]
    async with reviving():
        error = await ask()
    assert isinstance(error, UpstreamUnavailable)
    assert "has died, and the model is being loaded again." in error.message
    assert (503, 2.0) == (error.status, error.retry_after)

    assert isinstance(await ask(), ModelNotFound)


async def test_a_list_that_is_older_than_the_model(clock: Clock) -> None:
    """A process that has not seen the loaded model yet answers as while it is loaded."""
    async with reviving() as triton:
        triton.may_end.set()
        await clock.elapse(0.5)
        assert RELOADING == str(await carried())

        await clock.elapse(1.0)
        assert isinstance(await carried(), ModelNotFound)


async def test_a_model_that_cannot_be_loaded_again() -> None:
    """Triton does not have it then."""
    async with reviving(ServiceError("no")) as triton:
        triton.may_end.set()
        await turns()
        assert isinstance(await carried(), ModelNotFound)


async def test_a_look_at_the_lock_does_not_keep_the_model_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that looks whether the model is being loaded again does not make the process that loads it give up."""
    close = os.close
    first: list[bool] = []

    def load_meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "close", close)
        with reload_lock(MODEL) as locked:
            first.append(locked)
        close(descriptor)

    with reload_lock(MODEL) as locked:
        assert locked
        assert reloading_error(MODEL, MODEL) is not None
    monkeypatch.setattr(os, "close", load_meanwhile)
    assert reloading_error(MODEL, MODEL) is None
    assert [True] == first


def test_a_lock_of_another_user(tmp_path: Path) -> None:
    """What others put where the lock belongs, such as a pipe, neither locks the model nor blocks the event loop."""
    with reload_lock(MODEL) as locked:
        assert locked
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    answers: list[object] = []
    looking = threading.Thread(target=lambda: answers.append(reloading_error(MODEL, MODEL)))
    looking.start()
    looking.join(120)
    blocked = looking.is_alive()
    # A writer ends the wait.
    os.close(os.open(path, os.O_RDWR))
    looking.join()
    assert (False, [None]) == (blocked, answers)
    with pytest.raises(OSError, match="not a file of this user"), reload_lock(MODEL):
        pass
