"""``POST /v1/responses``: making a response, at once or in the background; compaction, and counts of tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
from msgspec.structs import replace

from triton_openai import errors, offload
from triton_openai.answer.run import Run
from triton_openai.api import agents
from triton_openai.api.bodies import check_texts, json_reply, now, report_ignored
from triton_openai.api.conversation import Conversation, PreparedChat
from triton_openai.api.responses import background
from triton_openai.api.responses.compaction import (
    SUMMARIZE,
    after_compaction,
    exceeds_threshold,
    prepare_without_summary,
    summary_limit,
)
from triton_openai.api.responses.context_window import answer_within_context, prepare_fitting
from triton_openai.api.responses.conversations import lock_conversation
from triton_openai.api.responses.item_renderer import response_event
from triton_openai.api.responses.items import InputResolver, input_items, too_long_error
from triton_openai.api.responses.objects import (
    CompactedResponse,
    CompactRequest,
    InputTokens,
    Item,
    OutputMessage,
    ResponseObject,
    ResponsesRequest,
)
from triton_openai.api.responses.request_reader import ParsedRequest, check_outputs, read
from triton_openai.api.responses.response_events import ResponseEvents, terminal_events
from triton_openai.api.responses.stored import RecentLane, StoredResponse
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.api.sse import JSON_LINES, SERVER_SENT
from triton_openai.operations import Call, Reply

# What a response repeats of its request.
_REPEATED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "safety_identifier", "tool_choice", "top_logprobs", "truncation",
    "user",
)  # fmt: skip
# The field with the messages.
_MESSAGES = "input"


async def create(service: Service, call: Call[ResponsesRequest], recent: RecentLane | None = None) -> Reply:
    """Answer with a response."""
    # Over a WebSocket, it may go on from one of the recent responses of the connection.
    context = await begin(service, call, read_as_chat=True)
    body = context.body
    if body.previous_response_id is not None and body.conversation is not None:
        raise errors.InvalidValue("'previous_response_id' cannot be used together with 'conversation'.", "conversation")
    made = _begun(context, recent)
    if body.background:
        return await _begin_in_background(context, made)
    async with _conversation(context, made) as (asked, request):
        request.before = ()
        if made.response.store and body.stream:
            await made.save_placeholder()
        if not made.response.store and made.response.conversation is None and recent is None:
            made.input = ()
        return await asked.admitted(partial(_answer, made=made, request=request), param=_MESSAGES)


async def prewarm(service: Service, call: Call[ResponsesRequest], recent: RecentLane) -> bytes:
    """
    Return the events, as lines, of a response with ``generate: false``: the model is not asked, and the next response
    goes on from its input. Raises :class:`ServiceError` for what is wrong with the request.
    """
    context = await begin(service, call, read_as_chat=True)
    made = _begun(context, recent)
    async with _conversation(context, made) as (asked, _):
        # Renders and tokenizes the prompt, so that what is wrong with it shows now.
        await agents.count_tokens(asked)
    # The next response asks the model, and is charged for them.
    call.record.input_tokens = 0
    made.response.status = "completed"
    made.response.completed_at = now()
    await made.finalize()
    recent.put(made)
    begun = replace(made.response, status="in_progress", completed_at=None)
    headers = call.record.answer_headers()
    created = response_event("response.created", 0, JSON_LINES, response=begun, headers=headers)
    return created + terminal_events(made.response, 1, framing=JSON_LINES, headers=headers)


def _begun(context: RequestContext[ResponsesRequest], recent: RecentLane | None = None) -> StoredResponse:
    """Return the response to a request, of which nothing is made yet. Raises :class:`UnsupportedParameter`."""
    body = context.body
    state = context.service.responses
    previous = body.previous_response_id
    if previous is not None and (recent is None or recent.find(previous) is None):
        state.store("previous_response_id")
    conversation = None
    if body.conversation is not None:
        state.store("conversation")
        if isinstance(body.conversation, str):
            conversation = {"id": body.conversation}
        else:
            conversation = {"id": body.conversation.id}
    summary = None
    if body.reasoning is not None:
        summary = body.reasoning.summary
    form: Any = {"type": "text"}
    if body.text is not None and body.text.format is not None:
        form = body.text.format
    repeated = {name: getattr(body, name) for name in _REPEATED}
    response = ResponseObject(
        id=f"resp_{token_hex(16)}",
        created_at=now(),
        conversation=conversation,
        reasoning={"effort": None, "summary": summary},
        store=body.store is not False and state.keeps,
        text={"format": form, "verbosity": "medium"},
        **{name: value for name, value in repeated.items() if value is not None},
    )
    made = StoredResponse(state, context.call.key.name, response)
    made.recent = recent
    return made


@asynccontextmanager
async def _conversation(
    context: RequestContext[ResponsesRequest], made: StoredResponse
) -> AsyncIterator[tuple[RequestContext[Conversation], ParsedRequest]]:
    """
    Yield a request for a response as a conversation, with the items that it goes on from.

    For the block, nobody else makes a response in the stored conversation.
    """
    response = made.response
    async with AsyncExitStack() as stack:
        if response.conversation is not None:
            await stack.enter_async_context(lock_conversation(made, response.conversation["id"]))
        request = await _read(context, made)
        conversation = request.conversation
        context.record.parameters = conversation.options
        context.record.messages = conversation.messages
        yield context.about(conversation), request


async def _read(context: RequestContext[ResponsesRequest], made: StoredResponse) -> ParsedRequest:
    """Return the request as a conversation, with the items that it goes on from. Raises :class:`InvalidRequest`."""
    body = context.body
    response = made.response
    settings = context.service.settings
    if response.conversation is None:
        param = "previous_response_id"
        source = body.previous_response_id
    else:
        param = "conversation"
        source = response.conversation["id"]
    inputs = InputResolver(made.state, made.owner, settings)
    suffix = f"{response.id.removeprefix('resp_')}i"
    size = context.record.body_size or 0
    recent = made.recent
    await inputs.resolve(input_items(body), source=source, param=param, suffix=suffix, size=size, recent=recent)
    made.input = inputs.rows
    if recent is not None:
        made.before = inputs.encoded
    made.ancestors = inputs.ancestors
    context.conversation = inputs.root
    # The response says whether it is used.
    asked_effort = None
    if body.reasoning is not None:
        asked_effort = body.reasoning.effort
    effort = await agents.known_effort(context.model, asked_effort)
    if body.previous_response_id is not None:
        check_outputs(inputs.before, inputs.resolved)
    items = [(param, item) for item in inputs.before]
    items += [(f"input[{number}]", item) for number, item in enumerate(inputs.resolved)]
    if not items and (body.input is None or body.instructions is None):
        raise errors.missing("input")

    def parse() -> ParsedRequest:
        request = read(body, after_compaction(items), strict_tools=settings.api.strict_tools, effort=effort)
        if inputs.check is not None:
            # It goes on with the JSON in texts, now that it is together.
            try:
                check_texts(request.conversation.json_texts(), inputs.check)
            except errors.InvalidRequest as error:
                raise too_long_error(error.message, error.param) from error
        return request

    cost = offload.rendering_cost(items, body.tools or ()) + offload.json_cost(inputs.size)
    request = await offload.run(parse, cost=cost)
    request.before = inputs.before
    # The conversation has it, and what is to be kept is encoded.
    body.input = []
    agents.report_left_out(context.record, request.tools.left_out)
    if effort is None and asked_effort is not None:
        report_ignored(context.record, ["reasoning.effort"])
    if body.text is not None and body.text.verbosity in ("low", "high"):
        report_ignored(context.record, ["text.verbosity"])
    response.tools = request.tools.shown
    response.reasoning = {**response.reasoning, "effort": effort}
    return request


async def _answer(context: RequestContext[Conversation], *, made: StoredResponse, request: ParsedRequest) -> Reply:
    if request.body.stream and await exceeds_threshold(context, request):
        return await _stream_compacted(context, made, request)

    async def answer(prepared: PreparedChat) -> Reply:
        if request.body.truncation != "auto":
            context.forget_messages()
        events = _events(context, made, request, prepared)
        if request.body.stream:
            return await context.stream(prepared.runs, events)
        await agents.feed_renderer(events, prepared.runs[0], timeout=context.limits.total)
        await events.ended(None)
        return json_reply(made.response)

    return await answer_within_context(context, request, made.response.id, answer)


async def _stream_compacted(
    context: RequestContext[Conversation], made: StoredResponse, request: ParsedRequest
) -> Reply:
    """
    Stream the answer to a conversation that is compacted before: the first events do not wait for the summary.

    The rest of the request is checked before. Raises as :func:`prepare_chat`.
    """
    checked = await prepare_without_summary(context, made.response.id)
    events = _events(context, made, request, checked)

    async def prepare() -> Sequence[Run]:
        prepared = await prepare_fitting(context, request, made.response.id)
        if request.body.truncation != "auto":
            context.forget_messages()
        (run,) = prepared.runs
        (parser,) = prepared.parsers
        events.go_on(run, parser, request.compaction)
        return prepared.runs

    return await context.stream_later(prepare, events)


def _events(
    context: RequestContext[Conversation], made: StoredResponse, request: ParsedRequest, prepared: PreparedChat
) -> ResponseEvents:
    """Return what renders the answer to what is *prepared* as the response."""
    (run,) = prepared.runs
    (parser,) = prepared.parsers
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        value = getattr(prepared.spec.template.sampling, name)
        if value is not None:
            setattr(made.response, name, value)
    sealed = "reasoning.encrypted_content" in (request.body.include or ())
    names = request.tools.names
    forced = prepared.plan.forced

    framing = SERVER_SENT
    record = None
    if made.recent is not None:
        # The connection is a WebSocket.
        framing = JSON_LINES
        record = context.record

    async def keep() -> None:
        await made.finalize()
        if made.recent is not None:
            made.recent.put(made)

    events = ResponseEvents(
        made.response,
        run,
        parser,
        names=names,
        sealed=sealed,
        forced=forced,
        record=record,
        keep=keep,
        framing=framing,
    )
    if request.compaction is not None:
        events.go_on(run, parser, request.compaction)
    return events


async def _begin_in_background(context: RequestContext[ResponsesRequest], made: StoredResponse) -> Reply:
    """
    Answer with the response, and make it in the background.

    The request is checked completely before. Raises :class:`ServiceError`.
    """
    record = background.admit(context, made)
    made.state.beginning[made.owner] += 1
    try:
        async with AsyncExitStack() as stack:
            stack.callback(record.free_memory)
            # Its events are stored as they come, whether or not its client asks for a stream.
            limits = replace(context.limits, times_tokens=True)
            own = replace(context, record=record, limits=limits)
            asked, request = await stack.enter_async_context(_conversation(own, made))
            prepare = partial(_prepare_for_later, request=request, answer_id=made.response.id)
            prepared = await asked.admitted(prepare, param=_MESSAGES, runs=False)
            # They name what is ignored.
            context.record.headers = record.headers
            events = _events(asked, made, request, prepared)
            first: PreparedChat | None = prepared
            if request.exceeds_threshold:
                # Its summary is made first.
                first = None
            await background.start(asked, made, first, events, request, stack)
    finally:
        made.state.beginning[made.owner] -= 1
        if not made.state.beginning[made.owner]:
            del made.state.beginning[made.owner]
    if context.body.stream:
        return await background.ResumedEvents(made, -1).send(context.call.output)
    return json_reply(made.response)


async def _prepare_for_later(
    context: RequestContext[Conversation], request: ParsedRequest, answer_id: str
) -> PreparedChat:
    """
    Return what answers the conversation of *request*, or what checks the rest of a request whose summary comes later.

    Raises as :func:`prepare_chat`.
    """
    if await exceeds_threshold(context, request):
        return await prepare_without_summary(context, answer_id)
    return await prepare_fitting(context, request, answer_id)


async def compact(service: Service, call: Call[CompactRequest]) -> Reply:
    """Return a shorter form of a conversation: the user's messages, and a summary that the model writes."""
    context = await begin(service, call, read_as_chat=True)
    items = input_items(context.body)
    if not items and context.body.previous_response_id is None:
        raise errors.missing("input")
    limit = summary_limit(context.model.settings.max_model_len)
    body = ResponsesRequest(
        model=context.body.model,
        max_output_tokens=limit,
        input=[*items, {"role": "user", "content": SUMMARIZE}],
        instructions=context.body.instructions,
        previous_response_id=context.body.previous_response_id,
        store=False,
    )
    if "temperature" in context.model.adapter.supported:
        body.temperature = 0.0
    about = context.about(body)
    made = _begun(about)
    async with _conversation(about, made) as (asked, request):
        await asked.admitted(partial(_answer, made=made, request=request), param=_MESSAGES)
    response = made.response
    summary = ""
    for output in response.output:
        if isinstance(output, OutputMessage):
            summary += "".join([part.text for part in output.content])
    if not summary or response.usage is None:
        raise errors.NoSummary(context.model.name, limit)
    own = [msgspec.json.decode(row.data, type=Item) for row in made.input[:-1]]
    kept = [item for item in [*request.before, *own] if item.get("role") == "user"]
    compaction = {"type": "compaction", "id": f"cmp_{token_hex(16)}", "encrypted_content": agents.seal(summary)}
    return json_reply(
        CompactedResponse(id=response.id, created_at=now(), output=[*kept, compaction], usage=response.usage)
    )


async def refuse_get(service: Service, call: Call[None]) -> Reply:
    """Refuse a request that asks for no WebSocket: for this path, GET is its upgrade."""
    record = call.record
    raise errors.MethodNotAllowed(f"{record.path} does not take {record.method}, only POST.", allowed="POST")


async def count_tokens(service: Service, call: Call[ResponsesRequest]) -> Reply:
    """Count the tokens of a request's input, as the model's template and tokenizer make them."""
    context = await begin(service, call, read_as_chat=True)
    async with _conversation(context, _begun(context)) as (asked, _):
        return json_reply(InputTokens(input_tokens=await agents.count_tokens(asked)))
