"""
Every path that is served, in one table of handlers.

The application's routes and ``GET /openapi.json`` are both made from it, so every route is described.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from triton_openai import errors
from triton_openai.access.restrictions import Routes
from triton_openai.api import chat, completions, embeddings, info, models, scoring, tokenize
from triton_openai.api.chat_response import ChatCompletion, ChatCompletionChunk
from triton_openai.api.completion_response import Completion, CompletionChunk
from triton_openai.config import Group


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """
    A *handler* with its *routes*, each a method and a path; GET includes HEAD.

    *name* is the operation's id, *tag* the heading it is listed under, *group* what keys and restrictions open.
    *request* is the type of the body, *answer* that of the answer, *event* that of a stream's events; *text* marks a
    plain-text answer. *refused* are the fields of the request that take only these values. *errors* are those that it
    can answer with, beside those that every request can have; *failures* are answers of other types, by status. Clients
    can shorten the time of a *limited* one.
    """

    handler: Handler
    routes: tuple[str, ...]
    name: str
    tag: str
    group: Group
    request: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    text: bool = False
    refused: Mapping[str, tuple[Any, ...]] = {}
    errors: tuple[type[errors.ServiceError], ...] = ()
    failures: Mapping[int, type[msgspec.Struct]] = {}
    limited: bool = False


def _openai(*routes: str) -> tuple[str, ...]:
    """Return *routes* with and without ``/v1``, for clients whose ``base_url`` lacks it."""
    return tuple(route.replace(" ", f" {prefix}") for prefix in ("/v1", "") for route in routes)


# Where a body is read.
_READ = (errors.InvalidRequest, errors.RequestTimeout, errors.PayloadTooLarge, errors.UnsupportedMediaType)
# Where a model is asked for too.
_MODEL = (*_READ, errors.ConfigurationError, errors.ModelNotFound)
_TRITON = (errors.UpstreamError, errors.UpstreamTimeout, errors.NotImplementedUpstream)
# Where Triton answers a request to a model.
_UPSTREAM = (
    *_MODEL,
    *_TRITON,
    errors.UnsupportedParameter,
    errors.ContextLengthExceeded,
    errors.Overloaded,
    errors.ServiceOverloaded,
)
# Where models are loaded and unloaded.
_CONTROL = (*_READ, *_TRITON, errors.ManagementDisabled, errors.ModelNotFound, errors.ModelConflict)

OPERATIONS = (
    Operation(
        handler=chat.handle,
        routes=_openai("POST /chat/completions"),
        name="create_chat_completion",
        tag="chat",
        group="inference",
        request=chat.ChatRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        refused=chat.REFUSED,
        errors=(*_UPSTREAM, errors.LoraNotLoaded),
        limited=True,
    ),
    Operation(
        handler=completions.handle,
        routes=_openai("POST /completions"),
        name="create_completion",
        tag="completions",
        group="inference",
        request=completions.CompletionRequest,
        answer=Completion,
        event=CompletionChunk,
        refused=completions.REFUSED,
        errors=(*_UPSTREAM, errors.LoraNotLoaded),
        limited=True,
    ),
    Operation(
        handler=embeddings.handle,
        routes=_openai("POST /embeddings"),
        name="create_embeddings",
        tag="embeddings",
        group="embedding",
        request=embeddings.EmbeddingsRequest,
        answer=embeddings.EmbeddingList,
        refused=embeddings.REFUSED,
        errors=_UPSTREAM,
        limited=True,
    ),
    Operation(
        handler=scoring.handle_rerank,
        # The last one is where the second version of Cohere's client asks.
        routes=(*_openai("POST /rerank"), "POST /v2/rerank"),
        name="rerank",
        tag="scores",
        group="embedding",
        request=scoring.RerankRequest,
        answer=scoring.Reranked,
        refused=scoring.RERANK_REFUSED,
        errors=_UPSTREAM,
        limited=True,
    ),
    Operation(
        handler=scoring.handle_score,
        routes=_openai("POST /score"),
        name="score",
        tag="scores",
        group="embedding",
        request=scoring.ScoreRequest,
        answer=scoring.ScoreList,
        refused=scoring.REFUSED,
        errors=_UPSTREAM,
        limited=True,
    ),
    Operation(
        handler=tokenize.tokenize,
        routes=_openai("POST /tokenize"),
        name="tokenize",
        tag="tokens",
        group="inference",
        request=tokenize.TokenizeRequest,
        answer=tokenize.TokenizeAnswer,
        errors=_MODEL,
    ),
    Operation(
        handler=tokenize.detokenize,
        routes=_openai("POST /detokenize"),
        name="detokenize",
        tag="tokens",
        group="inference",
        request=tokenize.DetokenizeRequest,
        answer=tokenize.DetokenizeAnswer,
        errors=_MODEL,
    ),
    Operation(
        handler=models.list_models,
        # Some clients post to list models.
        routes=_openai("GET /models", "POST /models"),
        name="list_models",
        tag="models",
        group="model-repository",
        answer=models.ModelList,
    ),
    Operation(
        handler=models.get_model,
        routes=_openai("GET /models/{model:.+}"),
        name="get_model",
        tag="models",
        group="model-repository",
        answer=models.ModelObject,
        errors=(errors.ModelNotFound,),
    ),
    Operation(
        handler=models.load,
        routes=_openai("POST /models/{model:.+}/load"),
        name="load_model",
        tag="models",
        group="model-repository",
        request=models.LoadRequest,
        answer=models.ModelObject,
        errors=_CONTROL,
    ),
    Operation(
        handler=models.unload,
        routes=_openai("POST /models/{model:.+}/unload"),
        name="unload_model",
        tag="models",
        group="model-repository",
        request=models.UnloadRequest,
        answer=models.Unloaded,
        errors=_CONTROL,
    ),
    Operation(
        handler=info.version,
        routes=("GET /version",),
        name="version",
        tag="service",
        group="info",
        answer=info.Version,
    ),
    # The OpenAPI Initiative's own schema describes this answer.
    Operation(handler=info.openapi, routes=("GET /openapi.json",), name="openapi", tag="service", group="info"),
    Operation(
        handler=info.live, routes=("GET /health/live",), name="live", tag="health", group="health", answer=info.Live
    ),
    Operation(
        handler=info.ready,
        routes=("GET /health/ready", "GET /health", "GET /v1/health", "GET /health_check"),
        name="ready",
        tag="health",
        group="health",
        answer=info.Ready,
        failures={503: info.NotReady},
    ),
    Operation(
        handler=info.metrics,
        routes=("GET /metrics",),
        name="metrics",
        tag="service",
        group="metrics",
        text=True,
        errors=(errors.EndpointNotFound,),
    ),
)


def add_routes(app: web.Application) -> None:
    """Add all routes to *app*."""
    routes = Routes(app)
    for operation in OPERATIONS:
        for route in operation.routes:
            method, path = route.split()
            add = routes.get if method == "GET" else routes.post
            add(operation.group, path, operation.handler)
