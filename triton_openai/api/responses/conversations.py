"""``/v1/conversations``: lists of items that responses are made in."""

from __future__ import annotations

from secrets import token_hex
from typing import Annotated, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.bodies import json_response, read_json
from triton_openai.api.responses.handlers import Deleted, list_of, listed
from triton_openai.api.responses.reader import check_items, numbered
from triton_openai.api.responses.state import STATE, Conversation, ResponseState
from triton_openai.api.responses.types import Item, Metadata
from triton_openai.api.service import key_of, now
from triton_openai.errors import InvalidRequest, ObjectNotFound

# As many as OpenAI takes at once, and as many as a chat may have messages.
_Items = Annotated[list[Item], Meta(max_length=20)]
_MOST_ITEMS = 4096


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


async def create(request: web.Request) -> web.Response:
    """Create a conversation."""
    state, _, owner = _state(request)
    body = ConversationRequest()
    if request.can_read_body:
        body = await read_json(request, ConversationRequest, strict=True)
    check_items(body.items or ())
    items = numbered(body.items or (), token_hex(16))
    conversation = Conversation(owner, f"conv_{token_hex(16)}", now(), body.metadata or {}, items)
    await state.put(conversation, 0)
    return _shown(conversation)


async def retrieve(request: web.Request) -> web.Response:
    """Return a conversation, without its items."""
    state, conversation_id, owner = _state(request)
    return _shown((await state.conversation(conversation_id, owner))[0])


async def update(request: web.Request) -> web.Response:
    """Replace the metadata of a conversation."""
    state, conversation_id, owner = _state(request)
    body = await read_json(request, ConversationUpdate, strict=True)

    def change(conversation: Conversation) -> None:
        conversation.metadata = body.metadata

    return _shown(await state.change(conversation_id, owner, change))


async def delete(request: web.Request) -> web.Response:
    """Delete a conversation with its items."""
    state, conversation_id, owner = _state(request)
    await state.conversation(conversation_id, owner)
    await state.store().delete(conversation_id)
    return json_response(Deleted(id=conversation_id, object="conversation.deleted"))


async def list_items(request: web.Request) -> web.Response:
    """List the items of a conversation."""
    state, conversation_id, owner = _state(request)
    return json_response(listed(request, (await state.conversation(conversation_id, owner))[0].items))


async def add_items(request: web.Request) -> web.Response:
    """Add items to the end of a conversation."""
    state, conversation_id, owner = _state(request)
    body = await read_json(request, NewItems, strict=True)
    check_items(body.items)
    added = numbered(body.items, token_hex(16))

    def change(conversation: Conversation) -> None:
        if len(conversation.items) + len(added) > _MOST_ITEMS:
            raise InvalidRequest(
                f"A conversation can have {_MOST_ITEMS} items at most.", param="items", code="array_above_max_length"
            )
        conversation.items.extend(added)

    await state.change(conversation_id, owner, change)
    return json_response(list_of(added))


def _unknown(item_id: str) -> ObjectNotFound:
    return ObjectNotFound(f"There is no item '{item_id[:100]}' in the conversation.", param="item_id")


async def retrieve_item(request: web.Request) -> web.Response:
    """Return an item of a conversation."""
    state, conversation_id, owner = _state(request)
    item_id = request.match_info["item"]
    for item in (await state.conversation(conversation_id, owner))[0].items:
        if item.get("id") == item_id:
            return web.Response(body=msgspec.json.encode(item), content_type="application/json")
    raise _unknown(item_id)


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item of a conversation."""
    state, conversation_id, owner = _state(request)
    item_id = request.match_info["item"]

    def change(conversation: Conversation) -> None:
        left = [item for item in conversation.items if item.get("id") != item_id]
        if len(left) == len(conversation.items):
            raise _unknown(item_id)
        conversation.items = left

    return _shown(await state.change(conversation_id, owner, change))
