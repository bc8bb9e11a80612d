"""``GET /openapi.json``: made when somebody asks for the first time, then kept as bytes until the settings change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web


class Description:
    """What *describe* returns, which is called once, and again when the settings have changed."""

    def __init__(self, describe: Callable[[], Mapping[str, Any]]) -> None:
        self._describe = describe
        self._made: bytes | None = None
        self._settings = 0

    @property
    def made(self) -> bool:
        """Whether it is there already."""
        return self._made is not None

    @property
    def body(self) -> bytes:
        """The description as JSON."""
        made = self._made
        if made is None:
            began = self._settings
            made = msgspec.json.encode(self._describe())
            # It is made in a thread: what was true when that began may not be any more.
            if began == self._settings:
                self._made = made
        return made

    def forget(self) -> None:
        """Make it again when it is asked for."""
        self._settings += 1
        self._made = None


DESCRIPTION: web.AppKey[Description] = web.AppKey("description", Description)


async def openapi(request: web.Request) -> web.Response:
    """Describe this API, as OpenAPI 3.1."""
    description = request.app[DESCRIPTION]
    # The first time it is some hundredths of a second of work, which are not to be taken from running streams.
    body = description.body if description.made else await asyncio.to_thread(lambda: description.body)
    return web.Response(body=body, content_type="application/json")
