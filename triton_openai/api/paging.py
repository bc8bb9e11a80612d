"""Pages of lists: what a query asks for, and what an answer says of the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import msgspec

from triton_openai.errors import InvalidValue

_Item = TypeVar("_Item")


class Page(msgspec.Struct, Generic[_Item], kw_only=True):
    """A page of a list, with the ids of the first and the last of it, and whether more follow."""

    data: Sequence[_Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, data: Sequence[Any], *, more: bool) -> Self:
        """Return a page of *data*, each of which has an id."""
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=more)


def page_limit(query: Mapping[str, str], most: int, *, default: int = 20) -> int:
    """Return the ``limit`` of a query, *most* at most. Raises :class:`InvalidValue`."""
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 6 and 1 <= int(limit) <= most):
        raise InvalidValue(f"'limit' must be a number from 1 to {most}.", "limit")
    return int(limit)


def unknown_place_error(after: str) -> InvalidValue:
    """Return the error for a page that is to follow what is not in the list."""
    return InvalidValue(f"'{after}' is the id of nothing in the list.", after)
