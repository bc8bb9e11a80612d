"""Which group of paths a request asks for: what its route was declared with, and not how its path is written."""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler

from triton_openai.config import Group

#: Groups whose requests count against what a key may use.
COUNTED: frozenset[Group] = frozenset({"inference", "embedding"})

ROUTE_GROUPS: web.AppKey[dict[web.AbstractRoute, Group]] = web.AppKey("route_groups", dict)


class Routes:
    """Adds routes to an application, each with its group."""

    def __init__(self, app: web.Application) -> None:
        self._router = app.router
        if ROUTE_GROUPS not in app:
            app[ROUTE_GROUPS] = {}
        self._groups = app[ROUTE_GROUPS]

    def get(self, group: Group, path: str, handler: Handler) -> None:
        """Answer GET and HEAD."""
        self._add(group, ("GET", "HEAD"), path, handler)

    def post(self, group: Group, path: str, handler: Handler) -> None:
        """Answer POST."""
        self._add(group, ("POST",), path, handler)

    def _add(self, group: Group, methods: tuple[str, ...], path: str, handler: Handler) -> None:
        resource = self._router.add_resource(path)
        for method in methods:
            self._groups[resource.add_route(method, handler, expect_handler=_expect)] = group


async def _expect(request: web.Request) -> None:
    """
    Do nothing about the header ``Expect``: aiohttp would ask for a body before anybody has looked who wants to send it.

    It is asked for when it is about to be read. Expectations that are not known may be ignored (RFC 9110, 10.1.1).
    """


def group_of(request: web.Request) -> Group | None:
    """Return the group of what *request* asks for; ``None`` when there is no such path or method."""
    return request.app[ROUTE_GROUPS].get(request.match_info.route)


def check_groups(app: web.Application) -> None:
    """Raise ``RuntimeError`` for a route that was added without a group: nothing would guard it."""
    for route in app.router.routes():
        if route not in app[ROUTE_GROUPS]:
            raise RuntimeError(f"{route} has no group.")
