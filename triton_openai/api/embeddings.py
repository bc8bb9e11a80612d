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
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.batches import answers_of
from triton_openai.api.bodies import ModelRequest
from triton_openai.api.context import begin
from triton_openai.api.fields import ABSENT, Accepted
from triton_openai.api.parameters import check_size, truncation
from triton_openai.api.prompts import outside
from triton_openai.api.service import Service, new_id
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import EmbeddingJob, EmbeddingResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text

_encode = msgspec.json.Encoder().encode
_MAX_INPUTS = 2048
# Requests and answers of more bytes, or more vectors, are made and read in a thread.
_INLINE_BYTES = 64 * 1024
_INLINE_VECTORS = 16


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
    # Names of vLLM's server that would change the vectors, and are not honoured: refused unless neutral (see REFUSED).
    add_special_tokens: Any = None
    embed_dtype: Any = None
    endianness: Any = None
    mm_processor_kwargs: Any = None
    normalize: Any = None
    use_activation: Any = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    # What models of embeddings do, and vLLM for them.
    "normalize": (True,),
    "use_activation": (True,),
}


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
    context = await begin(request, EmbeddingsRequest, "embeddings", refused=REFUSED)
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
    usage = msgspec.UNSET if tokens is None else EmbeddingsUsage(prompt_tokens=tokens, total_tokens=tokens)

    def answer() -> bytes:
        data = [_rendered(index, vector, as_text) for index, vector in enumerate(result.vectors)]
        return _encode(EmbeddingList(data=data, model=body.model, usage=usage))

    content = await offload.run(answer, size=sum(map(len, result.vectors)), threshold=_INLINE_BYTES)
    return web.Response(body=content, content_type="application/json")


def _inputs(value: str | list[str | int | list[int]]) -> list[str] | list[list[int]]:
    """Return the inputs one by one. Raises :class:`InvalidRequest` for empty, mixed, and too many ones."""
    if isinstance(value, str):
        items: list[Any] = [value]
    elif set(map(type, value)) == {int}:
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
            " (With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.)"
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
    unknown = outside(ids, tokenizer.vocab_size)
    if unknown is not None:
        raise InvalidRequest(
            f"'input' holds {unknown}, which is no token of this model. (LangChain's OpenAIEmbeddings sends the tokens"
            " of OpenAI's models unless check_embedding_ctx_length=False.)",
            param="input",
            code="invalid_value",
        )
    text = await tokenizer.decode_async(ids)
    if not text:
        raise InvalidRequest("'input' must not hold an empty item.", param="input", code="invalid_value")
    return text


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
