"""
``POST /v1/completions``.

Source of the wire format: OpenAI's ``text_completion`` object (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.answer.fan_out import Collected, collect
from triton_openai.api.bodies import json_response
from triton_openai.api.completion_response import Completion, CompletionChunks, Echo, completion_choice
from triton_openai.api.context import RequestContext, begin
from triton_openai.api.parameters import (
    SamplingRequest,
    guide_of,
    neutral_values,
    priority,
    sampling,
    scoring,
    stream_options,
    token_ids,
    truncation,
)
from triton_openai.api.prompts import filled, prompts_of
from triton_openai.api.service import Service, Task, new_id, now
from triton_openai.api.sse import stream
from triton_openai.api.usage import usage_of
from triton_openai.config import DefaultParameters
from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.models.served import ServedModel

_encode = msgspec.json.Encoder().encode


class CompletionRequest(SamplingRequest, kw_only=True):
    """
    The request; ``prompt`` is one text, one list of token ids, or several of either. A ``max_tokens`` of 0 asks for the
    prompt alone, with ``echo``.
    """

    # Null beside vLLM's prompt_embeds, which are refused by their own name.
    prompt: str | list[str | int | list[int]] | None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


REFUSED = neutral_values(CompletionRequest)


async def handle(request: web.Request) -> web.StreamResponse:
    """Continue one or several prompts; the choices are numbered prompt by prompt."""
    context = await begin(request, CompletionRequest, "text_completion", refused=REFUSED)
    async with context.admitted(param="prompt"):
        return await context.answered(_answer)


async def _answer(context: RequestContext[CompletionRequest]) -> web.StreamResponse:
    service, model, body = context.service, context.model, context.body
    observation, limits = context.observation, context.limits
    options = stream_options(body, always_usage=service.settings.api.always_include_usage)
    completion_id = new_id("cmpl")
    n = body.n or 1
    task = _task(service, model, body, completion_id, await model.default_parameters())
    if body.prompt is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt", code="missing_required_parameter")
    special = body.add_special_tokens is not False
    with observation.stage("render prompt"):
        if body.suffix:
            given = await filled(model, body.prompt, body.suffix, echo=bool(body.echo), special=special)
        else:
            given = await prompts_of(model, body.prompt, special=special)
    runs = await service.runs(model, given, task, limits=limits, observation=observation)
    echo = Echo(body.logprobs) if body.echo else None
    if body.stream:
        chunks = CompletionChunks(
            completion_id,
            body.model,
            runs,
            n=n,
            echo=echo,
            options=options,
            fingerprint=model.fingerprint,
        )
        heartbeat = service.settings.server.heartbeat_interval
        return await stream(context.request, runs, chunks, heartbeat=heartbeat, timeout=limits.total)
    answers = await collect(runs, timeout=limits.total)
    completion = Completion(
        id=completion_id,
        object="text_completion",
        created=now(),
        model=body.model,
        choices=[
            completion_choice(
                index,
                echo,
                answer,
                logprobs=body.logprobs is not None,
                prompt_alternatives=body.prompt_logprobs,
                token_ids=bool(body.return_token_ids),
            )
            for index, answer in enumerate(_best(answers, n=n, of=task.n))
        ],
        usage=usage_of(runs, n=task.n) or msgspec.UNSET,
        system_fingerprint=model.fingerprint,
    )
    return json_response(completion)


def _task(
    service: Service, model: ServedModel, body: CompletionRequest, completion_id: str, defaults: DefaultParameters
) -> Task:
    n, best_of = body.n or 1, body.best_of or 1
    if best_of == 1:
        # The default.
        best_of = n
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
        defaults=defaults,
        default_max_tokens=service.settings.api.default_max_tokens,
        adapter=model.adapter,
    )
    guide = guide_of(body, model.adapter.capabilities.guides)
    open_ended = body.max_tokens is None and model.settings.default_parameters.max_tokens is None
    return Task(
        id=completion_id,
        sampling=wanted,
        stream=bool(body.stream),
        n=best_of,
        guide=guide,
        open_ended=open_ended,
        most=defaults.max_tokens,
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
    found = answer.run.progress.cumulative_logprob
    if found is None:
        raise UpstreamError("The model did not tell how likely its answers are, which 'best_of' needs.")
    return found
