"""What every handler works with, reached through :func:`service_of`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence

import msgspec
from aiohttp import web

from triton_openai.access.keys import KEY
from triton_openai.answer.logprobs import Scoring, score_prompts
from triton_openai.answer.run import Background, Run
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api.parameters import bias_words, check_size, fit, longest_prompt, size_of, too_long
from triton_openai.api.prompts import Prompt, Written, outside
from triton_openai.config import Settings
from triton_openai.errors import ConfigurationError, InvalidRequest, ModelNotFound, UnsupportedParameter
from triton_openai.generation import Generation, Guide, Image, Sampling, Vocabulary
from triton_openai.media.images import ImageLoader
from triton_openai.models.control import ModelControl
from triton_openai.models.served import Models, ServedModel
from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_ids, cut_text
from triton_openai.serving.admission import Admission
from triton_openai.telemetry.observation import OBSERVATION, OBSERVERS, Observation
from triton_openai.triton.client import TritonClient

# Seeds fit every backend's integer: some take 32 bits, some refuse negative ones.
_SEEDS = 2**31 - 256
# Answers of one request: as many as it can have prompts.
_MAX_RUNS = 2048
# Runs that are prepared before other requests have their turn.
_RUNS_IN_A_TURN = 16
# Words that are tokenized on the event loop: some ten microseconds each.
_INLINE_WORDS = 20


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """
    What a request wants for each of its prompts: *n* answers under the ids that begin with *id*.

    ``open_ended`` is whether the client left the length of the answer open, and ``most`` what the model's authors
    recommend for that. ``scored`` is whether the answer's cumulative log probability is wanted, ``token_ids`` whether
    the ids of prompt and answer are. ``scoring`` asks for the log probabilities of the prompt's tokens. ``truncation``
    is what the prompts are cut to; ``priority`` is the request's place in Triton's queue. ``stream`` is whether the
    client wants the answers bit by bit.
    """

    id: str
    sampling: Sampling
    stream: bool = False
    n: int = 1
    guide: Guide | None = None
    open_ended: bool = False
    most: int | None = None
    truncation: Truncation | None = None
    priority: int = 0
    images: tuple[Image, ...] = ()
    scored: bool = False
    token_ids: bool = False
    scoring: Scoring | None = None


class LiveSettings:
    """The settings of a running service; replaced as a whole when they were read again."""

    def __init__(self, settings: Settings) -> None:
        self.current = settings


class Service(msgspec.Struct, frozen=True):
    """The parts of the running service."""

    live: LiveSettings
    models: Models
    control: ModelControl
    client: TritonClient
    background: Background
    admission: Admission
    images: ImageLoader

    @property
    def settings(self) -> Settings:
        """The settings now; a request that goes on for long may see others at its end than at its beginning."""
        return self.live.current

    async def runs(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        task: Task,
        *,
        limits: TimeLimits,
        observation: Observation,
    ) -> list[Run]:
        """
        Return the runs that answer *prompts*, not yet started: *n* for each, numbered prompt by prompt.

        Each answer of a prompt has a seed of its own. With the client's seed they follow from it, so the same request
        gives the same answers. Without one they are drawn where there are several, and where the backend's own default
        is the same for every request (``capabilities.fixed_seed``).
        A prompt may be token ids where the model takes them (``capabilities.tokens``): they go through unchanged.
        They stand in *observation* too. Raises :class:`InvalidRequest`, and :class:`ConfigurationError` for a model
        that needs a tokenizer and has none.
        """
        count = task.n
        if len(prompts) * count > _MAX_RUNS:
            raise InvalidRequest(
                f"A request can have {_MAX_RUNS} answers at most, this one asks for {len(prompts) * count}.",
                param="n" if count > 1 else "prompt",
                code="invalid_value",
            )
        first = task.sampling.seed
        if first is None and (count > 1 or model.adapter.capabilities.fixed_seed):
            first = secrets.randbelow(_SEEDS)
        tokenizer = (await model.prompter()).tokenizer
        single = len(prompts) * count == 1
        runs: list[Run] = []
        with observation.stage("tokenize prompt"):
            for place, prompt in enumerate(prompts):
                prepared = await prepare(model, tokenizer, prompt, task)
                fitted = await _fitted(model, tokenizer, prepared, task)
                for number in range(count):
                    if len(runs) % _RUNS_IN_A_TURN == _RUNS_IN_A_TURN - 1:
                        # Thousands of short prompts are as much work as a long one.
                        await asyncio.sleep(0)
                    sampling = fitted
                    if first is not None:
                        sampling = msgspec.structs.replace(sampling, seed=nth_seed(first, number))
                    generation = msgspec.structs.replace(
                        prepared, id=task.id if single else f"{task.id}-{place * count + number}", sampling=sampling
                    )
                    runs.append(self.run(model, generation, tokenizer, limits))
        observation.answers, observation.n, observation.response_id = [run.progress for run in runs], count, task.id
        if task.scoring is not None and tokenizer is not None:
            prepared_prompts = [run.generation for run in runs[::count]]
            scores = await score_prompts(model, tokenizer, prepared_prompts, task.scoring, self.client)
            for place, run in enumerate(runs):
                run.prompt_logprobs = scores[place // count]
        return runs

    def run(self, model: ServedModel, generation: Generation, tokenizer: Tokenizer | None, limits: TimeLimits) -> Run:
        """Return the run of one *generation*, not yet started."""
        return Run(
            model,
            generation,
            client=self.client,
            limits=limits,
            background=self.background,
            tokenizer=tokenizer,
        )


def nth_seed(first: int, number: int) -> int:
    """Return the seed of answer *number*, counting from the client's *first*; never beyond what every backend takes."""
    if number == 0 or 0 <= first <= _SEEDS:
        return first + number
    return (first + number) % _SEEDS


async def prepare(model: ServedModel, tokenizer: Tokenizer | None, prompt: Prompt, task: Task) -> Generation:
    """Return the generation for one prompt of *task*: as text, or as token ids where the model takes those."""
    written = None
    if isinstance(prompt, Written):
        written = prompt.shown
        prompt = prompt.text
    capabilities = model.adapter.capabilities
    limit = None if tokenizer is None else longest_prompt(model, tokenizer)
    if tokenizer is not None and limit is not None and isinstance(prompt, str) and task.truncation is None:
        check_size(prompt, tokenizer, limit)
    if capabilities.tokens:
        if tokenizer is None:
            raise ConfigurationError(
                f"The model '{model.name}' takes token ids: give its tokenizer with --tokenizer {model.name}=SOURCE."
            )
        return await _as_ids(model, tokenizer, prompt, task)
    if not isinstance(prompt, str):
        raise UnsupportedParameter("This model does not take prompts as token ids.", param="prompt")
    truncation = _truncation(model, task)
    if truncation is not None:
        if tokenizer is None:
            raise UnsupportedParameter(
                "'truncate_prompt_tokens' needs the model's tokenizer, which is not configured.",
                param="truncate_prompt_tokens",
            )
        cut = await cut_text(tokenizer, prompt, truncation, special=model.adapter.hints.adds_bos)
        prompt, written = cut, written if cut == prompt else None
    echo = None
    if capabilities.echoes and tokenizer is not None and not (task.stream and capabilities.streaming):
        echo = await tokenizer.decode_async(await tokenizer.encode_async(prompt))
    ids = None
    if task.token_ids:
        if tokenizer is None:
            raise UnsupportedParameter(
                "'return_token_ids' needs the model's tokenizer, which is not configured (--tokenizer).",
                param="return_token_ids",
            )
        ids = tuple(await tokenizer.encode_async(prompt, model.adapter.hints.adds_bos))
    biases = task.sampling.logit_bias if capabilities.bias_words else ()
    words = await offload.run(lambda: bias_words(tokenizer, biases), size=len(biases), threshold=_INLINE_WORDS)
    return Generation(
        id=task.id,
        prompt=prompt,
        sampling=task.sampling,
        stream=task.stream,
        prompt_echo=echo,
        written=written,
        prompt_ids=ids,
        bias_words=words,
        scored=task.scored,
        token_ids=task.token_ids,
        guide=task.guide,
        lora=model.lora,
        kv_cache_block_size=model.settings.kv_cache_block_size,
        priority=task.priority,
        images=task.images,
    )


def _truncation(model: ServedModel, task: Task) -> Truncation | None:
    """Return what prompts are cut to; room is left for the answer, or for one token of it where its length is open."""
    if task.truncation is None:
        return None
    limit = model.settings.max_model_len
    answer = 1 if task.open_ended else task.sampling.max_tokens
    return task.truncation.within(None if limit is None else limit - answer)


async def _fitted(model: ServedModel, tokenizer: Tokenizer | None, generation: Generation, task: Task) -> Sampling:
    """
    Return the sampling of *generation* within the model's context, where that and the tokenizer are known.

    Where only a bound on prompts is known, nothing changes for prompts within it.
    """
    limit = model.settings.max_model_len
    longest = None if tokenizer is None else longest_prompt(model, tokenizer)
    if tokenizer is None or longest is None:
        return generation.sampling
    if limit is None and generation.prompt_ids is None and size_of(generation.prompt) <= longest:
        # No more tokens than bytes: there is nothing to count.
        return generation.sampling
    if generation.prompt_ids is not None:
        count = len(generation.prompt_ids)
    else:
        count = await tokenizer.count_async(generation.prompt, model.adapter.hints.adds_bos)
    if limit is None:
        if count > longest:
            raise too_long(count, longest)
        return generation.sampling
    return fit(generation.sampling, prompt_tokens=count, limit=limit, open_ended=task.open_ended, most=task.most)


async def _as_ids(model: ServedModel, tokenizer: Tokenizer, prompt: str | Sequence[int], task: Task) -> Generation:
    size = tokenizer.vocab_size
    truncation = _truncation(model, task)
    if isinstance(prompt, str):
        # A chat's template has written the special tokens itself; where the tokenizer adds them, they were taken off.
        if truncation is not None and truncation.keeps_special:
            prompt = await cut_text(tokenizer, prompt, truncation, special=model.adapter.hints.adds_bos)
        ids = await tokenizer.encode_async(prompt, model.adapter.hints.adds_bos)
        if truncation is not None and len(ids) > truncation.tokens:
            ids = list(cut_ids(ids, truncation))
            prompt = await tokenizer.decode_async(ids, skip_special_tokens=False)
    else:
        ids = list(prompt if truncation is None else cut_ids(prompt, truncation))
        unknown = outside(ids, size)
        if unknown is not None:
            raise InvalidRequest(
                f"'prompt' holds the token id {unknown}, and the model has {size} tokens.",
                param="prompt",
                code="invalid_value",
            )
    if not ids:
        raise InvalidRequest("The prompt is empty: there is nothing to continue.", param="prompt", code="invalid_value")
    pad = tokenizer.special_tokens.get("pad_token")
    # As vLLM does it: the same word has other ids at the start of a text and within it.
    forms = [form for word in task.sampling.bad_words for form in (word, f" {word}")]
    return Generation(
        id=task.id,
        prompt=prompt if isinstance(prompt, str) else await tokenizer.decode_async(ids, skip_special_tokens=False),
        prompt_ids=tuple(ids),
        vocabulary=Vocabulary(
            size=size,
            end_ids=tokenizer.eos_token_ids,
            pad_id=None if pad is None else tokenizer.token_id(pad),
        ),
        bad_word_ids=await offload.run(
            lambda: tuple(dict.fromkeys(tuple(tokenizer.encode(form)) for form in forms)),
            size=len(forms),
            threshold=_INLINE_WORDS,
        ),
        sampling=task.sampling,
        stream=task.stream,
        scored=task.scored,
        token_ids=task.token_ids,
        guide=task.guide,
        lora=model.lora,
        kv_cache_block_size=model.settings.kv_cache_block_size,
        priority=task.priority,
    )


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def service_of(request: web.Request) -> Service:
    """Return the service of the application that serves *request*."""
    return request.app[SERVICE]


def new_id(prefix: str) -> str:
    """Return a fresh object id such as ``chatcmpl-…``; it is also what Triton sees as the request's id."""
    return f"{prefix}-{secrets.token_hex(16)}"


def now() -> int:
    """Return the time as OpenAI's ``created`` has it: whole seconds since the epoch."""
    return int(time.time())


def may_use(request: web.Request, model: str) -> bool:
    """Return whether the model that clients call *model* is there for *request*."""
    key = request.get(KEY)
    return key is None or key.allows(model)


def check_may_manage(request: web.Request) -> None:
    """Raise :class:`ManagementDisabled` where the request's key may not load and unload models."""
    key = request.get(KEY)
    if key is not None:
        key.check_may_manage()


def check_opens_everything(request: web.Request) -> None:
    """Raise :class:`KeyNotSufficient` where the request's key opens certain models only."""
    key = request.get(KEY)
    if key is not None:
        key.check_opens_everything()


def observe(request: web.Request, operation: str, *, model: ServedModel, stream: bool = False) -> Observation:
    """Record the operation and the model of *request*, and return its record."""
    observation = request[OBSERVATION]
    observation.identify(operation, model=model.name, adapter=model.adapter.name, stream=stream)
    observation.response_model = model.answers_as
    request.app[OBSERVERS].identified(observation)
    return observation


async def find_model(request: web.Request, name: str) -> ServedModel:
    """
    Return the served model called *name*, or the default one where that is empty.

    Raises :class:`ModelNotFound`, also for a model that the request's key does not open, which for it is not there;
    and :class:`UpstreamUnavailable` when Triton does not answer or the model is not ready.
    """
    models = service_of(request).models
    name = models.wanted(name)
    if not may_use(request, name):
        raise ModelNotFound(name, hidden=True)
    return await models.find(name)
