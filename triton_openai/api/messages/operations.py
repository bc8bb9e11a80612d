"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, and the models as Anthropic's API lists them."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from triton_openai.api import agents
from triton_openai.api.agents import known_effort
from triton_openai.api.bodies import json_reply, new_id, report_ignored
from triton_openai.api.conversation import Conversation, prepare_chat
from triton_openai.api.messages import types
from triton_openai.api.messages.message_events import MessageEvents, add_request_id
from triton_openai.api.messages.message_reader import read
from triton_openai.api.paging import message_page_query, unknown_id_error
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.models.lookup import Models
from triton_openai.operations import Call, Reply

_Body = TypeVar("_Body", bound=types.CountTokensRequest)
#: The header of an answer with the most tokens that fit the context, if the client asked for more.


async def create(service: Service, call: Call[types.MessagesRequest]) -> Reply:
    """Answer a conversation, as Anthropic's API does."""
    context = await _conversation(service, call)
    thinking = call.body.thinking
    omits = thinking is not None and thinking.display == "omitted"
    return await context.admitted(partial(_answer, omits_thinking=omits), param="messages")


async def count_tokens(service: Service, call: Call[types.CountTokensRequest]) -> Reply:
    """Count the tokens of a conversation, as the model's template renders it; images count as their placeholders."""
    context = await _conversation(service, call)
    return json_reply(types.TokenCount(input_tokens=await agents.count_tokens(context)))


async def _conversation(service: Service, call: Call[_Body]) -> RequestContext[Conversation]:
    """Return the context of *call*, read as a conversation. Raises :class:`InvalidRequest`."""
    context = await begin(service, call, read_as_chat=True)
    record = context.record
    add_request_id(record)
    request = read(context.body, strict_tools=context.service.settings.api.strict_tools)
    conversation = request.conversation
    options = conversation.options
    record.parameters = options
    record.messages = conversation.messages
    # The conversation has them.
    context.body.messages = []
    effort = await known_effort(context.model, options.reasoning_effort)
    if effort != options.reasoning_effort:
        report_ignored(record, ["output_config.effort"])
    options.reasoning_effort = effort
    agents.report_left_out(record, request.left_out)
    return context.about(conversation)


async def _answer(context: RequestContext[Conversation], *, omits_thinking: bool) -> Reply:
    options = context.body.options
    record = context.record
    prepared = await prepare_chat(context, new_id("msg", "_"), fitting=True)
    context.forget_messages()
    (run,) = prepared.runs
    (parser,) = prepared.parsers
    limited = run.generation.sampling.max_tokens < prepared.spec.limit.tokens
    events = MessageEvents(
        prepared.spec.template.id,
        options.model,
        run,
        parser,
        limited=limited,
        omits_thinking=omits_thinking,
        request_id=record.request_id,
        whole=not options.stream,
    )
    if options.stream:
        return await context.stream(prepared.runs, events)
    await agents.feed_renderer(events, run, timeout=context.limits.total)
    return json_reply(events.message)


async def list_models(service: Service, call: Call[None]) -> Reply:
    """Return a page of the models that the key of *call* may use. Raises :class:`InvalidRequest`."""
    models = service.models
    limit, param, next_to, before = message_page_query(call.query)
    names = [name for name in await models.listed() if call.key.allows(name)]
    if before:
        names.reverse()
    if next_to is not None:
        if next_to not in names:
            raise unknown_id_error(param)
        names = names[names.index(next_to) + 1 :]
    data = [describe(models, name) for name in names[:limit]]
    if before:
        data.reverse()
    return json_reply(types.ModelPage.of(data, more=len(names) > limit))


def describe(models: Models, name: str) -> types.ModelInfo:
    """Return the description of the model *name*."""
    served = models.served.get(name)
    max_input_tokens = None
    if served is not None:
        max_input_tokens = served.settings.max_model_len
    return types.ModelInfo(id=name, display_name=name, max_input_tokens=max_input_tokens)
