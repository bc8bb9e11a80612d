"""
``POST /v1/completions``.

Source of the wire format: OpenAI's ``text_completion`` object (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.access import find_model
from triton_openai.api.bodies import read_json
from triton_openai.api.guides import guide_of
from triton_openai.api.logprobs import CompletionLogprobs, completion_logprobs
from triton_openai.api.parameters import REFUSED as SHARED_REFUSED
from triton_openai.api.parameters import (
    SamplingRequest,
    StreamOptions,
    priority,
    refuse,
    sampling,
    stream_options,
    truncation,
)
from triton_openai.api.prompts import prompts_of
from triton_openai.api.service import Service, Task, new_id, now, service_of
from triton_openai.api.sse import END, FIELD
from triton_openai.api.streaming import Collected, collect, stream
from triton_openai.api.usage import UsageObject, usage_of, usage_so_far
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from triton_openai.generation import Delta, FinishReason
from triton_openai.models import ServedModel
from triton_openai.running import Run
from triton_openai.telemetry.observation import observe

_encode = msgspec.json.Encoder().encode


class CompletionRequest(SamplingRequest, kw_only=True):
    """The request; ``prompt`` is one text, one list of token ids, or several of either."""

    prompt: str | list[str | int | list[int]]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    # Documented, and not honoured: refused unless neutral.
    suffix: str | None = None


REFUSED: Mapping[str, tuple[Any, ...]] = {**SHARED_REFUSED, "suffix": ("",)}


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    id: str
    object: str = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[Choice]
    usage: UsageObject | None = None


class CompletionChunks:
    """
    The chunks of one stream: *n* choices for each of *prompts*, which are repeated first with *echo*.

    What is the same in all chunks is encoded once.
    """

    def __init__(
        self, completion_id: str, model: str, *, prompts: Sequence[str], n: int, echo: bool, options: StreamOptions
    ) -> None:
        # The request
        head = {"id": completion_id, "object": "text_completion", "created": now(), "model": model}
        self._head = FIELD + _encode(head)[:-1] + b',"choices":[{"text":'
        self._prompts = prompts
        self._n = n
        self._echo = echo
        self._include_usage = bool(options.include_usage)
        self._continuous = bool(options.continuous_usage_stats)
        self._tail = b'],"usage":null}' + END if self._include_usage else b"]}" + END
        choices = range(len(prompts) * n)
        self._text_tails = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % choice + self._tail for choice in choices
        ]
        # The stream: characters of each choice so far
        self._offsets = [len(prompts[choice // n]) if echo else 0 for choice in choices]

    def first(self, choice: int) -> bytes:
        """Return the prompt with ``echo``, else nothing: a choice begins with its first text."""
        if not self._echo:
            return b""
        return self._head + _encode(self._prompts[choice // self._n]) + self._text_tails[choice]

    def piece(self, choice: int, delta: Delta, run: Run) -> bytes:
        """Return the chunk of a piece of text."""
        if not delta.logprobs and not self._continuous:
            return self._head + _encode(delta.text) + self._text_tails[choice]
        logprobs = None
        if delta.logprobs:
            logprobs, self._offsets[choice] = completion_logprobs(delta.logprobs, offset=self._offsets[choice])
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null}' % (choice, _encode(logprobs))
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
    model = await find_model(request, body.model)
    adapter = model.adapter.name
    observation = observe(request, "text_completion", model=body.model, adapter=adapter, stream=bool(body.stream))
    options = stream_options(body, always_usage=service.settings.api.always_include_usage)
    completion_id = new_id("cmpl")
    n = body.n or 1
    try:
        task = _task(service, model, body, completion_id)
        given = await prompts_of(model, body.prompt)
        runs = observation.answers = await service.runs(model, given, task)
        observation.n = task.n
        prompts = [run.generation.prompt for run in runs[:: task.n]]
        if body.stream:
            chunks = CompletionChunks(
                completion_id, body.model, prompts=prompts, n=n, echo=bool(body.echo), options=options
            )
            return await stream(request, runs, chunks, heartbeat=service.settings.server.heartbeat_interval)
        answers = await collect(runs, timeout=service.settings.triton.request_timeout)
    except ContextLengthExceeded as error:
        error.param = error.param or "prompt"
        raise
    completion = Completion(
        id=completion_id,
        object="text_completion",
        created=now(),
        model=body.model,
        choices=[
            _choice(body, index, prompts[index // n], answer)
            for index, answer in enumerate(_best(answers, n=n, of=task.n))
        ],
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
    if body.echo and body.logprobs is not None:
        raise UnsupportedParameter(
            "'echo' cannot be used with 'logprobs': the backend does not tell the prompt's log probabilities.",
            param="logprobs",
        )
    if not model.adapter.capabilities.generate:
        raise InvalidRequest(f"The model '{body.model}' does not generate text.", param="model")
    logprobs = body.logprobs
    if best_of > n and logprobs is None:
        # The answers are ranked by them.
        if not model.adapter.capabilities.logprobs:
            raise UnsupportedParameter(
                "'best_of' needs log probabilities, which this model does not give.", param="best_of"
            )
        logprobs = 0
    wanted = sampling(
        body,
        max_tokens=body.max_tokens,
        max_tokens_name="max_tokens",
        logprobs=logprobs,
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
    )


def _best(answers: Sequence[Collected], *, n: int, of: int) -> list[Collected]:
    """Return the *n* answers of each prompt with the highest cumulative log probability, of the *of* there are."""
    if n == of:
        return list(answers)
    best: list[Collected] = []
    for start in range(0, len(answers), of):
        group = answers[start : start + of]
        best += sorted(group, key=lambda answer: answer.run.cumulative_logprob, reverse=True)[:n]
    return best


def _choice(body: CompletionRequest, index: int, prompt: str, answer: Collected) -> Choice:
    before = prompt if body.echo else ""
    logprobs = None
    if body.logprobs is not None:
        logprobs, _ = completion_logprobs(answer.logprobs, offset=len(before))
    return Choice(text=before + answer.text, index=index, logprobs=logprobs, finish_reason=answer.run.finish_reason)
