"""The context of a request to a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triton_openai.adapters import Adapter
from triton_openai.answer.limits import TimeLimits
from triton_openai.api.service import RequestContext
from triton_openai.config.tree import ModelSettings, ServerSettings, TritonSettings
from triton_openai.errors import UnsupportedParameter
from triton_openai.jobs import (
    ClassificationJob,
    ClassificationResult,
    EmbeddingJob,
    EmbeddingResult,
    JobType,
    Result,
    ScoreJob,
    ScoreResult,
)
from triton_openai.models.served import ServedModel
from triton_openai.serving.admission import Admission
from triton_openai.telemetry.process import LoopLag
from triton_openai.telemetry.request_record import RequestRecord
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.tensors import JsonResponse, ModelConfig

RESULTS: dict[JobType, Result] = {
    EmbeddingJob: EmbeddingResult(vectors=[b""], prompt_tokens=1),
    ClassificationJob: ClassificationResult(values=[[1.0]], prompt_tokens=1),
    ScoreJob: ScoreResult(scores=[1.0], prompt_tokens=1),
}


class Own(Adapter):
    """The model's own adapter."""

    name = "own"
    jobs = tuple(RESULTS)

    def encode(self, job: Any, /) -> Any:
        return [self.request("1", [], [])]

    def decode(self, job: Any, responses: Any, /) -> Any:
        return RESULTS[type(job)]


class Engine(Own):
    """An engine that takes nothing."""

    name = "engine"

    def encode(self, job: Any, /) -> Any:
        raise UnsupportedParameter("The engine does not take this.", param="input")


class Client:
    """Answers everything."""

    async def infer(self, request: Any) -> Any:
        return JsonResponse({})


def context_of(text_level: type[Adapter] | None) -> RequestContext[Any]:
    """Return a request to a model that an engine answers, with the model's own adapter behind it."""
    adapters = [kind(ModelConfig(name="m"), {}) for kind in (Engine, text_level or Engine)]
    prompter: Any = SimpleNamespace(resolved=SimpleNamespace(tokenizer=None))
    model = ServedModel(
        name="m",
        triton_model="m",
        adapter=adapters[0],
        reason="",
        settings=ModelSettings(),
        lazy_prompter=prompter,
        text_level=None if text_level is None else adapters[1],
    )
    admission = Admission(ServerSettings(), LoopLag(lambda _: None))
    settings: Any = SimpleNamespace(server=ServerSettings())
    client: Any = Client()
    fleet = Fleet(TritonSettings(), connect=lambda _: client)
    service: Any = SimpleNamespace(admission=admission, fleet=fleet, background=None, settings=settings)
    body: Any = SimpleNamespace(model="m", truncate_prompt_tokens=None, use_activation=None)
    record = RequestRecord(request_id="r", method="POST", path="/")
    limits = TimeLimits(first_token=1, idle=1, total=None)
    return RequestContext(SimpleNamespace(), service, body, model, record, limits)  # type: ignore[arg-type]


async def test_the_model_itself_takes_what_its_engine_does_not() -> None:
    """Requests for vectors, scores and classes too; where nothing else is there, the engine's refusal stands."""
    for kind, expected in RESULTS.items():
        job = kind(id="1", **kind.least)

        async def ask(context: RequestContext[Any], job: Any = job) -> Result:
            return await context.result_of(job)

        context = context_of(Own)
        assert expected == await ask(context)
        assert not context.service.admission.running
        for refusing in (Engine, None):
            with pytest.raises(UnsupportedParameter, match="The engine does not take this"):
                await ask(context_of(refusing))
