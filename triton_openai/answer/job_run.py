"""
Runs jobs: brings one into the form that its model takes, sends its requests to Triton, and reads the answers.

A cross-encoder scores a pair itself. For a model of embeddings a score is the cosine of the angle between the two.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import mul
from typing import Any, Literal, TypeVar, cast

from msgspec.structs import replace

from triton_openai import offload
from triton_openai.answer.limits import check_size, too_many_tokens_error
from triton_openai.answer.prepare import check_ids, no_tokenizer_error, tokenizer_of
from triton_openai.answer.run_group import timeout_error
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import InvalidAnswer, InvalidValue, UnsupportedParameter
from triton_openai.jobs import ClassificationResult, EmbeddingJob, Job, Pooling, Result, ScoreJob, ScoreResult, TextJob
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text
from triton_openai.triton.tensors import InferRequest, InferResponse

_R = TypeVar("_R", bound=Result)
Activation = Literal["softmax", "sigmoid", "none"]

# Requests of one job that are sent to Triton at the same time: enough to fill its batcher.
_PARALLEL_REQUESTS = 16
_LANGCHAIN = " (With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.)"


async def run_job(
    upstream: UpstreamClient, model: ServedModel, job: Job[_R], *, cut: Truncation | None = None, timeout: float | None
) -> _R:
    """
    Return the result of *job*, whose inputs are truncated as *cut* says, with its tokens where they can be counted.

    A model that makes embeddings and does not score compares them. Raises :class:`ServiceError`, also when *timeout*
    seconds were not enough.
    """
    if not isinstance(job, ScoreJob):
        return await _run(upstream, model, job, cut, timeout)
    result: Any
    if ScoreJob not in model.jobs:
        result = await _compared(upstream, model, job, timeout)
    else:
        result = await _run(upstream, model, await _with_token_pairs(model, job, cut), None, timeout)
        if job.activate and model.settings.score_activation == "sigmoid":
            result = replace(result, scores=[sigmoid(score) for score in result.scores])
    if not all(map(math.isfinite, result.scores)):
        raise InvalidAnswer("it has a score that is not a number", model=model.triton_model)
    return cast(_R, result)


async def _run(
    upstream: UpstreamClient, model: ServedModel, job: Job[_R], cut: Truncation | None, timeout: float | None
) -> _R:
    taken: Job[Any] = job
    if isinstance(job, TextJob):
        taken = replace(job, **await _taken(model, job, cut))
    adapter = model.adapter
    (rows, size) = taken.extent
    requests = await offload.run(lambda: adapter.encode(taken), cost=offload.ITEM * rows + offload.BYTE * size)
    answers = await _answers(upstream, requests, in_parts=job.in_parts, timeout=timeout)
    cost = 10 * offload.ITEM * rows + offload.BYTE * sum(answer.size for answer in answers)
    result: _R = await offload.run(lambda: adapter.decode(taken, answers), cost=cost)
    if result.prompt_tokens is None:
        result = replace(result, prompt_tokens=await _count(model, taken))
    return result


async def _answers(
    upstream: UpstreamClient, requests: Sequence[InferRequest], *, in_parts: bool, timeout: float | None
) -> Sequence[InferResponse]:
    """
    Return the first answer to each of *requests*, in their order, or all answers to each if they come *in_parts*.

    Raises :class:`ServiceError`.
    """
    slots = asyncio.Semaphore(_PARALLEL_REQUESTS)

    async def answer(request: InferRequest) -> Sequence[InferResponse]:
        async with slots:
            responses = await upstream.ask(request)
        if in_parts:
            return responses
        return responses[:1]

    tasks: list[asyncio.Task[Sequence[InferResponse]]] = []
    try:
        async with asyncio.timeout(timeout):
            for request in requests:
                tasks.append(asyncio.create_task(answer(request)))
                # Thousands of them take long to send: not in one turn of the event loop.
                await asyncio.sleep(0)
            return [*chain.from_iterable(await asyncio.gather(*tasks))]
    except TimeoutError as error:
        raise timeout_error(timeout) from error
    finally:
        for task in tasks:
            task.cancel()


async def _taken(model: ServedModel, job: TextJob[Any], cut: Truncation | None) -> dict[str, Any]:
    """Return the fields of *job* with its inputs in the form that the model takes. Raises :class:`ServiceError`."""
    inputs = job.inputs
    encodes = model.adapter.capabilities.tokens
    takes_ids = encodes or model.adapter.capabilities.token_inputs
    decodes = not takes_ids and not isinstance(inputs[0], str)
    if EmbeddingJob in model.jobs:
        hint = _LANGCHAIN
    else:
        hint = ""
    if cut is None and not decodes and not encodes:
        await _check_sizes(model, inputs)
        return {}
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None and encodes:
        raise no_tokenizer_error(model)
    if tokenizer is None and decodes:
        raise UnsupportedParameter(
            f"The model '{model.name}' takes text, not token ids, and its tokenizer is not configured (--tokenizer)."
            f"{hint}",
            param="input",
        )
    if tokenizer is None:
        raise UnsupportedParameter(
            "'truncate_prompt_tokens' needs the model's tokenizer, which is not configured (--tokenizer).",
            param="truncate_prompt_tokens",
        )
    longest = model.settings.max_model_len or tokenizer.model_max_length
    if cut is not None:
        cut = cut.within(longest).checked(longest)
    if cut is None:
        await _check_sizes(model, inputs)
    fields: dict[str, Any] = {"pad_id": tokenizer.special_id("pad_token")}
    prefix = ""
    if encodes and isinstance(job, EmbeddingJob):
        fields["pooling"] = pooling_of(model, tokenizer)
        prefix = fields["pooling"].prefix
    taken: list[Any] = []
    for item in inputs:
        if prefix and isinstance(item, str):
            item = prefix + item  # noqa: PLW2901 - the text as the model gets it
        if isinstance(item, str):
            if cut is None:
                taken.append(await tokenizer.encode_async(item, True))
            elif takes_ids:
                taken.append(await cut_encoded(tokenizer, item, cut))
            else:
                taken.append(await cut_text(tokenizer, item, cut, special=True))
        else:
            value: Any = item
            if cut is not None:
                value = cut_ids(item, cut)
            if decodes or encodes:
                check_ids(value, tokenizer, "input", hint)
            if decodes:
                # Without special tokens, which the backend adds.
                value = await tokenizer.decode_async(value)
                if not value:
                    what = f"'input[{len(taken)}]' holds only tokens that stand for no text, and the model takes text."
                    raise InvalidValue(what, "input")
            taken.append(value)
        # Thousands of short inputs are as much work as a long one.
        await asyncio.sleep(0)
    await _check_sizes(model, taken)
    return {"inputs": taken, **fields}


def pooling_of(model: ServedModel, tokenizer: Tokenizer) -> Pooling:
    """Return how the vectors of *model* are pooled: as its settings say, else the files beside its tokenizer."""
    pooling = tokenizer.pooling or Pooling()
    settings = model.settings
    if settings.pooling is not None:
        pooling = replace(pooling, mode=settings.pooling)
    if settings.normalize_embeddings is not None:
        pooling = replace(pooling, normalize=settings.normalize_embeddings)
    if settings.embedding_prefix is not None:
        pooling = replace(pooling, prefix=settings.embedding_prefix)
    return pooling


async def _check_sizes(model: ServedModel, inputs: Sequence[str] | Sequence[Sequence[int]]) -> None:
    """Raise :class:`ContextLengthExceeded` for token ids, and texts with any tokens, that exceed the context length."""
    # The tokenizer's own limit does not count here: models that make embeddings often cut what is longer.
    limit = model.settings.max_model_len
    if limit is None:
        tokenizer = None
    else:
        tokenizer = (await model.prompter()).tokenizer
    if limit is None or tokenizer is None:
        return
    for item in inputs:
        if isinstance(item, str):
            check_size(item, tokenizer, limit)
        elif len(item) > limit:
            raise too_many_tokens_error(limit, f"your input has {len(item)} tokens", tokens=len(item), param="input")


async def _with_token_pairs(model: ServedModel, job: ScoreJob, cut: Truncation | None) -> ScoreJob:
    """Return *job* with its pairs as token ids where the model takes those. Raises :class:`ServiceError`."""
    if not model.adapter.capabilities.tokens:
        return job
    tokenizer = await tokenizer_of(model)
    longest = model.settings.max_model_len
    if cut is None:
        limit = None
    else:
        limit = cut.within(longest or tokenizer.model_max_length).tokens
    if limit is None and longest is not None:
        for text in set().union(*job.pairs):
            check_size(text, tokenizer, longest)
    encoded = await tokenizer.encode_pairs_async(job.pairs, limit)
    tokens = max(len(pair.ids) for pair in encoded)
    if longest is not None and tokens > longest:
        raise too_many_tokens_error(longest, f"a query and its document have {tokens} tokens together")
    return replace(job, encoded=encoded, pad_id=tokenizer.special_id("pad_token"))


async def _count(model: ServedModel, job: Job[Any]) -> int | None:
    """Return the tokens of the inputs of *job*, ``None`` where there is no tokenizer to count them."""
    if isinstance(job, ScoreJob):
        tokenizer = (await model.prompter()).tokenizer
        pairs = job.encoded
        if not pairs and tokenizer is not None:
            pairs = await tokenizer.encode_pairs_async(job.pairs)
        if pairs:
            return sum(len(pair.ids) for pair in pairs)
        return None
    if not isinstance(job, TextJob):
        return None
    texts = [item for item in job.inputs if isinstance(item, str)]
    ids = sum(len(item) for item in job.inputs if not isinstance(item, str))
    tokenizer = None
    if texts:
        tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        if texts:
            return None
        return ids
    return ids + await tokenizer.count_async(texts, True, refusable=False)


async def _compared(upstream: UpstreamClient, model: ServedModel, job: ScoreJob, timeout: float | None) -> ScoreResult:
    """Return the cosines of embeddings. No text is embedded twice, and an activation changes no angle."""
    texts = list(dict.fromkeys(chain.from_iterable(job.pairs)))
    result = await run_job(upstream, model, EmbeddingJob(id=job.id, inputs=texts), timeout=timeout)
    vectors = dict(zip(texts, result.vectors, strict=True))
    size = len(job.pairs) * len(result.vectors[0]) // 4
    scores = await offload.run(lambda: _cosines(vectors, job.pairs), cost=2 * offload.BYTE * size)
    return ScoreResult(scores=scores, prompt_tokens=result.prompt_tokens)


def _cosines(vectors: Mapping[str, bytes], pairs: Sequence[tuple[str, str]]) -> list[float]:
    units = {text: _unit(vector) for text, vector in vectors.items()}
    return [sum(map(mul, units[query], units[document])) for query, document in pairs]


def _unit(vector: bytes) -> Sequence[float]:
    """Return *vector* at length one; one of length zero has no direction, and stays what it is."""
    values = array("f", vector)
    length = math.sqrt(sum(map(mul, values, values)))
    if length == 0:
        return values
    return array("d", [value / length for value in values])


def sigmoid(value: float) -> float:
    """Return the logistic function of *value*, computed so that nothing overflows."""
    return math.exp(min(value, 0.0)) / (1 + math.exp(-abs(value)))


def activation_of(model: ServedModel, tokenizer: Tokenizer | None) -> Activation:
    """Return how the numbers of *model*, a classifier, become probabilities."""
    kind = model.settings.problem_type
    if not kind and tokenizer is not None:
        kind = tokenizer.problem_type
    if not model.adapter.capabilities.logits or kind == "regression":
        return "none"
    if kind == "multi_label_classification":
        return "sigmoid"
    return "softmax"


def apply_activation(values: Sequence[float], activation: Activation) -> Sequence[float]:
    """Return the probabilities for logits; the softmax of one class is its sigmoid. Raises :class:`InvalidAnswer`."""
    highest = max(values)
    if activation == "sigmoid" or (activation == "softmax" and len(values) == 1):
        values = [sigmoid(value) for value in values]
    elif activation == "softmax":
        powers = [math.exp(value - highest) for value in values]
        total = sum(powers)
        values = [power / total for power in powers]
    if not all(map(math.isfinite, values)):
        raise InvalidAnswer("it has a value that is not a number")
    return values


def labels_of(result: ClassificationResult, tokenizer: Tokenizer | None) -> Mapping[int, str]:
    """Return the labels of the classes of *result*: the backend's, or those of the tokenizer's folder."""
    if result.labels or tokenizer is None:
        return result.labels
    return tokenizer.labels
