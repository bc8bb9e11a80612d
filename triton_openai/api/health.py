"""
Health: *live* says that this process answers; *ready* that a Triton answers, at least one served model is ready, and
the service is not about to end.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from triton_openai.api.service import service_of
from triton_openai.draining import DRAINING


async def live(request: web.Request) -> web.Response:
    """Answer 200 as long as the process does."""
    return _answer(200, {"status": "live"})


async def ready(request: web.Request) -> web.Response:
    """Answer 200 when requests can be served, else 503 with the reason."""
    if request.app[DRAINING].begun:
        return _answer(503, {"status": "not ready", "reason": "The service is stopping."})
    models = service_of(request).models
    if models.ready:
        return _answer(200, {"status": "ready"})
    snapshot = models.catalog.snapshot
    if snapshot.error is not None:
        reason = snapshot.error.message
    elif snapshot.waiting:
        reason = "No served model is ready yet."
    else:
        reason = "Triton has no model that can be served."
    return _answer(503, {"status": "not ready", "reason": reason})


def _answer(status: int, body: dict[str, str]) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(body),
        content_type="application/json",
        headers={"Cache-Control": "no-store"},
    )
