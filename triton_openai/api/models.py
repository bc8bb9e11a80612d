"""``/v1/models`` and ``/v1/models/{model}``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec
from aiohttp import web

from triton_openai.api.bodies import json_response, read_json
from triton_openai.api.service import check_may_manage, find_model, may_use, service_of
from triton_openai.errors import ModelNotFound
from triton_openai.models.served import Models

_Body = TypeVar("_Body", bound=msgspec.Struct)


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    """
    One model; ``created`` is 0: Triton does not tell when a model was made, and all workers and replicas say the same.

    ``max_model_len``, vLLM's extension that many clients read, is there where the operator or the model's files give
    it. A LoRA adapter has ``root``, its own name, and ``parent``, the model that it belongs to, as vLLM's server gives
    them.
    """

    id: str
    object: Literal["model"] = msgspec.field(name="object", default="model")
    created: int = 0
    owned_by: str = "triton"
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
    data = [describe(models, name) for name in models.listed() if may_use(request, name)]
    return json_response(ModelList(data=data))


async def get_model(request: web.Request) -> web.Response:
    """Describe one model; its name may hold slashes."""
    name = request.match_info["model"]
    models = service_of(request).models
    if name not in models.listed() or not may_use(request, name):
        await find_model(request, name)
    return json_response(describe(models, name))


def describe(models: Models, name: str) -> ModelObject:
    """Return what is told of the model *name*."""
    served = models.served.get(name)
    if served is None:
        return ModelObject(id=name)
    return ModelObject(
        id=name,
        root=served.lora.name if served.lora is not None else msgspec.UNSET,
        parent=served.owner if served.lora is not None else msgspec.UNSET,
        max_model_len=served.settings.max_model_len or msgspec.UNSET,
    )


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a load, if there is one: nothing can be said in it."""


class UnloadRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of an unload, if there is one. ``unload_dependents``: the models that an ensemble consists of go too."""

    unload_dependents: bool = False


class Unloaded(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an unload; ``model`` is Triton's name of it."""

    status: str = "success"
    model: str


async def load(request: web.Request) -> web.Response:
    """Load a model, and describe it once it is served."""
    service = service_of(request)
    # Nothing is dropped in silence here: Triton's own request can replace a model's configuration.
    name, _ = await _named(request, LoadRequest)
    return json_response(describe(service.models, await service.control.load(name)))


async def unload(request: web.Request) -> web.Response:
    """Unload a model, once what runs on it has ended."""
    name, body = await _named(request, UnloadRequest)
    model = await service_of(request).control.unload(name, dependents=body.unload_dependents)
    return json_response(Unloaded(model=model))


async def _named(request: web.Request, kind: type[_Body]) -> tuple[str, _Body]:
    """
    Return the model's name, and the body, which may be missing.

    Raises :class:`ManagementDisabled`, and :class:`ModelNotFound` for a model that the request's key does not open.
    """
    service_of(request).control.check_allowed()
    check_may_manage(request)
    body = await read_json(request, kind, strict=True) if request.can_read_body else kind()
    name = request.match_info["model"]
    if not may_use(request, name):
        raise ModelNotFound(name, hidden=True)
    return name, body
