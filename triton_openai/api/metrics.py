"""``GET /metrics``: for Prometheus."""

from __future__ import annotations

from aiohttp import web

from triton_openai.api.access import check_opens_everything
from triton_openai.errors import EndpointNotFound
from triton_openai.telemetry.exposition import Exposition

EXPOSITION: web.AppKey[Exposition] = web.AppKey("exposition", Exposition)


async def metrics(request: web.Request) -> web.Response:
    """
    Answer with all metrics.

    Raises :class:`EndpointNotFound` where they are turned off, and :class:`KeyNotSufficient` for a key of certain
    models: they name all of them, and tell of everybody's traffic.
    """
    check_opens_everything(request)
    exposition = request.app.get(EXPOSITION)
    if exposition is None:
        raise EndpointNotFound("The service's metrics are turned off.")
    body, content_type = await exposition.render(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type, "Cache-Control": "no-store"})
