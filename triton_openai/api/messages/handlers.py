"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, and the models as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import structlog

from triton_openai.api import agents
from triton_openai.api.agents import known_effort
from triton_openai.api.bodies import new_id, tell_ignored, whole
from triton_openai.api.chat import ChatRequest, turn_of
from triton_openai.api.messages import types
from triton_openai.api.messages.message_events import MessageEvents, add_request_id
from triton_openai.api.messages.message_reader import read
from triton_openai.api.paging import message_page_query, unknown_place_error
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.errors import InvalidRequest
from triton_openai.models.lookup import Models
from triton_openai.operations import Call, Reply

_Body = TypeVar("_Body", bound=types.CountTokensRequest)
_log = structlog.get_logger(__name__)
#: The header of an answer that says how many tokens there was room for, where the client asked for more.
LIMITED_HEADER = "x-max-tokens"


async def handle(service: Service, call: Call[types.MessagesRequest]) -> Reply:
    """Answer a conversation, as Anthropic's API does."""
    async with _chat(service, call) as chat:
        thinking = call.body.thinking
        omits = thinking is not None and thinking.display == "omitted"
        return await chat.admitted(partial(_answer, omits_thinking=omits), param="messages")


async def count_tokens(service: Service, call: Call[types.CountTokensRequest]) -> Reply:
    """Count the tokens of a conversation, as the model's template renders it; images count as their placeholders."""
    async with _chat(service, call) as chat:
        return whole(types.TokenCount(input_tokens=await agents.count_tokens(chat)))


@asynccontextmanager
async def _chat(service: Service, call: Call[_Body]) -> AsyncIterator[RequestContext[ChatRequest]]:
    """Yield a request for the same as *call*, as a chat. An error of the block names the fields of *call*."""
    context = await begin(service, call, read_as_chat=True)
    record = context.record
    add_request_id(record)
    reading = read(context.body, strict_tools=context.service.settings.api.strict_tools)
    record.parameters = chat = reading.chat
    # The chat has them.
    context.body.messages = []
    effort = await known_effort(context.model, chat.reasoning_effort)
    if effort != chat.reasoning_effort:
        tell_ignored(record, ["output_config.effort"])
    chat.reasoning_effort = effort
    agents.tell_left_out(record, reading.left_out)
    try:
        yield context.about(chat)
    except InvalidRequest as error:
        reading.relabel_param(error)
        raise


async def _answer(context: RequestContext[ChatRequest], *, omits_thinking: bool) -> Reply:
    body = context.body
    record = context.record
    turn = await turn_of(context, new_id("msg", "_"), fitting=True)
    context.forget_messages()
    (run,) = turn.runs
    (parser,) = turn.parsers
    room = run.generation.sampling.max_tokens
    asked = turn.spec.limit.tokens
    limited = room < asked
    if limited:
        record.headers = {**record.headers, LIMITED_HEADER: str(room)}
        _log.info("max_tokens is limited to what fits the context", asked=asked, room=room)
    events = MessageEvents(
        turn.spec.template.id,
        body.model,
        run,
        parser,
        limited=limited,
        omits_thinking=omits_thinking,
        request_id=record.request_id,
        whole=not body.stream,
    )
    if body.stream:
        return await context.stream(turn.runs, events)
    await agents.render(events, run, timeout=context.limits.total)
    return whole(events.message)


def list_models(service: Service, call: Call[None]) -> Reply:
    """Return a page of the models that the key of *call* may use. Raises :class:`InvalidRequest`."""
    models = service.models
    limit, param, place, before = message_page_query(call.query)
    names = [name for name in models.served if call.key.allows(name)]
    if before:
        names.reverse()
    if place is not None:
        if place not in names:
            raise unknown_place_error(param)
        names = names[names.index(place) + 1 :]
    data = [describe(models, name) for name in names[:limit]]
    if before:
        data.reverse()
    return whole(types.ModelPage.of(data, more=len(names) > limit))


def describe(models: Models, name: str) -> types.ModelInfo:
    """Return the description of the model *name*."""
    served = models.served.get(name)
    return types.ModelInfo(
        id=name, display_name=name, max_input_tokens=None if served is None else served.settings.max_model_len
    )
