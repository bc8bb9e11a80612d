"""``/v1/conversations``: lists of items that responses are made in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Annotated, Any, Literal

import msgspec
import structlog
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.access.keys import ApiKey
from triton_openai.api.bodies import json_reply, now
from triton_openai.api.paging import is_id
from triton_openai.api.responses.event_log import LEASE_SECONDS, RENEW_SECONDS
from triton_openai.api.responses.items import rows_of
from triton_openai.api.responses.objects import Deleted, Item, Metadata
from triton_openai.api.responses.request_reader import check_items
from triton_openai.api.responses.retrieve import list_of, page_of
from triton_openai.api.responses.stored import ResponseStore, StoredResponse, is_key, no_conversation
from triton_openai.api.service import Service
from triton_openai.operations import Call, Reply, Whole
from triton_openai.storage.store import Row, RowKey
from triton_openai.telemetry.logging import warn

_log = structlog.get_logger(__name__)
# As many as OpenAI takes at once.
_Items = Annotated[list[Item], Meta(max_length=20)]


class ConversationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new conversation."""

    items: _Items | None = None
    metadata: Metadata | None = None


class ConversationUpdate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What changes in a conversation."""

    metadata: Metadata


class NewItems(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Items for a conversation."""

    items: _Items


class ConversationObject(msgspec.Struct, kw_only=True):
    """A conversation."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


_CONVERSATION = offload.json_decoder(ConversationObject)


async def find(state: ResponseStore, conversation_id: str, owner: str) -> tuple[ConversationObject, int]:
    """Return a conversation and its version. Raises :class:`ObjectNotFound`."""
    entry = await state.entry("conv_", conversation_id, owner)
    if entry is None:
        raise no_conversation(conversation_id)
    return _CONVERSATION.decode(entry.head), entry.version


@asynccontextmanager
async def lock_conversation(made: StoredResponse, conversation_id: str) -> AsyncIterator[None]:
    """Lock a conversation for a response: no other is made in it meanwhile. Raises :class:`ConversationBusy`."""
    store = made.state.store()
    owner = made.owner
    response_id = made.response.id

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await store.claim(conversation_id, owner, response_id, LEASE_SECONDS, renew=True)
            except errors.StoreUnavailable as error:
                warn(_log, "a lease is not renewed", error)

    locked = False
    if is_key("conv_", conversation_id):
        locked = await store.claim(conversation_id, owner, response_id, LEASE_SECONDS)
    if not locked:
        await find(made.state, conversation_id, owner)
        raise errors.ConversationBusy("Another response is being made in this conversation.", param="conversation")
    renewing = asyncio.create_task(renew())
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})
        try:
            if not made.released:
                await store.claim(conversation_id, owner, response_id, 0, renew=True)
        except errors.StoreUnavailable as error:
            # Then the lease ends by itself.
            warn(_log, "a conversation is not released", error, conversation=conversation_id)


async def _conversation(service: Service, call: Call[Any]) -> ConversationObject:
    """Return the conversation that the path of *call* names. Raises :class:`ObjectNotFound`."""
    conversation, _ = await find(service.responses, call.path["conversation"], call.key.name)
    return conversation


async def _rows(call: Call[Any], items: Sequence[Item]) -> Sequence[Row]:
    """Return *items* of *call* as they are stored. Raises :class:`InvalidRequest`."""

    def rows() -> Sequence[Row]:
        check_items(items)
        return rows_of(items, token_hex(16), "items", name="items")

    return await offload.run(rows, cost=offload.json_cost(call.record.body_size or 0))


def check_store(service: Service, key: ApiKey) -> None:
    """Raise :class:`UnsupportedParameter` if the service stores no responses."""
    service.responses.store()


async def create(service: Service, call: Call[ConversationRequest]) -> Reply:
    """Create a conversation."""
    body = call.body
    responses = service.responses
    rows = await _rows(call, body.items or ())
    responses.check_room(0, 0, rows)
    made = ConversationObject(id=f"conv_{token_hex(16)}", created_at=now(), metadata=body.metadata or {})
    await responses.store().put(made.id, call.key.name, msgspec.json.encode(made), 0, rows=rows)
    return json_reply(made)


async def retrieve(service: Service, call: Call[None]) -> Reply:
    """Return a conversation, without its items."""
    return json_reply(await _conversation(service, call))


async def update(service: Service, call: Call[ConversationUpdate]) -> Reply:
    """Replace the metadata of a conversation."""
    responses = service.responses
    owner = call.key.name
    conversation, version = await find(responses, call.path["conversation"], owner)
    conversation.metadata = call.body.metadata
    if not await responses.store().put(conversation.id, owner, msgspec.json.encode(conversation), version):
        # The last writer wins, unless the conversation was deleted meanwhile.
        await find(responses, conversation.id, owner)
    return json_reply(conversation)


async def delete(service: Service, call: Call[None]) -> Reply:
    """Delete a conversation with its items."""
    conversation = await _conversation(service, call)
    await service.responses.store().delete(conversation.id)
    return json_reply(Deleted(id=conversation.id, object="conversation.deleted"))


async def list_items(service: Service, call: Call[None]) -> Reply:
    """List the items of a conversation."""
    conversation = await _conversation(service, call)
    return json_reply(await page_of(service, call, conversation.id, "items"))


async def add_items(service: Service, call: Call[NewItems]) -> Reply:
    """Add items to the end of a conversation. One that is in it already is not added again."""
    responses = service.responses
    owner = call.key.name
    rows = await _rows(call, call.body.items)
    conversation = await _conversation(service, call)
    added = {RowKey(conversation.id, row.id): row for row in rows}
    stored = await responses.store().fetch(owner, added)
    for number, (item, row) in enumerate(added.items()):
        if stored.get(item, row.data) != row.data:
            raise errors.InvalidValue("The conversation has another item with this id.", f"items[{number}].id")
    await responses.extend(conversation.id, owner, rows)
    return json_reply(list_of(rows))


def _unknown(item_id: str) -> errors.ObjectNotFound:
    return errors.ObjectNotFound(f"There is no item '{item_id[:100]}' in the conversation.", param="item_id")


async def retrieve_item(service: Service, call: Call[None]) -> Reply:
    """Return an item of a conversation."""
    conversation = await _conversation(service, call)
    item = RowKey(conversation.id, call.path["item"])
    if not is_id(item.id):
        raise _unknown(item.id)
    stored = await service.responses.store().fetch(call.key.name, [item])
    if item not in stored:
        raise _unknown(item.id)
    return Whole(stored[item])


async def delete_item(service: Service, call: Call[None]) -> Reply:
    """Delete an item of a conversation."""
    conversation = await _conversation(service, call)
    item_id = call.path["item"]
    if not is_id(item_id) or not await service.responses.store().delete_row(conversation.id, item_id):
        raise _unknown(item_id)
    return json_reply(conversation)
