"""``POST /v1/messages`` and ``/v1/messages/count_tokens``, and the models as Anthropic's API lists them."""

from __future__ import annotations

from functools import partial

import structlog
from aiohttp import web

from triton_openai.answer.limits import TimeLimits
from triton_openai.api import agents
from triton_openai.api.agents import known_effort, page
from triton_openai.api.bodies import json_response, tell_ignored
from triton_openai.api.chat import ChatRequest, turn_of
from triton_openai.api.messages import types
from triton_openai.api.messages.message_events import MessageEvents, add_request_id
from triton_openai.api.messages.message_reader import Reading, read
from triton_openai.api.parameters import check_unused
from triton_openai.api.service import RequestContext, Service, begin, key_of, new_id, read_request, service_of
from triton_openai.api.sse import stream
from triton_openai.errors import InvalidRequest
from triton_openai.models.lookup import Models
from triton_openai.models.served import ServedModel
from triton_openai.telemetry.request_record import RECORD, RequestRecord

_log = structlog.get_logger(__name__)
#: The header of an answer that says how many tokens there was room for, where the client asked for more.
LIMITED_HEADER = "x-max-tokens"


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, as Anthropic's API does."""
    context = await begin(request, types.MessagesRequest, read_as_chat=True)
    record, body = context.record, context.body
    add_request_id(record)
    reading = await _read(context.service, context.model, body, record)
    record.parameters = reading.chat
    chat = context.about(reading.chat)
    omits = body.thinking is not None and body.thinking.display == "omitted"

    answer = partial(_answer, omits_thinking=omits)
    try:
        return await chat.admitted(answer, param="messages")
    except InvalidRequest as error:
        reading.relabel_param(error)
        raise


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a conversation, as the model's template renders it; images count as their placeholders."""
    service, body, model = await read_request(request, types.CountTokensRequest)
    add_request_id(request[RECORD])
    tell_ignored(request[RECORD], check_unused(body))
    reading = await _read(service, model, body, request[RECORD])
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=False)
    context = RequestContext(request, service, reading.chat, model, request[RECORD], limits)
    try:
        return json_response(types.TokenCount(input_tokens=await agents.count_tokens(context)))
    except InvalidRequest as error:
        reading.relabel_param(error)
        raise


async def _read(service: Service, model: ServedModel, body: types.CountTokensRequest, record: RequestRecord) -> Reading:
    reading = read(body, strict_tools=service.settings.api.strict_tools)
    asked = reading.chat.reasoning_effort
    reading.chat.reasoning_effort = await known_effort(model, asked)
    if reading.chat.reasoning_effort != asked:
        tell_ignored(record, ["output_config.effort"])
    agents.tell_left_out(record, reading.left_out)
    return reading


async def _answer(context: RequestContext[ChatRequest], *, omits_thinking: bool) -> web.StreamResponse:
    body, record = context.body, context.record
    turn = await turn_of(context, new_id("msg", "_"), fitting=True)
    (run,), (parser,) = turn.runs, turn.parsers
    room, asked = run.generation.sampling.max_tokens, turn.spec.limit.tokens
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
        return await stream(context, turn.runs, events)
    await agents.render(events, run, timeout=context.limits.total)
    return json_response(events.message)


def list_models(request: web.Request) -> web.Response:
    """Return a page of the models that the request's key may use. Raises :class:`InvalidRequest`."""
    models, key, query = service_of(request).models, key_of(request), request.query
    backwards = -1 if "before_id" in query else 1
    names = [name for name in models.served if key.allows(name)][::backwards]
    shown, more = page(query, names, names, most=1000, after="before_id" if backwards < 0 else "after_id")
    return json_response(types.ModelPage.of([describe(models, name) for name in shown[::backwards]], more=more))


def describe(models: Models, name: str) -> types.ModelInfo:
    """Return the description of the model *name*."""
    served = models.served.get(name)
    return types.ModelInfo(
        id=name, display_name=name, max_input_tokens=None if served is None else served.settings.max_model_len
    )
