"""Responses that are stored: retrieved, streamed again, cancelled, deleted; and pages of items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
from aiohttp import web

from triton_openai import errors
from triton_openai.api.bodies import json_response, read_json
from triton_openai.api.paging import page_query, unknown_place_error
from triton_openai.api.responses.background import ResumedEvents
from triton_openai.api.responses.objects import Deleted, Item, ItemList
from triton_openai.api.responses.stored import STATE, StoredResponse
from triton_openai.api.service import key_of
from triton_openai.serving.request_body import LIMITS
from triton_openai.storage.store import Row


class _Retrieval(msgspec.Struct):
    """What openai-go sends in the body of a GET, and other clients in the query."""

    stream: bool = False
    starting_after: int = -1


async def _found(request: web.Request) -> StoredResponse:
    return await request.app[STATE].find(request.match_info["response"], key_of(request).name)


async def retrieve(request: web.Request) -> web.StreamResponse:
    """Return a response that was stored; with ``stream``, its events, if it was made in the background."""
    found = await _found(request)
    given = await read_json(request, _Retrieval, strict=False) if request.can_read_body else _Retrieval()
    stream = request.query.get("stream", "true" if given.stream else "false")
    if stream not in ("true", "false"):
        raise errors.InvalidValue("'stream' must be 'true' or 'false'.", "stream")
    if stream == "false":
        return json_response(found.log.shown if found.log is not None and found.running else found.response)
    if not found.response.background:
        raise errors.InvalidValue("Only responses that are made in the background can be streamed again.", "stream")
    try:
        after = int(request.query.get("starting_after", given.starting_after))
    except ValueError as error:
        raise errors.InvalidValue("'starting_after' must be the number of an event.", "starting_after") from error
    return await ResumedEvents(found, after).send(request)


async def delete(request: web.Request) -> web.Response:
    """
    Delete a response that was stored; one that is being made is cancelled.

    Responses that go on from it go on without its items.
    """
    found = await _found(request)
    await found.state.store().delete(found.response.id, bridged=True)
    if found.log is not None:
        await found.log.stop()
    return json_response(Deleted(id=found.response.id, object="response"))


async def cancel(request: web.Request) -> web.Response:
    """Cancel a response that is made in the background; one that has ended stays as it is."""
    while True:
        found = await _found(request)
        response = found.response
        if not response.background:
            raise errors.InvalidRequest(
                "Only responses that are made in the background can be cancelled.", param="response_id"
            )
        if not found.running:
            return json_response(response)
        if found.log is not None:
            await found.log.stop()
        else:
            # Its maker, in another process, can store nothing more. What it has stored is the output.
            response.status = "cancelled"
            await found.put()


async def list_input(request: web.Request) -> web.Response:
    """List the items of a response's own input."""
    found = await _found(request)
    return json_response(await page_of(request, found.response.id, "input"))


async def page_of(request: web.Request, key: str, name: str, order: str = "desc") -> ItemList:
    """
    Return the page that *request* asks for of the list *name* of what is stored, in this *order* if it names none.

    A page of large items has fewer than were asked for. Raises :class:`InvalidValue`.
    """
    limit, after, reverse = page_query(request.query, order)
    store, most = request.app[STATE].store(), request.app[LIMITS].max_text_size
    page = await store.page(key, name, after=after, limit=limit, most_size=most, reverse=reverse)
    if page is None:
        raise unknown_place_error("after")
    return list_of(page.rows, more=page.more)


def list_of(rows: Sequence[Row], *, more: bool = False) -> ItemList:
    """Return a list of the items that *rows* are kept of, of which there may be *more*."""
    first, last = (rows[0].id, rows[-1].id) if rows else (None, None)
    # They are in JSON already.
    data = cast(Sequence[Item], [msgspec.Raw(row.data) for row in rows])
    return ItemList(data=data, first_id=first, last_id=last, has_more=more)
