"""``GET /version``: which service this is, in the shape of vLLM's server, and which Triton is behind it."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from triton_openai import __version__
from triton_openai.api.service import service_of


class TritonVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The name and the version that Triton gives itself."""

    name: str
    version: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """
    The version of this service, and its name: the path is the same as that of other servers. ``triton`` is left out
    while Triton does not answer.
    """

    version: str
    name: Literal["triton-openai"] = "triton-openai"
    triton: TritonVersion | msgspec.UnsetType = msgspec.UNSET


async def version(request: web.Request) -> web.Response:
    """Tell the version of this service, and that of Triton. Nothing is asked of Triton for it."""
    server = service_of(request).models.catalog.snapshot.server
    triton = msgspec.UNSET if server is None else TritonVersion(name=server.name, version=server.version)
    body = msgspec.json.encode(Version(version=__version__, triton=triton))
    return web.Response(body=body, content_type="application/json")
