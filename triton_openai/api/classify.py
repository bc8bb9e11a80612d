"""
``POST /v1/classify``: the class of each text, and the probabilities of all classes.

Source of the wire format: ``/classify`` of vLLM's server, which Dynamo's frontend also has. Logits become probabilities
as in vLLM's server and in the pipelines of transformers: ``problem_type`` decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from triton_openai import offload
from triton_openai.answer.run import Sender
from triton_openai.api import embeddings
from triton_openai.api.embeddings import InputRequest, InputUsage
from triton_openai.api.parameters import refusing, truncation
from triton_openai.api.service import begin, new_id, now
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import ClassificationJob, ClassificationResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation
from triton_openai.serving.connections import WholeResponse

_encode = msgspec.json.Encoder().encode

Activation = Literal["softmax", "sigmoid", "none"]


# Names of vLLM's server that would change the answer.
@refusing(messages=None, activation=None, softmax=None, padding="do_not_pad")
class ClassifyRequest(InputRequest, kw_only=True):
    """The request; ``use_activation`` false asks for logits in the place of probabilities."""

    use_activation: bool | None = None


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of one input; ``label`` is that of the most probable one, null if it is not known."""

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class ClassificationList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    id: str
    object: Literal["list"] = msgspec.field(name="object", default="list")
    created: int
    model: str
    data: Sequence[Classification]
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET


async def handle(request: web.Request) -> web.StreamResponse:
    """Classify texts."""
    context = await begin(request, ClassifyRequest, "classify")
    body, model, observation = context.body, context.model, context.observation
    if not model.adapter.capabilities.classify:
        raise InvalidRequest(f"The model '{body.model}' does not classify texts.", param="model")
    if body.use_activation is False and not model.adapter.capabilities.logits:
        raise UnsupportedParameter(
            "This model gives probabilities, and 'use_activation' cannot turn them into logits.", param="use_activation"
        )
    inputs, cut = embeddings.inputs_of(body), truncation(body, side="right")
    job_id = observation.response_id = new_id("classify")
    job, result = await context.admitted(
        lambda context: classify(context.sender, context.model, job_id, inputs, cut, timeout=context.limits.total),
        param="input",
    )
    tokens = observation.input_tokens = await embeddings.count_inputs(model, job.inputs, None)
    tokenizer = (await model.prompter()).tokenizer
    activation = "none" if body.use_activation is False else activation_of(model, tokenizer)
    labels = result.labels or (tokenizer.labels if tokenizer is not None else {})

    def answer() -> bytes:
        data = [_rendered(index, values, activation, labels) for index, values in enumerate(result.values)]
        usage = embeddings.input_usage(tokens)
        return _encode(ClassificationList(id=job_id, created=now(), model=body.model, data=data, usage=usage))

    content = await offload.run(answer, cost=offload.NUMBER * sum(map(len, result.values)))
    return WholeResponse(body=content, content_type="application/json")


async def classify(
    sender: Sender,
    model: ServedModel,
    job_id: str,
    inputs: Sequence[str] | Sequence[Sequence[int]],
    cut: Truncation | None = None,
    *,
    timeout: float | None,
) -> tuple[ClassificationJob, ClassificationResult]:
    """Return the job for *inputs*, truncated as *cut* says, and its result. Raises :class:`ServiceError`."""
    taken = await embeddings.as_taken(model, inputs, cut)
    await embeddings.check_sizes(model, taken)
    tokenizer, adapter, size = (await model.prompter()).tokenizer, model.adapter, sum(map(len, taken))
    pad_id = None if tokenizer is None else tokenizer.special_id("pad_token")
    job = ClassificationJob(id=job_id, inputs=taken, pad_id=pad_id)
    requests = await offload.run(lambda: adapter.encode_classes(job), cost=offload.JSON * size)
    answers = await embeddings.answers_of(sender, model, requests, timeout=timeout)
    result = await offload.run(lambda: adapter.decode_classes(job, answers), cost=offload.VECTOR * len(taken))
    return job, result


def activation_of(model: ServedModel, tokenizer: Tokenizer | None) -> Activation:
    """Return how the numbers of *model* become probabilities."""
    kind = model.settings.problem_type or (tokenizer.problem_type if tokenizer is not None else None)
    if not model.adapter.capabilities.logits or kind == "regression":
        return "none"
    return "sigmoid" if kind == "multi_label_classification" else "softmax"


def activated(values: Sequence[float], activation: Activation) -> Sequence[float]:
    """Return the probabilities for logits; the softmax of one class is its sigmoid. Raises :class:`UpstreamError`."""
    highest = max(values)
    if activation == "sigmoid" or (activation == "softmax" and len(values) == 1):
        values = [embeddings.sigmoid(value) for value in values]
    elif activation == "softmax":
        powers = [math.exp(value - highest) for value in values]
        total = sum(powers)
        values = [power / total for power in powers]
    if not all(map(math.isfinite, values)):
        raise UpstreamError("The model sent a value that is not a number.")
    return values


def _rendered(index: int, values: Sequence[float], activation: Activation, labels: Mapping[int, str]) -> Any:
    """Return one input's classes as JSON: all at once would keep the interpreter lock for long."""
    probs = activated(values, activation)
    label = labels.get(max(range(len(probs)), key=probs.__getitem__))
    return msgspec.Raw(_encode(Classification(index=index, label=label, probs=probs, num_classes=len(probs))))
