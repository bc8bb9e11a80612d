"""What handlers work with: the running service, and the context of a request to a model."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from triton_openai.access.authorizer import AUTHORIZER, gateway_header
from triton_openai.access.keys import KEY, ApiKey
from triton_openai.access.rate_limits import RateLimit
from triton_openai.answer.job_run import run_job
from triton_openai.answer.limits import TimeLimits
from triton_openai.answer.logits_reader import score_prompts
from triton_openai.answer.prepare import GenerationSpec, Prompt, prepare
from triton_openai.answer.run import Run, Sender
from triton_openai.api import parameters
from triton_openai.api.bodies import FormRequest, ModelRequest, read_form, read_json, tell_ignored
from triton_openai.byte_budget import ByteBudget, Reservation
from triton_openai.config.tree import Group, Settings
from triton_openai.errors import (
    InvalidRequest,
    InvalidValue,
    PayloadTooLarge,
    PromptRefused,
    RateLimited,
    ServiceError,
    UnsupportedParameter,
)
from triton_openai.generation import Generation
from triton_openai.jobs import Job, JobType, Result
from triton_openai.media.images import ImageLoader
from triton_openai.models.control import ModelControl
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.prompts.prompter import Prompter
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation
from triton_openai.serving.admission import Admission
from triton_openai.shares import SHARING_KEY
from triton_openai.tasks import Background
from triton_openai.telemetry.request_record import OBSERVERS, RECORD, TOKENIZE, RequestRecord
from triton_openai.triton.fleet import Fleet, Route, Tried

# The accounts of seconds of audio: no key has such a name.
_AUDIO = "audio\n"
# Bytes of a form beside its file.
_FIELDS = 1024 * 1024
# The fields that say what a request is part of, the narrowest first: the first is vLLM's, the others are OpenAI's.
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "safety_identifier", "user")
# Bytes of the JSON of such a field. Longer ones are ignored: reading them would take too long.
_MAX_SESSION_SIZE = 4096
_Body = TypeVar("_Body", bound=ModelRequest)
_Other = TypeVar("_Other", bound=ModelRequest)
_Sampled = TypeVar("_Sampled", bound=parameters.SamplingRequest)
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
    #: Bytes of media in memory: files that are uploaded, and what is decoded of them and of chats.
    media: ByteBudget = field(default_factory=ByteBudget)


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


class _Metadata(msgspec.Struct):
    """What is read of the ``metadata`` of Anthropic's API."""

    user_id: str | int | None = None


#: The parameters of a query by name, each with its meaning and its schema.
Query: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]


class Operation(msgspec.Struct, frozen=True):
    """A row in the table of what is served: a handler, and all that follows from its row elsewhere."""

    handler: Handler
    #: Methods and paths; GET includes HEAD.
    routes: tuple[str, ...]
    #: The operation's id in the OpenAPI document.
    name: str
    #: What keys and restrictions open.
    group: Group
    #: The type of the body.
    request: type[msgspec.Struct] | None = None
    #: The type of the answer; without it, the answer is *text* or any object.
    answer: type[msgspec.Struct] | None = None
    #: The type of a stream's events.
    event: type[msgspec.Struct] | None = None
    #: Whether the answer is, or can be, plain text.
    text: bool = False
    #: The media types of an answer that is a file. Of one that no job makes, clients can ask for a part.
    media: tuple[str, ...] = ()
    #: The jobs that do it, of which a model has to take one; the first is what the operation is for. Triton is asked,
    #: within limits of time.
    jobs: tuple[JobType, ...] = ()
    #: What logs, metrics and spans call it (OpenTelemetry's ``gen_ai.operation.name``), if not by its name.
    label: str = ""
    query: Query = MappingProxyType({})
    #: Errors that do not follow from the rest.
    errors: tuple[type[ServiceError], ...] = ()
    #: A status that can have the *answer* itself as its body.
    failure: int | None = None
    #: The answer to clients of Anthropic's API where both have the path.
    shared: type[msgspec.Struct] | None = None

    @property
    def path(self) -> str:
        """The first of its paths."""
        return self.routes[0].split()[1]

    @property
    def anthropic(self) -> bool:
        """Whether it is an operation of Anthropic's API, with its errors."""
        return self.path.startswith("/v1/messages")


#: All that is served, by handler.
OPERATIONS_BY_HANDLER: web.AppKey[Mapping[Handler, Operation]] = web.AppKey("operations", Mapping)


def service_of(request: web.Request) -> Service:
    """Return the service of the application that serves *request*."""
    return request.app[SERVICE]


def key_of(request: web.Request) -> ApiKey:
    """Return the API key of *request*; one that allows everything where the service asks for no keys."""
    return request[KEY]


@contextlib.asynccontextmanager
async def counting_audio(request: web.Request) -> AsyncIterator[None]:
    """
    Charge the key of *request* with the seconds of audio that its record has at the end.

    Raises :class:`RateLimited` where the key has none left in this minute.
    """
    key, record, limits = key_of(request), request[RECORD], request.app[AUTHORIZER].limits
    most, account = key.limit.audio_seconds_per_minute, _AUDIO + key.name
    if most is None:
        yield
        return
    decision = await limits.admit(account, RateLimit(tokens_per_minute=most))
    told = {name.replace("tokens", "audio-seconds"): value for name, value in decision.headers.items()}
    record.headers = {**record.headers, **told}
    if decision.refusal is not None:
        wait = decision.refusal.wait
        message = f"Rate limit reached for '{key.name}' on seconds of audio per minute: limit {most}. Please try again"
        raise RateLimited(f"{message} in {math.ceil(wait)}s.", kind="audio_seconds", wait=wait)
    try:
        yield
    finally:
        limits.leave(account, math.ceil(sum(record.audio_seconds.values())))


# Seconds after which a file that has not arrived is counted by what has arrived of it.
_FAST_UPLOAD_SECONDS = 5.0


class Upload:
    """
    The memory for a file of audio that is uploaded.

    The whole file is reserved at first, so that those that arrive quickly do not wait for each other half-way. What
    takes longer has only what has arrived: slow clients do not keep others out with what they promise to send.
    """

    def __init__(self, request: web.Request, reservation: Reservation) -> None:
        #: The bytes of the file, and what is decoded of it.
        self.reservation = reservation
        self._request = request
        self._slow = False
        self._timer = asyncio.get_running_loop().call_later(_FAST_UPLOAD_SECONDS, self._count_arrived)

    def _count_arrived(self) -> None:
        """Give back what has not arrived yet."""
        self._slow = True
        self.reservation.shrink(self._request.content.total_bytes)

    async def arrived(self, size: int) -> None:
        """Wait until *size* bytes that have arrived are reserved. Raises :class:`ServiceOverloaded`."""
        if self._slow:
            await self.reservation.grow(size)

    def end(self) -> None:
        """Note that no more arrives, and give back what was reserved beyond it."""
        self._timer.cancel()
        self.reservation.shrink(self._request.content.total_bytes)

    async def reserve_decoded(self, size: int) -> None:
        """Reserve *size* bytes for what is decoded at the same time. Raises :class:`ServiceOverloaded`."""
        await self.reservation.finish(size)

    def decoded(self, size: int) -> None:
        """Note that all that is decoded has *size* bytes, which may be less than was reserved."""
        self.reservation.shrink(self._request.content.total_bytes + size)


#: Of a request that uploads a file of audio.
UPLOAD: web.RequestKey[Upload] = web.RequestKey("upload", Upload)


@contextlib.asynccontextmanager
async def receiving_audio(request: web.Request) -> AsyncIterator[None]:
    """
    Count the audio that *request* brings, as :func:`counting_audio` does, and wait until there is memory for it.

    Raises also :class:`PayloadTooLarge`, before anything is read, and :class:`ServiceOverloaded`.
    """
    service, limits = service_of(request), service_of(request).settings.audio
    max_size = _largest_form(service.settings)
    # Unless a client says how much it sends.
    size = max_size if request.content_length is None else request.content_length
    if size > max_size:
        raise audio_too_large(limits.max_file_size)
    async with counting_audio(request):
        with media_reservation(request) as reservation:
            await reservation.grow(size)
            upload = request[UPLOAD] = Upload(request, reservation)
            try:
                yield
            finally:
                upload.end()
                # It refers to the request, and such a circle would keep the file in memory.
                del request[UPLOAD]


def media_reservation(request: web.Request) -> Reservation:
    """Return a reservation for media of *request*; nothing is reserved yet."""
    service = service_of(request)
    return service.media.open(
        SHARING_KEY.get(),
        max_total=service.settings.audio.max_total_size,
        max_wait=service.settings.server.queue_timeout,
    )


def audio_too_large(most: int) -> PayloadTooLarge:
    """Return the error for a file of more than *most* bytes."""
    return PayloadTooLarge(f"The file is larger than the limit of {most} bytes.", param="file")


def _largest_form(settings: Settings) -> int:
    return settings.audio.max_file_size + _FIELDS


def new_id(prefix: str, separator: str = "-") -> str:
    """Return a fresh object id such as ``chatcmpl-…``; Triton gets the same id for the request."""
    return f"{prefix}{separator}{os.urandom(16).hex()}"


def now() -> int:
    """Return the time for OpenAI's ``created``: whole seconds since the epoch."""
    return int(time.time())


async def find_model(request: web.Request, name: str) -> ServedModel:
    """
    Return the served model called *name*, or the default model if the name is empty.

    Raises :class:`ModelNotFound`, also for a model that the request's key may not use, and
    :class:`UpstreamUnavailable` if Triton does not answer or the model is not ready.
    """
    return await service_of(request).models.find(name, key_of(request).allows)


async def read_request(request: web.Request, kind: type[_Body]) -> tuple[Service, _Body, ServedModel]:
    """
    Return the service, the body of *request* as *kind*, and the model that the body names.

    A deployment in the path, as Azure's clients have it, takes the place of the body's model. A body without a model
    gets the name of the default one. Raises as :func:`read_json` and :func:`find_model`.
    """
    service = service_of(request)
    read: Callable[..., Awaitable[Any]] = read_json
    if issubclass(kind, FormRequest):
        read = partial(_read_upload, max_size=_largest_form(service.settings))
    body = await read(request, kind, strict=service.settings.api.strict_parameters)
    model = await service.models.find(request.match_info.get("deployment", body.model), key_of(request).allows)
    body.model = model.name
    return service, body, model


async def _read_upload(request: web.Request, kind: type[_Body], *, strict: bool, max_size: int) -> _Body:
    """Return the form of *request* as :func:`read_form` does, counted against the memory for media."""
    upload = request.get(UPLOAD)
    if upload is None:
        return await read_form(request, kind, strict=strict, max_size=max_size)
    body = await read_form(request, kind, strict=strict, max_size=max_size, on_arrival=upload.arrived)
    upload.end()
    return body


@dataclass
class RequestContext(Generic[_Body]):
    """A request to a model, and what its handler works with."""

    request: web.Request
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
    tried: Tried | None = None

    def about(self, body: _Other) -> RequestContext[_Other]:
        """Return the context with another *body*."""
        context: RequestContext[Any] = replace(self)
        context.body = body
        return context

    def forget_messages(self) -> None:
        """
        Free the messages of the body, when all that Triton gets is made of them.

        They take as much memory again as the prompt, and the garbage collector looks at each while the event loop
        waits. They stay where another variant of the model may get the request, and where contents are logged.
        """
        model, settings = self.model, self.service.settings
        if not (model.variants or model.text_level or settings.server.log_content or settings.traces.content):
            self.body.messages = []  # type: ignore[attr-defined]

    def sender(self) -> Sender:
        """Return what sends the work for the request to Triton; of several Tritons, the way is recorded from now on."""
        fleet, model = self.service.fleet, self.model
        key, lora = self._key() if fleet.several else None, "" if model.lora is None else model.lora.name
        route = Route(
            fleet,
            model.triton_model,
            among=model.endpoints,
            key=key,
            lora=lora,
            before=self.tried,
            # What runs batches begins a line again, alone.
            resends_lost=self.record.batch is None,
        )
        if fleet.listed:
            self.record.route = route
        # Lines of batches come last.
        priority = 0 if self.record.batch is None else model.priorities
        return Sender(route, self.record.upstream, self.service.background, priority)

    def _key(self) -> str | None:
        """Return what should stay at one Triton: the session of the request, or its conversation."""
        fleet = self.service.fleet
        if fleet.policy(self.model.triton_model) != "affinity":
            return None
        return fleet.session_of(("session", self.session), ("conversation", self.conversation))

    async def result_of(self, job: Job[_Result], *, cut: Truncation | None = None, param: str = "input") -> _Result:
        """
        Wait for admission, and return the result of *job*, whose inputs are truncated as *cut* says.

        The id and the tokens of *job* are recorded. *param* and errors are those of :meth:`admitted`.
        """
        self.record.response_id = job.id
        result = await self.admitted(
            lambda context: run_job(context.sender(), context.model, job, cut=cut, timeout=context.limits.total),
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
        admission, triton_model = self.service.admission, self.model.triton_model
        task = None
        if runs:
            task = await admission.enter(triton_model, self.record, patience=self.limits.patience)
        try:
            if runs:
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
        tried = self.record.route.left if isinstance(self.record.route, Route) else None
        if tried is not None or isinstance(failure, InvalidRequest):
            fleet, name = self.service.fleet, self.model.triton_model
            for variant in self.model.variants:
                at = next((endpoint for endpoint in variant.endpoints if fleet.takes(name, endpoint)), None)
                if at is not None:
                    yield replace(self, model=self.model.variant_at(at), tried=tried)


def job_not_taken_error(app: web.Application, model: ServedModel, job: JobType) -> InvalidRequest:
    """Return the error for a *job* that *model* does not take; it says what the model does, and where."""
    paths: dict[str, list[str]] = {}
    for one in app[OPERATIONS_BY_HANDLER].values():
        if not set(model.jobs).isdisjoint(one.jobs):
            paths.setdefault(one.jobs[0].does[0], []).append(one.path)
    instead = " and ".join(f"{does} ({', '.join(where)})" for does, where in paths.items())
    does = f" It {instead}." if instead else ""
    return InvalidRequest(f"The model '{model.name}' does not {job.does[1]}.{does}", param="model")


def _session_of(request: web.Request, body: ModelRequest, *, anthropic: bool) -> str | None:
    """
    Return what the client says that *request* is part of, ``None`` if it says nothing.

    A session is narrower than a user: the header ``x-session-id`` comes first, then the fields of the API in
    :data:`_SESSION_FIELDS`. Anthropic's API has ``metadata.user_id`` for this.
    """
    if session := request.headers.get("x-session-id"):
        return session
    for name in _SESSION_FIELDS:
        if value := _text_of(getattr(body, name, None)):
            return value
    metadata = _decoded(getattr(body, "metadata", None), _Metadata) if anthropic else None
    return None if metadata is None else _text_of(metadata.user_id)


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


async def begin(request: web.Request, kind: type[_Body], *, read_as_chat: bool = False) -> RequestContext[_Body]:
    """
    Return the context of *request*. Raises :class:`InvalidRequest`, also if the model does not do the operation.

    Of a body that is to be *read_as_chat*, the parameters that are recorded are the chat's: the handler sets them.
    """
    operation = request.app[OPERATIONS_BY_HANDLER][request.match_info.handler]
    service, body, model = await read_request(request, kind)
    stream = bool(getattr(body, "stream", False))
    record = request[RECORD]
    if operation.jobs:
        # Metrics have a name for each model, and none for each name that a client makes up.
        label = model.name if model.listed else model.triton_model
        record.identify(operation.label or operation.name, model=label, adapter=model.adapter.name, stream=stream)
        record.response_model = model.answers_as
        request.app[OBSERVERS].identified(record)
        if set(model.jobs).isdisjoint(operation.jobs):
            raise job_not_taken_error(request.app, model, operation.jobs[0])
    triton = service.settings.triton if record.batch is None else service.settings.triton_for_batches
    limits = TimeLimits.of(triton, request.headers, stream=stream)
    if not read_as_chat:
        record.parameters = body
    if ignored := parameters.check_unused(body):
        tell_ignored(record, ignored)
    context = RequestContext(request, service, body, model, record, limits)
    if service.fleet.several:
        context.session = _session_of(request, body, anthropic=operation.anthropic)
    return context


def spec_of(
    context: RequestContext[_Sampled],
    answer_id: str,
    prompter: Prompter,
    *,
    n: int,
    echo_logprobs: int | None = None,
    cumulative_logprob: bool = False,
    keeps_special: bool = True,
    adds_special: bool = True,
) -> GenerationSpec:
    """
    Return what a request to generate text wants; the *prompter* is the model's.

    *echo_logprobs* is the number of alternatives to each token of the echoed prompt, ``None`` for no log probabilities.
    For the rest see :class:`GenerationSpec` and :mod:`triton_openai.api.parameters`. Raises :class:`InvalidRequest`.
    """
    body, model, settings = context.body, context.model, context.service.settings
    adapter, defaults, objective = model.adapter, model.default_parameters(prompter), 0
    if settings.access.trust_gateway:
        name = gateway_header(context.request.headers, "objective")
        objective = settings.access.gateway.objectives.get(name, 0)
    if context.record.batch is not None:
        # The last of the levels, if the model's queue has any.
        objective = model.priorities
    if body.stream_options is not None and not body.stream:
        raise InvalidValue("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    limit = parameters.token_limit(body, model, prompter.tokenizer, defaults, settings.api.default_max_tokens)
    truncation = parameters.truncation(body, keeps_special=keeps_special)
    template = Generation(
        id=answer_id,
        prompt="",
        sampling=parameters.sampling(body, limit=limit, defaults=defaults, adapter=adapter),
        stream=bool(body.stream),
        guide=parameters.guide_of(body, adapter.capabilities.guides),
        priority=parameters.priority(body, model.priorities, objective),
        cumulative_logprob=cumulative_logprob,
        token_ids=parameters.token_ids(body, adapter),
    )
    return GenerationSpec(
        template=template,
        limit=limit,
        n=n,
        truncation=None if truncation is None else truncation.within(limit.room_for_prompt),
        adds_special=adds_special,
        prompt_scoring=parameters.prompt_scoring(
            body, model, echo_logprobs=echo_logprobs, timeout=settings.triton.request_timeout
        ),
    )


async def runs_of(
    context: RequestContext[Any], tokenizer: Tokenizer | None, prompts: Sequence[Prompt], spec: GenerationSpec
) -> list[Run]:
    """Return the runs that answer *prompts* as :func:`prepare` does, with the log probabilities of the prompts."""
    model, record, sender = context.model, context.record, context.sender()
    with record.stage(TOKENIZE):
        runs = await prepare(model, tokenizer, prompts, spec, sender, context.limits)
    record.answers = [run.progress for run in runs]
    record.n, record.response_id = spec.n, spec.template.id
    if spec.prompt_scoring is not None and tokenizer is not None:
        generations = [run.generation for run in runs[:: spec.n]]
        scores = await score_prompts(model.adapter, tokenizer, generations, spec.prompt_scoring, sender.ask)
        for place, run in enumerate(runs):
            run.prompt_logprobs = scores[place // spec.n]
    return runs
