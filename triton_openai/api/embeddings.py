"""
``POST /v1/embeddings``.

Source of the wire format: OpenAI's ``embedding`` object (openai-openapi 2.3.0). The official client asks for base64
unless told otherwise: little-endian float32.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.access import model_of
from triton_openai.api.batches import answers_of
from triton_openai.api.bodies import read_json
from triton_openai.api.documented import Accepted
from triton_openai.api.service import Service, new_id, service_of
from triton_openai.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import EmbeddingJob, EmbeddingResult
from triton_openai.models import ServedModel
from triton_openai.telemetry.observation import observe
from triton_openai.time_limits import TimeLimits

_encode = msgspec.json.Encoder().encode
_MAX_INPUTS = 2048


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The request; ``input`` is a text, texts, token ids, or lists of token ids."""

    model: str = ""
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    user: Accepted = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or as base64 text."""

    object: Literal["embedding"] = msgspec.field(name="object", default="embedding")
    index: int
    embedding: Sequence[float] | str


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of an embeddings request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[Embedding]
    model: str
    usage: EmbeddingsUsage | msgspec.UnsetType = msgspec.UNSET


async def handle(request: web.Request) -> web.StreamResponse:
    """Embed texts."""
    service = service_of(request)
    body = await read_json(request, EmbeddingsRequest, strict=service.settings.api.strict_parameters)
    model = await model_of(request, body)
    observation = observe(request, "embeddings", model=model)
    observation.parameters = body
    capabilities = model.adapter.capabilities
    if not capabilities.embed:
        raise InvalidRequest(f"The model '{body.model}' does not make embeddings.", param="model")
    inputs = _inputs(body.input)
    if not capabilities.token_inputs and not all(isinstance(item, str) for item in inputs):
        raise UnsupportedParameter(
            f"The model '{body.model}' takes text, not token ids. (With LangChain's OpenAIEmbeddings, set "
            "check_embedding_ctx_length=False.)",
            param="input",
        )
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=False)
    job = EmbeddingJob(id=new_id("embd"), inputs=inputs, dimensions=body.dimensions)
    observation.response_id = job.id
    try:
        async with service.admission.enter(model.owner, observation, patience=limits.patience):
            limits = limits.after(observation.queued_seconds)
            result = await embed(service, model, job, timeout=limits.total)
    except ContextLengthExceeded as error:
        error.param = error.param or "input"
        raise
    tokens = observation.input_tokens = await count_inputs(model, job, result)
    as_text = body.encoding_format == "base64"
    answer = EmbeddingList(
        data=[
            Embedding(index=index, embedding=_render(vector, as_text)) for index, vector in enumerate(result.vectors)
        ],
        model=body.model,
        usage=msgspec.UNSET if tokens is None else EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens),
    )
    return web.Response(body=_encode(answer), content_type="application/json")


def _inputs(value: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """Return the inputs one by one. Raises :class:`InvalidRequest` for empty, mixed, and too many ones."""
    if isinstance(value, str):
        items: list[Any] = [value]
    elif value and all(isinstance(item, int) for item in value):
        items = [value]
    else:
        items = list(value)
    if not items:
        raise InvalidRequest("'input' must not be empty.", param="input", code="invalid_value")
    if len(items) > _MAX_INPUTS:
        raise InvalidRequest(
            f"'input' takes at most {_MAX_INPUTS} items.", param="input", code="array_above_max_length"
        )
    if len({type(item) for item in items}) > 1:
        raise InvalidRequest(
            "'input' must hold either texts or lists of token ids.", param="input", code="invalid_type"
        )
    if any(not item for item in items):
        raise InvalidRequest("'input' must not hold an empty item.", param="input", code="invalid_value")
    return items


async def embed(service: Service, model: ServedModel, job: EmbeddingJob, *, timeout: float | None) -> EmbeddingResult:
    """Return the vectors of *job*. Raises :class:`ServiceError`, also after *timeout* seconds."""
    requests = model.adapter.encode_embeddings(job)
    return model.adapter.decode_embeddings(job, await answers_of(service, model, requests, timeout=timeout))


async def count_inputs(model: ServedModel, job: EmbeddingJob, result: EmbeddingResult) -> int | None:
    """Return the tokens of the inputs: from the backend, else from the tokenizer that is configured, else ``None``."""
    if result.prompt_tokens is not None:
        return result.prompt_tokens
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        return None
    return sum([await tokenizer.count_async(item, True) for item in job.inputs if isinstance(item, str)])


def _render(vector: bytes, as_text: bool) -> Sequence[float] | str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    if not math.isfinite(sum(values)):
        raise UpstreamError("The model sent an embedding with values that are no numbers.")
    return base64.b64encode(vector).decode("ascii") if as_text else values.tolist()
