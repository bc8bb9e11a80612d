"""``/v1/conversations``: lists of items that responses are made in."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai import offload
from triton_openai.api.bodies import json_response, read_json
from triton_openai.api.responses.handlers import Deleted, list_of, page_of
from triton_openai.api.responses.reader import check_items, is_id, numbered
from triton_openai.api.responses.sources import encode
from triton_openai.api.responses.state import STATE, Conversation, ResponseState
from triton_openai.api.responses.types import Item, Metadata
from triton_openai.api.service import key_of, now
from triton_openai.errors import InvalidValue, ObjectNotFound
from triton_openai.storage.store import Place, Row
from triton_openai.telemetry.observation import OBSERVATION

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


def _state(request: web.Request) -> tuple[ResponseState, str, str]:
    """Return the state, the conversation's id and the owner. Raises :class:`UnsupportedParameter` for no store."""
    state = request.app[STATE]
    state.store()
    return state, request.match_info.get("conversation", ""), key_of(request).name


def _shown(conversation: Conversation) -> web.Response:
    return json_response(msgspec.convert(conversation, ConversationObject, from_attributes=True))


async def _rows(request: web.Request, items: Sequence[Item]) -> Sequence[Row]:
    """Return *items* of a request as they are kept. Raises :class:`InvalidRequest`."""

    def rows() -> Sequence[Row]:
        check_items(items)
        own = numbered(items, token_hex(16), "items")
        return [Row("items", item["id"], encode(item, f"items[{number}]")) for number, item in enumerate(own)]

    return await offload.run(rows, cost=offload.json_cost(request[OBSERVATION].body_size or 0))


async def create(request: web.Request) -> web.Response:
    """Create a conversation."""
    state, _, owner = _state(request)
    body = ConversationRequest()
    if request.can_read_body:
        body = await read_json(request, ConversationRequest, strict=True)
    rows = await _rows(request, body.items or ())
    conversation = Conversation(f"conv_{token_hex(16)}", now(), body.metadata or {})
    await state.begin(conversation, owner, rows)
    return _shown(conversation)


async def retrieve(request: web.Request) -> web.Response:
    """Return a conversation, without its items."""
    state, conversation_id, owner = _state(request)
    return _shown((await state.conversation(conversation_id, owner))[0])


async def update(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    state, conversation_id, owner = _state(request)
    body = await read_json(request, ConversationUpdate, strict=True)
    return _shown(await state.describe(conversation_id, owner, body.metadata))


async def delete(request: web.Request) -> web.Response:
    """Delete a conversation with its items."""
    state, conversation_id, owner = _state(request)
    await state.conversation(conversation_id, owner)
    await state.store().delete(conversation_id)
    return json_response(Deleted(id=conversation_id, object="conversation.deleted"))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation."""
    state, conversation_id, owner = _state(request)
    await state.conversation(conversation_id, owner)
    return json_response(await page_of(request, conversation_id, "items"))


async def add_items(request: web.Request) -> web.Response:
    """Add items to the end of a conversation. One that is in it already is not added again."""
    state, conversation_id, owner = _state(request)
    body = await read_json(request, NewItems, strict=True)
    rows = await _rows(request, body.items)
    await state.conversation(conversation_id, owner)
    places = {Place(conversation_id, row.id): row for row in rows}
    known = await state.store().fetch(owner, places)
    for number, (place, row) in enumerate(places.items()):
        if known.get(place, row.data) != row.data:
            raise InvalidValue("The conversation has another item with this id.", f"items[{number}].id")
    await state.extend(conversation_id, owner, rows)
    return json_response(list_of(rows))


def _unknown(item_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"There is no item '{item_id[:100]}' in the conversation.", param="item_id")


async def retrieve_item(request: web.Request) -> web.Response:
    """Return an item of a conversation."""
    state, conversation_id, owner = _state(request)
    await state.conversation(conversation_id, owner)
    place = Place(conversation_id, request.match_info["item"])
    found = await state.store().fetch(owner, [place] if is_id(place.id) else [])
    if place not in found:
        raise _unknown(place.id)
    return web.Response(body=found[place], content_type="application/json")


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item of a conversation."""
    state, conversation_id, owner = _state(request)
    conversation, _ = await state.conversation(conversation_id, owner)
    item_id = request.match_info["item"]
    if not is_id(item_id) or not await state.store().delete_row(conversation_id, item_id):
        raise _unknown(item_id)
    return _shown(conversation)
