"""What is kept of responses and conversations, and the responses that are made in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import msgspec
import structlog
from aiohttp import web

from triton_openai import errors, offload
from triton_openai.api.responses.reader import reference
from triton_openai.api.responses.store import Store
from triton_openai.api.responses.types import IncompleteDetails, Item, ResponseObject, ResponseStatus
from triton_openai.api.sse import EventLog
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)
# Whoever makes a response, or holds a conversation, says so again within this time, else it has ended.
_LEASE = 15.0
# Values of more bytes are read and written in a thread.
_LONGEST_INLINE = 64 * 1024
_RUNNING = frozenset({"queued", "in_progress"})

_Kept = TypeVar("_Kept", bound="Record | Conversation")


class Record(msgspec.Struct):
    """
    A response with its own input, of the key *owner*.

    While it is made, *lease* is the time until which its maker lives. *events* are those of a stream, for responses
    made in the background.
    """

    owner: str
    response: ResponseObject
    input: Sequence[Item] = ()
    lease: float = 0.0
    events: bytes = b""

    @property
    def running(self) -> bool:
        """Whether it is being made."""
        return self.response.status in _RUNNING

    def settle(self) -> None:
        """Make a response whose maker is gone an incomplete one."""
        if self.running and self.lease < time.time():
            self.response.status, self.response.incomplete_details = "incomplete", IncompleteDetails("interrupted")

    def items(self) -> list[Item]:
        """Return input and output."""
        return [*self.input, *output_items(self.response)]


class Conversation(msgspec.Struct):
    """A conversation of the key *owner*; *busy* is the response that is made in it, until *until* at most."""

    owner: str
    id: str
    created_at: int
    metadata: dict[str, str] = {}
    items: list[Item] = []
    busy: str = ""
    until: float = 0.0


# Made at import: two threads that use a type for the first time at the same time can crash msgspec (0.22).
_DECODERS: Mapping[type, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Record, Conversation)
}


def output_items(response: ResponseObject) -> list[Item]:
    """Return the output as items of an input."""
    items: list[Item] = msgspec.to_builtins(response.output)
    return items


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

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self.live: dict[str, Live] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything is kept."""
        return self._store is not None

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

    async def _load(self, kind: type[_Kept], key: str, owner: str) -> tuple[_Kept, int, int] | None:
        """Return the value of *key*, its version and its size; ``None`` also for one of another owner or kind."""
        store = self.store()
        found = await store.get(key) if key.startswith("resp_" if kind is Record else "conv_") else None
        if found is None:
            return None
        value = await offload.run(_DECODERS[kind].decode, found[0], size=len(found[0]), threshold=_LONGEST_INLINE)
        if isinstance(value, Record):
            value.settle()
        return (value, found[1], len(found[0])) if value.owner == owner else None

    async def record(self, response_id: str, owner: str) -> tuple[Record, int]:
        """Return a response and its version. Raises :class:`ObjectNotFound`."""
        if found := await self._load(Record, response_id, owner):
            return found[:2]
        raise errors.ObjectNotFound(f"There is no response '{response_id[:100]}'.", param="response_id")

    async def conversation(self, conversation_id: str, owner: str) -> tuple[Conversation, int]:
        """Return a conversation and its version. Raises :class:`ObjectNotFound`."""
        if found := await self._load(Conversation, conversation_id, owner):
            return found[:2]
        raise errors.ObjectNotFound(f"There is no conversation '{conversation_id[:100]}'.", param="conversation")

    async def put(self, value: Record | Conversation, version: int) -> bool:
        """Keep *value*, unless another *version* than this is kept; return whether it is."""
        key = value.response.id if isinstance(value, Record) else value.id
        size = sum(len(item) * 256 for item in (value.input if isinstance(value, Record) else value.items))
        encoded = await offload.run(msgspec.msgpack.encode, value, size=size, threshold=_LONGEST_INLINE)
        return await self.store().put(key, encoded, version)

    async def change(self, conversation_id: str, owner: str, change: Callable[[Conversation], None]) -> Conversation:
        """Make a *change* to a conversation that others may change too. Raises what it raises."""
        while True:
            conversation, version = await self.conversation(conversation_id, owner)
            change(conversation)
            if await self.put(conversation, version):
                return conversation

    async def history(self, previous: str, owner: str, *, most: int) -> list[Item]:
        """Return the items of *previous* and those before it, *most* bytes of them. Raises :class:`InvalidRequest`."""
        param = "previous_response_id"
        records: list[Record] = []
        following: str | None = previous
        while following is not None:
            found = await self._load(Record, following, owner)
            if found is None:
                raise errors.InvalidRequest(
                    f"Previous response with id '{following[:100]}' not found.",
                    param=param,
                    code="previous_response_not_found",
                )
            record, _, size = found
            most -= size
            if most < 0:
                raise errors.PayloadTooLarge("The responses before this one are too large together.", param=param)
            if record.running:
                raise errors.InvalidValue(f"The response '{following}' has not ended yet.", param)
            if record.response.conversation is not None:
                raise errors.InvalidValue(f"The response '{following}' is part of a conversation: give that.", param)
            records.append(record)
            following = record.response.previous_response_id
        return [item for record in reversed(records) for item in record.items()]

    async def resolved(self, items: Sequence[tuple[str, Item]], known: Sequence[Item], owner: str) -> list[Item]:
        """Return *items* with what they refer to: *known* items, or kept ones. Raises :class:`ObjectNotFound`."""
        by_id = {item.get("id"): item for item in known}
        resolved = []
        for place, item in items:
            wanted = reference(item)
            if wanted is not None:
                if wanted not in by_id and self.keeps:
                    # The id of an item begins with that of its response.
                    with suppress(errors.ObjectNotFound):
                        record, _ = await self.record(f"resp_{wanted.partition('_')[2][:32]}", owner)
                        by_id.update((each.get("id"), each) for each in record.items())
                if wanted not in by_id:
                    raise errors.ObjectNotFound(f"There is no item '{wanted[:100]}'.", param=f"{place}.id")
            resolved.append(item if wanted is None else by_id[wanted])
        return resolved

    @asynccontextmanager
    async def claimed(self, conversation_id: str, owner: str, response_id: str) -> AsyncIterator[Conversation]:
        """Hold a conversation for a response: no other is made in it meanwhile. Raises :class:`ConversationBusy`."""

        def claim(conversation: Conversation) -> None:
            if conversation.busy not in ("", response_id) and conversation.until > time.time():
                raise errors.ConversationBusy(
                    "Another response is being made in this conversation.", param="conversation"
                )
            conversation.busy, conversation.until = response_id, time.time() + _LEASE

        def release(conversation: Conversation) -> None:
            if conversation.busy == response_id:
                conversation.busy, conversation.until = "", 0.0

        async def renew() -> None:
            await self.change(conversation_id, owner, claim)

        conversation = await self.change(conversation_id, owner, claim)
        try:
            async with every(_LEASE / 3, renew):
                yield conversation
        finally:
            # It may be deleted meanwhile, or the store be gone: then the lease ends.
            with suppress(errors.ServiceError):
                await self.change(conversation_id, owner, release)

    def stop(self, response_id: str) -> None:
        """Stop making a response in the background, if this process makes it."""
        live = self.live.pop(response_id, None)
        if live is not None:
            live.task.cancel()

    async def close(self) -> None:
        """Disconnect from the store."""
        if self._store is not None:
            await self._store.close()


def lease() -> float:
    """Return the time until which the maker of a response lives, unless it says so again."""
    return time.time() + _LEASE


@asynccontextmanager
async def every(seconds: float, work: Callable[[], Any]) -> AsyncIterator[None]:
    """Repeat *work* while the block runs; when the service cannot do it, it is tried again."""

    async def repeat() -> None:
        while True:
            await asyncio.sleep(seconds)
            with suppress(errors.ServiceError):
                await work()

    task = asyncio.create_task(repeat())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


#: How often whoever makes a response has to say so.
RENEW_SECONDS = _LEASE / 3
STATE: web.AppKey[ResponseState] = web.AppKey("responses", ResponseState)
