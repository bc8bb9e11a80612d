"""The only place where the parts are put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from triton_openai.adapters.registry import load as load_adapter
from triton_openai.api.bodies import LIMITS
from triton_openai.api.groups import check_groups
from triton_openai.api.routes import add_routes
from triton_openai.api.service import SERVICE, Service
from triton_openai.background import Background
from triton_openai.chat.parsers import AUTO, NONE
from triton_openai.config import Settings
from triton_openai.draining import DRAINING, Draining
from triton_openai.models import Models
from triton_openai.server.connections import mark_answering
from triton_openai.server.cors import CORS, Cors, add_cors_headers, answer_preflights
from triton_openai.server.guard import GUARD, Guard, add_limit_headers, let_in
from triton_openai.server.middlewares import add_headers, envelope_errors, identify
from triton_openai.telemetry.access_log import AccessLog
from triton_openai.telemetry.observation import OBSERVERS, Observers
from triton_openai.text.reasoning import registry as reasoning_parsers
from triton_openai.text.tools import registry as tool_parsers
from triton_openai.triton.client import TritonClient
from triton_openai.triton.endpoint import Endpoint
from triton_openai.worker import WORKER, Worker


def create_app(
    settings: Settings, *, client: TritonClient | None = None, worker: Worker | None = None
) -> web.Application:
    """
    Return the application; nothing runs and nothing is connected before it is started.

    *client* replaces the connection to Triton; *worker* is this process among several that serve together. Raises
    :class:`ConfigurationError` for settings that cannot work.
    """
    _check_names(settings)
    connection = client or Endpoint(settings.triton.url, connect_timeout=settings.triton.connect_timeout)
    service = Service(
        settings=settings,
        models=Models(settings, connection),
        client=connection,
        background=Background(),
    )
    app = web.Application(
        middlewares=[mark_answering, identify, envelope_errors, answer_preflights, let_in],
        client_max_size=settings.server.max_body_size,
    )
    app[SERVICE] = service
    app[WORKER] = worker or Worker()
    app[DRAINING] = Draining()
    app[OBSERVERS] = Observers(AccessLog())
    app[LIMITS] = settings.limits
    app[CORS] = Cors(settings.access)
    guard = app[GUARD] = Guard(settings.access)
    app.on_response_prepare.extend([add_headers, add_limit_headers, add_cors_headers])
    app.cleanup_ctx.extend([_run_service, guard.run])
    add_routes(app)
    check_groups(app)
    return app


def _check_names(settings: Settings) -> None:
    """Raise :class:`ConfigurationError` for adapters and parsers that do not exist, before anything runs."""
    for entry in (settings.defaults, *settings.models.values()):
        if entry.adapter is not None:
            load_adapter(entry.adapter)
        if entry.tool_call_parser not in (None, AUTO, NONE):
            tool_parsers.load(entry.tool_call_parser)
        if entry.reasoning_parser not in (None, AUTO, NONE):
            reasoning_parsers.load(entry.reasoning_parser)


def models_of(app: web.Application) -> Models:
    """Return the served models of *app*, for who started it."""
    return app[SERVICE].models


async def _run_service(app: web.Application) -> AsyncIterator[None]:
    """Discover models while the application runs; close everything after it."""
    service = app[SERVICE]
    discovery = asyncio.create_task(service.models.catalog.run())
    yield
    discovery.cancel()
    await asyncio.gather(discovery, return_exceptions=True)
    await service.models.catalog.close()
    await service.background.close()
    await service.client.close()
