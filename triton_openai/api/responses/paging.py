"""Lists of items, a page at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from aiohttp import web

from triton_openai.api.responses.types import Item
from triton_openai.errors import InvalidValue

_MOST = 100


class ItemList(msgspec.Struct, kw_only=True):
    """Items, with the ids of the first and the last, and whether more follow."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def page(request: web.Request, items: Sequence[Item]) -> ItemList:
    """
    Return those of *items* that the query of *request* asks for: ``limit`` of them in an ``order``, ``after`` an id.

    Raises :class:`InvalidValue`.
    """
    query = request.query
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= _MOST):
        raise InvalidValue(f"'limit' must be from 1 to {_MOST}.", "limit")
    if order not in ("asc", "desc"):
        raise InvalidValue("'order' must be 'asc' or 'desc'.", "order")
    ordered = list(items if order == "asc" else reversed(items))
    if after is not None:
        place = next((number for number, item in enumerate(ordered) if item.get("id") == after), None)
        if place is None:
            raise InvalidValue("'after' is the id of no item in the list.", "after")
        ordered = ordered[place + 1 :]
    shown = ordered[: int(limit)]
    return ItemList(
        data=shown,
        first_id=shown[0].get("id") if shown else None,
        last_id=shown[-1].get("id") if shown else None,
        has_more=len(ordered) > len(shown),
    )
