"""From what a request wants and its prompts to the runs that answer it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.answer.budgeted_run import BudgetedRun
from triton_openai.answer.limits import TimeLimits, TokenLimit, check_size, utf8_size
from triton_openai.answer.logits_reader import PromptScoring
from triton_openai.answer.run import Run
from triton_openai.answer.thinking_budget import ThinkingBudget
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.errors import ConfigurationError, InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.generation import Generation, Vocabulary
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_ids, cut_text

# Seeds fit every backend's integer: some take 32 bits, some refuse negative ones.
_SEEDS = 2**31 - 256
# Answers of one request: as many as it can have prompts.
_MAX_RUNS = 2048
# Runs that are prepared before other requests have their turn.
_RUNS_IN_A_TURN = 16
# Tokens of a logit_bias that are sent as texts: to find a token's text takes some ten microseconds.
_MAX_WORDS = 1024

#: A prompt: a text, or exactly these tokens.
Prompt: TypeAlias = str | Sequence[int]


class GenerationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants for each of its prompts."""

    #: A generation without its prompt. The ids of the answers begin with its id.
    template: Generation
    limit: TokenLimit
    #: The number of answers to each prompt.
    n: int = 1
    #: How long prompts are cut.
    truncation: Truncation | None = None
    #: Whether the usual special tokens are added to a prompt in text.
    adds_special: bool = True
    #: Asks for the log probabilities of the prompt's tokens.
    prompt_scoring: PromptScoring | None = None
    #: How much an answer may think, where its engine has no such limit.
    thinking_budget: ThinkingBudget | None = None


async def prepare(
    model: ServedModel,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Prompt],
    spec: GenerationSpec,
    upstream: UpstreamClient,
    time_limits: TimeLimits,
) -> list[Run]:
    """
    Return the runs that answer *prompts*, not yet started: *n* for each prompt, numbered prompt by prompt.

    Each answer to a prompt has its own seed. The seeds follow from the client's, so that the same request gives the
    same answers. Without one they are random if there are several, and if the backend's own default is the same for
    every request (``capabilities.fixed_seed``). Raises :class:`InvalidRequest`, and :class:`ConfigurationError` for a
    model that needs a tokenizer and has none.
    """
    count = spec.n
    adapter = model.adapter
    template = spec.template
    if len(prompts) * count > _MAX_RUNS:
        param = "prompt"
        if count > 1:
            param = "n"
        raise InvalidValue(
            f"A request can have {_MAX_RUNS} answers at most, this one asks for {len(prompts) * count}.", param
        )
    first = template.sampling.seed
    if first is None and (count > 1 or adapter.capabilities.fixed_seed):
        first = secrets.randbelow(_SEEDS)
    single = len(prompts) * count == 1
    runs: list[Run] = []
    for place, prompt in enumerate(prompts):
        prepared = await generation_of(model, tokenizer, prompt, spec)
        for number in range(count):
            if len(runs) % _RUNS_IN_A_TURN == _RUNS_IN_A_TURN - 1:
                # Thousands of short prompts are as much work as a long one.
                await asyncio.sleep(0)
            own: dict[str, Any] = {}
            if not single:
                own["id"] = f"{template.id}-{len(runs)}"
            if first is not None:
                own["sampling"] = replace(prepared.sampling, seed=nth_seed(first, number))
            if template.beams is not None:
                search = f"{template.id}-{place}"
                own["beams"] = replace(template.beams, index=number, search=search)
            new_run: Callable[..., Run] = Run
            if spec.thinking_budget is not None:
                new_run = partial(BudgetedRun, budget=spec.thinking_budget)
            run = new_run(
                replace(prepared, **own),
                adapter=adapter,
                upstream=upstream,
                time_limits=time_limits,
                token_limit=spec.limit,
                tokenizer=tokenizer,
                lora_deliveries=model.lora_delivery,
            )
            runs.append(run)
    return runs


def nth_seed(first: int, number: int) -> int:
    """Return the seed of answer *number*: the client's *first* plus *number*, within what every backend takes."""
    if number == 0 or 0 <= first <= _SEEDS:
        return first + number
    return (first + number) % _SEEDS


async def generation_of(
    model: ServedModel, tokenizer: Tokenizer | None, prompt: Prompt, spec: GenerationSpec
) -> Generation:
    """
    Return the generation for one prompt of *spec*: as text, or as token ids where the model takes those.

    The answer fits the model's context, where its length is known. Raises :class:`InvalidRequest`, and
    :class:`ConfigurationError` for a model that needs a tokenizer and has none.
    """
    original = None
    if not isinstance(prompt, str):
        if not model.adapter.capabilities.tokens:
            prompt, original = await _as_text(model, tokenizer, prompt)
    elif not spec.adds_special and model.adapter.metadata.adds_bos:
        prompt, original = await _without_special(model, tokenizer, prompt)
    if tokenizer is not None and isinstance(prompt, str) and spec.truncation is None:
        check_size(prompt, tokenizer, spec.limit.longest_prompt)
    if isinstance(prompt, str) and not model.adapter.capabilities.tokens:
        fields = await _text_fields(model, tokenizer, prompt, original, spec)
    elif tokenizer is not None:
        fields = await _id_fields(model, tokenizer, prompt, spec)
    else:
        raise no_tokenizer_error(model)
    generation = replace(
        spec.template,
        lora=model.lora,
        kv_cache_block_size=model.settings.kv_cache_block_size,
        over_grpc=model.over_grpc,
        **fields,
    )
    if tokenizer is None:
        return generation
    return await _fitted(model, tokenizer, generation, spec.limit)


async def _as_text(model: ServedModel, tokenizer: Tokenizer | None, ids: Sequence[int]) -> tuple[str, str]:
    """
    Return the text that is sent in place of *ids*, and the text that they stand for.

    Raises :class:`UnsupportedParameter` if the text has other token ids: the model would answer another prompt.
    """
    if tokenizer is None:
        raise UnsupportedParameter(
            "Prompts given as token ids need the model's tokenizer, which is not configured.", param="prompt"
        )
    if not ids:
        raise InvalidValue("'prompt' must not hold an empty list of token ids.", "prompt")
    adds_bos = model.adapter.metadata.adds_bos and tokenizer.adds_bos
    if adds_bos and ids[0] == tokenizer.special_id("bos_token"):
        own = ids[1:]
    else:
        own = ids
    check_ids(ids, tokenizer, "prompt")
    text = await tokenizer.decode_async(own, skip_special_tokens=False)
    if await tokenizer.encode_async(text, adds_bos) != ids:
        raise UnsupportedParameter(
            "These token ids cannot be sent to the model as text without changing them.", param="prompt"
        )
    return text, tokenizer.decode(ids, skip_special_tokens=False)


async def _without_special(
    model: ServedModel, tokenizer: Tokenizer | None, text: str
) -> tuple[str | Sequence[int], str | None]:
    """
    Return what is sent for *text* alone to a backend that adds special tokens, and *text* if that is another text.

    Raises :class:`UnsupportedParameter`.
    """
    if tokenizer is not None:
        ids = await tokenizer.encode_async(text)
        if model.adapter.capabilities.tokens:
            return ids, None
        for own in (text, tokenizer.strip_bos(text)):
            if await tokenizer.encode_async(own, True) == ids:
                return own, text
    raise UnsupportedParameter(
        "The model's backend adds special tokens to every text: 'add_special_tokens' can be false only for a prompt"
        " that begins with just these.",
        param="add_special_tokens",
    )


async def _text_fields(
    model: ServedModel, tokenizer: Tokenizer | None, prompt: str, original: str | None, spec: GenerationSpec
) -> dict[str, Any]:
    """Return the fields of a :class:`Generation` for a model that takes text."""
    capabilities = model.adapter.capabilities
    special = model.adapter.metadata.adds_bos
    template = spec.template
    truncation = spec.truncation
    if truncation is not None:
        needs = "truncate_prompt_tokens"
    elif template.token_ids:
        needs = "return_token_ids"
    else:
        needs = None
    if tokenizer is None and needs is not None:
        raise UnsupportedParameter(
            f"'{needs}' needs the model's tokenizer, which is not configured (--tokenizer).", param=needs
        )
    echo = ids = None
    if tokenizer is not None:
        if truncation is not None:
            cut = await cut_text(tokenizer, prompt, truncation, special=special)
            if cut != prompt:
                original = None
            prompt = cut
        if capabilities.echoes and not (template.stream and capabilities.streaming):
            echo = await tokenizer.decode_async(await tokenizer.encode_async(prompt))
        if template.token_ids:
            ids = tuple(await tokenizer.encode_async(prompt, special))
    if capabilities.bias_words:
        biases = template.sampling.logit_bias
    else:
        biases = ()
    words: Sequence[tuple[str, float]] = ()
    if biases:
        words = await offload.run(bias_words, tokenizer, biases, cost=3 * offload.ITEM * len(biases))
    return {"prompt": prompt, "original_prompt": original, "prompt_echo": echo, "prompt_ids": ids, "bias_words": words}


async def _id_fields(model: ServedModel, tokenizer: Tokenizer, prompt: Prompt, spec: GenerationSpec) -> dict[str, Any]:
    """Return the fields of a :class:`Generation` for a model that takes token ids."""
    truncation = spec.truncation
    if isinstance(prompt, str):
        # A chat template writes the special tokens itself. The caller removed those that the tokenizer adds.
        if truncation is not None and truncation.keeps_special:
            prompt = await cut_text(tokenizer, prompt, truncation, special=model.adapter.metadata.adds_bos)
        elif truncation is not None:
            prompt = await tokenizer.cut_roughly_async(prompt, truncation.tokens, truncation.side)
        ids = await tokenizer.encode_async(prompt, model.adapter.metadata.adds_bos)
        if truncation is not None and len(ids) > truncation.tokens:
            ids = list(cut_ids(ids, truncation))
            prompt = await tokenizer.decode_async(ids, skip_special_tokens=False)
    else:
        ids = list(prompt)
        if truncation is not None:
            ids = list(cut_ids(ids, truncation))
        check_ids(ids, tokenizer, "prompt")
        prompt = await tokenizer.decode_async(ids, skip_special_tokens=False)
    if not ids:
        raise InvalidValue("The prompt is empty: there is nothing to continue.", "prompt")
    # As in vLLM: the same word has other ids at the start of a text and within it.
    forms: list[str] = []
    for word in spec.template.sampling.bad_words:
        forms += (word, f" {word}")
    bad_word_ids = await offload.run(
        lambda: tuple(dict.fromkeys(tuple(tokenizer.encode(form)) for form in forms)),
        cost=offload.ITEM * len(forms) + offload.CHARACTER * sum(map(len, forms)),
        refusable=True,
    )
    vocabulary = Vocabulary(
        size=tokenizer.vocab_size, end_ids=tokenizer.eos_token_ids, pad_id=tokenizer.special_id("pad_token")
    )
    return {"prompt": prompt, "prompt_ids": tuple(ids), "vocabulary": vocabulary, "bad_word_ids": bad_word_ids}


async def _fitted(model: ServedModel, tokenizer: Tokenizer, generation: Generation, limit: TokenLimit) -> Generation:
    """Return *generation* with an answer that fits the model's context. Raises :class:`ContextLengthExceeded`."""
    ids = generation.prompt_ids
    longest = limit.longest_prompt
    # There are no more tokens than bytes.
    if longest is None or (ids is None and limit.context is None and utf8_size(generation.prompt) <= longest):
        return generation
    adds_bos = model.adapter.metadata.adds_bos
    if ids is not None:
        count = len(ids)
    else:
        count = await tokenizer.count_async(generation.prompt, adds_bos)
    max_tokens = limit.max_tokens_for(count)
    sampling = replace(generation.sampling, max_tokens=max_tokens)
    if (sampling.min_tokens or 0) > max_tokens:
        sampling = replace(sampling, min_tokens=max_tokens)
    return replace(generation, sampling=sampling, prompt_tokens=count)


def check_ids(ids: Sequence[int], tokenizer: Tokenizer, param: str, hint: str = "") -> None:
    """Raise :class:`InvalidRequest` for *ids* that are not in the vocabulary; *hint* is added to its message."""
    # Fast for long prompts.
    for number in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= number < tokenizer.vocab_size:
            raise InvalidValue(f"'{param}' holds {number}, which is not a token of this model.{hint}", param)


async def tokenizer_of(model: ServedModel) -> Tokenizer:
    """Return the tokenizer of *model*. Raises :class:`ConfigurationError` where it is not known."""
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None:
        raise no_tokenizer_error(model)
    return tokenizer


def no_tokenizer_error(model: ServedModel) -> ConfigurationError:
    """Return the error for what needs a tokenizer where the model's is not known."""
    message = f"The model's tokenizer is not known: give it with --tokenizer {model.triton_model}=SOURCE."
    return ConfigurationError(message, param="model")


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
    if len(biases) > _MAX_WORDS:
        raise InvalidRequest(
            f"'logit_bias' holds {len(biases)} tokens, and may hold {_MAX_WORDS} at most on this model, which takes "
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
