"""The context of a request to a model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from triton_openai.adapters import Adapter, Capabilities
from triton_openai.answer.limits import TimeLimits
from triton_openai.api import embeddings
from triton_openai.api.classify import classify
from triton_openai.api.service import RequestContext
from triton_openai.config.tree import ModelSettings, ServerSettings
from triton_openai.errors import UnsupportedParameter
from triton_openai.generation import ClassificationResult, EmbeddingJob, EmbeddingResult, ScoreResult
from triton_openai.models.served import ServedModel
from triton_openai.serving.admission import Admission
from triton_openai.telemetry.observation import Observation
from triton_openai.triton.tensors import ModelConfig


class Own(Adapter):
    """The model's own adapter."""

    name = "own"
    capabilities = Capabilities(embed=True, score=True, classify=True)

    def encode(self, job: Any) -> Any:
        return [self.request("1", [], [])]

    def decode(self, job: Any, responses: Any) -> Any:
        return self.name

    encode_embeddings = encode_scores = encode_classes = encode
    decode_embeddings = decode_classes = decode

    def decode_scores(self, job: Any, responses: Any) -> ScoreResult:
        return ScoreResult(scores=[1.0])


class Engine(Own):
    """An engine that takes nothing."""

    name = "engine"

    def encode(self, job: Any) -> Any:
        raise UnsupportedParameter("The engine does not take this.", param="input")

    encode_embeddings = encode_scores = encode_classes = encode


class Client:
    """Answers everything."""

    async def infer(self, request: Any) -> Any:
        return None


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
    admission = Admission(ServerSettings(), lambda: 0.0)
    settings: Any = SimpleNamespace(server=ServerSettings())
    service: Any = SimpleNamespace(admission=admission, client=Client(), background=None, settings=settings)
    body: Any = SimpleNamespace(model="m", truncate_prompt_tokens=None, use_activation=None)
    observation = Observation(request_id="r", method="POST", path="/")
    limits = TimeLimits(first_token=1, idle=1, total=None)
    return RequestContext(SimpleNamespace(), service, body, model, observation, limits)  # type: ignore[arg-type]


async def embedded(context: RequestContext[Any]) -> EmbeddingResult:
    """Ask for embeddings as the handler does."""
    job = EmbeddingJob(id="e", inputs=("a",))
    return await context.admitted(lambda context: embeddings.embed(context, job), param="input")


async def classified(context: RequestContext[Any]) -> ClassificationResult:
    """Ask for classes as the handler does."""
    _, result = await context.admitted(
        lambda context: classify(context.sender, context.model, "c", ("a",), timeout=1),
        param="input",
    )
    return result


async def scored(context: RequestContext[Any]) -> ScoreResult:
    """Ask for scores as the handlers do."""
    return await embeddings.score(context, "s", [("a", "b")], param="documents")


async def test_the_model_itself_takes_what_its_engine_does_not() -> None:
    """Requests for vectors, scores and classes too; where nothing else is there, the engine's refusal stands."""
    for ask, expected in ((embedded, "own"), (classified, "own"), (scored, ScoreResult(scores=[1.0]))):
        context = context_of(Own)
        assert expected == await ask(context)
        assert not context.service.admission.running
        for refusing in (Engine, None):
            with pytest.raises(UnsupportedParameter, match="The engine does not take this"):
                await ask(context_of(refusing))
