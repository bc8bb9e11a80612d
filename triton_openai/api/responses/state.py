"""What is kept of responses and conversations, and the responses that are made in the background."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from aiohttp import web

from triton_openai import errors, offload
from triton_openai.api.responses.background import EVENTS, LEASE_SECONDS, RENEW_SECONDS, EventLog
from triton_openai.api.responses.events import replayed
from triton_openai.api.responses.types import INTERRUPTED, OutputItem, ResponseObject, ResponseStatus
from triton_openai.config.tree import ResponsesSettings
from triton_openai.storage.store import Entry, EntryFull, Link, Row, Store
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)
_RUNNING = frozenset({"queued", "in_progress"})
_KEY = re.compile(r"(resp|conv)_[0-9a-f]{32}")
# A change that somebody else was faster with is tried so often.
_TRIES = 8
# The lists of a response's rows; a conversation has the list `items`.
_ITEMS = ("input", "output")


class Record(msgspec.Struct):
    """A response as it is kept, and the *version* of that."""

    response: ResponseObject
    version: int

    @property
    def running(self) -> bool:
        """Whether it is being made."""
        return self.response.status in _RUNNING


class Conversation(msgspec.Struct):
    """A conversation without its items."""

    id: str
    created_at: int
    metadata: dict[str, str] = {}


# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_RESPONSE, _OUTPUT = offload.json_decoder(ResponseObject), offload.json_decoder(list[OutputItem])
_CONVERSATION = offload.json_decoder(Conversation)


def _record(entry: Entry, output: Sequence[bytes]) -> Record:
    response = _RESPONSE.decode(entry.head)
    response.output = _OUTPUT.decode(joined(output))
    return Record(response, entry.version)


def joined(items: Sequence[bytes]) -> bytes:
    """Return *items*, each in JSON, as a list in JSON."""
    return b"[%b]" % b",".join(items)


def output_rows(response: ResponseObject) -> list[Row]:
    """Return the output as rows."""
    return [Row("output", item.id, msgspec.json.encode(item)) for item in response.output]


class Live(msgspec.Struct):
    """A response that this process makes in the background."""

    response: ResponseObject
    log: EventLog
    task: asyncio.Task[None]

    @property
    def shown(self) -> ResponseObject:
        """The response as clients see it: its output and its end once they are kept."""
        response = self.response
        status: ResponseStatus = "queued" if response.status == "queued" else "in_progress"
        unknown = {"completed_at": None, "error": None, "incomplete_details": None, "output": (), "usage": None}
        return msgspec.structs.replace(response, status=status, **unknown)


class ResponseState:
    """Responses and conversations in *store*, of which each key sees its own; ``None`` keeps nothing."""

    def __init__(self, store: Store | None, settings: ResponsesSettings) -> None:
        self._store = store
        self._settings = settings
        self.live: dict[str, Live] = {}
        #: How many more are about to be.
        self.beginning = 0

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._store is not None

    @property
    def available(self) -> bool:
        """Whether the store answers, as far as is known, or there is none."""
        return self._store is None or self._store.available

    def store(self, param: str | None = None) -> Store:
        """Return the store. Raises :class:`UnsupportedParameter` if there is none."""
        if self._store is None:
            raise errors.UnsupportedParameter("This service keeps no responses (--responses-store none).", param=param)
        return self._store

    async def check(self) -> None:
        """Warn the operator if the store cannot be used."""
        try:
            await self.store().get("")
        except errors.ServiceError as error:
            warn(_log, "responses cannot be stored", error)

    def not_kept(self, error: errors.ServiceError, response_id: str) -> None:
        """Log that a response is not kept; that a store does not answer is logged once."""
        if self.available:
            warn(_log, "response is not kept", error, response=response_id)

    async def _entry(self, prefix: str, key: str, owner: str) -> Entry | None:
        store = self.store()
        entry = await store.get(key) if key.startswith(prefix) and _KEY.fullmatch(key) else None
        return entry if entry is not None and entry.owner == owner else None

    async def record(self, response_id: str, owner: str) -> Record:
        """Return a response. Raises :class:`ObjectNotFound`."""
        entry = await self._entry("resp_", response_id, owner)
        if entry is None:
            raise errors.ObjectNotFound(f"There is no response '{response_id[:100]}'.", param="response_id")
        output = await self.store().read([response_id], ["output"])
        record = await offload.run(_record, entry, output, cost=offload.json_cost(entry.size))
        lost = record.running and entry.until < time.time()
        if lost:
            record.response.status, record.response.error = "failed", INTERRUPTED
        if lost or (record.response.status == "cancelled" and not output):
            await self._settle(record, owner, changed=lost)
        return record

    async def _settle(self, record: Record, owner: str, *, changed: bool) -> None:
        """Give a response, which its maker has not ended, the output that its events tell of."""
        response = record.response
        events = b"".join(await self.store().read([response.id], [EVENTS]))
        response.output = await offload.run(replayed, events, cost=offload.JSON * len(events))
        if changed or response.output:
            # Another process that is faster does the same.
            record.version += await self.keep(response, owner, record.version, output_rows(response))

    async def keep(
        self, response: ResponseObject, owner: str, version: int, rows: Sequence[Row] = (), *, lease: float = 0.0
    ) -> bool:
        """
        Keep *response* without its output, with more *rows*, unless another *version* than this is kept.

        Whoever makes it says so again within *lease* seconds. Returns whether it is kept.
        """
        head = msgspec.structs.replace(response, output=())
        encoded = await offload.run(msgspec.json.encode, head, cost=offload.rendering_cost(head))
        parent = response.previous_response_id if response.conversation is None else response.conversation["id"]
        held = (response.id if lease else "", lease)
        return await self.store().put(response.id, owner, encoded, version, rows=rows, parent=parent, lease=held)

    async def conversation(self, conversation_id: str, owner: str) -> tuple[Conversation, int]:
        """Return a conversation and its version. Raises :class:`ObjectNotFound`."""
        entry = await self._entry("conv_", conversation_id, owner)
        if entry is None:
            raise errors.ObjectNotFound(f"There is no conversation '{conversation_id[:100]}'.", param="conversation")
        return _CONVERSATION.decode(entry.head), entry.version

    async def begin(self, conversation: Conversation, owner: str, items: Sequence[Row]) -> None:
        """Keep a new conversation. Raises :class:`ConversationFull`."""
        self.check_room(0, 0, items)
        await self.store().put(conversation.id, owner, msgspec.json.encode(conversation), 0, rows=items)

    def check_room(self, count: int, size: int, items: Sequence[Row]) -> None:
        """Raise :class:`ConversationFull` if there is no room for *items* beside *count* items of *size* bytes."""
        most_items, most_size = self._settings.max_conversation_items, self._settings.max_conversation_size
        if count + len(items) > most_items or size + sum(len(row.data) for row in items) > most_size:
            raise errors.ConversationFull(most_items, most_size)

    async def extend(self, conversation_id: str, owner: str, items: Sequence[Row]) -> None:
        """Add *items* to a conversation. Raises :class:`ConversationFull` and :class:`ObjectNotFound`."""
        most_items, most_size = self._settings.max_conversation_items, self._settings.max_conversation_size
        rows = [row._replace(list="items") for row in items]
        try:
            if await self.store().append(conversation_id, owner, rows, most_rows=most_items, most_size=most_size):
                return
        except EntryFull as error:
            raise errors.ConversationFull(most_items, most_size) from error
        raise errors.ObjectNotFound(f"There is no conversation '{conversation_id[:100]}'.", param="conversation")

    async def describe(self, conversation_id: str, owner: str, metadata: dict[str, str]) -> Conversation:
        """Replace the metadata of a conversation. Raises :class:`ObjectNotFound` and :class:`ConversationBusy`."""
        for number in range(_TRIES):
            conversation, version = await self.conversation(conversation_id, owner)
            conversation.metadata = metadata
            if await self.store().put(conversation_id, owner, msgspec.json.encode(conversation), version):
                return conversation
            await asyncio.sleep(random.uniform(0, 0.01 * 2**number))
        raise errors.ConversationBusy("The conversation is being changed by others.", param="conversation")

    async def chain(self, key: str, owner: str, *, most: int) -> tuple[Sequence[str], int, int]:
        """
        Return the keys of a conversation, or of a response and those before it, the number of their items and bytes.

        They are *most* items at most, and the oldest comes first. Raises :class:`InvalidRequest` for what is not there,
        has not ended, or is part of a conversation.
        """
        if key.startswith("conv_"):
            (link,) = await self.store().chain(key, owner, ["items"], most=1)
            return [key], link.rows, link.size
        param, links = "previous_response_id", list[Link]()
        if _KEY.fullmatch(key) and key.startswith("resp_"):
            links.extend(await self.store().chain(key, owner, _ITEMS, most=most + 1))
        for link in links or [Link(key, False, 0.0, 0, 0)]:
            if link.key.startswith("conv_"):
                raise errors.InvalidValue("The response before this one is part of a conversation: give that.", param)
            if not link.found:
                found = f"Previous response with id '{key[:100]}' not found."
                if link.key != key:
                    found = f"The response '{key}' goes on from '{link.key}', which is not stored any more."
                raise errors.InvalidRequest(
                    found,
                    param=param,
                    code="previous_response_not_found",
                )
            if link.until > time.time():
                raise errors.InvalidValue(f"The response '{link.key}' has not ended yet.", param)
        return [link.key for link in reversed(links)], sum(x.rows for x in links), sum(x.size for x in links)

    async def read(self, keys: Sequence[str]) -> Sequence[bytes]:
        """Return the items of responses or of a conversation, each in JSON."""
        return await self.store().read(keys, ["items", *_ITEMS])

    @asynccontextmanager
    async def claimed(self, conversation_id: str, owner: str, response_id: str) -> AsyncIterator[None]:
        """Hold a conversation for a response: no other is made in it meanwhile. Raises :class:`ConversationBusy`."""
        store = self.store()

        async def renew() -> None:
            await store.claim(conversation_id, response_id, LEASE_SECONDS, renew=True)

        await self.conversation(conversation_id, owner)
        if not await store.claim(conversation_id, response_id, LEASE_SECONDS):
            raise errors.ConversationBusy("Another response is being made in this conversation.", param="conversation")
        try:
            async with every(RENEW_SECONDS, renew):
                yield
        finally:
            try:
                await store.claim(conversation_id, response_id, 0, renew=True)
            except errors.StoreUnavailable as error:
                # Then the lease ends by itself.
                warn(_log, "a conversation is not released", error, conversation=conversation_id)

    async def stop(self, response_id: str) -> bool:
        """Stop making a response in the background, and wait until that is kept; false if this process makes none."""
        live = self.live.get(response_id)
        if live is not None:
            if not live.task.cancelling():
                live.task.cancel()
            await asyncio.wait({live.task})
        return live is not None

    async def close(self) -> None:
        """Disconnect from the store."""
        if self._store is not None:
            await self._store.close()


@asynccontextmanager
async def every(seconds: float, work: Callable[[], Any]) -> AsyncIterator[None]:
    """Repeat *work* while the block runs; when the service cannot do it, the log says so, and it is tried again."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await work()
            except errors.ServiceError as error:
                warn(_log, "a lease is not renewed", error)

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


STATE: web.AppKey[ResponseState] = web.AppKey("responses", ResponseState)
