"""``GET /version``: which service this is, in the shape of vLLM's server."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from triton_openai import __version__


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """The version of this service, and its name: the path is the same as that of other servers."""

    version: str
    name: Literal["triton-openai"] = "triton-openai"


_BODY = msgspec.json.encode(Version(version=__version__))


async def version(request: web.Request) -> web.Response:
    """Tell the version of this service."""
    return web.Response(body=_BODY, content_type="application/json")
