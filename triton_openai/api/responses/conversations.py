"""``/v1/conversations``: lists of items that responses are made in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from secrets import token_hex
from typing import Annotated, Literal

import msgspec
import structlog
from aiohttp import web
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.api.bodies import json_response, read_json
from triton_openai.api.paging import is_id
from triton_openai.api.responses.chat_request import check_items
from triton_openai.api.responses.event_log import LEASE_SECONDS, RENEW_SECONDS
from triton_openai.api.responses.items import rows_of
from triton_openai.api.responses.objects import Deleted, Item, Metadata
from triton_openai.api.responses.retrieve import list_of, page_of
from triton_openai.api.responses.stored import STATE, ResponseStore, StoredResponse, is_key, no_conversation
from triton_openai.api.service import key_of, now
from triton_openai.storage.store import Place, Row
from triton_openai.telemetry.logging import warn
from triton_openai.telemetry.request_record import RECORD

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
    object: Literal["conversation"] = msgspec.field(name="object", default="conversation")
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
async def claimed(made: StoredResponse, conversation_id: str) -> AsyncIterator[None]:
    """Hold a conversation for a response: no other is made in it meanwhile. Raises :class:`ConversationBusy`."""
    store, owner, response_id = made.state.store(), made.owner, made.response.id

    async def renew() -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await store.claim(conversation_id, owner, response_id, LEASE_SECONDS, renew=True)
            except errors.StoreUnavailable as error:
                warn(_log, "a lease is not renewed", error)

    known = is_key("conv_", conversation_id)
    if not known or not await store.claim(conversation_id, owner, response_id, LEASE_SECONDS):
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


async def _found(request: web.Request) -> tuple[ResponseStore, str, ConversationObject]:
    """Return the state, the owner and the conversation of *request*. Raises :class:`ObjectNotFound`."""
    state, owner = request.app[STATE], key_of(request).name
    return state, owner, (await find(state, request.match_info["conversation"], owner))[0]


async def _rows(request: web.Request, items: Sequence[Item]) -> Sequence[Row]:
    """Return *items* of a request as they are kept. Raises :class:`InvalidRequest`."""

    def rows() -> Sequence[Row]:
        check_items(items)
        return rows_of(items, token_hex(16), "items", name="items")

    return await offload.run(rows, cost=offload.json_cost(request[RECORD].body_size or 0))


async def create(request: web.Request) -> web.Response:
    """Create a conversation."""
    state = request.app[STATE]
    store, body = state.store(), ConversationRequest()
    if request.can_read_body:
        body = await read_json(request, ConversationRequest, strict=True)
    rows = await _rows(request, body.items or ())
    state.check_room(0, 0, rows)
    made = ConversationObject(id=f"conv_{token_hex(16)}", created_at=now(), metadata=body.metadata or {})
    await store.put(made.id, key_of(request).name, msgspec.json.encode(made), 0, rows=rows)
    return json_response(made)


async def retrieve(request: web.Request) -> web.Response:
    """Return a conversation, without its items."""
    return json_response((await _found(request))[2])


async def update(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    state, owner = request.app[STATE], key_of(request).name
    store = state.store()
    body = await read_json(request, ConversationUpdate, strict=True)
    conversation, version = await find(state, request.match_info["conversation"], owner)
    conversation.metadata = body.metadata
    if not await store.put(conversation.id, owner, msgspec.json.encode(conversation), version):
        # Somebody else has replaced them meanwhile, which is as if it had come after this; or has deleted it.
        await find(state, conversation.id, owner)
    return json_response(conversation)


async def delete(request: web.Request) -> web.Response:
    """Delete a conversation with its items."""
    state, _, conversation = await _found(request)
    await state.store().delete(conversation.id)
    return json_response(Deleted(id=conversation.id, object="conversation.deleted"))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation."""
    _, _, conversation = await _found(request)
    return json_response(await page_of(request, conversation.id, "items"))


async def add_items(request: web.Request) -> web.Response:
    """Add items to the end of a conversation. One that is in it already is not added again."""
    request.app[STATE].store()
    body = await read_json(request, NewItems, strict=True)
    rows = await _rows(request, body.items)
    state, owner, conversation = await _found(request)
    places = {Place(conversation.id, row.id): row for row in rows}
    known = await state.store().fetch(owner, places)
    for number, (place, row) in enumerate(places.items()):
        if known.get(place, row.data) != row.data:
            raise errors.InvalidValue("The conversation has another item with this id.", f"items[{number}].id")
    await state.extend(conversation.id, owner, rows)
    return json_response(list_of(rows))


def _unknown(item_id: str) -> errors.ObjectNotFound:
    return errors.ObjectNotFound(f"There is no item '{item_id[:100]}' in the conversation.", param="item_id")


async def retrieve_item(request: web.Request) -> web.Response:
    """Return an item of a conversation."""
    state, owner, conversation = await _found(request)
    place = Place(conversation.id, request.match_info["item"])
    found = await state.store().fetch(owner, [place] if is_id(place.id) else [])
    if place not in found:
        raise _unknown(place.id)
    return web.Response(body=found[place], content_type="application/json")


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item of a conversation."""
    state, _, conversation = await _found(request)
    item_id = request.match_info["item"]
    if not is_id(item_id) or not await state.store().delete_row(conversation.id, item_id):
        raise _unknown(item_id)
    return json_response(conversation)
