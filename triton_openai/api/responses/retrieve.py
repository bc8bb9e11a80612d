"""Responses that are stored: retrieved, streamed again, cancelled, deleted; and pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from triton_openai import errors
from triton_openai.api.bodies import whole
from triton_openai.api.paging import page_query, unknown_place_error
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
    found = await _stored(service, call)
    given = call.body
    stream = call.query.get("stream", "true" if given.stream else "false")
    if stream not in ("true", "false"):
        raise errors.InvalidValue("'stream' must be 'true' or 'false'.", "stream")
    if stream == "false":
        return whole(found.log.shown if found.log is not None and found.running else found.response)
    if not found.response.background:
        raise errors.InvalidValue("Only responses that are made in the background can be streamed again.", "stream")
    try:
        after = int(call.query.get("starting_after", given.starting_after))
    except ValueError as error:
        raise errors.InvalidValue("'starting_after' must be the number of an event.", "starting_after") from error
    return await ResumedEvents(found, after).send(call.output)


async def delete(service: Service, call: Call[None]) -> Reply:
    """
    Delete a response that was stored; one that is being made is cancelled.

    Responses that go on from it go on without its items.
    """
    found = await _stored(service, call)
    await found.state.store().delete(found.response.id, bridged=True)
    if found.log is not None:
        await found.log.stop()
    return whole(Deleted(id=found.response.id, object="response"))


async def cancel(service: Service, call: Call[None]) -> Reply:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    while True:
        found = await _stored(service, call)
        response = found.response
        if not response.background:
            raise errors.InvalidRequest(
                "Only responses that are made in the background can be cancelled.", param="response_id"
            )
        if not found.running:
            return whole(response)
        if found.log is not None:
            await found.log.stop()
        else:
            # Its maker, in another process, can store nothing more. What it has stored is the output.
            response.status = "cancelled"
            await found.put()


async def list_input(service: Service, call: Call[None]) -> Reply:
    """List the items of a response's own input."""
    found = await _stored(service, call)
    return whole(await page_of(service, call, found.response.id, "input"))


async def page_of(service: Service, call: Call[Any], key: str, name: str, order: str = "desc") -> ItemList:
    """
    Return the page that *call* asks for of the list *name* of what is stored, in this *order* if it names none.

    A page of large items has fewer than were asked for. Raises :class:`InvalidValue`.
    """
    limit, after, reverse = page_query(call.query, order)
    store = service.responses.store()
    most = service.settings.limits.max_text_size
    page = await store.page(key, name, after=after, limit=limit, max_size=most, reverse=reverse)
    if page is None:
        raise unknown_place_error("after")
    return list_of(page.rows, more=page.more)


def list_of(rows: Sequence[Row], *, more: bool = False) -> ItemList:
    """Return a list of the items that *rows* are kept of, of which there may be *more*."""
    if rows:
        first = rows[0].id
        last = rows[-1].id
    else:
        first = None
        last = None
    # They are in JSON already.
    data = cast(Sequence[Item], [msgspec.Raw(row.data) for row in rows])
    return ItemList(data=data, first_id=first, last_id=last, has_more=more)
