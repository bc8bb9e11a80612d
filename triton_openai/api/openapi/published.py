"""``GET /openapi.json``: made when somebody asks for the first time, then kept as bytes until the settings change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from triton_openai.api.service import service_of
from triton_openai.config import Settings


class Description:
    """What *describe* returns for the settings of the service, as JSON; called once for each."""

    def __init__(self, describe: Callable[[Settings], Mapping[str, Any]]) -> None:
        self._describe = describe
        self._made: tuple[Settings, bytes] | None = None

    def made(self, settings: Settings) -> bytes | None:
        """Return the description under *settings* if it is there already."""
        return self._made[1] if self._made is not None and self._made[0] is settings else None

    def make(self, settings: Settings) -> bytes:
        """Make it, and keep it."""
        body = msgspec.json.encode(self._describe(settings))
        self._made = settings, body
        return body


DESCRIPTION: web.AppKey[Description] = web.AppKey("description", Description)


async def openapi(request: web.Request) -> web.Response:
    """Describe this API, as OpenAPI 3.1."""
    description, settings = request.app[DESCRIPTION], service_of(request).settings
    # The first time it is some hundredths of a second of work, which are not to be taken from running streams.
    body = description.made(settings) or await asyncio.to_thread(description.make, settings)
    return web.Response(body=body, content_type="application/json")
