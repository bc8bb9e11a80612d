"""Which models a request may use: those of its API key, and all where keys are not asked for."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from triton_openai.api.service import service_of
from triton_openai.errors import ModelNotFound
from triton_openai.models import ServedModel
from triton_openai.server.keys import ApiKey


class NamesModel(Protocol):
    """A request that says for which model it is."""

    model: str


#: The key that let the request in; there is none where keys are not asked for.
KEY: web.RequestKey[ApiKey] = web.RequestKey("api_key", ApiKey)


def may_use(request: web.Request, model: str) -> bool:
    """Return whether the model that clients call *model* is there for *request*."""
    key = request.get(KEY)
    return key is None or key.allows(model)


def check_may_manage(request: web.Request) -> None:
    """Raise :class:`ManagementDisabled` where the request's key may not load and unload models."""
    key = request.get(KEY)
    if key is not None:
        key.check_may_manage()


def check_opens_everything(request: web.Request) -> None:
    """Raise :class:`KeyNotSufficient` where the request's key opens certain models only."""
    key = request.get(KEY)
    if key is not None:
        key.check_opens_everything()


async def find_model(request: web.Request, name: str) -> ServedModel:
    """
    Return the served model called *name*, or the default one where that is empty.

    Raises :class:`ModelNotFound`, also for a model that the request's key does not open, which for it is not there;
    and :class:`UpstreamUnavailable` when Triton does not answer or the model is not ready.
    """
    models = service_of(request).models
    name = models.wanted(name)
    if not may_use(request, name):
        raise ModelNotFound(name, hidden=True)
    return await models.find(name)


async def model_of(request: web.Request, body: NamesModel) -> ServedModel:
    """Return the model that *body* is for, and put its name there where it has none. Raises as :func:`find_model`."""
    model = await find_model(request, body.model)
    body.model = model.name
    return model
