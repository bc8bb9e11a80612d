"""What the service says of itself: whether it lives and is ready and its models answer, its version, its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from aiohttp import web

from triton_openai import __version__
from triton_openai.answer.time_limits import TimeLimits
from triton_openai.api.bodies import json_response
from triton_openai.api.embeddings import answers_of
from triton_openai.api.service import Service, Task, check_opens_everything, new_id, prepare, service_of
from triton_openai.errors import EndpointNotFound
from triton_openai.generation import EmbeddingJob, Sampling, ScoreJob
from triton_openai.models.canary import CANARY
from triton_openai.models.draining import DRAINING
from triton_openai.models.served import ServedModel
from triton_openai.telemetry.exposition import Exposition

_NO_STORE = {"Cache-Control": "no-store"}


class Live(msgspec.Struct, kw_only=True):
    """The process answers."""

    status: Literal["live"] = "live"


class Ready(msgspec.Struct, kw_only=True):
    """Requests can be served; ``not_answering`` are Triton models that leave theirs without an answer."""

    status: Literal["ready"] = "ready"
    not_answering: Sequence[str] | msgspec.UnsetType = msgspec.UNSET


class NotReady(msgspec.Struct, kw_only=True):
    """Requests cannot be served now."""

    status: Literal["not ready"] = "not ready"
    reason: str
    not_answering: Sequence[str] | msgspec.UnsetType = msgspec.UNSET


async def live(request: web.Request) -> web.Response:
    """Answer 200 as long as the process does."""
    return json_response(Live(), headers=_NO_STORE)


async def ready(request: web.Request) -> web.Response:
    """Answer 200 when requests can be served, else 503 with the reason."""
    if request.app[DRAINING].begun:
        return _not_ready(NotReady(reason="The service is stopping."))
    models, canary = service_of(request).models, request.app[CANARY]
    silent = sorted(canary.not_answering) or msgspec.UNSET
    if models.ready and canary.any_answers:
        return json_response(Ready(not_answering=silent), headers=_NO_STORE)
    if models.ready:
        reason = "Triton has models that are ready, and none of them answers."
        return _not_ready(NotReady(reason=reason, not_answering=silent))
    snapshot = models.catalog.snapshot
    if snapshot.error is not None:
        reason = snapshot.error.message
    elif snapshot.waiting:
        reason = "No served model is ready yet."
    else:
        reason = "Triton has no model that can be served."
    return _not_ready(NotReady(reason=reason))


def _not_ready(answer: NotReady) -> web.Response:
    return json_response(answer, 503, _NO_STORE)


class TritonVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The name and the version that Triton gives itself."""

    name: str
    version: str


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """
    The version of this service, and its name: the path is the same as that of other servers. ``triton`` is left out
    while Triton does not answer.
    """

    version: str
    name: Literal["triton-openai"] = "triton-openai"
    triton: TritonVersion | msgspec.UnsetType = msgspec.UNSET


async def version(request: web.Request) -> web.Response:
    """Tell the version of this service, and that of Triton. Nothing is asked of Triton for it."""
    server = service_of(request).models.catalog.snapshot.server
    triton = msgspec.UNSET if server is None else TritonVersion(name=server.name, version=server.version)
    return json_response(Version(version=__version__, triton=triton))


_TEXT = "Hi"


async def probe(service: Service, model: ServedModel, *, timeout: float) -> None:
    """
    Ask *model* for one token, or for one vector or score.

    Raises :class:`ServiceError`, also when it takes more than *timeout* seconds; limits of this service do not apply.
    """
    capabilities = model.adapter.capabilities
    number = new_id("probe")
    tokenizer = (await model.prompter()).tokenizer
    if capabilities.generate:
        generation = await prepare(model, tokenizer, _TEXT, Task(id=number, sampling=Sampling(max_tokens=1)))
        limits = TimeLimits(first_token=timeout, idle=timeout, total=None)
        run = service.run(model, generation, tokenizer, limits)
        try:
            await run.start()
            while not run.finished:
                await run.read()
        finally:
            run.close()
    elif capabilities.embed:
        job = EmbeddingJob(id=number, inputs=(_TEXT,))
        await answers_of(service, model, model.adapter.encode_embeddings(job), timeout=timeout)
    else:
        pairs = [(_TEXT, _TEXT)]
        encoded = await tokenizer.encode_pairs_async(pairs) if tokenizer is not None else ()
        scores = ScoreJob(id=number, pairs=pairs, encoded=encoded)
        await answers_of(service, model, model.adapter.encode_scores(scores), timeout=timeout)


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
