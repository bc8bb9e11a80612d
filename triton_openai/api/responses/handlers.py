"""``/v1/responses``: making responses, at once or in the background, and what is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from secrets import token_hex
from typing import Literal

import msgspec
import structlog
from aiohttp import web

from triton_openai import errors
from triton_openai.access.rate_limits import TICKET, Ticket, tokens_charged
from triton_openai.answer.fan_out import collect
from triton_openai.api import agents, chat
from triton_openai.api.agents import known_effort
from triton_openai.api.bodies import json_response, missing, tell_ignored
from triton_openai.api.responses import types
from triton_openai.api.responses.events import ResponseEvents
from triton_openai.api.responses.reader import Reading, input_items, numbered, read
from triton_openai.api.responses.state import (
    RENEW_SECONDS,
    STATE,
    Live,
    Record,
    ResponseState,
    every,
    lease,
    output_items,
)
from triton_openai.api.service import RequestContext, begin, key_of, now
from triton_openai.api.sse import EventLog, stream
from triton_openai.generation import Delta
from triton_openai.models.draining import DRAINING
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.serving.middleware import Observed
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.observation import OBSERVERS

_log = structlog.get_logger(__name__)


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
        digits = token_hex(16)
        self.id = f"resp_{digits}"
        #: The request's own items, as they are kept.
        self.items = numbered(input_items(body), f"{digits}i")
        #: The items that it goes on from, and the request as a chat, once it is read.
        self.before: Sequence[types.Item] = ()
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

    async def read(self, context: RequestContext[types.ResponsesRequest], before: Sequence[types.Item]) -> Reading:
        """Return the request as a chat that goes on from the items *before*. Raises :class:`InvalidRequest`."""
        body = self.body
        # The response says whether it is used.
        effort = await known_effort(context.model, None if body.reasoning is None else body.reasoning.effort)
        source = "conversation" if self.conversation is not None else "previous_response_id"
        own = [(f"input[{number}]", item) for number, item in enumerate(input_items(body))]
        resolved = await self.state.resolved(own, before, self.owner)
        items = [(source, item) for item in before]
        items += [(place, item) for (place, _), item in zip(own, resolved, strict=True)]
        if not items:
            raise missing("input")
        # What is kept has no references to what may be gone later.
        self.items = [
            item if new is old else new for item, new, (_, old) in zip(self.items, resolved, own, strict=True)
        ]
        self.before = before
        strict = context.service.settings.api.strict_tools
        reading = self.reading = read(body, items, strict_tools=strict, effort=effort)
        agents.tell_left_out(context.observation, reading.tools.left_out)
        if effort is None and body.reasoning is not None and body.reasoning.effort is not None:
            tell_ignored(context.observation, ["reasoning.effort"])
        self.response.tools = reading.tools.shown
        self.response.reasoning = {**self.response.reasoning, "effort": effort}
        return reading

    def events(self, turn: chat.Turn | None) -> ResponseEvents:
        """Return what renders the response; without a *turn*, it has failed before it began."""
        response, run, parser = self.response, None, AnswerParser(None, None)
        response.status = "in_progress"
        if turn is not None:
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
            kept = msgspec.structs.replace(
                kept, status="incomplete", incomplete_details=types.IncompleteDetails("interrupted"), output=()
            )
        await self._put(kept, lease=lease())

    async def renew(self) -> None:
        """Say that this process still makes the response in the background; end that if somebody has ended it."""
        if not await self._put(self.response, lease=lease()):
            self.state.stop(self.id)

    async def keep(self, last: bytes = b"") -> bool:
        """Keep the response and its *last* events; return whether that worked. If not, the response says so."""
        response = self.response
        try:
            if self.conversation is not None and response.status in ("completed", "incomplete"):
                added = [*self.items, *output_items(response)]
                await self.state.change(self.conversation, self.owner, lambda kept: kept.items.extend(added))
            if self.stored:
                # Those in the background are read again after their end.
                await self._put_last(b"" if self.log is None else bytes(self.log) + last)
        except (errors.StoreUnavailable, errors.ObjectNotFound) as error:
            warn(_log, "response is not kept", error, response=self.id)
            response.store, response.conversation = False, None
            return False
        return True

    async def _put_last(self, events: bytes) -> None:
        """Keep the whole response, unless somebody has cancelled or deleted it."""
        while not await self._put(self.response, events=events):
            # Or a renewal was written and its result not seen.
            with suppress(errors.ObjectNotFound):
                found, version = await self.state.record(self.id, self.owner)
                if found.response.status != "cancelled" and version != self.version:
                    self.version = version
                    continue
            return

    async def _put(self, response: types.ResponseObject, *, lease: float = 0.0, events: bytes = b"") -> bool:
        kept = await self.state.put(Record(self.owner, response, self.items, lease, events), self.version)
        self.version += kept
        return kept


async def handle(request: web.Request) -> web.StreamResponse:
    """Answer with a response."""
    context = await begin(request, types.ResponsesRequest, "responses")
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
                with suppress(errors.StoreUnavailable):
                    await job.announce()
            return await asked.admitted(partial(_answer, job=job), param="messages")
    if not job.stored:
        raise errors.InvalidValue("'background' needs the response to be stored.", "background")
    job.response.status = "queued"
    await job.announce()
    job.log = EventLog()
    # The key is charged when the response has ended, not with this request.
    ticket = request.pop(TICKET, None)
    task = asyncio.create_task(_in_background(context, job, job.log, ticket))
    state.live[job.id] = Live(job.response, job.log, task)
    if body.stream:
        return await job.log.send(request, after=-1)
    return json_response(job.response)


@asynccontextmanager
async def _chat(
    context: RequestContext[types.ResponsesRequest], job: Job
) -> AsyncIterator[RequestContext[chat.ChatRequest]]:
    """
    Yield the request of *job* as a chat, with what it goes on from; its conversation is held for the block.

    An error of the block names the field of the request.
    """
    state, body = job.state, job.body
    async with AsyncExitStack() as stack:
        before: Sequence[types.Item] = ()
        if job.conversation is not None:
            before = (await stack.enter_async_context(state.claimed(job.conversation, job.owner, job.id))).items
        elif body.previous_response_id is not None:
            most = context.service.settings.server.max_body_size
            before = await state.history(body.previous_response_id, job.owner, most=most)
        reading = await job.read(context, before)
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


async def _in_background(
    context: RequestContext[types.ResponsesRequest], job: Job, log: EventLog, ticket: Ticket | None
) -> None:
    """Make the response of *job*, whatever becomes of the client."""
    app = context.request.app
    observation = msgspec.structs.replace(
        context.observation, request=None, began=time.monotonic(), stages=[], unknown_fields=(), stream=True, status=200
    )
    context = replace(context, observation=observation)
    failure: errors.ServiceError | None = None
    events: ResponseEvents | None = None

    async def answer(context: RequestContext[chat.ChatRequest]) -> None:
        nonlocal events
        turn = await _turn_of(context, job)
        rendering = events = job.events(turn)
        log.add(rendering.opening())

        def push(choice: int, deltas: Sequence[Delta]) -> None:
            log.add(b"".join([rendering.piece(choice, delta) for delta in deltas]))

        await collect(turn.runs, timeout=context.limits.total, push=push)
        log.add(rendering.last(0))

    with Observed(app, observation):
        app[OBSERVERS].identified(observation)
        try:
            try:
                async with _chat(context, job) as asked:
                    async with every(RENEW_SECONDS, job.renew):
                        await asked.admitted(answer, param="messages")
                    if events is not None:
                        log.add(await events.ended(None))
            except asyncio.CancelledError:
                failure = app[DRAINING].reason()
                if failure is None:
                    # Somebody has cancelled it.
                    job.response.status = "cancelled"
                    await job.keep()
            except errors.ServiceError as error:
                failure = error
            except Exception:  # noqa: BLE001 - the last resort: logged, and nothing of it reaches the client
                _log.exception("response failed", request_id=observation.request_id, response=job.id)
                failure = errors.ServiceError("The service failed to answer the request.")
            if failure is not None:
                observation.error = failure
                log.add(await (events or job.events(None)).ended(failure))
        finally:
            log.end()
            job.state.live.pop(job.id, None)
            if ticket is not None:
                ticket.close(tokens_charged(observation, served=failure is None, cut_short=False))


_SUMMARIZE = (
    "Summarize this conversation for somebody who has to go on with it, and who has only the user's messages and your "
    "summary: what the user wants, what was found out, decided and done, the names, paths, numbers and texts that "
    "matter, and what is left to do. Write the summary and nothing else."
)


async def compact(request: web.Request) -> web.Response:
    """Return a shorter form of a conversation: the user's messages, and a summary that the model writes."""
    context = await begin(request, types.CompactRequest, "responses")
    given = context.body
    items = input_items(given)
    if not items and given.previous_response_id is None:
        raise missing("input")
    body = types.ResponsesRequest(
        model=given.model,
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
    if response.status != "completed":
        raise errors.ContextLengthExceeded("There is no room for a summary of the conversation.", param="input")
    if not summary or response.usage is None:
        raise errors.UpstreamError("The model wrote no summary of the conversation.")
    kept = [item for item in [*job.before, *job.items[:-1]] if item.get("role") == "user"]
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
    context = await begin(request, types.ResponsesRequest, "responses")
    job = Job(context)
    async with _chat(context, job) as asked:
        return json_response(InputTokens(input_tokens=await agents.count_tokens(asked)))


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a response that was stored; with ``stream``, its events, if it was made in the background."""
    state, record, _ = await _found(request)
    live = state.live.get(record.response.id)
    stream = request.query.get("stream", "false")
    if stream not in ("true", "false"):
        raise errors.InvalidValue("'stream' must be 'true' or 'false'.", "stream")
    if stream == "false":
        return json_response(record.response if live is None or not record.running else live.shown)
    if not record.response.background:
        raise errors.InvalidValue("Only responses that are made in the background can be streamed again.", "stream")
    try:
        after = int(request.query.get("starting_after", "-1"))
    except ValueError as error:
        raise errors.InvalidValue("'starting_after' must be the number of an event.", "starting_after") from error
    log = None if live is None else live.log
    while log is None:
        # Another process makes it.
        if not record.running:
            log = EventLog(record.events, over=True)
        else:
            await asyncio.sleep(1)
            _, record, _ = await _found(request)
    return await log.send(request, after=max(-1, after))


async def _found(request: web.Request) -> tuple[ResponseState, Record, int]:
    state = request.app[STATE]
    return state, *await state.record(request.match_info["response"], key_of(request).name)


class Deleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion; ``object`` says of what."""

    id: str
    object: Literal["response", "conversation.deleted"] = msgspec.field(name="object")
    deleted: bool = True


async def delete(request: web.Request) -> web.Response:
    """Delete a response that was stored; one that is being made is cancelled."""
    state, record, _ = await _found(request)
    await state.store().delete(record.response.id)
    state.stop(record.response.id)
    return json_response(Deleted(id=record.response.id, object="response"))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    while True:
        state, record, version = await _found(request)
        if not record.response.background:
            raise errors.InvalidRequest(
                "Only responses that are made in the background can be cancelled.", param="response_id"
            )
        if not record.running:
            return json_response(record.response)
        record.response.status, record.lease = "cancelled", 0.0
        if await state.put(record, version):
            state.stop(record.response.id)
            return json_response(record.response)


async def list_input(request: web.Request) -> web.Response:
    """List the items of a response's own input."""
    _, record, _ = await _found(request)
    return json_response(listed(request, record.input))


class ItemList(msgspec.Struct, kw_only=True):
    """Items, with the ids of the first and the last, and whether more follow."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[types.Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


def listed(request: web.Request, items: Sequence[types.Item]) -> ItemList:
    """Return the page of *items* that *request* asks for, in an ``order``. Raises :class:`InvalidValue`."""
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise errors.InvalidValue("'order' must be 'asc' or 'desc'.", "order")
    items = items[:: 1 if order == "asc" else -1]
    shown, more = agents.page(request.query, items, [item.get("id") for item in items], most=100, after="after")
    return list_of(shown, more=more)


def list_of(items: Sequence[types.Item], *, more: bool = False) -> ItemList:
    """Return a list of *items*, of which there may be *more*."""
    first, last = (items[0].get("id"), items[-1].get("id")) if items else (None, None)
    return ItemList(data=items, first_id=first, last_id=last, has_more=more)
