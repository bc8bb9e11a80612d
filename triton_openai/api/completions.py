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
from triton_openai.api.bodies import json_response, missing
from triton_openai.api.completion_response import Completion, CompletionChunks, Echo, completion_choice
from triton_openai.api.generate import Task, runs_of, task_of
from triton_openai.api.parameters import SamplingRequest
from triton_openai.api.prompts import filled, prompts_of
from triton_openai.api.service import RequestContext, begin, new_id, now
from triton_openai.api.sse import stream
from triton_openai.api.usage import usage_of
from triton_openai.errors import InvalidValue, UnsupportedParameter, UpstreamError
from triton_openai.telemetry.observation import RENDER


class CompletionRequest(SamplingRequest, kw_only=True):
    """
    The request; ``prompt`` is one text, one list of token ids, or several of either. A ``max_tokens`` of 0 asks for the
    prompt alone, with ``echo``.
    """

    # Null beside vLLM's prompt_embeds, which are refused by their own name.
    prompt: str | list[str | int | list[int]] | None
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def alternatives(self) -> tuple[str, int | None]:
        """The number of alternatives to each token, behind its name; ``None`` for no log probabilities."""
        return "logprobs", self.logprobs


async def handle(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts; the choices are numbered prompt by prompt."""
    context = await begin(request, CompletionRequest, "text_completion")
    return await context.admitted(_answer, param="prompt")


async def _answer(context: RequestContext[CompletionRequest]) -> web.StreamResponse:
    model, body = context.model, context.body
    task = await _task(context)
    if body.prompt is None:
        raise missing("prompt")
    special = body.add_special_tokens is not False
    with context.observation.stage(RENDER):
        if body.suffix:
            given = await filled(model, body.prompt, body.suffix, echo=bool(body.echo), special=special)
        else:
            given = await prompts_of(model, body.prompt, special=special)
    runs = await runs_of(context, given, task)
    echo = Echo(body.logprobs) if body.echo else None
    if body.stream:
        return await stream(context, runs, CompletionChunks(context, task, runs, echo))
    answers = await collect(runs, timeout=context.limits.total)
    completion = Completion(
        id=task.id,
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
            for index, answer in enumerate(_best(answers, n=body.n or 1, of=task.n))
        ],
        usage=usage_of([run.progress.usage for run in runs], n=task.n) or msgspec.UNSET,
        system_fingerprint=model.fingerprint,
    )
    return json_response(completion)


async def _task(context: RequestContext[CompletionRequest]) -> Task:
    body, model = context.body, context.model
    n = body.n or 1
    # 1 is the default.
    best_of = n if body.best_of in (None, 1) else body.best_of
    if best_of < n:
        raise InvalidValue("'best_of' must not be less than 'n'.", "best_of")
    if best_of > n and body.stream:
        raise InvalidValue("'best_of' cannot be used with 'stream'.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidValue("'max_tokens' can be 0 only with 'echo'.", "max_tokens")
    task = task_of(
        context,
        new_id("cmpl"),
        defaults=model.default_parameters(await model.prompter()),
        n=best_of,
        echo_logprobs=body.logprobs if body.echo else None,
        cumulative_logprob=best_of > n,
    )
    if task.cumulative_logprob and not model.adapter.capabilities.cumulative_logprob:
        raise UnsupportedParameter(
            "'best_of' needs log probabilities, which this model does not give.", param="best_of"
        )
    return task


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
        raise UpstreamError("'best_of' needs the log probabilities of the answers, which the model did not send.")
    return found
