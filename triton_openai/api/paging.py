"""Pages of lists: what a query asks for, and what an answer has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from triton_openai.errors import InvalidValue

_T = TypeVar("_T")
_Item = TypeVar("_Item")
#: Characters of an id: more than any in use has, and few enough for the index of a database.
MAX_ID = 512


class Page(msgspec.Struct, Generic[_Item], kw_only=True):
    """A page of a list, with the ids of the first and the last of it, and whether more follow."""

    data: Sequence[_Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[Any], *, more: bool) -> Self:
        """Return a page of *data*, each of which has an id."""
        if data:
            first = data[0].id
            last = data[-1].id
        else:
            first = None
            last = None
        return cls(data=data, first_id=first, last_id=last, has_more=more)


def is_id(text: object) -> bool:
    """Return whether an entry of a list can have the id *text*."""
    return isinstance(text, str) and len(text) <= MAX_ID and text.isprintable()


def page_limit(query: Mapping[str, str], max_limit: int, *, default: int = 20) -> int:
    """Return the ``limit`` of a query, *max_limit* at most. Raises :class:`InvalidValue`."""
    text = query.get("limit", str(default))
    limit = 0
    if text.isascii() and text.isdecimal() and len(text) < 6:
        limit = int(text)
    if not 1 <= limit <= max_limit:
        raise InvalidValue(f"'limit' must be a number from 1 to {max_limit}.", "limit")
    return limit


def page_query(
    query: Mapping[str, str], order: str = "desc", *, max_limit: int = 100, default: int = 20
) -> tuple[int, str | None, bool]:
    """
    Return the ``limit`` of the page that a *query* of OpenAI's API asks for, the id that it follows, and whether the
    last comes first.

    *order* and *default* hold where the query has none. Raises :class:`InvalidValue`.
    """
    order = query.get("order", order)
    after = query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidValue("'order' must be 'asc' or 'desc'.", "order")
    if after is not None and not is_id(after):
        raise unknown_id_error("after")
    return page_limit(query, max_limit, default=default), after, order == "desc"


def message_page_query(query: Mapping[str, str]) -> tuple[int, str, str | None, bool]:
    """
    Return the ``limit`` of the page that a *query* of Anthropic's API asks for, the parameter with the id that the page
    is next to, that id, and whether the page is before it. Raises :class:`InvalidValue`.
    """
    before = "before_id" in query
    if before:
        param = "before_id"
    else:
        param = "after_id"
    return page_limit(query, 1000), param, query.get(param), before


async def fetch_page(
    find: Callable[..., Awaitable[Sequence[_T] | None]] | None, limit: int, after: str | None, param: str = "after"
) -> tuple[Sequence[_T], bool]:
    """
    Return *limit* entries that *find* returns after the id *after*, and whether there are more.

    Without *find*, there are none. Raises :class:`InvalidValue`, about *param*, if there is no entry *after*.
    """
    rows: Sequence[_T] | None = None
    if find is not None:
        rows = await find(after=after, limit=limit + 1)
    elif after is None:
        rows = []
    if rows is None:
        raise unknown_id_error(param)
    return rows[:limit], len(rows) > limit


def unknown_id_error(param: str) -> InvalidValue:
    """Return the error for a page that is to follow an entry that is not in the list."""
    return InvalidValue(f"'{param}' is the id of nothing in the list.", param)
