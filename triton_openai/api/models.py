"""``/v1/models`` and ``/v1/models/{model}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from triton_openai.api.access import find_model, may_use
from triton_openai.api.service import service_of
from triton_openai.models import Models

_OWNER = "triton"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """
    One model; ``created`` is when this service first saw it.

    ``max_model_len``, vLLM's extension that many clients read, is there where the operator has given it. A LoRA adapter
    has ``root``, its own name, and ``parent``, the model that it belongs to, as vLLM's server gives them.
    """

    id: str
    object: Literal["model"] = msgspec.field(name="object", default="model")
    created: int
    owned_by: str = _OWNER
    root: str | msgspec.UnsetType = msgspec.UNSET
    parent: str | msgspec.UnsetType = msgspec.UNSET
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[ModelObject]


async def list_models(request: web.Request) -> web.Response:
    """List what is served now, and open to who asks."""
    models = service_of(request).models
    data = [describe(models, name, created) for name, created in models.listed() if may_use(request, name)]
    return web.Response(body=msgspec.json.encode(ModelList(data=data)), content_type="application/json")


async def get_model(request: web.Request) -> web.Response:
    """Describe one model; its name may hold slashes."""
    name = request.match_info["model"]
    models = service_of(request).models
    created = dict(models.listed()).get(name) if may_use(request, name) else None
    if created is None:
        created = (await find_model(request, name)).created
    body = msgspec.json.encode(describe(models, name, created))
    return web.Response(body=body, content_type="application/json")


def describe(models: Models, name: str, created: int) -> ModelObject:
    """Return what is told of the model *name*, served since *created*."""
    served = models.served.get(name)
    if served is None:
        return ModelObject(id=name, created=created)
    return ModelObject(
        id=name,
        created=created,
        root=served.lora.name if served.lora is not None else msgspec.UNSET,
        parent=served.owner if served.lora is not None else msgspec.UNSET,
        max_model_len=served.settings.max_model_len or msgspec.UNSET,
    )
