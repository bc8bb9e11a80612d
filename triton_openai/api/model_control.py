"""
``POST /v1/models/{model}/load`` and ``/unload``.

The paths and the answers are those of NVIDIA's OpenAI frontend of Triton; the errors have this service's statuses.
"""

from __future__ import annotations

import msgspec
from aiohttp import web

from triton_openai.api.access import check_may_manage, may_use
from triton_openai.api.bodies import read_json
from triton_openai.api.models import describe
from triton_openai.api.service import service_of
from triton_openai.errors import ModelNotFound

_encode = msgspec.json.Encoder().encode


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a load, if there is one: nothing can be said in it."""


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an unload, if there is one. ``unload_dependents``: the models that an ensemble consists of go too."""

    unload_dependents: bool = False


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an unload; ``model`` is Triton's name of it."""

    status: str = "success"
    model: str


async def load(request: web.Request) -> web.Response:
    """Load a model, and describe it once it is served."""
    control, models = service_of(request).control, service_of(request).models
    control.check_allowed()
    check_may_manage(request)
    if request.can_read_body:
        # Nothing is dropped in silence here: Triton's own request can replace a model's configuration.
        await read_json(request, LoadRequest, strict=True)
    model = await control.load(_name(request))
    created = models.since(model)
    return web.Response(body=_encode(describe(models, model, created)), content_type="application/json")


async def unload(request: web.Request) -> web.Response:
    """Unload a model, once what runs on it has ended."""
    control = service_of(request).control
    control.check_allowed()
    check_may_manage(request)
    body = await read_json(request, UnloadRequest, strict=True) if request.can_read_body else UnloadRequest()
    model = await control.unload(_name(request), dependents=body.unload_dependents)
    return web.Response(body=_encode(Unloaded(model=model)), content_type="application/json")


def _name(request: web.Request) -> str:
    """Return the model's name. Raises :class:`ModelNotFound` for one that the request's key does not open."""
    name = request.match_info["model"]
    if not may_use(request, name):
        raise ModelNotFound(name, hidden=True)
    return name
