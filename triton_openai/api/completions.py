"""
``POST /v1/completions``.

Source of the wire format: OpenAI's ``text_completion`` object (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from triton_openai import offload
from triton_openai.answer.prepare import GenerationSpec, Prompt
from triton_openai.answer.run import Run
from triton_openai.answer.run_group import Collected, answers_cost, collect
from triton_openai.api.bodies import NotNegative, encode, encode_each, json_reply_of, new_id, now, separated
from triton_openai.api.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    drop_prompt_logprobs,
    joined,
    narrowed,
    prompt_logprobs,
)
from triton_openai.api.parameters import Alternatives, GenerationOptions, completing
from triton_openai.api.service import RequestContext, Service, begin, runs_of, spec_of
from triton_openai.api.sse import Chunks
from triton_openai.api.usage import UsageObject, usage_of
from triton_openai.errors import InvalidValue, UnsupportedParameter, UpstreamError, missing
from triton_openai.generation import Delta, FinishReason
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Reply
from triton_openai.prompts.infill import fill, fim_form, known_fim_form
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.telemetry.request_record import RENDER


@completing
class CompletionRequest(GenerationOptions, kw_only=True):
    """
    The request; ``prompt`` is one text, one list of token ids, or several of either. A ``max_tokens`` of 0 asks for the
    prompt alone, with ``echo``.
    """

    # Null beside vLLM's prompt_embeds, which are refused by their own name.
    prompt: str | list[str | int | list[int]] | None
    max_tokens: NotNegative | None = None
    logprobs: Alternatives | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=20)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "logprobs", self.logprobs


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """
    One answer, or a piece of it. The last four fields are vLLM's: ``stop_reason`` is there once the answer has ended,
    the others when they were asked for.
    """

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """
    The whole answer, or one event of a stream, as in OpenAI's API.

    ``usage`` is left out if the tokens are not known. In a stream it is there on request, and null except in the
    last event, which has no choices.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: Sequence[CompletionChoice]
    usage: UsageObject | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType = UNSET


async def create(service: Service, call: Call[CompletionRequest]) -> Reply:
    """Complete one or several prompts; the choices are numbered prompt by prompt."""
    context = await begin(service, call)
    return await context.admitted(_answer, param="prompt")


async def _answer(context: RequestContext[CompletionRequest]) -> Reply:
    model = context.model
    body = context.body
    prompter = await model.prompter()
    spec = _spec(context, prompter)
    if body.prompt is None:
        raise missing("prompt")
    with context.record.stage(RENDER):
        prompts: Sequence[Prompt] = separated(body.prompt, "prompt")
        if body.suffix:
            prompts = _filled(prompts, body.suffix, model, prompter.tokenizer, echo=bool(body.echo))
    runs = await runs_of(context, prompter.tokenizer, prompts, spec)
    n = body.n or 1
    echoes = await offload.run(_echoes, body, runs, spec.n, cost=_echo_cost(spec, runs[:: spec.n]))
    size = n * sum(echo.size for echo in echoes)
    max_size = context.service.settings.server.max_body_size
    if size > max_size:
        if n > 1:
            param = "n"
        else:
            param = "prompt"
        raise InvalidValue(
            f"What the answers repeat of their prompts has more than {max_size} bytes together (server.max_body_size).",
            param,
        )
    if body.stream:
        return await context.stream(runs, CompletionChunks(context, spec, runs, echoes))
    answers = await collect(runs, timeout=context.limits.total)

    def completion() -> Completion:
        best = _best(answers, n=n, of=spec.n)
        return Completion(
            id=spec.template.id,
            created=now(),
            model=body.model,
            choices=encode_each(_choice(body, echoes[index // n], index, answer) for index, answer in enumerate(best)),
            usage=usage_of(runs, n=spec.n) or UNSET,
            system_fingerprint=model.fingerprint,
        )

    return await json_reply_of(completion, cost=offload.BYTE * size + answers_cost(answers))


def _spec(context: RequestContext[CompletionRequest], prompter: Prompter) -> GenerationSpec:
    body = context.body
    model = context.model
    n = body.n or 1
    if body.best_of is None:
        best_of = n
    else:
        best_of = body.best_of
    if best_of < n:
        raise InvalidValue("'best_of' must not be less than 'n'.", "best_of")
    if best_of > n and body.stream:
        raise InvalidValue("'best_of' cannot be used with 'stream'.", "best_of")
    if body.max_tokens == 0 and not body.echo:
        raise InvalidValue("'max_tokens' can be 0 only with 'echo'.", "max_tokens")
    echo_logprobs = None
    if body.echo:
        echo_logprobs = body.logprobs
    spec = spec_of(
        context,
        body,
        new_id("cmpl"),
        prompter,
        n=best_of,
        echo_logprobs=echo_logprobs,
        cumulative_logprob=best_of > n,
        adds_special=body.add_special_tokens is not False,
    )
    if best_of > n and not model.adapter.capabilities.cumulative_logprob:
        raise UnsupportedParameter(
            "'best_of' needs log probabilities, which this model does not report.", param="best_of"
        )
    if context.service.settings.api.strict_parameters:
        return spec
    return replace(spec, limit=replace(spec.limit, open=True))


def _filled(
    prompts: Sequence[Prompt], suffix: str, model: ServedModel, tokenizer: Tokenizer | None, *, echo: bool
) -> Sequence[str]:
    """Return prompts for the text between each of *prompts* and *suffix*. Raises :class:`InvalidRequest`."""
    form = fim_form(model.settings.fim_template, tokenizer)
    if form is None:
        known = known_fim_form(tokenizer)
        if known:
            hint = f" Its tokenizer has the tokens of the form '{known}', which can be configured."
        else:
            hint = ""
        raise UnsupportedParameter(
            f"The model is not configured to fill in the middle (fim_template).{hint}", param="suffix"
        )
    if echo:
        raise UnsupportedParameter("'echo' cannot be used with 'suffix'.", param="echo")
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise UnsupportedParameter("'suffix' cannot be used with prompts as token ids.", param="suffix")
    return [fill(form, text, suffix) for text in texts]


def _best(answers: Sequence[Collected], *, n: int, of: int) -> list[Collected]:
    """Return the *n* answers of each prompt with the highest cumulative log probability; it has *of* of *answers*."""
    if n == of:
        return list(answers)
    best: list[Collected] = []
    for start in range(0, len(answers), of):
        group = answers[start : start + of]
        best += sorted(group, key=_likelihood, reverse=True)[:n]
    return best


def _likelihood(answer: Collected) -> float:
    logprob = answer.run.progress.cumulative_logprob
    if logprob is None:
        raise UpstreamError("'best_of' needs the log probabilities of the answers, which the model did not send.")
    return logprob


class _Echo(NamedTuple):
    """What all answers to a prompt repeat of it, as far as they are to."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: Any
    ids: Any
    #: About how many bytes all of it has.
    size: int


def _echoes(body: CompletionRequest, runs: Sequence[Run], n: int) -> list[_Echo]:
    """Return what the answers repeat of their prompts, of which each has *n* of *runs*."""
    echoes = [_echo(body, run) for run in runs[::n]]
    drop_prompt_logprobs(runs)
    return echoes


def _echo(body: CompletionRequest, run: Run) -> _Echo:
    if body.echo:
        text = run.generation.shown_prompt
    else:
        text = ""
    logprobs: CompletionLogprobs | None = None
    scores: Any = UNSET
    ids: Any = UNSET
    size = len(text)
    if body.echo and body.logprobs is not None:
        logprobs = _encode_logprobs(completion_logprobs(narrowed(run.prompt_logprobs, body.logprobs), offset=0)[0])
        size += len(encode(logprobs))
    if body.prompt_logprobs is not None:
        entries = prompt_logprobs(narrowed(run.prompt_logprobs, body.prompt_logprobs))
        scores = msgspec.Raw(encode(encode_each(entries)))
        size += len(scores)
    if body.return_token_ids:
        ids = msgspec.Raw(encode(run.generation.prompt_ids or ()))
        size += len(ids)
    return _Echo(text, logprobs, scores, ids, size)


def _encode_logprobs(logprobs: CompletionLogprobs) -> CompletionLogprobs:
    return replace(logprobs, top_logprobs=encode_each(logprobs.top_logprobs))


def _echo_cost(spec: GenerationSpec, runs: Sequence[Run]) -> float:
    """Return about how many microseconds :func:`_echoes` takes for *runs*."""
    if spec.template.token_ids:
        ids = sum(len(run.generation.prompt_ids or ()) for run in runs)
    else:
        ids = 0
    if spec.prompt_scoring is None:
        alternatives = None
    else:
        alternatives = spec.prompt_scoring.count
    return offload.BYTE * ids + offload.logprobs_cost(sum(len(run.prompt_logprobs) for run in runs), alternatives)


def _choice(body: CompletionRequest, echo: _Echo, index: int, answer: Collected) -> CompletionChoice:
    """Return a choice of the whole answer."""
    run = answer.run
    logprobs = echo.logprobs
    if body.logprobs is not None:
        own = _encode_logprobs(completion_logprobs(answer.logprobs, offset=len(echo.text))[0])
        if logprobs is None:
            logprobs = own
        else:
            logprobs = joined(logprobs, own)
    token_ids: Sequence[int] | UnsetType = UNSET
    if body.return_token_ids:
        token_ids = answer.token_ids
    return CompletionChoice(
        text=echo.text + answer.text,
        index=index,
        logprobs=logprobs,
        finish_reason=run.progress.finish_reason,
        stop_reason=run.progress.stop_reason,
        prompt_logprobs=echo.prompt_logprobs,
        prompt_token_ids=echo.ids,
        token_ids=token_ids,
    )


class CompletionChunks(Chunks):
    """The chunks of one stream."""

    def __init__(
        self, context: RequestContext[Any], spec: GenerationSpec, runs: Sequence[Run], echoes: Sequence[_Echo]
    ) -> None:
        super().__init__(
            "text_completion",
            spec,
            runs,
            model=context.body.model,
            fingerprint=context.model.fingerprint,
            options=context.body.stream_options,
            always_usage=context.service.settings.api.always_include_usage,
        )
        # That of each prompt in JSON: the text, the log probabilities and the ids.
        self._echoes = [self._encoded(echo) for echo in echoes]
        self._text = self._head + b'{"text":'
        self._body = context.body
        self._text_tails = [
            b',"index":%d,"logprobs":null,"finish_reason":null}' % choice + self._tail for choice in range(len(runs))
        ]
        # Characters of each choice so far
        self._offsets = [0] * len(runs)
        if context.body.echo:
            self._offsets = [len(run.generation.shown_prompt) for run in runs]

    def _encoded(self, echo: _Echo) -> tuple[bytes, bytes, bytes]:
        ids = b""
        if self._ids:
            ids = encode(echo.ids)
        return encode(echo.text), encode(echo.logprobs), ids

    def first(self, choice: int) -> bytes:
        """Return the prompt with ``echo``, and its ids; else nothing: a choice begins with its first text."""
        if not self._body.echo and not self._ids:
            return b""
        text, logprobs, ids = self._echoes[choice // self._n]
        if self._ids:
            ids = b',"prompt_token_ids":%b,"token_ids":[]' % ids
        else:
            ids = b""
        # Copied once: together, the choices may be tens of megabytes.
        index = b',"index":%d,"logprobs":' % choice
        end = b',"finish_reason":null%b}' % ids
        return b"".join((self._text, text, index, logprobs, end, self._tail))

    def piece(self, choice: int, delta: Delta) -> bytes:
        if not delta.logprobs and not self._continuous and not self._ids:
            return self._text + encode(delta.text) + self._text_tails[choice]
        if self._continuous:
            self._shown[choice] += delta.tokens or 0
        logprobs = None
        if delta.logprobs:
            logprobs, self._offsets[choice] = completion_logprobs(delta.logprobs, offset=self._offsets[choice])
        if self._ids:
            ids = b',"token_ids":%b' % encode(list(delta.token_ids))
        else:
            ids = b""
        tail = b',"index":%d,"logprobs":%b,"finish_reason":null%b}' % (choice, encode(logprobs), ids)
        return self._text + encode(delta.text) + tail + self._counted(choice)

    def last(self, choice: int) -> bytes:
        """Return the chunk with the finish reason."""
        progress = self._runs[choice].progress
        reasons = (encode(progress.finish_reason), encode(progress.stop_reason))
        end = b'"","index":%d,"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (choice, *reasons)
        return self._text + end + self._ended(choice)
