"""
Groups of paths that are open only to requests with a certain header, as NVIDIA's frontend has them.

The route says to which group a path belongs, so all spellings and aliases of a path are restricted alike. A
restriction of "inference" covers embeddings too, unless they have a header of their own: NVIDIA's frontend counts them
as inference, and its documentation as a group of their own.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

from aiohttp import web
from multidict import CIMultiDictProxy

from triton_openai.access.keys import sha256
from triton_openai.config.tree import Group, RestrictedApi
from triton_openai.errors import ApiRestricted

#: Groups whose requests count against what a key may use.
COUNTED: frozenset[Group] = frozenset({"inference", "embedding"})

#: What a route belongs to: a group, or the page, which is open to everybody.
RouteGroup: TypeAlias = Group | Literal["page"]
#: The group of each route.
ROUTE_GROUPS: web.AppKey[dict[web.AbstractRoute, RouteGroup]] = web.AppKey("route_groups", dict)


class Restrictions:
    """The restricted groups, each with the header that opens it."""

    def __init__(self, entries: Iterable[RestrictedApi] = ()) -> None:
        self._headers: dict[Group, tuple[str, bytes]] = {}
        self.replace(entries)

    def replace(self, entries: Iterable[RestrictedApi]) -> None:
        """Restrict what *entries* say, and nothing else."""
        headers = {api: (entry.header, sha256(entry.value)) for entry in entries for api in entry.apis}
        if "inference" in headers:
            headers.setdefault("embedding", headers["inference"])
        self._headers = headers

    @property
    def header_names(self) -> frozenset[str]:
        """The headers that open something, in lower case."""
        return frozenset(name.lower() for name, _ in self._headers.values())

    @property
    def groups(self) -> Collection[Group]:
        """The groups that are restricted."""
        return self._headers.keys()

    def check(self, group: Group, headers: CIMultiDictProxy[str]) -> None:
        """Raise :class:`ApiRestricted` for a request without the header that opens *group*."""
        wanted = self._headers.get(group)
        if wanted is None:
            return
        name, digest = wanted
        # Several headers of that name are refused: a proxy may have checked another one.
        given = headers.getall(name, [])
        if len(given) != 1 or not hmac.compare_digest(sha256(given[0].strip()), digest):
            raise ApiRestricted("This API is restricted: the request lacks the header with the value that opens it.")
