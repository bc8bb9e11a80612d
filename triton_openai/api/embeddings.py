"""
``POST /v1/embeddings``.

Source of the wire format: OpenAI's ``embedding`` object (openai-openapi 2.3.0). The official client asks for base64
unless told otherwise: little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.bodies import ModelRequest
from triton_openai.api.context import begin
from triton_openai.api.parameters import ABSENT, Accepted, check_size, neutral_values, truncation, unused
from triton_openai.api.prompts import check_ids, separated
from triton_openai.api.service import Service, new_id
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter, UpstreamError, UpstreamTimeout
from triton_openai.generation import EmbeddingJob, EmbeddingResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text
from triton_openai.telemetry.observation import UPSTREAM
from triton_openai.triton.client import SingleAnswer
from triton_openai.triton.status import no_answer
from triton_openai.triton.tensors import InferRequest, InferResponse

_encode = msgspec.json.Encoder().encode
# Requests of one call that are sent to Triton at the same time: enough to fill its batcher.
_PARALLEL_REQUESTS = 16
# Requests and answers of more bytes, or more vectors, are made and read in a thread.
_INLINE_BYTES = 64 * 1024
_INLINE_VECTORS = 16
_LANGCHAIN = " (With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.)"


class EmbeddingsRequest(ModelRequest, kw_only=True):
    """The request; ``input`` is a text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    user: Accepted = ABSENT
    # Names of vLLM's server, about how it works and not about what it answers.
    cache_salt: Accepted = ABSENT
    priority: Accepted = ABSENT
    request_id: Accepted = ABSENT
    # Names of vLLM's server that would change the vectors, and are not honoured.
    add_special_tokens: Annotated[Any, unused(True)] = None
    embed_dtype: Annotated[Any, unused("float32")] = None
    endianness: Annotated[Any, unused("native", "little")] = None
    mm_processor_kwargs: Annotated[Any, unused({})] = None
    # What models of embeddings do, and vLLM for them.
    normalize: Annotated[Any, unused(True)] = None
    use_activation: Annotated[Any, unused(True)] = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or as base64 text."""

    object: Literal["embedding"] = msgspec.field(name="object", default="embedding")
    index: int
    embedding: Sequence[float] | str


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request for vectors or scores: what was sent to the model."""

    prompt_tokens: int
    total_tokens: int


def usage_of(tokens: int | None) -> InputUsage | msgspec.UnsetType:
    """Return the usage, to be left out where nobody counted."""
    return msgspec.UNSET if tokens is None else InputUsage(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[Embedding]
    model: str
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET


async def handle(request: web.Request) -> web.StreamResponse:
    """Embed texts."""
    context = await begin(request, EmbeddingsRequest, "embeddings", refused=neutral_values(EmbeddingsRequest))
    body, model, observation = context.body, context.model, context.observation
    if not model.adapter.capabilities.embed:
        raise InvalidRequest(f"The model '{body.model}' does not make embeddings.", param="model")
    inputs = await _as_taken(model, _inputs(body.input), truncation(body, side="right"))
    job = EmbeddingJob(id=new_id("embd"), inputs=inputs, dimensions=body.dimensions)
    observation.response_id = job.id
    async with context.admitted(param="input"):
        result = await embed(context.service, model, job, timeout=context.limits.total)
    tokens = observation.input_tokens = await count_inputs(model, job, result)
    as_text = body.encoding_format == "base64"

    def answer() -> bytes:
        data = [_rendered(index, vector, as_text) for index, vector in enumerate(result.vectors)]
        return _encode(EmbeddingList(data=data, model=body.model, usage=usage_of(tokens)))

    content = await offload.run(answer, size=sum(map(len, result.vectors)), threshold=_INLINE_BYTES)
    return web.Response(body=content, content_type="application/json")


def _inputs(value: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """Return the inputs one by one. Raises :class:`InvalidRequest` for empty and for mixed ones."""
    items = separated(value, "input")
    if not all(items):
        raise InvalidValue("'input' must not hold an empty item.", "input")
    if len(set(map(type, items))) > 1:
        raise InvalidRequest(
            "'input' must hold either texts or lists of token ids.", param="input", code="invalid_type"
        )
    return items


async def _as_taken(
    model: ServedModel, inputs: Sequence[str] | Sequence[Sequence[int]], cut: Truncation | None
) -> Sequence[str] | Sequence[Sequence[int]]:
    """
    Return *inputs* cut to what *cut* leaves of them, and as text for a model that takes no token ids.

    Raises :class:`InvalidRequest`, and :class:`UnsupportedParameter` where the tokenizer that it needs is not known.
    """
    takes_ids = model.adapter.capabilities.token_inputs
    decodes = not takes_ids and not isinstance(inputs[0], str)
    if cut is None and not decodes:
        return inputs
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        raise UnsupportedParameter(
            f"The model '{model.name}' takes text, not token ids, and its tokenizer is not configured (--tokenizer)."
            f"{_LANGCHAIN}"
            if decodes
            else "'truncate_prompt_tokens' needs the model's tokenizer, which is not configured (--tokenizer).",
            param="input" if decodes else "truncate_prompt_tokens",
        )
    longest = model.settings.max_model_len or tokenizer.model_max_length
    cut = cut if cut is None else cut.within(longest).checked(longest)
    taken: list[Any] = []
    for item in inputs:
        if isinstance(item, str):
            assert cut is not None
            if takes_ids:
                taken.append(await cut_encoded(tokenizer, item, cut))
            else:
                taken.append(await cut_text(tokenizer, item, cut, special=True))
        else:
            ids = item if cut is None else cut_ids(item, cut)
            taken.append(await _decoded(tokenizer, ids) if decodes else ids)
        # Thousands of short inputs are as much work as a long one.
        await asyncio.sleep(0)
    return taken


async def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return the text of *ids* without special tokens, which the backend adds. Raises :class:`InvalidRequest`."""
    check_ids(ids, tokenizer, "input", _LANGCHAIN)
    text = await tokenizer.decode_async(ids)
    if not text:
        raise InvalidValue("'input' must not hold an empty item.", "input")
    return text


async def answers_of(
    service: Service, model: ServedModel, requests: Sequence[InferRequest], *, timeout: float | None
) -> Sequence[InferResponse]:
    """
    Return the first answer to each of *requests*, in their order.

    Raises :class:`ServiceError` for the first that fails, and :class:`UpstreamTimeout` when all together take more than
    *timeout* seconds.
    """
    slots = asyncio.Semaphore(_PARALLEL_REQUESTS)

    async def answer(request: InferRequest) -> InferResponse:
        async with slots:
            with UPSTREAM.get().call(request) as sent:
                client = service.client
                stream = await client.stream(sent) if sent.stream else SingleAnswer(client, sent)
                try:
                    responses = await stream.read()
                finally:
                    stream.close()
        if not responses:
            raise no_answer(model.name)
        return responses[0]

    tasks: list[asyncio.Task[InferResponse]] = []
    try:
        async with asyncio.timeout(timeout):
            for request in requests:
                tasks.append(asyncio.create_task(answer(request)))
                # Thousands of them take long to send: not in one turn of the event loop.
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise UpstreamTimeout(f"The answer was not complete after {timeout or 0:g} seconds.") from error
    finally:
        for task in tasks:
            task.cancel()


async def embed(service: Service, model: ServedModel, job: EmbeddingJob, *, timeout: float | None) -> EmbeddingResult:
    """Return the vectors of *job*. Raises :class:`ServiceError`, also after *timeout* seconds."""
    limit = model.settings.max_model_len
    tokenizer = None if limit is None else (await model.prompter()).tokenizer
    if limit is not None and tokenizer is not None:
        # The tokenizer's own limit does not count here: models that make embeddings often cut what is longer.
        for item in job.inputs:
            if isinstance(item, str):
                check_size(item, tokenizer, limit)
    adapter, size = model.adapter, sum(map(len, job.inputs))
    requests = await offload.run(lambda: adapter.encode_embeddings(job), size=size, threshold=_INLINE_BYTES)
    answers = await answers_of(service, model, requests, timeout=timeout)
    return await offload.run(
        lambda: adapter.decode_embeddings(job, answers), size=len(job.inputs), threshold=_INLINE_VECTORS
    )


async def count_inputs(model: ServedModel, job: EmbeddingJob, result: EmbeddingResult) -> int | None:
    """Return the tokens of the inputs: from the backend, else from the tokenizer that is configured, else ``None``."""
    if result.prompt_tokens is not None:
        return result.prompt_tokens
    if not any(isinstance(item, str) for item in job.inputs):
        return sum(map(len, job.inputs))
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        return None
    ids = sum(len(item) for item in job.inputs if not isinstance(item, str))
    return ids + await tokenizer.count_async([item for item in job.inputs if isinstance(item, str)], True)


def _rendered(index: int, vector: bytes, as_text: bool) -> Any:
    """Return an embedding as JSON: by itself, as millions of numbers at once would hold the interpreter lock."""
    return msgspec.Raw(_encode(Embedding(index=index, embedding=_render(vector, as_text))))


def _render(vector: bytes, as_text: bool) -> Sequence[float] | str:
    values = array("f", vector)
    if sys.byteorder == "big":
        values.byteswap()
    if not math.isfinite(sum(values)):
        raise UpstreamError("The model sent an embedding with values that are no numbers.")
    return base64.b64encode(vector).decode("ascii") if as_text else values.tolist()
