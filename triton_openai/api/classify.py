"""
``POST /v1/classify``: the class of each text, and the probabilities of all classes.

Source of the wire format: ``/classify`` of vLLM's server, which Dynamo's frontend also has. Logits become probabilities
as in vLLM's server and in the pipelines of transformers: ``problem_type`` decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from triton_openai import offload
from triton_openai.answer.job_run import Activation, activation_of, apply_activation, labels_of
from triton_openai.api.bodies import encode_each, json_reply_of, new_id, now
from triton_openai.api.embeddings import InputRequest, ListOf, input_usage, inputs_of
from triton_openai.api.parameters import refusing, truncation
from triton_openai.api.service import Service, begin
from triton_openai.errors import UnsupportedParameter
from triton_openai.jobs import ClassificationJob
from triton_openai.operations import Call, Reply


# Names of vLLM's server that would change the answer.
@refusing(messages=None, activation=None, softmax=None, padding="do_not_pad")
class ClassifyRequest(InputRequest, kw_only=True):
    """The request; ``use_activation`` false returns logits instead of probabilities."""

    use_activation: bool | None = None


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """The classes of one input; ``label`` is that of the most probable one, null if it is not known."""

    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class ClassificationList(ListOf[Classification], frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""


async def create(service: Service, call: Call[ClassifyRequest]) -> Reply:
    """Classify texts."""
    context = await begin(service, call)
    body = context.body
    model = context.model
    activate = body.use_activation is not False
    capabilities = model.adapter.capabilities
    if not activate and not (capabilities.logits or capabilities.activation):
        raise UnsupportedParameter(
            "This model gives probabilities, and 'use_activation' cannot turn them into logits.", param="use_activation"
        )
    job = ClassificationJob(id=new_id("classify"), inputs=inputs_of(body), activate=activate)
    result = await context.result_of(job, cut=truncation(body, side="right"))
    tokenizer = (await model.prompter()).tokenizer
    activation = activation_of(model, tokenizer)
    if not activate:
        activation = "none"
    labels = labels_of(result, tokenizer)

    def answer() -> ClassificationList:
        data = encode_each(_classes(index, values, activation, labels) for index, values in enumerate(result.values))
        usage = input_usage(result.prompt_tokens)
        return ClassificationList(id=job.id, created=now(), model=body.model, data=data, usage=usage)

    return await json_reply_of(answer, cost=offload.CHARACTER * sum(map(len, result.values)))


def _classes(index: int, values: Sequence[float], activation: Activation, labels: Mapping[int, str]) -> Classification:
    probs = apply_activation(values, activation)
    label = labels.get(max(range(len(probs)), key=probs.__getitem__))
    return Classification(index=index, label=label, probs=probs, num_classes=len(probs))
