"""
The service without sockets: operations are called as functions, in front of a model that runs in this process.

The tests of a face (what an API reads and renders) need no server and no Triton, so each takes milliseconds. The tests
of adapters and transports ask one face, in front of a real Triton.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from multidict import CIMultiDict, CIMultiDictProxy

from tests import described
from tests.conformance.fake_triton import config_of
from tests.proxy_fixture import Answer
from triton_openai import demo
from triton_openai.access.keys import NO_KEY
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import RunGroup
from triton_openai.api.bodies import decode_json
from triton_openai.api.messages.message_events import error_body
from triton_openai.api.service import Service
from triton_openai.app import SERVICE, create_app
from triton_openai.config.tree import ModelSettings, Settings, TritonSettings
from triton_openai.demo.standins.engine import EngineFailure, Options
from triton_openai.demo.standins.generation import Generation, Step
from triton_openai.demo.standins.scripted import ScriptedEngine
from triton_openai.demo.standins.text import IncrementalText, Vocabulary
from triton_openai.errors import ServiceError, UpstreamError
from triton_openai.generation import Delta
from triton_openai.operations import STREAMED, Call, Operation, PrepareRuns, Renderer, Streamed, Whole
from triton_openai.telemetry.request_record import RequestRecord, request_id
from triton_openai.triton.client import IndexEntry, Receiver, ServerInfo
from triton_openai.triton.config_reader import read_model_config
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonOutputs, ModelConfig

TOKENIZER = Path(demo.__file__).parent / "tokenizer"
#: The model's name. It takes all orders in prompts but those of time.
MODEL = "text_model"
_CONFIG = config_of(
    MODEL,
    (
        "PROMPT BYTES 1", "max_tokens? INT32 1", "min_tokens? INT32 1", "temperature? FP32 1", "top_p? FP32 1",
        "seed? INT64 1", "ignore_eos? BOOL 1", "skip_special_tokens? BOOL 1",
    ),
    ("TEXT BYTES 1", "finish_reason BYTES 1", "completion_tokens INT32 1", "prompt_tokens INT32 1"),
    backend="python",
)  # fmt: skip


class _Outputs(JsonOutputs):
    """A response of the model."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._named = values

    @property
    def model(self) -> str:
        return MODEL

    @property
    def size(self) -> int:
        return 0

    def value(self, name: str) -> Any:
        return self._named.get(name)

    def first(self, names: tuple[str, ...]) -> Sequence[Any]:
        return [self.value(name) for name in names]


class _Stream:
    """The answer to one request: a step of the model in each turn of the event loop."""

    def __init__(self, vocabulary: Vocabulary, request: InferRequest, receiver: Receiver) -> None:
        inputs = {tensor.name: tensor.values[0] for tensor in request.inputs}
        self._receiver = receiver
        self._ids = vocabulary.encode(inputs["PROMPT"], add_special_tokens=True)
        options = Options(
            seed=inputs.get("seed"),
            max_tokens=inputs["max_tokens"],
            min_tokens=inputs.get("min_tokens", 0),
            ignore_eos=inputs.get("ignore_eos", False),
        )
        answer = ScriptedEngine(vocabulary).answer(inputs["PROMPT"], self._ids, options)
        self._generation = Generation(answer, end_id=vocabulary.eos_id, max_tokens=options.max_tokens)
        self._text = IncrementalText(vocabulary, skip_special_tokens=inputs.get("skip_special_tokens", True))
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        finish = None
        while finish is None:
            await asyncio.sleep(0)
            try:
                step = self._generation.step()
            except EngineFailure as failure:
                self._receiver.end(UpstreamError(f"The model failed: {failure}"))
                return
            finish = step.finish
            self._receiver.receive((self._response(step),))
        self._receiver.end(None)

    def _response(self, step: Step) -> InferResponse:
        text = "".join(map(self._text.feed, step.ids))
        counts = {"completion_tokens": len(step.ids), "prompt_tokens": len(self._ids)}
        return _Outputs({"TEXT": text, "finish_reason": step.finish or "", **counts})

    def pause(self) -> None:
        """Do nothing: the output reads at once."""

    def resume(self) -> None:
        """Do nothing."""

    def close(self, *, silent: bool = False) -> None:
        self._task.cancel()


class ModelInProcess:
    """A Triton with one model, in this process. *asked* are the requests that it got."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.asked: list[InferRequest] = []

    async def server_info(self) -> ServerInfo:
        return ServerInfo(name="triton", version="2.51.0")

    async def repository_index(self) -> Sequence[IndexEntry]:
        return (IndexEntry(name=MODEL, version="1", state="READY"),)

    async def model_config(self, model: str) -> ModelConfig:
        return read_model_config(_CONFIG, model)

    async def load_model(self, model: str) -> None:
        raise NotImplementedError

    async def unload_model(self, model: str, *, dependents: bool = False) -> None:
        raise NotImplementedError

    async def infer(self, request: InferRequest) -> InferResponse:
        raise NotImplementedError

    def stream(self, request: InferRequest, receiver: Receiver) -> _Stream:
        self.asked.append(request)
        return _Stream(self._vocabulary, request, receiver)

    async def close(self) -> None:
        """Do nothing."""


class _Output:
    """Collects the stream of one call."""

    def __init__(self) -> None:
        self.body = bytearray()

    async def stream(self, runs: Sequence[Run], renderer: Renderer, *, timeout: float | None) -> Streamed:
        pieces: list[bytes] = []

        def push(choice: int, deltas: Sequence[Delta]) -> None:
            pieces.extend([renderer.piece(choice, delta) for delta in deltas])

        error = None
        try:
            with closing(RunGroup(runs, push)) as group:
                await group.start()
                while group.unfinished:
                    pieces.extend([renderer.last(choice) for choice in await group.wait()])
        except ServiceError as failure:
            if not pieces:
                raise
            error = failure
        self.body += b"".join((*renderer.openings(), *pieces))
        self.body += await renderer.ended(error)
        return STREAMED

    async def stream_later(self, prepare: PrepareRuns, renderer: Renderer, *, timeout: float | None) -> Streamed:
        self.body += renderer.opening()
        try:
            runs = await prepare()
        except ServiceError as failure:
            self.body += await renderer.ended(failure)
            return STREAMED
        self.body += renderer.opening()
        return await self.stream(runs, renderer, timeout=timeout)

    async def send_parts(
        self, parts: AsyncGenerator[bytes, None], *, timeout: float | None, media_type: str | None = None
    ) -> Streamed:
        async with aclosing(parts):
            async for part in parts:
                self.body += part
        return STREAMED

    async def send_events(
        self, following: Callable[[float], Awaitable[bytes | None]], stop: Callable[[ServiceError], None]
    ) -> Streamed:
        while (events := await following(60.0)) is not None:
            self.body += events
        return STREAMED


class Faces:
    """The running service. Every answer is held against the service's description of itself."""

    def __init__(self, service: Service, triton: ModelInProcess) -> None:
        self.service = service
        self.triton = triton

    async def post(self, path: str, body: Mapping[str, Any] | bytes, **headers: str) -> Answer:
        """Call the operation of *path*, and return its answer as a client gets it."""
        (operation,) = [one for one in self.service.operations if f"POST {path}" in one.routes]
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        record = RequestRecord(request_id=request_id({}), method="POST", path=path)
        named = CIMultiDictProxy(CIMultiDict(headers))
        work = partial(self._answer, operation, content, record, named)
        answer = await self.service.executor.run(record, work, failed=partial(self._failed, record, named))
        described.check("POST", path, answer.status, answer.headers, answer.body)
        return answer

    async def _answer(
        self, operation: Operation, content: bytes, record: RequestRecord, headers: CIMultiDictProxy[str]
    ) -> Answer:
        output = _Output()
        body = await decode_json(content, operation, record, self.service.settings)
        reply = await operation.function(self.service, Call(operation, body, NO_KEY, record, output, headers=headers))
        if reply is STREAMED:
            record.status = 200
            return Answer(200, _headers(record, "text/event-stream"), bytes(output.body))
        assert isinstance(reply, Whole), "a face returns its answer or streams it"
        record.status = reply.status
        return Answer(reply.status, {**_headers(record, reply.media_type), **reply.headers}, reply.body)

    @staticmethod
    async def _failed(record: RequestRecord, headers: CIMultiDictProxy[str], error: ServiceError) -> Answer:
        status, body = error_body(record.path, headers, record, error) or (error.status, error.envelope())
        record.status = status
        return Answer(status, {**_headers(record, "application/json"), **error.headers()}, body)


def _headers(record: RequestRecord, media_type: str) -> dict[str, str]:
    """Return what every answer over HTTP has."""
    own = {"Content-Type": media_type, "x-request-id": record.request_id, "openai-processing-ms": "0"}
    return {**own, **record.headers}


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[Faces]:
    """Run the service without a port; *settings* are those of the model."""
    triton = ModelInProcess(Vocabulary(TOKENIZER))
    model = {MODEL: ModelSettings(tokenizer=str(TOKENIZER), **settings)}
    app = create_app(Settings(triton=TritonSettings(url=("http://127.0.0.1:1",)), models=model), client=triton)
    app.freeze()
    await app.startup()
    try:
        service = app[SERVICE]
        await asyncio.wait_for(service.fleet.first.wait(), 120)
        yield Faces(service, triton)
    finally:
        await app.shutdown()
        await app.cleanup()
