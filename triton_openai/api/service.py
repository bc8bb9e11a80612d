"""What operations work with: the running service, and the context of a request to a model."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec
import structlog
from msgspec.structs import replace

from triton_openai.access.authorizer import Authorizer, gateway_header
from triton_openai.access.keys import ApiKey
from triton_openai.answer.job_run import run_job
from triton_openai.answer.limits import TimeLimits
from triton_openai.answer.logits_reader import score_prompts
from triton_openai.answer.prepare import GenerationSpec, Prompt, prepare
from triton_openai.answer.run import Run
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.api import parameters
from triton_openai.api.bodies import ModelRequest, report_ignored
from triton_openai.api.guides import guide_of, guide_options
from triton_openai.api.responses.stored import ResponseStore
from triton_openai.batches.batch_runner import BatchRunner
from triton_openai.batches.file_folder import Files
from triton_openai.byte_budget import ByteBudget
from triton_openai.config.tree import Settings
from triton_openai.config.worker import Worker
from triton_openai.errors import (
    InvalidRequest,
    InvalidValue,
    PromptRefused,
    ServiceError,
    UnsupportedParameter,
)
from triton_openai.generation import Generation
from triton_openai.jobs import Job, JobType, Result
from triton_openai.media.images import ImageLoader
from triton_openai.models.canary import Canary
from triton_openai.models.control import ModelControl
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Operation, PrepareRuns, Renderer, Reply
from triton_openai.prompts.origins import CHAT_ORIGINS, Origins
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation
from triton_openai.serving.admission import Admission
from triton_openai.serving.execution import Executor
from triton_openai.tasks import Background
from triton_openai.telemetry.exposition import Exposition
from triton_openai.telemetry.request_record import TOKENIZE, RequestRecord
from triton_openai.triton.fleet import Fleet
from triton_openai.triton.leasing import Attempts
from triton_openai.triton.route import Route
from triton_openai.triton.routing import session_key

_log = structlog.get_logger(__name__)


class _Metadata(msgspec.Struct):
    """What is read of the ``metadata`` of Anthropic's API."""

    user_id: str | int | None = None


# The fields that say what a request is part of, the narrowest first: the first is vLLM's, the others are OpenAI's.
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "safety_identifier", "user")
# Bytes of the JSON of such a field. Longer ones are ignored: reading them would take too long.
_MAX_SESSION_SIZE = 4096
# The header of an answer that may have fewer tokens than its request asks for: the most that fit the context.
_LIMITED_HEADER = "x-max-tokens"
_Body = TypeVar("_Body")
_Other = TypeVar("_Other")
_Request = TypeVar("_Request", bound=ModelRequest)
_Answer = TypeVar("_Answer")
_Result = TypeVar("_Result", bound=Result)


@dataclass
class Service:
    """The parts of the running service. ``settings`` is replaced as a whole when the settings change."""

    settings: Settings
    models: Models
    control: ModelControl
    fleet: Fleet
    background: Background
    admission: Admission
    images: ImageLoader
    worker: Worker
    executor: Executor
    #: Runs the requests that the service itself sends to models.
    probes: Executor
    authorizer: Authorizer
    canary: Canary
    exposition: Exposition
    responses: ResponseStore
    #: The table of what is served.
    operations: Sequence[Operation]
    #: Files and what runs batches; ``None`` where they are off.
    files: Files | None = None
    batches: BatchRunner | None = None
    #: Bytes of media in memory: files that are uploaded, and what is decoded of them and of chats.
    media: ByteBudget = field(default_factory=ByteBudget)
    #: The open realtime sessions, by the names of their keys.
    realtime_sessions: Counter[str] = field(default_factory=Counter)

    async def find_model(self, name: str, key: ApiKey) -> ServedModel:
        """
        Return the served model called *name*, or the default model if the name is empty.

        Raises :class:`ModelNotFound`, also for a model that *key* may not use, and :class:`UpstreamUnavailable` if
        Triton does not answer or the model is not ready.
        """
        return await self.models.find(name, key)


class RequestContext(msgspec.Struct, Generic[_Body], eq=False):
    """A request to a model, and what its operation works with."""

    call: Call[Any]
    service: Service
    body: _Body
    model: ServedModel
    record: RequestRecord
    #: The time that is left after the wait for admission.
    limits: TimeLimits
    #: What the client says that the request is part of, for the policy ``affinity``.
    session: str | None = None
    #: The id of the conversation, or of the response with which a chain began, that the request goes on from.
    conversation: str | None = None
    #: The Tritons that have failed for the request, where it goes on with another variant of the model.
    tried: Attempts | None = None

    def about(self, body: _Other) -> RequestContext[_Other]:
        """Return the context with another *body*."""
        context: RequestContext[Any] = replace(self, body=body)
        return context

    def forget_messages(self) -> None:
        """
        Free the messages of the body, when all that Triton gets is made of them.

        They take as much memory again as the prompt, and the garbage collector looks at each while the event loop
        waits. They stay where another variant of the model may get the request, and where contents are logged.
        """
        model = self.model
        settings = self.service.settings
        if not (model.variants or model.text_level or settings.server.log_content or settings.traces.content):
            # Wherever the list is: the request, the conversation, or the record.
            self.body.messages.clear()  # type: ignore[attr-defined]

    def upstream(self) -> UpstreamClient:
        """Return what sends the work for the request to Triton; of several Tritons, the way is recorded from now on."""
        fleet = self.service.fleet
        model = self.model
        key = None
        if len(fleet.members) > 1:
            key = self._key()
        if model.lora is None:
            lora = ""
        else:
            lora = model.lora.name
        route = Route(
            fleet.leasing,
            model.triton_model,
            among=model.endpoints,
            key=key,
            lora=lora,
            previous_attempts=self.tried,
            # What runs batches begins a line again, alone.
            resends_lost=self.record.batch is None,
            prefers=self.record.preferred_endpoint,
        )
        if fleet.leasing.single is None:
            self.record.route = route
        # Lines of batches come last.
        if self.record.batch is None:
            priority = 0
        else:
            priority = model.priorities
        return UpstreamClient(route, self.record.call_tracer, self.service.background, priority)

    def _key(self) -> str | None:
        """Return what should stay at one Triton: the session of the request, or its conversation."""
        leasing = self.service.fleet.leasing
        if leasing.policy(self.model.triton_model) != "affinity":
            return None
        return session_key(leasing.routing, ("session", self.session), ("conversation", self.conversation))

    def stream(self, runs: Sequence[Run], renderer: Renderer) -> Awaitable[Reply]:
        """Stream *runs* to the caller, rendered by *renderer*. Raises as :meth:`Output.stream`."""
        return self.call.output.stream(runs, renderer, timeout=self.limits.total)

    def stream_later(self, prepare: PrepareRuns, renderer: Renderer) -> Awaitable[Reply]:
        """Stream the runs that *prepare* makes, as :meth:`Output.stream_later`. Raises as :meth:`Output.stream`."""
        return self.call.output.stream_later(prepare, renderer, timeout=self.limits.total)

    def send_parts(self, parts: AsyncGenerator[bytes, None], media_type: str | None = None) -> Awaitable[Reply]:
        """Send *parts*, of a file of *media_type* or else events. Raises as :meth:`Output.send_parts`."""
        return self.call.output.send_parts(parts, timeout=self.limits.total, media_type=media_type)

    async def result_of(self, job: Job[_Result], *, cut: Truncation | None = None, param: str = "input") -> _Result:
        """
        Wait for admission, and return the result of *job*, whose inputs are truncated as *cut* says.

        The id and the tokens of *job* are recorded. *param* and errors are those of :meth:`admitted`.
        """
        self.record.response_id = job.id
        result = await self.admitted(
            lambda context: run_job(context.upstream(), context.model, job, cut=cut, timeout=context.limits.total),
            param=param,
        )
        self.record.input_tokens = result.prompt_tokens
        return result

    async def admitted(
        self, answer: Callable[[RequestContext[_Body]], Awaitable[_Answer]], *, param: str, runs: bool = True
    ) -> _Answer:
        """
        Wait for admission, and return what *answer* returns for this context, which counts as running.

        The wait counts towards the limits. What only prepares an answer, and so *runs* not, does not wait. A text-level
        model may be served by its token-level engine. If the engine does not take the request, the text-level model
        gets it. *param* is the field to blame if the model refuses the input and names no field. Raises as
        :meth:`Admission.enter`, and the engine's :class:`UnsupportedParameter` if neither takes the request.
        """
        admission = self.service.admission
        triton_model = self.model.triton_model
        task = None
        if runs:
            task = await admission.enter(triton_model, self.record, patience=self.limits.patience)
        try:
            if runs and self.record.queued_seconds:
                self.limits = self.limits.after(self.record.queued_seconds)
            try:
                return await answer(self)
            except ServiceError as failure:
                for other in self._others(failure):
                    with contextlib.suppress(InvalidRequest):
                        return await answer(other)
                raise
        except PromptRefused as error:
            error.param = error.param or param
            raise
        finally:
            if runs:
                admission.leave(triton_model, task)

    def _others(self, failure: ServiceError) -> Iterator[RequestContext[_Body]]:
        """Yield the other ways in which the model may take a request, by the most usual one first."""
        if self.model.text_level is not None and isinstance(failure, UnsupportedParameter):
            yield replace(self, model=self.model.on_text_level("its engine does not take the request"))
        tried = None
        if isinstance(self.record.route, Route):
            tried = self.record.route.exhausted
        if tried is not None or isinstance(failure, InvalidRequest):
            fleet = self.service.fleet
            name = self.model.triton_model
            for variant in self.model.variants:
                at = next((endpoint for endpoint in variant.endpoints if fleet.leasing.takes(name, endpoint)), None)
                if at is not None:
                    yield replace(self, model=self.model.variant_at(at), tried=tried)


def job_not_taken_error(service: Service, model: ServedModel, job: JobType) -> InvalidRequest:
    """Return the error for a *job* that *model* does not take; it says what the model does, and where."""
    paths: dict[str, list[str]] = {}
    for operation in service.operations:
        if not set(model.jobs).isdisjoint(operation.jobs):
            paths.setdefault(operation.jobs[0].does[0], []).append(operation.path)
    instead = " and ".join(f"{does} ({', '.join(where)})" for does, where in paths.items())
    if instead:
        does = f" It {instead}."
    else:
        does = ""
    return InvalidRequest(f"The model '{model.name}' does not {job.does[1]}.{does}", param="model")


def _session_of(call: Call[Any]) -> str | None:
    """
    Return what the client says that *call* is part of, ``None`` if it says nothing.

    A session is narrower than a user: the header ``x-session-id`` comes first, then the fields of the API in
    :data:`_SESSION_FIELDS`. Anthropic's API has ``metadata.user_id`` for this.
    """
    if session := call.headers.get("x-session-id"):
        return session
    for name in _SESSION_FIELDS:
        if value := _text_of(getattr(call.body, name, None)):
            return value
    metadata = None
    if call.operation.anthropic:
        metadata = _decoded(getattr(call.body, "metadata", None), _Metadata)
    if metadata is None:
        return None
    return _text_of(metadata.user_id)


def _text_of(value: Any) -> str | None:
    """Return a text or a number, which may still be JSON, as a text; ``None`` for anything else."""
    if isinstance(value, msgspec.Raw):
        value = _decoded(value, str | int)
    if not isinstance(value, str | int):
        return None
    return str(value)[:_MAX_SESSION_SIZE]


def _decoded(raw: Any, kind: Any) -> Any:
    """Return a field that the request does not check as *kind*; ``None`` if it is too long, or something else."""
    if not isinstance(raw, msgspec.Raw) or memoryview(raw).nbytes > _MAX_SESSION_SIZE:
        return None
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


async def begin(service: Service, call: Call[_Request], *, read_as_chat: bool = False) -> RequestContext[_Request]:
    """
    Return the context of *call*, with the model that its body names.

    A deployment in the path, as Azure's clients have it, takes the place of the body's model. A body without a model
    gets the name of the default one. Raises as :meth:`Service.find_model`, and :class:`InvalidRequest` if the model
    does not do the operation.

    Of a body that is to be *read_as_chat*, the parameters that are recorded are the chat's: the operation sets them.
    """
    operation = call.operation
    body = call.body
    record = call.record
    model = await service.models.find(call.path.get("deployment", body.model), call.key)
    body.model = model.name
    stream = bool(getattr(body, "stream", False))
    if operation.jobs:
        # Metrics have a name for each model, and none for each name that a client makes up.
        if model.listed:
            label = model.name
        else:
            label = model.triton_model
        record.identify(
            operation.label or operation.name,
            model=label,
            adapter=model.adapter.name,
            triton_model=model.triton_model,
            stream=stream,
        )
        record.response_model = model.answers_as
        service.executor.observer.identified(record)
        if set(model.jobs).isdisjoint(operation.jobs):
            raise job_not_taken_error(service, model, operation.jobs[0])
    if record.batch is None:
        triton = service.settings.triton
    else:
        triton = service.settings.triton_for_batches
    limits = TimeLimits.of(triton, call.headers, stream=stream)
    if not read_as_chat:
        record.parameters = body
    if ignored := parameters.check_unused(body):
        report_ignored(record, ignored)
    context = RequestContext(call, service, body, model, record, limits)
    if len(service.fleet.members) > 1:
        context.session = _session_of(call)
    return context


def spec_of(
    context: RequestContext[Any],
    options: parameters.GenerationOptions,
    answer_id: str,
    prompter: Prompter,
    *,
    n: int,
    origins: Origins = CHAT_ORIGINS,
    echo_logprobs: int | None = None,
    cumulative_logprob: bool = False,
    keeps_special: bool = True,
    adds_special: bool = True,
) -> GenerationSpec:
    """
    Return what a request to generate text asks for with *options*; the *prompter* is the model's.

    *origins* has the client's names, for errors.
    *echo_logprobs* is the number of alternatives to each token of the echoed prompt, ``None`` for no log probabilities.
    For the rest see :class:`GenerationSpec` and :mod:`triton_openai.api.parameters`. Raises :class:`InvalidRequest`.
    """
    model = context.model
    settings = context.service.settings
    adapter = model.adapter
    defaults = model.settings.default_parameters
    if prompter.recommended:
        defaults = model.default_parameters(prompter)
    objective = 0
    if settings.access.trust_gateway:
        name = gateway_header(context.call.headers, "objective")
        objective = settings.access.gateway.objectives.get(name, 0)
    if context.record.batch is not None:
        # The last of the levels, if the model's queue has any.
        objective = model.priorities
    if options.stream_options is not None and not options.stream:
        raise InvalidValue("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    limit = parameters.token_limit(options, model, prompter.tokenizer, defaults, settings.api.default_max_tokens)
    truncation = parameters.truncation(options, keeps_special=keeps_special)
    if truncation is not None and truncation.tokens < 0:
        truncation = truncation.within(limit.room_for_prompt(), limit.param)
    beams = None
    if options.use_beam_search:
        beams = parameters.beams(options, adapter, width=n)
        report_ignored(context.record, map(origins.name, parameters.ignored_by_beams(options)))
        # It is one of the search.
        options = replace(options, length_penalty=None)
    priority = 0
    if options.priority or objective:
        priority = parameters.priority(options, model.priorities, objective)
    if options.return_token_ids:
        parameters.check_token_ids(adapter)
    prompt_scoring = None
    if echo_logprobs is not None or options.prompt_logprobs is not None:
        prompt_scoring = parameters.prompt_scoring(
            options, model, echo_logprobs=echo_logprobs, timeout=settings.triton.request_timeout
        )
    guide = None
    guides = guide_options(options)
    if guides.count(None) < len(guides):
        guide = guide_of(options, adapter.capabilities.guides, origins)
    template = Generation(
        id=answer_id,
        prompt="",
        sampling=parameters.sampling(options, limit=limit, defaults=defaults, adapter=adapter, origins=origins),
        stream=bool(options.stream),
        times_tokens=context.limits.times_tokens,
        guide=guide,
        priority=priority,
        cumulative_logprob=cumulative_logprob,
        token_ids=bool(options.return_token_ids),
        beams=beams,
    )
    if beams is not None and template.guide is not None:
        raise InvalidRequest(
            f"'use_beam_search' cannot be used together with '{template.guide.param}'.", param="use_beam_search"
        )
    return GenerationSpec(
        template=template,
        limit=limit,
        n=n,
        truncation=truncation,
        adds_special=adds_special,
        prompt_scoring=prompt_scoring,
    )


async def runs_of(
    context: RequestContext[Any], tokenizer: Tokenizer | None, prompts: Sequence[Prompt], spec: GenerationSpec
) -> list[Run]:
    """Return the runs that answer *prompts* as :func:`prepare` does, with the log probabilities of the prompts."""
    model = context.model
    record = context.record
    upstream = context.upstream()
    with record.stage(TOKENIZE):
        runs = await prepare(model, tokenizer, prompts, spec, upstream, context.limits)
    asked = spec.limit.asked
    # Most requests have one prompt, whose answer has room.
    if asked is not None and (len(runs) > 1 or runs[0].generation.sampling.max_tokens < asked):
        _report_limited(record, asked, runs)
    record.answers = [run.progress for run in runs]
    record.n = spec.n
    record.response_id = spec.template.id
    if spec.prompt_scoring is not None and tokenizer is not None:
        generations = [run.generation for run in runs[:: spec.n]]
        scores = await score_prompts(model.adapter, tokenizer, generations, spec.prompt_scoring, upstream.ask)
        for place, run in enumerate(runs):
            run.prompt_logprobs = scores[place // spec.n]
    return runs


def _report_limited(record: RequestRecord, asked: int, runs: Sequence[Run]) -> None:
    """Report to the client and to the log if *runs* may have fewer tokens than *asked*, because no more fit."""
    max_tokens = min([run.generation.sampling.max_tokens for run in runs])
    if max_tokens < asked:
        record.headers = {**record.headers, _LIMITED_HEADER: str(max_tokens)}
        _log.info("max_tokens is limited to what fits the context", asked=asked, max_tokens=max_tokens)
