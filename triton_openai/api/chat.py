"""
``POST /v1/chat/completions``.

Source of the wire format: OpenAI's ``chat.completion`` and ``chat.completion.chunk`` objects (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai import offload
from triton_openai.answer.fan_out import collect
from triton_openai.answer.run import Run
from triton_openai.api.bodies import MAX_ITEMS, MAX_MESSAGES, json_response
from triton_openai.api.chat_response import (
    ChatChoice,
    ChatChunks,
    ChatCompletion,
    chat_choice,
    reasoning_fields,
    reasoning_tokens,
)
from triton_openai.api.generate import Task, runs_of, task_of
from triton_openai.api.logprobs import prompt_logprobs
from triton_openai.api.parameters import SamplingRequest, accepting, refusing
from triton_openai.api.prompts import as_sent, images_of, rendered_chat
from triton_openai.api.service import RequestContext, begin, new_id, now
from triton_openai.api.sse import stream
from triton_openai.api.tools import Function, FunctionChoice, Tool, ToolChoice, ToolPlan, plan_tools
from triton_openai.api.usage import usage_of
from triton_openai.errors import InvalidRequest, InvalidValue, UnsupportedParameter
from triton_openai.media.images import ImageReference
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.registry import Parsers
from triton_openai.parsers.tools.base import ToolParser
from triton_openai.parsers.tools.guided import ForcedCall, GuidedCalls, HeldCalls
from triton_openai.parsers.tools.json_calls import Llama3Json
from triton_openai.prompts.messages import Message
from triton_openai.prompts.prompter import INLINE_WEIGHT, ITEM_WEIGHT, Prompter
from triton_openai.telemetry.observation import RENDER

#: Whole answers of more characters than this are parsed in a thread: reading dense JSON takes up to 1 µs a character.
LONGEST_INLINE = 10_000


@accepting("prediction", "prompt_cache_options", "prompt_cache_retention")
@refusing(
    modalities=["text"], audio=None, verbosity="medium", web_search_options=None, moderation=None, echo=False,
    best_of=1, add_special_tokens=False,
)  # fmt: skip
class ChatRequest(SamplingRequest, kw_only=True):
    """The request. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins."""

    messages: Annotated[list[Message], Meta(max_length=MAX_MESSAGES, extra_json_schema={"minItems": 1})]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    chat_template: str | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None
    function_call: FunctionChoice = None

    @property
    def limit(self) -> tuple[str, int | None]:
        newer = self.max_completion_tokens
        return ("max_tokens", self.max_tokens) if newer is None else ("max_completion_tokens", newer)

    @property
    def alternatives(self) -> tuple[str, int | None]:
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


async def handle(request: web.Request) -> web.StreamResponse:
    """Create a chat completion."""
    context = await begin(request, ChatRequest, "chat")
    return await context.admitted(_answer, param="messages")


class Turn(msgspec.Struct, frozen=True):
    """
    An assistant's turn, ready to be generated. The APIs for chats prepare one each, and render it in their own way.

    *runs* are its answers, not yet started; *parsers* has the parser of each.
    """

    task: Task
    plan: ToolPlan
    runs: Sequence[Run]
    parsers: Sequence[AnswerParser]


def plan_of(body: ChatRequest) -> ToolPlan:
    """Return how the tools of *body* are used. Raises :class:`InvalidRequest`."""
    return plan_tools(
        tools=body.tools,
        tool_choice=body.tool_choice,
        functions=body.functions,
        function_call=body.function_call,
        parallel=body.parallel_tool_calls,
    )


async def prompt_of(
    context: RequestContext[ChatRequest], plan: ToolPlan, prompter: Prompter
) -> tuple[str, Sequence[ImageReference]]:
    """
    Return the prompt of a chat, by its model's *prompter*, and its images, not loaded yet.

    Raises :class:`InvalidRequest`, and :class:`ConfigurationError` for a model that cannot chat.
    """
    service, model, body = context.service, context.model, context.body
    pictures = images_of(model, body.messages)
    # Before they are rendered: each is looked for in all of its message's text.
    service.images.check_count(pictures, most=model.adapter.capabilities.max_images)
    prompt, context.observation.chat_template = await rendered_chat(
        model,
        prompter,
        body,
        body.messages,
        tools=plan.prompt,
        images=pictures,
        reasoning_effort=body.reasoning_effort,
        trust_template=service.settings.api.trust_request_chat_template,
    )
    return as_sent(model, prompter.tokenizer, prompt), pictures


async def turn_of(context: RequestContext[ChatRequest], answer_id: str, *, fitting: bool = False) -> Turn:
    """
    Return the turn that answers the chat of *context*; *answer_id* is the id of the answer.

    With *fitting*, ``max_tokens`` may ask for more than the model's context has room for. Raises
    :class:`InvalidRequest` and its subclasses, and :class:`ConfigurationError` for a model that cannot chat.
    """
    service, body, observation = context.service, context.body, context.observation
    plan = plan_of(body)
    prompter = await context.model.prompter()
    parsers = prompter.parsers
    task = await _task(context, answer_id, plan, prompter)
    if fitting and not task.open_ended:
        task = msgspec.structs.replace(task, open_ended=True, open_limit=task.sampling.max_tokens)
    with observation.stage(RENDER):
        prompt, pictures = await prompt_of(context, plan, prompter)
    if pictures:
        with observation.stage("load images"):
            task = msgspec.structs.replace(task, images=await service.images.load(pictures))
    runs = await runs_of(context, [prompt], task)
    answer_parsers = [make_parser(parsers, plan, prompt) for _ in runs]
    observation.reasoning_tokens = partial(reasoning_tokens, answer_parsers)
    return Turn(task, plan, runs, answer_parsers)


async def _answer(context: RequestContext[ChatRequest]) -> web.StreamResponse:
    service, model, body = context.service, context.model, context.body
    turn = await turn_of(context, new_id("chatcmpl"))
    task, plan, runs = turn.task, turn.plan, turn.runs
    fields = () if body.include_reasoning is False else reasoning_fields(service.settings.api.reasoning_field)
    if body.stream:
        chunks = ChatChunks(context, task, runs, parsers=turn.parsers, plan=plan, fields=fields)
        return await stream(context, runs, chunks)
    answers = await collect(runs, timeout=context.limits.total)
    wanted = {"logprobs": bool(body.logprobs), "token_ids": bool(body.return_token_ids)}

    def rendered() -> list[ChatChoice]:
        return [chat_choice(i, answer, turn.parsers[i], plan, fields, **wanted) for i, answer in enumerate(answers)]

    size = sum(len(delta.text) for answer in answers for delta in answer.deltas)
    choices = await offload.run(rendered, size=size, threshold=LONGEST_INLINE)
    usages = [run.progress.usage for run in runs]
    usage = usage_of(usages, n=task.n, reasoning_tokens=reasoning_tokens(turn.parsers))
    completion = ChatCompletion(
        id=task.id,
        object="chat.completion",
        created=now(),
        model=body.model,
        choices=choices,
        usage=usage or msgspec.UNSET,
        system_fingerprint=model.fingerprint,
        prompt_logprobs=msgspec.UNSET if body.prompt_logprobs is None else prompt_logprobs(runs[0].prompt_logprobs),
        prompt_token_ids=(runs[0].generation.prompt_ids or ()) if body.return_token_ids else msgspec.UNSET,
    )
    return json_response(completion)


async def _task(context: RequestContext[ChatRequest], answer_id: str, plan: ToolPlan, prompter: Prompter) -> Task:
    body, model, parsers = context.body, context.model, prompter.parsers
    if body.top_logprobs and not body.logprobs:
        raise InvalidValue("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    forced = None
    if plan.forced:
        # The schemas are walked, in Python.
        size = offload.weigh(dict(plan.schemas), INLINE_WEIGHT, per_item=ITEM_WEIGHT)
        forced = await offload.run(plan.guide, size=size, threshold=INLINE_WEIGHT)
    task = task_of(context, answer_id, defaults=model.default_parameters(prompter), n=body.n or 1, keeps_special=False)
    if plan.forced and "json_schema" not in model.adapter.capabilities.guides:
        raise UnsupportedParameter(
            "The model has no guided decoding, so it cannot be forced to call a tool. Use 'auto'.", param=plan.param
        )
    if forced is not None and task.guide is not None:
        raise InvalidRequest(f"'{task.guide.param}' cannot be used together with a forced tool call.", param=plan.param)
    if plan.mode == "auto" and parsers.tools is None:
        raise UnsupportedParameter(
            "How this model writes tool calls is not known: name its format with --tool-call-parser.", param="tools"
        )
    honoured = model.adapter.honoured
    if (plan.active or parsers.reasoning) and parsers.special_tokens and "skip_special_tokens" in honoured:
        task = msgspec.structs.replace(task, sampling=msgspec.structs.replace(task.sampling, skip_special_tokens=False))
    return task if forced is None else msgspec.structs.replace(task, guide=forced)


def make_parser(parsers: Parsers, plan: ToolPlan, prompt: str) -> AnswerParser:
    """Return the parser of one choice."""
    if plan.forced:
        # These calls have ids of the model's family too: its template may take no others.
        new_id = ToolParser.new_id if parsers.tools is None else parsers.tools.new_id
        # The answer is calls and nothing else: no reasoning comes before it.
        forced = GuidedCalls(plan.schemas, new_id=new_id) if plan.name is None else ForcedCall(plan.name, new_id=new_id)
        own = (parsers.tools or Llama3Json)(plan.schemas)
        return AnswerParser(None, HeldCalls(forced, own), parallel=plan.parallel)
    tools = parsers.tools(plan.schemas) if plan.mode == "auto" and parsers.tools is not None else None
    kind = parsers.reasoning
    reasoning = None if kind is None else kind(inside=kind.inside_after(prompt))
    return AnswerParser(reasoning, tools, parallel=plan.parallel)
