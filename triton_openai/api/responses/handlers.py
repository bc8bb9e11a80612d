"""``POST /v1/responses`` and what belongs to it."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from triton_openai.answer.fan_out import collect
from triton_openai.api import chat
from triton_openai.api.bodies import json_response, missing
from triton_openai.api.responses.events import ResponseEvents
from triton_openai.api.responses.reader import Reading, input_items, read
from triton_openai.api.responses.types import ResponseObject, ResponsesRequest
from triton_openai.api.service import RequestContext, begin, new_id, now
from triton_openai.api.sse import stream
from triton_openai.errors import MethodNotAllowed, ServiceError, UpgradeRefused
from triton_openai.prompts import offload


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer with a response."""
    context = await begin(request, ResponsesRequest, "responses")
    reading = await _read(context)
    context.observation.parameters = reading.chat
    turned = RequestContext(request, context.service, reading.chat, context.model, context.observation, context.limits)
    answer = partial(_answer, body=context.body, reading=reading)
    try:
        return await turned.admitted(lambda: turned.answered(answer), param="messages")
    except ServiceError as error:
        reading.blame(error)
        raise


async def refuse_websocket(request: web.Request) -> web.Response:
    """
    Refuse a WebSocket.

    Agents try it first, and take this status as the sign to go on with POST at once.
    """
    if request.headers.get("Upgrade", "").lower() == "websocket":
        raise UpgradeRefused("Responses are not served over WebSocket: use POST, with 'stream' for events.")
    raise MethodNotAllowed(f"{request.path} does not take {request.method}, only POST.")


async def _read(context: RequestContext[ResponsesRequest]) -> Reading:
    body = context.body
    if body.input is None:
        raise missing("input")
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is not None and "reasoning_effort" not in (await context.model.prompter()).template_for().variables:
        # Agents send it to every model; the response says that it was not used.
        effort = None
    items = [(f"input[{number}]", item) for number, item in enumerate(input_items(body))]
    return read(body, items, strict_tools=context.service.settings.api.strict_tools, effort=effort)


def _response(response_id: str, body: ResponsesRequest, reading: Reading, turn: chat.Turn) -> ResponseObject:
    """Return the response as it is before its first token."""
    sampling, text = turn.task.sampling, body.text
    form = None if text is None else text.format
    return ResponseObject(
        id=response_id,
        created_at=now(),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": reading.chat.reasoning_effort,
            "summary": None if body.reasoning is None else body.reasoning.summary,
        },
        safety_identifier=body.safety_identifier,
        temperature=1.0 if sampling.temperature is None else sampling.temperature,
        text={"format": form or {"type": "text"}, "verbosity": (text and text.verbosity) or "medium"},
        tool_choice=body.tool_choice or "auto",
        tools=reading.tools.shown,
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        truncation=body.truncation or "disabled",
        presence_penalty=sampling.presence_penalty or 0,
        frequency_penalty=sampling.frequency_penalty or 0,
        user=body.user,
        metadata=body.metadata or {},
    )


async def _answer(
    context: RequestContext[chat.ChatRequest], *, body: ResponsesRequest, reading: Reading
) -> web.StreamResponse:
    response_id = new_id("resp", "_")
    turn = await chat.prepare(context, response_id, fitting=True)
    events = ResponseEvents(
        _response(response_id, body, reading, turn),
        turn.runs[0],
        turn.parsers[0],
        names=reading.tools.names,
        sealed="reasoning.encrypted_content" in (body.include or ()),
    )
    timeout = context.limits.total
    if body.stream:
        heartbeat = context.service.settings.server.heartbeat_interval
        return await stream(context.request, turn.runs, events, heartbeat=heartbeat, timeout=timeout)
    (answer,) = await collect(turn.runs, timeout=timeout)

    def rendered() -> None:
        # The events make the response; nobody reads them here.
        for delta in answer.deltas:
            events.piece(0, delta)
        events.last(0)
        events.closing()

    await offload.run(rendered, size=len(answer.text), threshold=chat.LONGEST_INLINE)
    return json_response(events.response)
