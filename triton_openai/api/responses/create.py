"""``POST /v1/responses``: making a response, at once or in the background; compaction, and counts of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from secrets import token_hex

import msgspec

from triton_openai import errors, offload
from triton_openai.api import agents, chat
from triton_openai.api.bodies import check_texts, now, tell_ignored, whole
from triton_openai.api.responses import background
from triton_openai.api.responses.chat_request import Reading, read
from triton_openai.api.responses.context_window import answered, turn_of
from triton_openai.api.responses.conversations import claimed
from triton_openai.api.responses.items import Sources, input_items, too_long
from triton_openai.api.responses.objects import (
    CompactedResponse,
    CompactRequest,
    InputTokens,
    Item,
    OutputMessage,
    ResponseObject,
    ResponsesRequest,
)
from triton_openai.api.responses.response_events import ResponseEvents, response_event, terminal_events
from triton_openai.api.responses.stored import RecentLane, StoredResponse
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.operations import Call, Reply

# What a response repeats of its request.
_REPEATED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "safety_identifier", "tool_choice", "top_logprobs", "truncation",
    "user",
)  # fmt: skip
_SUMMARIZE = (
    "Summarize this conversation for somebody who has to go on with it, and who has only the user's messages and your "
    "summary: what the user wants, what was found out, decided and done, the names, paths, numbers and texts that "
    "matter, and what is left to do. Write the summary and nothing else."
)
# Most tokens of a summary, thoughts included; less where the context is small, so that the next turn has room.
_SUMMARY_TOKENS = 2048


async def create(service: Service, call: Call[ResponsesRequest]) -> Reply:
    """Answer with a response."""
    return await respond(service, call)


async def respond(service: Service, call: Call[ResponsesRequest], recent: RecentLane | None = None) -> Reply:
    """Answer with a response, which may go on from one of the *recent* responses of its connection."""
    context = await begin(service, call, read_as_chat=True)
    body = context.body
    if body.previous_response_id is not None and body.conversation is not None:
        raise errors.InvalidValue("'previous_response_id' cannot be used together with 'conversation'.", "conversation")
    made = _begun(context, recent)
    if body.background:
        return await _begin_in_background(context, made)
    async with _chat(context, made) as (asked, reading):
        reading.before = ()
        if made.response.store and body.stream:
            await made.announce()
        if not made.response.store and made.response.conversation is None and recent is None:
            made.input = ()
        return await asked.admitted(partial(_answer, made=made, reading=reading), param="messages")


async def prepare(service: Service, call: Call[ResponsesRequest], recent: RecentLane) -> bytes:
    """Return the events of a response for which the model is not asked: the next one goes on from its input."""
    context = await begin(service, call, read_as_chat=True)
    made = _begun(context, recent)
    async with _chat(context, made) as (asked, _):
        # Renders and tokenizes the prompt, so that what is wrong with it shows now.
        await agents.count_tokens(asked)
    made.response.status = "completed"
    made.response.completed_at = now()
    await made.keep()
    recent.put(made)
    begun = msgspec.structs.replace(made.response, status="in_progress", completed_at=None)
    return response_event("response.created", 0, response=begun) + terminal_events(made.response, 1)


def _begun(context: RequestContext[ResponsesRequest], recent: RecentLane | None = None) -> StoredResponse:
    """Return the response to a request, of which nothing is made yet. Raises :class:`UnsupportedParameter`."""
    body = context.body
    state = context.service.responses
    given = body.conversation
    if given is None or isinstance(given, str):
        conversation = given
    else:
        conversation = given.id
    if conversation is not None:
        state.store("conversation")
    previous = body.previous_response_id
    if previous is not None and (recent is None or recent.find(previous) is None):
        state.store("previous_response_id")
    response = ResponseObject(
        id=f"resp_{token_hex(16)}",
        created_at=now(),
        conversation=None if conversation is None else {"id": conversation},
        reasoning={"effort": None, "summary": None if body.reasoning is None else body.reasoning.summary},
        store=body.store is not False and state.keeps,
        text={"format": (body.text and body.text.format) or {"type": "text"}, "verbosity": "medium"},
        **{name: value for name in _REPEATED if (value := getattr(body, name)) is not None},
    )
    made = StoredResponse(state, context.call.key.name, response)
    made.recent = recent
    return made


@asynccontextmanager
async def _chat(
    context: RequestContext[ResponsesRequest], made: StoredResponse
) -> AsyncIterator[tuple[RequestContext[chat.ChatRequest], Reading]]:
    """
    Yield a request for a response as a chat, with what it goes on from; its conversation is held for the block.

    An error of the block names the field of the request.
    """
    response = made.response
    async with AsyncExitStack() as stack:
        if response.conversation is not None:
            await stack.enter_async_context(claimed(made, response.conversation["id"]))
        reading = await _read(context, made)
        context.record.parameters = reading.chat
        try:
            yield context.about(reading.chat), reading
        except errors.ServiceError as error:
            reading.relabel_param(error)
            raise


async def _read(context: RequestContext[ResponsesRequest], made: StoredResponse) -> Reading:
    """Return the request as a chat, with what it goes on from. Raises :class:`InvalidRequest`."""
    body = context.body
    response = made.response
    settings = context.service.settings
    source = body.previous_response_id
    param = "previous_response_id"
    if response.conversation is not None:
        source = response.conversation["id"]
        param = "conversation"
    sources = Sources(made.state, made.owner, settings)
    suffix = f"{response.id.removeprefix('resp_')}i"
    size = context.record.body_size or 0
    recent = made.recent
    await sources.gather(input_items(body), source=source, param=param, suffix=suffix, size=size, recent=recent)
    made.input = sources.rows
    if recent is not None:
        made.before = sources.encoded
    made.ancestors = sources.ancestors
    context.conversation = sources.root
    # The response says whether it is used.
    if body.reasoning is None:
        wanted = None
    else:
        wanted = body.reasoning.effort
    effort = await agents.known_effort(context.model, wanted)
    items = [(param, item) for item in sources.before]
    items += [(f"input[{number}]", item) for number, item in enumerate(sources.resolved)]
    if not items:
        raise errors.missing("input")

    def as_chat() -> Reading:
        reading = read(body, items, strict_tools=settings.api.strict_tools, effort=effort)
        if sources.check is not None:
            # It goes on with the JSON in texts, now that it is together.
            try:
                check_texts(reading.chat, sources.check)
            except errors.InvalidRequest as error:
                reading.relabel_param(error)
                raise too_long(error.message, error.param) from error
        return reading

    cost = offload.rendering_cost(items, body.tools or ()) + offload.json_cost(sources.size)
    reading = await offload.run(as_chat, cost=cost)
    reading.before = sources.before
    # The chat has it, and what is to be kept is encoded.
    body.input = []
    agents.tell_left_out(context.record, reading.tools.left_out)
    if effort is None and wanted is not None:
        tell_ignored(context.record, ["reasoning.effort"])
    if body.text is not None and body.text.verbosity in ("low", "high"):
        tell_ignored(context.record, ["text.verbosity"])
    response.tools = reading.tools.shown
    response.reasoning = {**response.reasoning, "effort": effort}
    return reading


async def _answer(context: RequestContext[chat.ChatRequest], *, made: StoredResponse, reading: Reading) -> Reply:
    async def answer(turn: chat.Turn) -> Reply:
        if reading.body.truncation != "auto":
            context.forget_messages()
        events = _events(made, reading, turn)
        if reading.body.stream:
            return await context.stream(turn.runs, events)
        await agents.render(events, turn.runs[0], timeout=context.limits.total)
        await events.ended(None)
        return whole(made.response)

    return await answered(context, reading, made.response.id, answer)


def _events(made: StoredResponse, reading: Reading, turn: chat.Turn) -> ResponseEvents:
    """Return what renders the response, which is the answer of *turn*."""
    (run,) = turn.runs
    (parser,) = turn.parsers
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        if (value := getattr(turn.spec.template.sampling, name)) is not None:
            setattr(made.response, name, value)
    sealed = "reasoning.encrypted_content" in (reading.body.include or ())
    names = reading.tools.names
    forced = turn.plan.forced

    async def keep() -> None:
        await made.keep()
        if made.recent is not None:
            made.recent.put(made)

    return ResponseEvents(made.response, run, parser, names=names, sealed=sealed, forced=forced, keep=keep)


async def _begin_in_background(context: RequestContext[ResponsesRequest], made: StoredResponse) -> Reply:
    """
    Answer with the response, and make it in the background.

    Whatever can be wrong with the request is found out before. Raises :class:`ServiceError`.
    """
    record = background.record_of(context, made)
    made.state.beginning[made.owner] += 1
    try:
        async with AsyncExitStack() as stack:
            stack.callback(record.free_memory)
            asked, reading = await stack.enter_async_context(_chat(replace(context, record=record), made))
            begun = partial(turn_of, reading=reading, answer_id=made.response.id)
            turn = await asked.admitted(begun, param="messages", runs=False)
            # What is ignored was found out meanwhile.
            context.record.headers = record.headers
            events = _events(made, reading, turn)
            await background.start(asked, made, turn, events, reading, stack)
    finally:
        made.state.beginning[made.owner] -= 1
        if not made.state.beginning[made.owner]:
            del made.state.beginning[made.owner]
    if context.body.stream:
        return await background.ResumedEvents(made, -1).send(context.call.output)
    return whole(made.response)


async def compact(service: Service, call: Call[CompactRequest]) -> Reply:
    """Return a shorter form of a conversation: the user's messages, and a summary that the model writes."""
    context = await begin(service, call, read_as_chat=True)
    given = context.body
    items = input_items(given)
    if not items and given.previous_response_id is None:
        raise errors.missing("input")
    adapter = context.model.adapter
    room = context.model.settings.max_model_len
    if room is None:
        limit = _SUMMARY_TOKENS
    else:
        limit = min(_SUMMARY_TOKENS, max(1, room // 4))
    body = ResponsesRequest(
        model=given.model,
        max_output_tokens=limit,
        temperature=0.0 if "temperature" in adapter.supported else None,
        input=[*items, {"role": "user", "content": _SUMMARIZE}],
        instructions=given.instructions,
        previous_response_id=given.previous_response_id,
        store=False,
    )
    about = context.about(body)
    made = _begun(about)
    async with _chat(about, made) as (asked, reading):
        await asked.admitted(partial(_answer, made=made, reading=reading), param="messages")
    response = made.response
    summary = "".join(part.text for item in response.output if isinstance(item, OutputMessage) for part in item.content)
    if not summary or response.usage is None:
        raise errors.UpstreamError(f"The model wrote no summary of the conversation in {limit} tokens.")
    own = [msgspec.json.decode(row.data, type=Item) for row in made.input[:-1]]
    kept = [item for item in [*reading.before, *own] if item.get("role") == "user"]
    compaction = {"type": "compaction", "id": f"cmp_{token_hex(16)}", "encrypted_content": agents.seal(summary)}
    return whole(CompactedResponse(id=response.id, created_at=now(), output=[*kept, compaction], usage=response.usage))


async def refuse_get(service: Service, call: Call[None]) -> Reply:
    """Refuse a request that asks for no WebSocket: for this path, GET is its upgrade."""
    record = call.record
    raise errors.MethodNotAllowed(f"{record.path} does not take {record.method}, only POST.", allowed="POST")


async def count_tokens(service: Service, call: Call[ResponsesRequest]) -> Reply:
    """Count the tokens of a request's input, as the model's template and tokenizer make them."""
    context = await begin(service, call, read_as_chat=True)
    async with _chat(context, _begun(context)) as (asked, _):
        return whole(InputTokens(input_tokens=await agents.count_tokens(asked)))
