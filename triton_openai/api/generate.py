"""What chats and completions share: from a request's parameters and prompts to the runs that answer it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from triton_openai import offload
from triton_openai.access.guard import gateway_header
from triton_openai.answer.logprobs import PromptScoring, score_prompts
from triton_openai.answer.run import Run
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api import parameters
from triton_openai.api.prompts import (
    Prompt,
    Rewritten,
    check_ids,
    check_size,
    longest_prompt,
    no_tokenizer,
    size_of,
    too_many_tokens,
)
from triton_openai.api.service import RequestContext, Service
from triton_openai.config.tree import DefaultParameters
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.generation import Generation, Vocabulary
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_ids, cut_text
from triton_openai.telemetry.observation import TOKENIZE

# Seeds fit every backend's integer: some take 32 bits, some refuse negative ones.
_SEEDS = 2**31 - 256
# Answers of one request: as many as it can have prompts.
_MAX_RUNS = 2048
# Runs that are prepared before other requests have their turn.
_RUNS_IN_A_TURN = 16
# Tokens of a logit_bias that are sent as texts: to find a token's text takes some ten microseconds.
_MOST_WORDS = 1024

_Body = TypeVar("_Body", bound=parameters.SamplingRequest)


class Task(Generation, frozen=True, kw_only=True):
    """
    What a request wants for each of its prompts: *n* answers, whose ids begin with *id*. It has no prompt itself.

    ``open_ended`` is true if neither the client nor the operator limits the answer; ``open_limit`` is the limit that
    the model's authors recommend for such answers. ``prompt_scoring`` asks for the log probabilities of the prompt's
    tokens. ``truncation`` says how long prompts are cut.
    """

    prompt: str = ""
    options: parameters.StreamOptions = parameters.StreamOptions()
    n: int = 1
    open_ended: bool = False
    open_limit: int | None = None
    truncation: Truncation | None = None
    prompt_scoring: PromptScoring | None = None


def task_of(
    context: RequestContext[_Body],
    answer_id: str,
    *,
    defaults: DefaultParameters,
    n: int,
    echo_logprobs: int | None = None,
    cumulative_logprob: bool = False,
    keeps_special: bool = True,
) -> Task:
    """
    Return the task of a request to generate text.

    *defaults* are the model's. *echo_logprobs* is the number of alternatives to each token of the echoed prompt,
    ``None`` for no log probabilities. For the rest see :class:`Task` and :mod:`triton_openai.api.parameters`. Raises
    :class:`InvalidRequest`.
    """
    body, model, settings = context.body, context.model, context.service.settings
    adapter = model.adapter
    objective = 0
    if settings.access.trust_gateway:
        name = gateway_header(context.request.headers, "objective")
        objective = settings.access.gateway.objectives.get(name, 0)
    return Task(
        id=answer_id,
        sampling=parameters.sampling(
            body, defaults=defaults, default_max_tokens=settings.api.default_max_tokens, adapter=adapter
        ),
        stream=bool(body.stream),
        options=parameters.stream_options(body, always_usage=settings.api.always_include_usage),
        n=n,
        guide=parameters.guide_of(body, adapter.capabilities.guides),
        open_ended=body.limit[1] is None and model.settings.default_parameters.max_tokens is None,
        open_limit=defaults.max_tokens,
        truncation=parameters.truncation(body, keeps_special=keeps_special),
        priority=parameters.priority(body, model.priorities, objective),
        cumulative_logprob=cumulative_logprob,
        token_ids=parameters.token_ids(body, adapter),
        prompt_scoring=parameters.prompt_scoring(
            body, adapter, echo_logprobs=echo_logprobs, timeout=settings.triton.request_timeout
        ),
    )


async def runs_of(context: RequestContext[Any], prompts: Sequence[Prompt], task: Task) -> list[Run]:
    """
    Return the runs that answer *prompts*, not yet started: *n* for each prompt, numbered prompt by prompt.

    Each answer to a prompt has its own seed. The seeds follow from the client's, so that the same request gives the
    same answers. Without one they are random if there are several, and if the backend's own default is the same for
    every request (``capabilities.fixed_seed``). Raises :class:`InvalidRequest`, and :class:`ConfigurationError` for a
    model that needs a tokenizer and has none.
    """
    service, model, observation, count = context.service, context.model, context.observation, task.n
    if len(prompts) * count > _MAX_RUNS:
        raise InvalidValue(
            f"A request can have {_MAX_RUNS} answers at most, this one asks for {len(prompts) * count}.",
            "n" if count > 1 else "prompt",
        )
    first = task.sampling.seed
    if first is None and (count > 1 or model.adapter.capabilities.fixed_seed):
        first = secrets.randbelow(_SEEDS)
    tokenizer = (await model.prompter()).tokenizer
    single = len(prompts) * count == 1
    runs: list[Run] = []
    with observation.stage(TOKENIZE):
        for place, prompt in enumerate(prompts):
            prepared = await generation_of(model, tokenizer, prompt, task)
            if tokenizer is not None:
                prepared = await _fitted(model, tokenizer, prepared, task)
            for number in range(count):
                if len(runs) % _RUNS_IN_A_TURN == _RUNS_IN_A_TURN - 1:
                    # Thousands of short prompts are as much work as a long one.
                    await asyncio.sleep(0)
                generation = prepared
                if not single:
                    generation = msgspec.structs.replace(generation, id=f"{task.id}-{place * count + number}")
                if first is not None:
                    sampling = msgspec.structs.replace(prepared.sampling, seed=nth_seed(first, number))
                    generation = msgspec.structs.replace(generation, sampling=sampling)
                runs.append(run_of(service, model, generation, tokenizer, context.limits))
    observation.answers, observation.n, observation.response_id = [run.progress for run in runs], count, task.id
    if task.prompt_scoring is not None and tokenizer is not None:
        prepared_prompts = [run.generation for run in runs[::count]]
        scores = await score_prompts(model, tokenizer, prepared_prompts, task.prompt_scoring, service.client)
        for place, run in enumerate(runs):
            run.prompt_logprobs = scores[place // count]
    return runs


_INSTEAD = {
    "embed": "makes embeddings (/v1/embeddings)",
    "rerank": "ranks texts (/v1/rerank, /v1/score)",
    "classify": "classifies texts (/v1/classify)",
}


def not_generating(model: ServedModel) -> InvalidRequest:
    """Return the error for a model that generates no text; it says what the model does, and where."""
    instead = " and ".join(_INSTEAD[task] for task in model.tasks if task in _INSTEAD)
    does = f" It {instead}." if instead else ""
    return InvalidRequest(f"The model '{model.name}' does not generate text.{does}", param="model")


def run_of(
    service: Service, model: ServedModel, generation: Generation, tokenizer: Tokenizer | None, limits: TimeLimits
) -> Run:
    """Return the run of one *generation*, not yet started."""
    client, background = service.client, service.background
    return Run(model, generation, client=client, limits=limits, background=background, tokenizer=tokenizer)


def nth_seed(first: int, number: int) -> int:
    """Return the seed of answer *number*: the client's *first* plus *number*, within what every backend takes."""
    if number == 0 or 0 <= first <= _SEEDS:
        return first + number
    return (first + number) % _SEEDS


async def generation_of(model: ServedModel, tokenizer: Tokenizer | None, prompt: Prompt, task: Task) -> Generation:
    """Return the generation for one prompt of *task*: as text, or as token ids where the model takes those."""
    original = None
    if isinstance(prompt, Rewritten):
        original, prompt = prompt.original, prompt.sent
    if tokenizer is not None and isinstance(prompt, str) and task.truncation is None:
        check_size(prompt, tokenizer, longest_prompt(model, tokenizer))
    if not model.adapter.capabilities.tokens:
        fields = await _text_fields(model, tokenizer, prompt, original, task)
    elif tokenizer is not None:
        fields = await _id_fields(model, tokenizer, prompt, task)
    else:
        raise no_tokenizer(model)
    return msgspec.structs.replace(
        task, lora=model.lora, kv_cache_block_size=model.settings.kv_cache_block_size, **fields
    )


def _truncation(model: ServedModel, task: Task) -> Truncation | None:
    """Return what prompts are cut to; room is left for the answer, or for one token of it where its length is open."""
    if task.truncation is None:
        return None
    limit = model.settings.max_model_len
    answer = 1 if task.open_ended else task.sampling.max_tokens
    return task.truncation.within(None if limit is None else limit - answer)


async def _text_fields(
    model: ServedModel, tokenizer: Tokenizer | None, prompt: str | Sequence[int], original: str | None, task: Task
) -> dict[str, Any]:
    """Return the fields of a :class:`Generation` for a model that takes text."""
    if not isinstance(prompt, str):
        raise UnsupportedParameter("This model does not take prompts as token ids.", param="prompt")
    capabilities, special = model.adapter.capabilities, model.adapter.hints.adds_bos
    truncation = _truncation(model, task)
    needs = "truncate_prompt_tokens" if truncation is not None else "return_token_ids" if task.token_ids else None
    if tokenizer is None and needs is not None:
        raise UnsupportedParameter(
            f"'{needs}' needs the model's tokenizer, which is not configured (--tokenizer).", param=needs
        )
    echo = ids = None
    if tokenizer is not None:
        if truncation is not None:
            cut = await cut_text(tokenizer, prompt, truncation, special=special)
            prompt, original = cut, original if cut == prompt else None
        if capabilities.echoes and not (task.stream and capabilities.streaming):
            echo = await tokenizer.decode_async(await tokenizer.encode_async(prompt))
        if task.token_ids:
            ids = tuple(await tokenizer.encode_async(prompt, special))
    biases = task.sampling.logit_bias if capabilities.bias_words else ()
    words: Sequence[tuple[str, float]] = ()
    if biases:
        words = await offload.run(bias_words, tokenizer, biases, cost=3 * offload.TEXT * len(biases))
    return {"prompt": prompt, "original_prompt": original, "prompt_echo": echo, "prompt_ids": ids, "bias_words": words}


async def _id_fields(
    model: ServedModel, tokenizer: Tokenizer, prompt: str | Sequence[int], task: Task
) -> dict[str, Any]:
    """Return the fields of a :class:`Generation` for a model that takes token ids."""
    truncation = _truncation(model, task)
    if isinstance(prompt, str):
        # A chat template writes the special tokens itself. `prompt_of` removed those that the tokenizer adds.
        if truncation is not None and truncation.keeps_special:
            prompt = await cut_text(tokenizer, prompt, truncation, special=model.adapter.hints.adds_bos)
        elif truncation is not None:
            prompt = await tokenizer.part_async(prompt, truncation.tokens, truncation.side)
        ids = await tokenizer.encode_async(prompt, model.adapter.hints.adds_bos)
        if truncation is not None and len(ids) > truncation.tokens:
            ids = list(cut_ids(ids, truncation))
            prompt = await tokenizer.decode_async(ids, skip_special_tokens=False)
    else:
        ids = list(prompt if truncation is None else cut_ids(prompt, truncation))
        check_ids(ids, tokenizer, "prompt")
        prompt = await tokenizer.decode_async(ids, skip_special_tokens=False)
    if not ids:
        raise InvalidValue("The prompt is empty: there is nothing to continue.", "prompt")
    # As in vLLM: the same word has other ids at the start of a text and within it.
    forms = [form for word in task.sampling.bad_words for form in (word, f" {word}")]
    bad_word_ids = await offload.run(
        lambda: tuple(dict.fromkeys(tuple(tokenizer.encode(form)) for form in forms)),
        cost=offload.TEXT * len(forms) + offload.TOKENIZE * sum(map(len, forms)),
        refusable=True,
    )
    vocabulary = Vocabulary(
        size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids, pad_id=tokenizer.special_id("pad_token")
    )
    return {
        "prompt": prompt,
        "prompt_ids": tuple(ids),
        "vocabulary": vocabulary,
        "bad_word_ids": bad_word_ids,
    }


async def _fitted(model: ServedModel, tokenizer: Tokenizer, generation: Generation, task: Task) -> Generation:
    """
    Return *generation* with an answer that fits the model's context, where its length is known.

    An open-ended answer may go on to the end of the context. Raises :class:`ContextLengthExceeded`, in OpenAI's words,
    for a prompt, or prompt and answer together, that do not fit.
    """
    sampling, limit = generation.sampling, model.settings.max_model_len
    longest = longest_prompt(model, tokenizer)
    if longest is None:
        return generation
    if limit is None and generation.prompt_ids is None and size_of(generation.prompt) <= longest:
        # No more tokens than bytes: there is nothing to count.
        return generation
    if generation.prompt_ids is not None:
        count = len(generation.prompt_ids)
    else:
        count = await tokenizer.count_async(generation.prompt, model.adapter.hints.adds_bos)
    if count > longest or count == limit:
        raise too_many_tokens(longest, f"your prompt has {count} tokens", tokens=count)
    if limit is not None:
        room = limit - count
        if task.open_ended:
            sampling = msgspec.structs.replace(sampling, max_tokens=min(room, task.open_limit or room))
        elif sampling.max_tokens > room:
            wanted = sampling.max_tokens
            asked = f"you requested {count + wanted} tokens ({count} in the prompt, {wanted} in the completion)"
            raise too_many_tokens(limit, asked)
    return msgspec.structs.replace(generation, sampling=sampling, prompt_tokens=count)


def bias_words(tokenizer: Tokenizer | None, biases: Sequence[tuple[int, float]]) -> tuple[tuple[str, float], ...]:
    """
    Return texts and weights with which a backend biases just the tokens of *biases*.

    The backend tokenizes each text with its special tokens and adds the weight to every token it gets. Those special
    tokens get the whole sum taken off again, by an empty text, which consists of nothing else. Raises
    :class:`InvalidRequest`, such as for a token that no text gives.
    """
    if tokenizer is None:
        raise UnsupportedParameter(
            "'logit_bias' needs the model's tokenizer, which is not configured (--tokenizer).", param="logit_bias"
        )
    if len(biases) > _MOST_WORDS:
        raise InvalidRequest(
            f"'logit_bias' holds {len(biases)} tokens, and may hold {_MOST_WORDS} at most on this model, which takes "
            "biases as texts.",
            param="logit_bias",
            code="array_above_max_length",
        )
    frame = tokenizer.encode("", add_special_tokens=True)
    words = []
    for number, weight in biases:
        if number >= tokenizer.vocab_size:
            raise InvalidValue(
                f"'logit_bias' names the token {number}, and the model has {tokenizer.vocab_size} tokens.", "logit_bias"
            )
        text = tokenizer.decode([number], skip_special_tokens=False)
        if not text or sorted(tokenizer.encode(text, add_special_tokens=True)) != sorted([*frame, number]):
            raise UnsupportedParameter(
                f"'logit_bias' cannot name the token {number} ({text!r}) on this model, which takes biases as texts:"
                " as a text it becomes other tokens.",
                param="logit_bias",
            )
        words.append((text, weight))
    if frame:
        words.append(("", -sum(weight for _, weight in words)))
    return tuple(words)
