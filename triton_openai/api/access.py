"""Which models a request may use: those of its API key, and all where keys are not asked for."""

from __future__ import annotations

from aiohttp import web

from triton_openai.api.service import service_of
from triton_openai.errors import ModelNotFound
from triton_openai.models import ServedModel
from triton_openai.server.keys import ApiKey

#: The key that let the request in; there is none where keys are not asked for.
KEY: web.RequestKey[ApiKey] = web.RequestKey("api_key", ApiKey)


def may_use(request: web.Request, model: str) -> bool:
    """Return whether the model that clients call *model* is there for *request*."""
    key = request.get(KEY)
    return key is None or key.allows(model)


async def find_model(request: web.Request, name: str) -> ServedModel:
    """
    Return the served model called *name*.

    Raises :class:`ModelNotFound`, also for a model that the request's key does not open, which for it is not there;
    and :class:`UpstreamUnavailable` when Triton does not answer or the model is not ready.
    """
    if not may_use(request, name):
        raise ModelNotFound(name, hidden=True)
    return await service_of(request).models.find(name)
