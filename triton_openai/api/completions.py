"""
``POST /v1/completions``.

Source of the wire format: OpenAI's ``text_completion`` object (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.access import model_of
from triton_openai.api.bodies import read_json
from triton_openai.api.guides import guide_of
from triton_openai.api.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    joined,
    narrowed,
    prompt_logprobs,
)
from triton_openai.api.parameters import REFUSED as SHARED_REFUSED
from triton_openai.api.parameters import (
    SamplingRequest,
    StreamOptions,
    priority,
    refuse,
    sampling,
    scoring,
    stream_options,
    token_ids,
    truncation,
)
from triton_openai.api.prompts import filled, prompts_of
from triton_openai.api.service import Service, Task, new_id, now, service_of
from triton_openai.api.sse import END, FIELD
from triton_openai.api.streaming import Collected, collect, stream
from triton_openai.api.usage import UsageObject, usage_of, usage_so_far
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import Delta, FinishReason
from triton_openai.models import ServedModel
from triton_openai.running import Run
from triton_openai.telemetry.observation import Observation, observe
from triton_openai.time_limits import TimeLimits

_encode = msgspec.json.Encoder().encode


class CompletionRequest(SamplingRequest, kw_only=True):
    """
    The request; ``prompt`` is one text, one list of token ids, or several of either. A ``max_tokens`` of 0 asks for the
    prompt alone, with ``echo``.
    """

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    suffix: str | None = None


REFUSED: Mapping[str, tuple[Any, ...]] = SHARED_REFUSED


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The last three fields are vLLM's, there when they were asked for."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    id: str
    object: Literal["text_completion"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[Choice]
    usage: UsageObject | None = None


class Echo(msgspec.Struct, frozen=True):
    """The prompt before an answer; *count* is how many alternatives to its tokens are told, ``None`` for no tokens."""

    count: int | None

    def logprobs(self, run: Run) -> CompletionLogprobs | None:
        """Return the log probabilities of the prompt's tokens, where they are told."""
        if self.count is None:
            return None
        return completion_logprobs(narrowed(run.prompt_logprobs, self.count), offset=0)[0]


class CompletionChunks:
    """
    The chunks of one stream: *n* choices for each prompt, answered by *runs*, which begin with *echo*.

    What is the same in all chunks is encoded once.
    """

    def __init__(
        self, completion_id: str, model: str, *, runs: Sequence[Run], n: int, echo: Echo | None, options: StreamOptions
    ) -> None:
        # The request
        head = {"id": completion_id, "object": "text_completion", "created": now(), "model": model}
        self._head = FIELD + _encode(head)[:-1] + b',"choices":[{"text":'
        self._n = n
        self._echo = echo
        self._ids = any(run.generation.token_ids for run in runs)
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}' + END if self._include_usage else b"]}" + END
        choices = range(len(runs))
        self._text_tails = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % choice + self._tail for choice in choices
        ]
        # The stream: characters of each choice so far
        self._offsets = [len(run.generation.prompt) if echo is not None else 0 for run in runs]

    def first(self, choice: int, run: Run) -> bytes:
        """Return the prompt with ``echo``, and its ids; else nothing: a choice begins with its first text."""
        echo = self._echo
        if echo is None and not self._ids:
            return b""
        text = "" if echo is None else run.generation.prompt
        logprobs = None if echo is None else echo.logprobs(run)
        ids = b',"prompt_token_ids":%b,"token_ids":[]' % _encode(run.generation.prompt_ids) if self._ids else b""
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null%b}' % (choice, _encode(logprobs), ids)
        return self._head + _encode(text) + tail + self._tail

    def piece(self, choice: int, delta: Delta, run: Run) -> bytes:
        """Return the chunk of a piece of text."""
        if not delta.logprobs and not self._continuous and not self._ids:
            return self._head + _encode(delta.text) + self._text_tails[choice]
        logprobs = None
        if delta.logprobs:
            logprobs, self._offsets[choice] = completion_logprobs(delta.logprobs, offset=self._offsets[choice])
        ids = b',"token_ids":%b' % _encode(list(delta.token_ids)) if self._ids else b""
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null%b}' % (choice, _encode(logprobs), ids)
        return self._head + _encode(delta.text) + tail + self._counted(run)

    def last(self, choice: int, run: Run) -> bytes:
        """Return the chunk with the finish reason."""
        end = b'"","index":%d,"logprobs":null,"finish_reason":%b}' % (choice, _encode(run.finish_reason))
        return self._head + end + self._counted(run)

    def usage(self, runs: Sequence[Run]) -> bytes:
        """Return the chunk with the usage, if the client wants it and it is known."""
        usage = usage_of(runs, n=self._n) if self._include_usage else None
        if usage is None:
            return b""
        return self._head.removesuffix(b'{"text":') + b'],"usage":' + _encode(usage) + b"}" + END

    def _counted(self, run: Run) -> bytes:
        usage = usage_so_far([run]) if self._continuous else None
        return self._tail if usage is None else b'],"usage":' + _encode(usage) + b"}" + END


async def handle(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts; the choices are numbered prompt by prompt."""
    service = service_of(request)
    body = await read_json(request, CompletionRequest, strict=service.settings.api.strict_parameters)
    model = await model_of(request, body)
    observation = observe(request, "text_completion", model=model, stream=bool(body.stream))
    observation.parameters = body
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=bool(body.stream))
    async with service.admission.enter(model.owner, observation, patience=limits.patience):
        limits = limits.after(observation.queued_seconds)
        return await _answer(request, service, model, body, observation, limits)


async def _answer(
    request: web.Request,
    service: Service,
    model: ServedModel,
    body: CompletionRequest,
    observation: Observation,
    limits: TimeLimits,
) -> web.StreamResponse:
    options = stream_options(body, always_usage=service.settings.api.always_include_usage)
    completion_id = new_id("cmpl")
    n = body.n or 1
    try:
        task = _task(service, model, body, completion_id)
        with observation.stage("render prompt"):
            if body.suffix:
                given = await filled(model, body.prompt, body.suffix, echo=bool(body.echo))
            else:
                given = await prompts_of(model, body.prompt)
        runs = await service.runs(model, given, task, limits=limits, observation=observation)
        echo = Echo(body.logprobs) if body.echo else None
        if body.stream:
            chunks = CompletionChunks(completion_id, body.model, runs=runs, n=n, echo=echo, options=options)
            heartbeat = service.settings.server.heartbeat_interval
            return await stream(request, runs, chunks, heartbeat=heartbeat, timeout=limits.total)
        answers = await collect(runs, timeout=limits.total)
    except ContextLengthExceeded as error:
        error.param = error.param or "prompt"
        raise
    completion = Completion(
        id=completion_id,
        object="text_completion",
        created=now(),
        model=body.model,
        choices=[_choice(body, index, echo, answer) for index, answer in enumerate(_best(answers, n=n, of=task.n))],
        usage=usage_of(runs, n=task.n),
    )
    return web.Response(body=_encode(completion), content_type="application/json")


def _task(service: Service, model: ServedModel, body: CompletionRequest, completion_id: str) -> Task:
    refuse(body, REFUSED)
    n, best_of = body.n or 1, body.best_of or body.n or 1
    if best_of < n:
        raise InvalidRequest("'best_of' must not be less than 'n'.", param="best_of", code="invalid_value")
    if best_of > n and body.stream:
        raise InvalidRequest("'best_of' cannot be used with 'stream'.", param="best_of", code="invalid_value")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("'max_tokens' can be 0 with 'echo' only.", param="max_tokens", code="invalid_value")
    if not model.adapter.capabilities.generate:
        raise InvalidRequest(f"The model '{body.model}' does not generate text.", param="model")
    if best_of > n and not model.adapter.capabilities.cumulative_logprob:
        raise UnsupportedParameter(
            "'best_of' needs log probabilities, which this model does not give.", param="best_of"
        )
    wanted = sampling(
        body,
        max_tokens=body.max_tokens,
        max_tokens_name="max_tokens",
        logprobs=body.logprobs,
        defaults=model.settings.default_parameters,
        default_max_tokens=service.settings.api.default_max_tokens,
        adapter=model.adapter,
    )
    guide = guide_of(body, model.adapter.capabilities.guides)
    open_ended = body.max_tokens is None and model.settings.default_parameters.max_tokens is None
    return Task(
        id=completion_id,
        sampling=wanted,
        n=best_of,
        guide=guide,
        open_ended=open_ended,
        truncation=truncation(body),
        priority=priority(body, model.priorities),
        scored=best_of > n,
        token_ids=token_ids(body, model.adapter),
        scoring=scoring(
            body,
            model.adapter,
            echoed=body.logprobs if body.echo else None,
            timeout=service.settings.triton.request_timeout,
        ),
    )


def _best(answers: Sequence[Collected], *, n: int, of: int) -> list[Collected]:
    """Return the *n* answers of each prompt with the highest cumulative log probability, of the *of* there are."""
    if n == of:
        return list(answers)
    best: list[Collected] = []
    for start in range(0, len(answers), of):
        group = answers[start : start + of]
        best += sorted(group, key=_likelihood, reverse=True)[:n]
    return best


def _likelihood(answer: Collected) -> float:
    found = answer.run.cumulative_logprob
    if found is None:
        raise UpstreamError("The model did not tell how likely its answers are, which 'best_of' needs.")
    return found


def _choice(body: CompletionRequest, index: int, echo: Echo | None, answer: Collected) -> Choice:
    run = answer.run
    before = run.generation.prompt if echo is not None else ""
    logprobs = None
    if body.logprobs is not None:
        logprobs, _ = completion_logprobs(answer.logprobs, offset=len(before))
        asked = echo.logprobs(run) if echo is not None else None
        logprobs = logprobs if asked is None else joined(asked, logprobs)
    wanted = body.prompt_logprobs
    ids = bool(body.return_token_ids)
    return Choice(
        text=before + answer.text,
        index=index,
        logprobs=logprobs,
        finish_reason=run.finish_reason,
        prompt_logprobs=msgspec.UNSET if wanted is None else prompt_logprobs(narrowed(run.prompt_logprobs, wanted)),
        prompt_token_ids=(run.generation.prompt_ids or ()) if ids else msgspec.UNSET,
        token_ids=answer.token_ids if ids else msgspec.UNSET,
    )
