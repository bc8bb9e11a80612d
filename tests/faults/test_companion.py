"""The companion model over a real Triton: its process or its engine dies, its clients go, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.proxy_fixture import TRANSPORTS
from tests.standins.repository import build_repository
from tests.triton_fixture import TestTriton, embedded, shared
from triton_openai.adapters.companion import Companion
from triton_openai.demo.record import Record
from triton_openai.errors import ModelCrashed, UpstreamUnavailable
from triton_openai.generation import Generation, Sampling, Vocabulary
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton import carrier
from triton_openai.triton.endpoint import Endpoint

STREAMS = 64
ENDLESS = '<<steer {"text": "w ", "repeat": 4000, "delay_ms": 20}>>'
SHORT = '<<steer {"text": "one two"}>>'
DEADLY = '<<steer {"text": "one two", "fail_at": 1, "error": "the engine dies"}>>'


class Reader:
    """Receives one stream, and waits for its first token and for its end."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.ended: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()

    def receive(self, responses: Sequence[Any]) -> None:
        self.begun.set()

    def end(self, error: Exception | None) -> None:
        self.begun.set()
        self.ended.set_result(error)


class Asking:
    """The companion model behind one transport."""

    def __init__(self, url: str, tokenizer: Tokenizer, adapter: Companion) -> None:
        self.endpoint = Endpoint([url])
        self._tokenizer = tokenizer
        self._adapter = adapter

    def ask(self, prompt: str, name: str = "x") -> tuple[Reader, Any]:
        """Begin an answer to *prompt*; return what receives it, and the stream."""
        generation = Generation(
            id=name,
            prompt=prompt,
            prompt_ids=tuple(self._tokenizer.encode(prompt)),
            sampling=Sampling(max_tokens=4000),
            vocabulary=Vocabulary(size=self._tokenizer.vocab_size),
        )
        (request,) = self._adapter.encode(generation)
        reader = Reader()
        return reader, self.endpoint.stream(request, reader)

    async def works(self) -> bool:
        """Return whether an answer comes soon. A client may try again after every error, and after a silence."""
        reader, stream = self.ask(SHORT)
        try:
            error = await asyncio.wait_for(reader.ended, 5)
        except TimeoutError:
            return False
        finally:
            stream.close()
        assert error is None or isinstance(error, UpstreamUnavailable)
        return error is None

    async def works_again(self) -> None:
        """Wait until an answer comes."""
        async with asyncio.timeout(120):
            while not await self.works():
                pass


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestTriton]:
    """A Triton with the companion model alone, which loads models when it is asked to."""
    folder = tmp_path_factory.mktemp("companion")
    record = folder / "record.jsonl"
    repository = build_repository(folder / "repository", models=["companion"], record=record)
    server = embedded(repository, model_control_mode="explicit", load_models=("*",))
    with shared(server):
        yield TestTriton(server, repository, Record(record))


@pytest.fixture(params=TRANSPORTS)
async def asking(request: pytest.FixtureRequest, own: TestTriton) -> AsyncIterator[Asking]:
    """The model over each transport in turn."""
    endpoint = Endpoint([own.http_url])
    adapter = Companion(await endpoint.model_config("companion"), {})
    await endpoint.close()
    url = own.http_url if request.param == "http" else own.grpc_url
    running = Asking(url, Tokenizer.load(str(own.tokenizer)), adapter)
    yield running
    await running.endpoint.close()


def processes_of(repository: Path) -> list[int]:
    """Return the processes in which Triton runs the models of *repository*."""
    command = ["pgrep", "-f", f"python_backend_stub.*{repository}"]
    listed = subprocess.run(command, check=False, capture_output=True, text=True)
    return [int(line) for line in listed.stdout.split()]


async def test_a_process_that_is_killed(asking: Asking, own: TestTriton, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its streams ends with an error that says so, and the model is back by itself."""
    monkeypatch.setattr(carrier, "SILENCE", 3.0)
    asked = [asking.ask(ENDLESS, f"killed-{number}") for number in range(STREAMS)]
    for reader, _ in asked:
        await asyncio.wait_for(reader.begun.wait(), 120)
    for process in processes_of(own.repository.path):
        os.kill(process, signal.SIGKILL)

    errors = [await asyncio.wait_for(reader.ended, 120) for reader, _ in asked]
    assert {"The model's process has not answered for 3 seconds."} == {str(error) for error in errors}
    assert {ModelCrashed} == {type(error) for error in errors}
    await asking.works_again()


async def test_an_engine_that_dies(asking: Asking) -> None:
    """Every stream ends with an error that says so, and the engine starts again within the model's process."""
    other, _ = asking.ask(ENDLESS, "beside")
    await asyncio.wait_for(other.begun.wait(), 120)
    reader, _ = asking.ask(DEADLY, "deadly")

    errors = [await asyncio.wait_for(each.ended, 120) for each in (reader, other)]
    assert {"The model's engine has died, and starts again."} == {str(error) for error in errors}
    await asking.works_again()


async def test_a_client_that_goes(asking: Asking, own: TestTriton) -> None:
    """When the connection of a carrier is lost, the engine stops the work for all of its streams."""
    names = [f"goes-{uuid.uuid4().hex}" for _ in range(3)]
    asked = [asking.ask(ENDLESS, name) for name in names]
    for reader, _ in asked:
        await asyncio.wait_for(reader.begun.wait(), 120)
    await asking.endpoint.close()

    for name in names:
        assert await asyncio.to_thread(own.record.wait_for, bool, 120.0, id=name, event="cancelled")
