"""Responses that are stored: retrieved, streamed again, cancelled, deleted; and pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from triton_openai import errors
from triton_openai.api.bodies import json_reply
from triton_openai.api.paging import page_query, unknown_id_error
from triton_openai.api.responses.background import ResumedEvents
from triton_openai.api.responses.objects import Deleted, Item, ItemList
from triton_openai.api.responses.stored import StoredResponse
from triton_openai.api.service import Service
from triton_openai.operations import Call, Reply
from triton_openai.storage.store import Row


class Retrieval(msgspec.Struct):
    """What openai-go sends in the body of a GET, and other clients in the query."""

    stream: bool = False
    starting_after: int = -1


async def _stored(service: Service, call: Call[Any]) -> StoredResponse:
    return await service.responses.find(call.path["response"], call.key.name)


async def retrieve(service: Service, call: Call[Retrieval]) -> Reply:
    """Return a response that was stored; with ``stream``, its events, if it was made in the background."""
    stored = await _stored(service, call)
    if not _wants_stream(call):
        if stored.log is not None and stored.running:
            return json_reply(stored.log.shown)
        return json_reply(stored.response)
    if not stored.response.background:
        raise errors.InvalidValue("Only responses that are made in the background can be streamed again.", "stream")
    try:
        after = int(call.query.get("starting_after", call.body.starting_after))
    except ValueError as error:
        raise errors.InvalidValue("'starting_after' must be the number of an event.", "starting_after") from error
    return await ResumedEvents(stored, after).send(call.output)


def _wants_stream(call: Call[Retrieval]) -> bool:
    """Return whether the query, or else the body, asks for events. Raises :class:`InvalidValue`."""
    stream = call.query.get("stream")
    if stream is None:
        return call.body.stream
    if stream not in ("true", "false"):
        raise errors.InvalidValue("'stream' must be 'true' or 'false'.", "stream")
    return stream == "true"


async def delete(service: Service, call: Call[None]) -> Reply:
    """
    Delete a response that was stored; one that is being made is cancelled.

    Responses that go on from it go on without its items.
    """
    stored = await _stored(service, call)
    await stored.state.store().delete(stored.response.id, bridged=True)
    if stored.log is not None:
        await stored.log.stop()
    return json_reply(Deleted(id=stored.response.id, object="response"))


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    while True:
        stored = await _stored(service, call)
        response = stored.response
        if not response.background:
            raise errors.InvalidRequest(
                "Only responses that are made in the background can be cancelled.", param="response_id"
            )
        if not stored.running:
            return json_reply(response)
        if stored.log is not None:
            await stored.log.stop()
        else:
            # Its maker, in another process, can store nothing more. What it has stored is the output.
            response.status = "cancelled"
            await stored.save()


async def list_input(service: Service, call: Call[None]) -> Reply:
    """List the items of a response's own input."""
    stored = await _stored(service, call)
    return json_reply(await page_of(service, call, stored.response.id, "input"))


async def page_of(service: Service, call: Call[Any], key: str, name: str, order: str = "desc") -> ItemList:
    """
    Return the page that *call* asks for of the list *name* of what is stored, in this *order* if it names none.

    A page of large items has fewer than were asked for. Raises :class:`InvalidValue`.
    """
    limit, after, reverse = page_query(call.query, order)
    store = service.responses.store()
    max_size = service.settings.limits.max_text_size
    page = await store.page(key, name, after=after, limit=limit, max_size=max_size, reverse=reverse)
    if page is None:
        raise unknown_id_error("after")
    return list_of(page.rows, more=page.more)


def list_of(rows: Sequence[Row], *, more: bool = False) -> ItemList:
    """Return a list of the items in *rows*; *more* is whether others follow."""
    page = ItemList.of(rows, more=more)
    # They are in JSON already.
    page.data = cast(Sequence[Item], [msgspec.Raw(row.data) for row in rows])
    return page
