"""
``POST /v1/chat/completions``.

Source of the wire format: OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.adapters.parameters import Rule
from triton_openai.api.access import model_of
from triton_openai.api.bodies import read_json
from triton_openai.api.chat_prompt import ImageSpot, PromptOptions, as_sent, rendered
from triton_openai.api.chat_response import (
    ChatChunks,
    ChatCompletion,
    Choice,
    ReasoningField,
    finish_reason,
    message_of,
    reasoning_tokens,
)
from triton_openai.api.documented import Accepted, Function, FunctionChoice, Tool, ToolChoice
from triton_openai.api.guides import guide_of
from triton_openai.api.images import images_of
from triton_openai.api.logprobs import chat_logprobs, prompt_logprobs
from triton_openai.api.parameters import REFUSED as SHARED_REFUSED
from triton_openai.api.parameters import (
    SamplingRequest,
    priority,
    refuse,
    sampling,
    scoring,
    stream_options,
    token_ids,
    truncation,
)
from triton_openai.api.service import Service, Task, new_id, now, service_of
from triton_openai.api.streaming import Collected, collect, stream
from triton_openai.api.tools import ToolPlan
from triton_openai.api.tools import plan as plan_tools
from triton_openai.api.usage import usage_of
from triton_openai.chat import offload
from triton_openai.chat.messages import Message
from triton_openai.chat.parsers import Parsers
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from triton_openai.models import ServedModel
from triton_openai.telemetry.observation import Observation, observe
from triton_openai.text.answer import AnswerParser, ForcedCall
from triton_openai.text.tools.base import CallGrammar, NewId, ToolParser
from triton_openai.text.tools.events import Content, Event
from triton_openai.text.tools.guided import GuidedCalls
from triton_openai.time_limits import TimeLimits

_encode = msgspec.json.Encoder().encode

#: Whole answers of more characters than this are parsed in a thread: reading dense JSON takes up to 1 µs a character.
_LONGEST_INLINE = 10_000


class ChatRequest(SamplingRequest, kw_only=True):
    """The request. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""

    messages: Annotated[list[Message], Meta(extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: FunctionChoice = None
    # Documented, and without influence on the answer here: accepted.
    prediction: Accepted = None
    prompt_cache_options: Accepted = None
    prompt_cache_retention: Accepted = None
    # Documented or in common use, and not honoured: refused unless neutral.
    modalities: Any = None
    audio: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None
    echo: Any = None
    best_of: Any = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    **SHARED_REFUSED,
    "modalities": (["text"],),
    "audio": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "moderation": (),
    "echo": (False,),
    "best_of": (1,),
}


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer a chat."""
    service = service_of(request)
    body = await read_json(request, ChatRequest, strict=service.settings.api.strict_parameters)
    model = await model_of(request, body)
    observation = observe(request, "chat", model=model, stream=bool(body.stream))
    observation.parameters = body
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=bool(body.stream))
    async with service.admission.enter(model.owner, observation, patience=limits.patience):
        limits = limits.after(observation.queued_seconds)
        return await _answer(request, service, model, body, observation, limits)


async def _answer(
    request: web.Request,
    service: Service,
    model: ServedModel,
    body: ChatRequest,
    observation: Observation,
    limits: TimeLimits,
) -> web.StreamResponse:
    options = stream_options(body, always_usage=service.settings.api.always_include_usage)
    completion_id = new_id("chatcmpl")
    plan = plan_tools(
        tools=body.tools,
        tool_choice=body.tool_choice,
        functions=body.functions,
        function_call=body.function_call,
        parallel=body.parallel_tool_calls,
    )
    field = service.settings.api.reasoning_field
    try:
        prompter = await model.prompter()
        parsers = await model.parsers()
        task = _task(service, model, body, completion_id, plan, parsers)
        pictures = images_of(model, body.messages)
        with observation.stage("render prompt"):
            prompt = await rendered(
                prompter,
                body.messages,
                PromptOptions.of(body),
                tools=plan.prompt,
                images=ImageSpot(model.settings.image_placeholder, pictures[0].place) if pictures else None,
                trust_template=service.settings.api.trust_request_chat_template,
            )
            prompt = as_sent(model, prompter, prompt)
        if pictures:
            with observation.stage("load images"):
                loaded = await service.images.load(pictures, most=model.adapter.capabilities.max_images)
            task = msgspec.structs.replace(task, images=loaded)
        runs = await service.runs(model, [prompt], task, limits=limits, observation=observation)
        answer_parsers = [make_parser(parsers, plan, prompt) for _ in runs]
        observation.reasoning_tokens = partial(reasoning_tokens, answer_parsers)
        if body.stream:
            chunks = ChatChunks(
                completion_id, body.model, parsers=answer_parsers, plan=plan, field=field, options=options
            )
            heartbeat = service.settings.server.heartbeat_interval
            return await stream(request, runs, chunks, heartbeat=heartbeat, timeout=limits.total)
        answers = await collect(runs, timeout=limits.total)
    except ContextLengthExceeded as error:
        error.param = error.param or "messages"
        raise
    choices = await offload.run(
        lambda: [
            _choice(body, index, answer, parser, plan, field)
            for index, (answer, parser) in enumerate(zip(answers, answer_parsers, strict=True))
        ],
        size=sum(len(delta.text) for answer in answers for delta in answer.deltas) if any(answer_parsers) else 0,
        threshold=_LONGEST_INLINE,
    )
    completion = ChatCompletion(
        id=completion_id,
        object="chat.completion",
        created=now(),
        model=body.model,
        choices=choices,
        usage=usage_of(runs, n=task.n, reasoning_tokens=reasoning_tokens(answer_parsers)),
        prompt_logprobs=msgspec.UNSET if body.prompt_logprobs is None else prompt_logprobs(runs[0].prompt_logprobs),
        prompt_token_ids=(runs[0].generation.prompt_ids or ()) if body.return_token_ids else msgspec.UNSET,
    )
    return web.Response(body=_encode(completion), content_type="application/json")


def _choice(
    body: ChatRequest,
    index: int,
    answer: Collected,
    parser: AnswerParser | None,
    plan: ToolPlan,
    field: ReasoningField,
) -> Choice:
    events: list[Event] = [Content(answer.text)]
    if parser is not None:
        events = [event for delta in answer.deltas for event in parser.feed(delta.text, delta.tokens)]
        events += parser.flush()
    return Choice(
        index=index,
        message=message_of(events, plan, field),
        logprobs=chat_logprobs(answer.logprobs) if body.logprobs else None,
        finish_reason=finish_reason(answer.run, parser, plan),
        token_ids=answer.token_ids if body.return_token_ids else msgspec.UNSET,
    )


def _task(
    service: Service, model: ServedModel, body: ChatRequest, completion_id: str, plan: ToolPlan, parsers: Parsers
) -> Task:
    refuse(body, REFUSED)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs", code="invalid_value")
    capabilities = model.adapter.capabilities
    if not capabilities.generate:
        raise InvalidRequest(f"The model '{body.model}' does not generate text.", param="model")
    guide = guide_of(body, capabilities.guides)
    if plan.forced and "json_schema" not in capabilities.guides:
        raise UnsupportedParameter(
            "The model cannot be held to a tool call: it has no guided decoding. Use 'auto'.", param=plan.param
        )
    forced = plan.guide()
    if forced is not None and guide is not None:
        raise InvalidRequest(f"'{guide.param}' cannot be used together with a forced tool call.", param=plan.param)
    if plan.mode == "auto" and parsers.tools is None:
        raise UnsupportedParameter(
            "How this model writes tool calls is not known: name its format with --tool-call-parser.", param="tools"
        )
    max_tokens = body.max_completion_tokens or body.max_tokens
    defaults = model.settings.default_parameters
    wanted = sampling(
        body,
        max_tokens=max_tokens,
        max_tokens_name="max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        alternatives_name="top_logprobs",
        defaults=defaults,
        default_max_tokens=service.settings.api.default_max_tokens,
        adapter=model.adapter,
    )
    if (plan.active or parsers.reasoning) and parsers.special_tokens and _can_keep_special_tokens(model):
        wanted = msgspec.structs.replace(wanted, skip_special_tokens=False)
    return Task(
        id=completion_id,
        sampling=wanted,
        n=body.n or 1,
        guide=forced or guide,
        open_ended=max_tokens is None and defaults.max_tokens is None,
        truncation=truncation(body),
        priority=priority(body, model.priorities),
        token_ids=token_ids(body, model.adapter),
        scoring=scoring(body, model.adapter, timeout=service.settings.triton.request_timeout),
    )


def _can_keep_special_tokens(model: ServedModel) -> bool:
    return any(
        parameter.name == "skip_special_tokens" and parameter.rule is not Rule.REFUSED
        for parameter in model.adapter.parameters
    )


def make_parser(parsers: Parsers, plan: ToolPlan, prompt: str) -> AnswerParser | None:
    """Return the parser of one choice, or ``None`` where its text is just text."""
    reasoning = parsers.reasoning
    tools: ToolParser | ForcedCall | None = None
    # Calls that the backend is held to have ids of the model's family too: its template may take no others.
    new_id: NewId = getattr(parsers.tools, "new_id", CallGrammar.new_id)
    if plan.mode == "named" and plan.name is not None:
        # The answer is the arguments and nothing else: no thinking comes before it.
        return AnswerParser(None, ForcedCall(plan.name, new_id=new_id))
    if plan.mode == "required":
        return AnswerParser(None, GuidedCalls(plan.schemas, new_id=new_id), parallel=plan.parallel)
    if plan.mode == "auto" and parsers.tools is not None:
        tools = parsers.tools(plan.schemas)
    if tools is None and reasoning is None:
        return None
    inside = None if reasoning is None else reasoning.inside_after(prompt)
    return AnswerParser(None if reasoning is None else reasoning(inside=inside), tools, parallel=plan.parallel)
