"""``/v1/responses``: making responses, at once or in the background, and what is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Any, Literal, cast

import msgspec
import structlog
from aiohttp import web

from triton_openai import errors, offload
from triton_openai.access.rate_limits import TICKET, Ticket, tokens_charged
from triton_openai.answer.fan_out import collect
from triton_openai.api import agents, chat
from triton_openai.api.agents import known_effort
from triton_openai.api.bodies import JsonCheck, check_texts, json_response, missing, read_json, tell_ignored
from triton_openai.api.responses import types
from triton_openai.api.responses.background import LEASE_SECONDS, EventLog
from triton_openai.api.responses.events import ResponseEvents, terminal_events
from triton_openai.api.responses.reader import Reading, input_items, is_id, read
from triton_openai.api.responses.resume import ResumedEvents
from triton_openai.api.responses.sources import Sources, gather, too_long
from triton_openai.api.responses.state import STATE, Live, Record, ResponseState, output_rows
from triton_openai.api.service import RequestContext, begin, key_of, now
from triton_openai.api.sse import send_events, stream
from triton_openai.config.worker import WORKER
from triton_openai.generation import Delta
from triton_openai.models.draining import DRAINING
from triton_openai.serving.middleware import Observed
from triton_openai.serving.request_body import LIMITS
from triton_openai.storage.store import Row
from triton_openai.telemetry.observation import OBSERVERS, Observation

_log = structlog.get_logger(__name__)


# The seconds between attempts to keep a response that was made in the background.
_PAUSES = (0.5, 1.0, 2.0, 4.0)
# What a response repeats of its request.
_REPEATED = (
    "background", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "parallel_tool_calls",
    "previous_response_id", "prompt_cache_key", "safety_identifier", "tool_choice", "top_logprobs", "truncation",
    "user",
)  # fmt: skip


class Job:
    """A request for a response: what it is about, and how its response is kept."""

    def __init__(self, context: RequestContext[types.ResponsesRequest]) -> None:
        body = self.body = context.body
        self.state = context.request.app[STATE]
        self.owner = key_of(context.request).name
        self.digits = token_hex(16)
        self.id = f"resp_{self.digits}"
        #: What the request is about, and the request as a chat, once it is read.
        self.sources = Sources((), (), (), None)
        self.reading: Reading | None = None
        given = body.conversation
        self.conversation = given if given is None or isinstance(given, str) else given.id
        self.stored = body.store is not False and self.state.keeps
        #: That of what is kept: 0 before the first time.
        self.version = 0
        self.log: EventLog | None = None
        told = {name: value for name in _REPEATED if (value := getattr(body, name)) is not None}
        self.response = types.ResponseObject(
            id=self.id,
            created_at=now(),
            conversation=None if self.conversation is None else {"id": self.conversation},
            reasoning={"effort": None, "summary": None if body.reasoning is None else body.reasoning.summary},
            store=self.stored,
            text={
                "format": (body.text and body.text.format) or {"type": "text"},
                "verbosity": "medium",
            },
            **told,
        )

    async def read(self, context: RequestContext[types.ResponsesRequest]) -> Reading:
        """Return the request as a chat, with what it goes on from. Raises :class:`InvalidRequest`."""
        body = self.body
        given = input_items(body)
        found = self.sources = await gather(
            *(self.state, given, self.owner),
            source=body.previous_response_id if self.conversation is None else self.conversation,
            suffix=f"{self.digits}i",
            size=context.observation.body_size or 0,
            settings=context.service.settings,
        )
        # The response says whether it is used.
        effort = await known_effort(context.model, None if body.reasoning is None else body.reasoning.effort)
        source = "conversation" if self.conversation is not None else "previous_response_id"
        items = [(source, item) for item in found.before]
        items += [(f"input[{number}]", item) for number, item in enumerate(found.resolved)]
        if not items:
            raise missing("input")
        strict = context.service.settings.api.strict_tools
        reading = self.reading = await offload.run(
            partial(read, body, items, strict_tools=strict, effort=effort),
            cost=offload.rendering_cost(items, body.tools or ()),
        )
        if found.check is not None:
            await self._check_texts(reading, found.check)
        agents.tell_left_out(context.observation, reading.tools.left_out)
        if effort is None and body.reasoning is not None and body.reasoning.effort is not None:
            tell_ignored(context.observation, ["reasoning.effort"])
        if body.text is not None and body.text.verbosity in ("low", "high"):
            tell_ignored(context.observation, ["text.verbosity"])
        self.response.tools = reading.tools.shown
        self.response.reasoning = {**self.response.reasoning, "effort": effort}
        return reading

    async def _check_texts(self, reading: Reading, check: JsonCheck) -> None:
        """Go on with *check* over the JSON in texts, now that it is together."""
        try:
            await offload.run(check_texts, reading.chat, check, cost=offload.LONG)
        except errors.InvalidRequest as error:
            reading.blame(error)
            raise too_long(error.message, error.param) from error

    def events(self, turn: chat.Turn) -> ResponseEvents:
        """Return what renders the response, which is the answer of *turn*."""
        response = self.response
        (run,), (parser,) = turn.runs, turn.parsers
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
            if (value := getattr(turn.task.sampling, name)) is not None:
                setattr(response, name, value)
        names = {} if self.reading is None else self.reading.tools.names
        sealed = "reasoning.encrypted_content" in (self.body.include or ())
        return ResponseEvents(response, run, parser, names=names, sealed=sealed, keep=self.keep)

    async def announce(self) -> None:
        """
        Keep the response before it is made. Raises :class:`StoreUnavailable`.

        One that is made for a waiting client is kept as what it will be if this process ends in the middle of it.
        """
        kept = self.response
        if not kept.background:
            kept = msgspec.structs.replace(kept, status="failed", error=types.INTERRUPTED, output=())
        await self._put(kept, self.sources.rows, lease=LEASE_SECONDS if kept.background else 0.0)

    async def begin(self) -> bool:
        """Tell other processes that the response is in progress; return false if one of them has cancelled it."""
        try:
            return await self._put(self.response, (), lease=LEASE_SECONDS)
        except errors.StoreUnavailable as error:
            self.state.not_kept(error, self.id)
            return True

    async def keep(self) -> None:
        """Keep the response, which has ended. If that does not work, it says so."""
        response = self.response
        rows = [*self.sources.rows, *output_rows(response)]
        if self.conversation is not None and response.status in ("completed", "incomplete"):
            try:
                await self.state.extend(self.conversation, self.owner, rows)
            except (errors.StoreUnavailable, errors.ObjectNotFound, errors.ConversationFull) as error:
                self.state.not_kept(error, self.id)
                response.conversation = None
        if self.log is not None:
            await self.log.close()
            await self._keep_at_last(rows, self.log)
        elif self.stored:
            try:
                # Somebody may have deleted it.
                response.store = await self._put(response, rows)
            except errors.StoreUnavailable as error:
                self.state.not_kept(error, self.id)
                response.store, response.conversation = False, None

    async def _keep_at_last(self, rows: Sequence[Row], log: EventLog) -> None:
        """Keep a response of the background, of which a waiting client has nothing, if not at once then soon."""
        for pause in (*_PAUSES, None):
            try:
                if not await self._put(self.response, [*rows, *log.rows()]):
                    # Somebody has ended it before, or this was kept, and the store could not say so.
                    self.response = (await self.state.record(self.id, self.owner)).response
                return
            except errors.ObjectNotFound:
                self.response.status = "cancelled"
                return
            except errors.StoreUnavailable as error:
                self.state.not_kept(error, self.id)
                if pause is None:
                    self.response.store, self.response.conversation = False, None
                else:
                    await asyncio.sleep(pause)

    async def _put(self, response: types.ResponseObject, rows: Sequence[Row], *, lease: float = 0.0) -> bool:
        kept = await self.state.keep(response, self.owner, self.version, rows, lease=lease)
        self.version += kept
        return kept


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer with a response."""
    context = await begin(request, types.ResponsesRequest, "chat")
    body, state = context.body, request.app[STATE]
    if body.previous_response_id is not None and body.conversation is not None:
        raise errors.InvalidValue("'previous_response_id' cannot be used together with 'conversation'.", "conversation")
    for param, given in (("previous_response_id", body.previous_response_id), ("conversation", body.conversation)):
        if given is not None:
            state.store(param)
    job = Job(context)
    if not body.background:
        async with _chat(context, job) as asked:
            if body.stream and job.stored:
                try:
                    await job.announce()
                except errors.StoreUnavailable as error:
                    state.not_kept(error, job.id)
            return await asked.admitted(partial(_answer, job=job), param="messages")
    return await _begin_in_background(context, job)


@asynccontextmanager
async def _chat(
    context: RequestContext[types.ResponsesRequest], job: Job
) -> AsyncIterator[RequestContext[chat.ChatRequest]]:
    """
    Yield the request of *job* as a chat, with what it goes on from; its conversation is held for the block.

    An error of the block names the field of the request.
    """
    state = job.state
    async with AsyncExitStack() as stack:
        if job.conversation is not None:
            await stack.enter_async_context(state.claimed(job.conversation, job.owner, job.id))
        reading = await job.read(context)
        context.observation.parameters = reading.chat
        try:
            yield context.about(reading.chat)
        except errors.ServiceError as error:
            reading.blame(error)
            raise


async def _answer(context: RequestContext[chat.ChatRequest], *, job: Job) -> web.StreamResponse:
    turn = await _turn_of(context, job)
    events = job.events(turn)
    if job.body.stream:
        return await stream(context, turn.runs, events)
    await agents.render(events, turn.runs[0], timeout=context.limits.total)
    await events.ended(None)
    return json_response(job.response)


async def _turn_of(context: RequestContext[chat.ChatRequest], job: Job) -> chat.Turn:
    """Return the turn of *job*; with ``truncation``, without the oldest messages until the rest fits."""
    turns, reading = 1, job.reading
    while True:
        try:
            return await chat.turn_of(context, job.id, fitting=True)
        except errors.ContextLengthExceeded:
            if job.body.truncation != "auto" or reading is None or not reading.leave_out(turns):
                raise
            context.body = reading.chat
            turns *= 2


async def _begin_in_background(context: RequestContext[types.ResponsesRequest], job: Job) -> web.StreamResponse:
    """
    Answer with the response of *job*, and make it in the background.

    Whatever can be wrong with the request is found out before. Raises :class:`ServiceError`.
    """
    request, state = context.request, job.state
    if not job.stored:
        raise errors.InvalidValue("'background' needs the response to be stored.", "background")
    most = context.service.settings.responses.max_background
    if len(state.live) + state.beginning >= request.app[WORKER].share(most):
        raise errors.ServiceOverloaded("Too many responses are being made in the background already.", retry_after=10)
    context.service.admission.check(context.model.triton_model)
    observation = msgspec.structs.replace(
        context.observation, request=None, began=time.monotonic(), stages=[], unknown_fields=(), stream=True, status=200
    )
    state.beginning += 1
    try:
        async with AsyncExitStack() as stack:
            asked = await stack.enter_async_context(_chat(replace(context, observation=observation), job))
            turn = await asked.admitted(partial(_turn_of, job=job), param="messages", runs=False)
            # What is ignored was found out meanwhile.
            context.observation.headers = observation.headers
            events = job.events(turn)
            job.response.status = "queued"
            await job.announce()
            # The key is charged when the response has ended, not with this request.
            ticket = request.pop(TICKET, None)
            log = job.log = EventLog(state.store(), job.id, job.owner)
            log.add(events.queued())
            work = _in_background(asked, job, turn, events, log, stack.pop_all())
            task = asyncio.create_task(_charged(work, observation, ticket))
            state.live[job.id] = Live(job.response, log, task)
            record = Record(job.response, job.version)
    finally:
        state.beginning -= 1
    if job.body.stream:
        return await send_events(request, ResumedEvents(state, record, job.owner, -1))
    return json_response(job.response)


async def _charged(work: Coroutine[Any, Any, None], observation: Observation, ticket: Ticket | None) -> None:
    """Do the *work* of a request that *observation* tells of; then its *ticket* is charged."""
    try:
        await work
    finally:
        if ticket is not None:
            ticket.close(tokens_charged(observation, served=observation.error is None, cut_short=False))


async def _in_background(
    context: RequestContext[chat.ChatRequest],
    job: Job,
    prepared: chat.Turn,
    events: ResponseEvents,
    log: EventLog,
    held: AsyncExitStack,
) -> None:
    """Make the response of *job* from its *prepared* turn, whatever becomes of the client; then *held* is closed."""
    app, observation = context.request.app, context.observation
    failure: errors.ServiceError | None = None
    turns = [prepared]

    async def answer(context: RequestContext[chat.ChatRequest]) -> None:
        # If the model's engine does not take it, the text-level model gets another turn.
        turn = turns.pop() if turns else await _turn_of(context, job)
        (events.run,), (events.parser,) = turn.runs, turn.parsers
        log.add(events.opening())
        if not await job.begin():
            raise asyncio.CancelledError

        def push(choice: int, deltas: Sequence[Delta]) -> None:
            log.check_room()
            log.add(b"".join([events.piece(choice, delta) for delta in deltas]))

        await collect(turn.runs, timeout=context.limits.total, push=push)
        log.add(events.last(0))

    with Observed(app, observation):
        app[OBSERVERS].identified(observation)
        log.start(cast("asyncio.Task[None]", asyncio.current_task()).cancel)
        try:
            try:
                async with held:
                    await context.admitted(answer, param="messages")
                    log.add(events.concluded(None))
                    await job.keep()
            except asyncio.CancelledError:
                failure = app[DRAINING].reason()
                if failure is None:
                    # Somebody has cancelled it.
                    log.add(events.cancelled())
                    await job.keep()
            except errors.ServiceError as error:
                failure = error
            except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
                _log.exception("response failed", request_id=observation.request_id, response=job.id)
                failure = errors.ServiceError("The service failed to answer the request.")
            if failure is not None:
                observation.error = failure
                log.add(events.concluded(failure))
                await job.keep()
        finally:
            await log.close()
            log.end(terminal_events(job.response, log.count, None if failure is None else failure.param))
            job.state.live.pop(job.id, None)


_SUMMARIZE = (
    "Summarize this conversation for somebody who has to go on with it, and who has only the user's messages and your "
    "summary: what the user wants, what was found out, decided and done, the names, paths, numbers and texts that "
    "matter, and what is left to do. Write the summary and nothing else."
)
# Most tokens of a summary, thoughts included; less where the context is small, so that the next turn has room.
_SUMMARY_TOKENS = 2048


async def compact(request: web.Request) -> web.Response:
    """Return a shorter form of a conversation: the user's messages, and a summary that the model writes."""
    context = await begin(request, types.CompactRequest, "chat")
    given = context.body
    items = input_items(given)
    if not items and given.previous_response_id is None:
        raise missing("input")
    adapter, room = context.model.adapter, context.model.settings.max_model_len
    limit = _SUMMARY_TOKENS if room is None else min(_SUMMARY_TOKENS, max(1, room // 4))
    body = types.ResponsesRequest(
        model=given.model,
        max_output_tokens=limit,
        temperature=0.0 if "temperature" in adapter.honoured else None,
        input=[*items, {"role": "user", "content": _SUMMARIZE}],
        instructions=given.instructions,
        previous_response_id=given.previous_response_id,
        store=False,
    )
    asked = context.about(body)
    job = Job(asked)
    if body.previous_response_id is not None:
        job.state.store("previous_response_id")
    async with _chat(asked, job) as summarizing:
        await summarizing.admitted(partial(_answer, job=job), param="messages")
    response = job.response
    summary = "".join(
        part.text for item in response.output if isinstance(item, types.OutputMessage) for part in item.content
    )
    if not summary or response.usage is None:
        raise errors.UpstreamError(f"The model wrote no summary of the conversation in {limit} tokens.")
    own = [msgspec.json.decode(row.data, type=types.Item) for row in job.sources.rows[:-1]]
    kept = [item for item in [*job.sources.before, *own] if item.get("role") == "user"]
    compaction = {"type": "compaction", "id": f"cmp_{token_hex(16)}", "encrypted_content": agents.seal(summary)}
    return json_response(
        types.CompactedResponse(id=job.id, created_at=now(), output=[*kept, compaction], usage=response.usage)
    )


async def refuse_websocket(request: web.Request) -> web.Response:
    """
    Refuse a WebSocket.

    Agents try it first, and take this status as the sign to go on with POST at once.
    """
    if request.headers.get("Upgrade", "").lower() == "websocket":
        raise errors.UpgradeRefused("Responses are not served over WebSocket: use POST, with 'stream' for events.")
    raise web.HTTPMethodNotAllowed(request.method, ("POST",))


class InputTokens(msgspec.Struct, kw_only=True):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"] = msgspec.field(name="object", default="response.input_tokens")
    input_tokens: int


async def count_tokens(request: web.Request) -> web.Response:
    """Count the tokens of a request's input, as the model's template and tokenizer make them."""
    context = await begin(request, types.ResponsesRequest, "chat")
    job = Job(context)
    async with _chat(context, job) as asked:
        return json_response(InputTokens(input_tokens=await agents.count_tokens(asked)))


class _Retrieval(msgspec.Struct):
    """What openai-go sends in the body of a GET, and other clients in the query."""

    stream: bool = False
    starting_after: int = -1


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a response that was stored; with ``stream``, its events, if it was made in the background."""
    state, record = await _found(request)
    live = state.live.get(record.response.id)
    given = await read_json(request, _Retrieval, strict=False) if request.can_read_body else _Retrieval()
    stream = request.query.get("stream", "true" if given.stream else "false")
    if stream not in ("true", "false"):
        raise errors.InvalidValue("'stream' must be 'true' or 'false'.", "stream")
    if stream == "false":
        return json_response(record.response if live is None or not record.running else live.shown)
    if not record.response.background:
        raise errors.InvalidValue("Only responses that are made in the background can be streamed again.", "stream")
    try:
        after = int(request.query.get("starting_after", given.starting_after))
    except ValueError as error:
        raise errors.InvalidValue("'starting_after' must be the number of an event.", "starting_after") from error
    return await send_events(request, ResumedEvents(state, record, key_of(request).name, after))


async def _found(request: web.Request) -> tuple[ResponseState, Record]:
    state = request.app[STATE]
    return state, await state.record(request.match_info["response"], key_of(request).name)


class Deleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion; ``object`` says of what."""

    id: str
    object: Literal["response", "conversation.deleted"] = msgspec.field(name="object")
    deleted: bool = True


async def delete(request: web.Request) -> web.Response:
    """
    Delete a response that was stored; one that is being made is cancelled.

    Responses that go on from it go on without its items.
    """
    state, record = await _found(request)
    await state.store().delete(record.response.id, bridged=True)
    await state.stop(record.response.id)
    return json_response(Deleted(id=record.response.id, object="response"))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    while True:
        state, record = await _found(request)
        response = record.response
        if not response.background:
            raise errors.InvalidRequest(
                "Only responses that are made in the background can be cancelled.", param="response_id"
            )
        if not record.running:
            return json_response(response)
        if not await state.stop(response.id):
            # Its maker, in another process, can store nothing more. What it has stored is the output.
            response.status = "cancelled"
            await state.keep(response, key_of(request).name, record.version)


async def list_input(request: web.Request) -> web.Response:
    """List the items of a response's own input."""
    _, record = await _found(request)
    return json_response(await page_of(request, record.response.id, "input"))


class ItemList(msgspec.Struct, kw_only=True):
    """Items, with the ids of the first and the last, and whether more follow."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[types.Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


async def page_of(request: web.Request, key: str, name: str) -> ItemList:
    """
    Return the page that *request* asks for of the list *name* of a response or conversation, in an ``order``.

    A page of large items has fewer than were asked for. Raises :class:`InvalidValue`.
    """
    order, after = request.query.get("order", "desc"), request.query.get("after")
    if order not in ("asc", "desc"):
        raise errors.InvalidValue("'order' must be 'asc' or 'desc'.", "order")
    limit, most = agents.page_limit(request.query, 100), request.app[LIMITS].max_text_size
    store = request.app[STATE].store()
    if after is not None and not is_id(after):
        raise agents.unknown_place("after")
    page = await store.page(key, name, after=after, limit=limit, most_size=most, reverse=order == "desc")
    if page is None:
        raise agents.unknown_place("after")
    return list_of(page.rows, more=page.more)


def list_of(rows: Sequence[Row], *, more: bool = False) -> ItemList:
    """Return a list of the items that *rows* are kept of, of which there may be *more*."""
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    # They are in JSON already.
    data = cast(Sequence[types.Item], [msgspec.Raw(row.data) for row in rows])
    return ItemList(data=data, first_id=first, last_id=last, has_more=more)
