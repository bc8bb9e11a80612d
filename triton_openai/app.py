"""The only place where the parts are put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from triton_openai.adapters.registry import load as load_adapter
from triton_openai.api.openapi.document import describe
from triton_openai.api.openapi.published import DESCRIPTION, Description
from triton_openai.api.routes import add_routes
from triton_openai.api.service import SERVICE, Service
from triton_openai.background import Background
from triton_openai.chat import history, infill
from triton_openai.chat.parsers import AUTO, NONE
from triton_openai.config import Settings
from triton_openai.draining import DRAINING, Draining
from triton_openai.media.addresses import is_public, is_public_or_private
from triton_openai.media.fetch import ImageFetcher
from triton_openai.media.hosts import AllowedHosts
from triton_openai.media.images import ImageLoader
from triton_openai.models import Models
from triton_openai.server.admission import Admission
from triton_openai.server.middlewares import add_headers, envelope_errors, identify
from triton_openai.telemetry.access_log import AccessLog
from triton_openai.telemetry.loop_lag import LOOP_LAG, LoopLag
from triton_openai.telemetry.observation import OBSERVERS, Observers
from triton_openai.text.reasoning import registry as reasoning_parsers
from triton_openai.text.tools import registry as tool_parsers
from triton_openai.triton.client import TritonClient
from triton_openai.triton.endpoint import Endpoint
from triton_openai.worker import WORKER, Worker


def create_app(
    settings: Settings,
    *,
    client: TritonClient | None = None,
    images: ImageLoader | None = None,
    worker: Worker | None = None,
) -> web.Application:
    """
    Return the application; nothing runs and nothing is connected before it is started.

    *client* replaces the connection to Triton, *images* what loads the images of requests; *worker* is this process
    among several that serve together. Raises
    :class:`ConfigurationError` for settings that cannot work.
    """
    _check_names(settings)
    connection = client or Endpoint(settings.triton.url, connect_timeout=settings.triton.connect_timeout)
    worker = worker or Worker()
    observers = Observers(AccessLog())
    lag = LoopLag()
    service = Service(
        settings=settings,
        models=Models(settings, connection),
        client=connection,
        background=Background(),
        admission=Admission(settings.server, lambda: lag.sustained, workers=worker.count, observer=observers),
        images=images or _image_loader(settings),
    )
    app = web.Application(
        middlewares=[identify, envelope_errors],
        client_max_size=settings.server.max_body_size,
    )
    app[SERVICE] = service
    app[WORKER] = worker
    app[LOOP_LAG] = lag
    app[DRAINING] = Draining()
    app[OBSERVERS] = observers
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_run_service)
    add_routes(app)
    app[DESCRIPTION] = Description(lambda: describe(app, settings))
    return app


def _image_loader(settings: Settings) -> ImageLoader:
    media = settings.media
    fetcher = ImageFetcher(
        AllowedHosts(media.allowed_domains),
        largest=media.max_image_size,
        timeout=media.fetch_timeout,
        concurrency=media.max_fetches,
        allows=is_public_or_private if media.private_addresses else is_public,
    )
    # Fetched images may make a request no larger than it could be with the images in it.
    return ImageLoader(
        fetcher, most=media.max_images, largest=media.max_image_size, together=settings.server.max_body_size
    )


def _check_names(settings: Settings) -> None:
    """Raise :class:`ConfigurationError` for adapters, parsers and forms that are none, before anything runs."""
    for entry in (settings.defaults, *settings.models.values()):
        if entry.adapter is not None:
            load_adapter(entry.adapter)
        history.load(entry.history_template, entry.history_template_file)
        if entry.fim_template is not None:
            infill.parse(entry.fim_template)
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
    tasks = [asyncio.create_task(service.models.catalog.run()), asyncio.create_task(app[LOOP_LAG].run())]
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await service.models.catalog.close()
    await service.background.close()
    await service.images.close()
    await service.client.close()
