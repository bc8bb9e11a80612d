"""The log probabilities of a prompt's own tokens, asked of the model in a request of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from triton_openai.adapters.base import Adapter
from triton_openai.chat.offload import run as offloaded
from triton_openai.chat.tokenizer import Tokenizer
from triton_openai.deadlines import within
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError, UpstreamTimeout
from triton_openai.generation import Generation, Logits, TokenLogprob
from triton_openai.models import ServedModel
from triton_openai.telemetry.upstream import UPSTREAM
from triton_openai.text.logits import INLINE_NUMBERS, log_probabilities
from triton_openai.text.naming import TokenNames
from triton_openai.triton.client import TritonClient
from triton_openai.triton.tensors import InferRequest

# A prompt's scores may be hundreds of megabytes.
_PARALLEL = 2


class Scoring(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is wanted: *count* alternatives to each token, for the request's parameter *param*, within *timeout* seconds.
    """

    count: int
    param: str
    timeout: float


async def score_prompts(
    model: ServedModel,
    tokenizer: Tokenizer,
    generations: Sequence[Generation],
    scoring: Scoring,
    client: TritonClient,
) -> list[tuple[TokenLogprob, ...]]:
    """
    Return an entry for each token of each prompt; the first has no log probability, as nothing stands before it.

    Raises :class:`ServiceError`, with the parameter where the request is at fault.
    """
    if model.lora_delivery is not None:
        raise UnsupportedParameter(
            "The log probabilities of prompts cannot be had for a LoRA adapter whose weights go with its requests.",
            param=scoring.param,
        )
    gate = asyncio.Semaphore(_PARALLEL)

    async def score(generation: Generation) -> tuple[TokenLogprob, ...]:
        async with gate:
            return await _score(model, tokenizer, generation, scoring, client)

    tasks = [asyncio.create_task(score(generation)) for generation in generations]

    async def together() -> list[tuple[TokenLogprob, ...]]:
        return list(await asyncio.gather(*tasks))

    try:
        return await within(scoring.timeout, together())
    except asyncio.TimeoutError as error:
        raise UpstreamTimeout(f"The prompt was not scored within {scoring.timeout:g} seconds.") from error
    except InvalidRequest as error:
        error.param = error.param or scoring.param
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _score(
    model: ServedModel, tokenizer: Tokenizer, generation: Generation, scoring: Scoring, client: TritonClient
) -> tuple[TokenLogprob, ...]:
    ids = generation.prompt_ids or ()
    if len(ids) < 2:
        return _named(tokenizer, generation, ())
    logits = await _ask(model, generation, scoring.param, client)
    chosen, count = ids[1:], scoring.count
    entries = await offloaded(
        lambda: log_probabilities(logits, chosen, count), size=len(chosen) * logits.width, threshold=INLINE_NUMBERS
    )
    return _named(tokenizer, generation, entries)


async def _ask(model: ServedModel, generation: Generation, param: str, client: TritonClient) -> Logits:
    request = msgspec.structs.replace(model.adapter.encode_prompt_logits(generation), needed_for=param)
    with UPSTREAM.get().call(request) as sent:
        return await _scores(model.adapter, sent, client)


async def _scores(adapter: Adapter, request: InferRequest, client: TritonClient) -> Logits:
    found: Logits | None = None
    if not request.stream:
        found = adapter.decode_prompt_logits(await client.infer(request))
    else:
        stream = await client.stream(request)
        try:
            while found is None and (responses := await stream.read()):
                found = next((logits for each in responses if (logits := adapter.decode_prompt_logits(each))), None)
        finally:
            stream.close()
    if found is None:
        raise UpstreamError("The model ended without the scores of the prompt.")
    return found


def _named(tokenizer: Tokenizer, generation: Generation, entries: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """
    Return *entries* with the names of their tokens, behind the prompt's first token, which has no log probability.

    Special tokens are a part of the prompt, but for those that the tokenizer put in front of its text.
    """
    pieces, prompt = tokenizer.pieces, generation.prompt
    names = TokenNames(pieces, skip_special_tokens=False)
    ids = generation.prompt_ids or ()
    named = [names.named(entry) for entry in (*(TokenLogprob("", None, id=number) for number in ids[:1]), *entries)]
    for place, number in enumerate(ids):
        entry = named[place]
        if number in pieces.special_ids and not prompt.startswith(entry.token):
            named[place] = msgspec.structs.replace(entry, hidden=True)
            continue
        if number not in pieces.special_ids and pieces.exact:
            # Some tokenizers begin a text with a space that it does not have.
            first = pieces.first(number)
            named[place] = msgspec.structs.replace(entry, token=first.decode("utf-8", "replace"), raw=first)
        break
    return tuple(named)
