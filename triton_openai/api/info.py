"""What is served: the models, and the service itself with its health, version and metrics."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from triton_openai import __version__
from triton_openai.access.keys import ApiKey
from triton_openai.answer.job_run import run_job
from triton_openai.answer.limits import TimeLimits, TokenLimit
from triton_openai.answer.prepare import GenerationSpec, prepare
from triton_openai.answer.run_group import collect
from triton_openai.answer.upstream_call import UpstreamClient
from triton_openai.api.bodies import json_reply, new_id
from triton_openai.api.messages import operations as messages
from triton_openai.api.service import Service
from triton_openai.errors import ModelNotFound, ServiceError
from triton_openai.generation import Generation
from triton_openai.jobs import SynthesisJob
from triton_openai.models.lookup import Models
from triton_openai.models.overview import EndpointLine, ModelLine, endpoint_lines, features_of, model_lines
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Reply, Whole
from triton_openai.telemetry.exposition import ServiceLoad
from triton_openai.telemetry.request_record import RequestRecord
from triton_openai.triton.client import ServerInfo
from triton_openai.triton.route import Route
from triton_openai.triton.status import public_reason


class Architecture(msgspec.Struct, frozen=True):
    """What goes into a model, and what comes out of it: ``text``, ``image`` or ``audio``."""

    input_modalities: Sequence[str]
    output_modalities: Sequence[str]


# The features of a model by LM Studio's names, and the parameters that OpenRouter lists for them.
_CAPABILITIES = {"tools": "tool_use", "images": "vision", "reasoning": "reasoning"}
_FEATURE_PARAMETERS = {
    "tools": ("tools", "tool_choice"),
    "reasoning": ("reasoning", "include_reasoning"),
    "json_schema": ("response_format", "structured_outputs"),
}


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """
    One model; ``created`` is when the service first saw it loaded: Triton does not report when a model was made.

    The context length is there where the operator or the model's files give it, under each name that clients read:
    ``max_model_len`` of vLLM's server, ``context_length`` of OpenRouter, ``max_context_length`` of LM Studio, and
    ``max_output_tokens``, as one answer may take all of it. ``capabilities`` are those of LM Studio, ``architecture``
    and ``supported_parameters`` those of OpenRouter. A LoRA adapter has ``root``, its own name, and ``parent``, the
    model that it belongs to, as in vLLM. The answer to a load has ``served`` and, if that is false, the ``reason``; of
    several Tritons, also the state at each.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "triton"
    root: str | UnsetType = UNSET
    parent: str | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    context_length: int | UnsetType = UNSET
    max_context_length: int | UnsetType = UNSET
    max_output_tokens: int | UnsetType = UNSET
    architecture: Architecture | UnsetType = UNSET
    capabilities: Sequence[str] | UnsetType = UNSET
    supported_parameters: Sequence[str] | UnsetType = UNSET
    served: bool | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    endpoints: Mapping[str, str] | UnsetType = UNSET


class AgentModel(msgspec.Struct, kw_only=True):
    """
    A model as Codex CLI reads it, which takes a window of 258,400 tokens for one that is not listed so.

    These are the fields that codex-cli 0.169 requires, without which it ignores the whole list. ``context_window`` is
    left out where it is not known, ``truncation_policy`` is how much of a command's output the agent keeps.
    """

    slug: str
    display_name: str
    description: str = "A model in Triton Inference Server."
    base_instructions: str = (
        "You are a coding agent that works in the user's repository through a terminal. Read files before you change "
        "them, and do not guess what they contain. Make the smallest change that does what is asked, in the style of "
        "the code around it. Run commands to check your work, such as the tests that concern it. If a command fails, "
        "read what it prints and try something else. When you have finished, say in a few sentences what you changed "
        "and what you did not do."
    )
    context_window: int | UnsetType = UNSET
    max_context_window: int | UnsetType = UNSET
    effective_context_window_percent: int = 95
    input_modalities: Sequence[str]
    supported_reasoning_levels: Sequence[Mapping[str, str]] = ()
    shell_type: str = "default"
    visibility: str = "list"
    supported_in_api: bool = True
    priority: int
    support_verbosity: bool = False
    truncation_policy: Mapping[str, str | int] = msgspec.field(
        default_factory=lambda: {"mode": "tokens", "limit": 10_000}
    )
    experimental_supported_tools: Sequence[str] = ()
    supports_search_tool: bool = False
    use_responses_lite: bool = False


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models. ``models`` is there for Codex CLI, which sends its version as ``client_version``."""

    object: Literal["list"] = "list"
    data: Sequence[ModelObject]
    models: Sequence[AgentModel] | UnsetType = UNSET


async def list_models(service: Service, call: Call[None]) -> Reply:
    """
    List the models that are served now and that the key may use.

    Clients of Anthropic's API, which send ``anthropic-version``, get its form.
    """
    if _wants_anthropic(call):
        return await messages.list_models(service, call)
    models = service.models
    served = await models.listed()
    names = [name for name in served if call.key.allows(name)]
    for_agents: Sequence[AgentModel] | UnsetType = UNSET
    if "client_version" in call.query:
        for_agents = _for_agents(served[name] for name in names)
    return json_reply(ModelList(data=[describe(models, name) for name in names], models=for_agents))


def _for_agents(models: Iterable[ServedModel]) -> Sequence[AgentModel]:
    """Return those of *models* that can chat."""
    able = [model for model in models if "generate" in model.tasks and model.can_chat is not False]
    return [_for_agent(model, priority) for priority, model in enumerate(able)]


def _for_agent(model: ServedModel, priority: int) -> AgentModel:
    context_window = model.settings.max_model_len or UNSET
    return AgentModel(
        slug=model.name,
        display_name=model.name,
        context_window=context_window,
        max_context_window=context_window,
        input_modalities=_input_modalities(model),
        priority=priority,
    )


async def get_model(service: Service, call: Call[None]) -> Reply:
    """Describe one model; its name may hold slashes. Clients of Anthropic's API get its form."""
    name = call.path["model"]
    models = service.models
    if name not in models.served or not call.key.allows(name):
        name = (await service.find_model(name, call.key)).name
    if _wants_anthropic(call):
        return json_reply(messages.describe(models, name))
    return json_reply(describe(models, name))


def _wants_anthropic(call: Call[Any]) -> bool:
    """Return whether *call* is of Anthropic's API, which shares the paths of the models with OpenAI's."""
    return "anthropic-version" in call.headers


def describe(models: Models, name: str) -> ModelObject:
    """Return the description of the model *name*."""
    served = models.served.get(name) or models.unlisted_lora(name)
    if served is None:
        return ModelObject(id=name, created=models.created.get(name, 0))
    described = ModelObject(id=name, created=models.created[served.triton_model])
    if served.lora is not None:
        described = replace(described, root=served.lora.name, parent=served.triton_model)
    length = served.settings.max_model_len
    if length is not None:
        described = replace(described, max_model_len=length, context_length=length, max_context_length=length)
    if "generate" not in served.tasks:
        return described
    if length is not None:
        described = replace(described, max_output_tokens=length)
    features = features_of(served)
    parameters = {"max_tokens", *served.adapter.supported}
    for feature in features:
        parameters.update(_FEATURE_PARAMETERS.get(feature, ()))
    return replace(
        described,
        architecture=Architecture(_input_modalities(served), ["text"]),
        capabilities=[_CAPABILITIES[feature] for feature in features if feature in _CAPABILITIES],
        supported_parameters=sorted(parameters),
    )


def _input_modalities(model: ServedModel) -> list[str]:
    """Return what a chat with *model* can have."""
    modalities = ["text"]
    if model.takes_images:
        modalities.append("image")
    if model.adapter.capabilities.audio:
        modalities.append("audio")
    return modalities


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a load, if there is one; it has no fields."""


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an unload, if there is one. ``unload_dependents`` also unloads the models of an ensemble."""

    unload_dependents: bool = False


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an unload; ``model`` is Triton's name of it."""

    status: str = "success"
    model: str


def check_may_manage(service: Service, key: ApiKey) -> None:
    """Raise :class:`ManagementDisabled` where the service, or *key*, loads and unloads no models."""
    service.control.check_allowed()
    key.check_may_manage()


async def load(service: Service, call: Call[LoadRequest]) -> Reply:
    """Load a model, and describe it once it is loaded."""
    name, problem = await service.control.load(_named(call), endpoint=call.query.get("endpoint"))
    reason: str | UnsetType = UNSET
    if problem is not None:
        reason = public_reason(problem) or "it cannot be served"
    loaded = replace(describe(service.models, name), served=problem is None, reason=reason)
    if service.fleet.leasing.single is None:
        states = {}
        for member in service.fleet.members.values():
            if name in member.targets:
                states[member.name] = "ready"
            else:
                states[member.name] = "not ready"
        loaded = replace(loaded, endpoints=states)
    return json_reply(loaded)


async def unload(service: Service, call: Call[UnloadRequest]) -> Reply:
    """
    Unload a model after its running requests have ended.

    Raises :class:`KeyNotSufficient` for the models of an ensemble if the key is limited to certain models.
    """
    if call.body.unload_dependents:
        # They have names that the key may not open, and may be parts of other models.
        call.key.check_opens_everything()
    model = await service.control.unload(
        _named(call), dependents=call.body.unload_dependents, endpoint=call.query.get("endpoint")
    )
    return json_reply(Unloaded(model=model))


def _named(call: Call[Any]) -> str:
    """Return the name of the model in the path. Raises :class:`ModelNotFound`."""
    name = call.path["model"]
    if not name:
        raise ModelNotFound(name)
    if not call.key.allows(name):
        raise ModelNotFound(name, hidden=True)
    return name


_NO_STORE = {"Cache-Control": "no-store"}


class Health(msgspec.Struct, kw_only=True):
    """
    The state of the service, with the ``reason`` if it is not ready. ``not_answering`` are Triton models that leave
    their requests without an answer.
    """

    status: Literal["live", "ready", "not ready"]
    reason: str | UnsetType = UNSET
    not_answering: Sequence[str] | UnsetType = UNSET


async def live(service: Service, call: Call[None]) -> Reply:
    """Return 200 while the process runs."""
    return json_reply(Health(status="live"), headers=_NO_STORE)


async def ready(service: Service, call: Call[None]) -> Reply:
    """Return 200 when requests can be served, else 503 with the reason."""
    models = service.models
    canary = service.canary
    snapshot = models.fleet.snapshot
    silent = sorted(canary.not_answering) or UNSET
    if service.executor.draining.begun:
        reason = "The service is stopping."
    elif models.ready and (canary.any_answers or not models.served):
        return json_reply(Health(status="ready", not_answering=silent), headers=_NO_STORE)
    elif models.ready:
        reason = "Triton has models that are ready, and none of them answers."
    elif snapshot.error is not None:
        reason = snapshot.error.message
    elif snapshot.waiting:
        reason = "No served model is ready yet."
    else:
        reason = "Triton has no model that can be served."
    return json_reply(Health(status="not ready", reason=reason, not_answering=silent), 503, _NO_STORE)


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """
    The version of this service, and its name: the path is the same as that of other servers. ``triton`` is left out
    while Triton does not answer.
    """

    version: str
    name: Literal["triton-openai"] = "triton-openai"
    triton: ServerInfo | UnsetType = UNSET


async def version(service: Service, call: Call[None]) -> Reply:
    """Return the versions of this service and of Triton."""
    server = service.fleet.snapshot.server
    return json_reply(Version(version=__version__, triton=server or UNSET))


async def probe(service: Service, model: ServedModel, *, timeout: float, at: str | None = None) -> None:
    """
    Ask *model* for the smallest job of its main type, within *timeout* seconds; *at* names the one of several Tritons.

    No observer sees it: it is in no log, metric or trace. Raises :class:`ServiceError`.
    """
    record = RequestRecord(request_id=new_id("probe"), method="", path="")

    async def failed(error: ServiceError) -> None:
        raise error

    work = partial(_answer_probe, service, model, record, timeout=timeout, at=at)
    # Each call has a task, and with it a context, of its own.
    await asyncio.create_task(service.probes.run(record, work, failed=failed))


async def _answer_probe(
    service: Service, model: ServedModel, record: RequestRecord, *, timeout: float, at: str | None
) -> None:
    route = Route(service.fleet.leasing, model.triton_model, among=model.endpoints, at=at)
    upstream = UpstreamClient(route, record.call_tracer, service.background)
    kind = model.jobs[0]
    job = kind(id=record.request_id, **kind.least)
    if isinstance(job, SynthesisJob) and model.voices is not None:
        job = replace(job, voice=model.voices.default_voice())
    if not isinstance(job, Generation):
        await run_job(upstream, model, job, timeout=timeout)
        return
    tokenizer = (await model.prompter()).tokenizer
    spec = GenerationSpec(template=job, limit=TokenLimit(tokens=job.sampling.max_tokens))
    limits = TimeLimits(first_token=timeout, idle=timeout, total=None)
    await collect(await prepare(model, tokenizer, [job.prompt], spec, upstream, limits), timeout=None)


class Status(msgspec.Struct, kw_only=True):
    """
    What the page shows: versions, whether Triton answers, and the models that the request's key may use.

    ``figures`` and ``endpoints`` are left out for requests that may not read the metrics, ``endpoints`` also where
    there is one Triton, and ``triton`` while none answers.
    """

    version: str = __version__
    triton: ServerInfo | UnsetType = UNSET
    triton_answers: bool
    models: Sequence[ModelLine]
    endpoints: Sequence[EndpointLine] | UnsetType = UNSET
    figures: ServiceLoad | UnsetType = UNSET


async def status(service: Service, call: Call[None]) -> Reply:
    """Answer with each model, what it can do and why it cannot chat, and with what the service does now."""
    models = service.models
    key = call.key
    snapshot = models.fleet.snapshot
    silent = service.canary.not_answering
    lines = []
    for line in model_lines(models, unserved=True):
        visible = _visible(line, key)
        if visible is None:
            continue
        if line.name in silent:
            visible = replace(visible, state="does not answer")
        lines.append(visible)
    answer = Status(
        triton=snapshot.server or UNSET,
        triton_answers=snapshot.reachable,
        models=lines,
    )
    with contextlib.suppress(ServiceError):
        service.authorizer.restrictions.check("metrics", call.headers)
        key.check_opens_everything()
        answer.figures = await asyncio.to_thread(service.exposition.service_load)
        answer.endpoints = endpoint_lines(models) or UNSET
    return json_reply(answer, headers=_NO_STORE)


def _visible(line: ModelLine, key: ApiKey) -> ModelLine | None:
    """Return what *key* may read of *line*: names that it opens, and reasons without paths of this machine."""
    names = list(filter(key.allows, (line.name, *line.aliases, *line.loras)))
    if not names:
        return None
    return replace(
        line,
        name=names[0],
        state=public_reason(line.state) or "not ready",
        problem=line.problem and public_reason(line.problem),
        aliases=tuple(name for name in line.aliases if name in names[1:]),
        loras=tuple(name for name in line.loras if name in names[1:]),
    )


async def metrics(service: Service, call: Call[None]) -> Reply:
    """
    Return all metrics.

    Raises :class:`KeyNotSufficient` for a key that is limited to certain models, because metrics name all models.
    """
    call.key.check_opens_everything()
    body, media_type = await service.exposition.render(call.headers.get("Accept", ""))
    return Whole(body, media_type=media_type, headers=_NO_STORE)
