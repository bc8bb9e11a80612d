"""``GET /openapi.json``: made when somebody asks for the first time, then kept as bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import msgspec
from aiohttp import web


class Description:
    """What *describe* returns, which is called once."""

    def __init__(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._describe = describe

    @property
    def made(self) -> bool:
        """Whether it is there already."""
        return "body" in self.__dict__

    @cached_property
    def body(self) -> bytes:
        """The description as JSON."""
        return msgspec.json.encode(self._describe())


DESCRIPTION: web.AppKey[Description] = web.AppKey("description", Description)


async def openapi(request: web.Request) -> web.Response:
    """Describe this API, as OpenAPI 3.1."""
    description = request.app[DESCRIPTION]
    # The first time it is some hundredths of a second of work, which are not to be taken from running streams.
    body = description.body if description.made else await asyncio.to_thread(lambda: description.body)
    return web.Response(body=body, content_type="application/json")
