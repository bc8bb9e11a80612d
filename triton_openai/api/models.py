"""``/v1/models`` and ``/v1/models/{model}``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from aiohttp import web

from triton_openai.api.access import find_model, may_use
from triton_openai.api.service import service_of
from triton_openai.models import Models

_OWNER = "triton"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """
    One model; ``created`` is when this service first saw it.

    ``max_model_len``, vLLM's extension that many clients read, is there where the operator has given it.
    """

    id: str
    object: str = msgspec.field(name="object", default="model")
    created: int
    owned_by: str = _OWNER
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: str = msgspec.field(name="object", default="list")
    data: Sequence[ModelObject]


async def list_models(request: web.Request) -> web.Response:
    """List what is served now, and open to who asks."""
    models = service_of(request).models
    data = [_describe(models, name, created) for name, created in models.listed() if may_use(request, name)]
    return web.Response(body=msgspec.json.encode(ModelList(data=data)), content_type="application/json")


async def get_model(request: web.Request) -> web.Response:
    """Describe one model; its name may hold slashes."""
    name = request.match_info["model"]
    models = service_of(request).models
    created = dict(models.listed()).get(name) if may_use(request, name) else None
    if created is None:
        created = (await find_model(request, name)).created
    body = msgspec.json.encode(_describe(models, name, created))
    return web.Response(body=body, content_type="application/json")


def _describe(models: Models, name: str, created: int) -> ModelObject:
    served = models.served.get(name)
    limit = served.settings.max_model_len if served is not None else None
    return ModelObject(id=name, created=created, max_model_len=limit or msgspec.UNSET)
