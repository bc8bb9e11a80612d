"""
What there is to say of each handler: one line for each, for all the paths and methods that it answers.

A handler that is added to the routes needs its line here; the tests say so.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from triton_openai import errors
from triton_openai.api import (
    chat,
    completions,
    embeddings,
    health,
    metrics,
    model_control,
    models,
    rerank,
    score,
    scoring,
    tokenize,
    version,
)
from triton_openai.api.chat_response import ChatCompletion
from triton_openai.api.chat_response import Choice as ChatChoice
from triton_openai.api.openapi import published, shapes
from triton_openai.chat import messages

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """
    One handler: its *name*, the *group* it is listed under, what it takes and what it gives.

    *request* is the type of the body, *answer* that of the answer, *event* that of a stream's events. *refused* are the
    fields of the request that take no values but these. *errors* are the errors that it can answer with, beside those
    that every request can have; *failures* are answers of other types, by status. *limited* is whether clients can
    shorten its time. *text* is whether the answer is plain text.
    """

    name: str
    group: str
    request: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    refused: Mapping[str, tuple[Any, ...]] = {}
    errors: tuple[type[errors.ServiceError], ...] = ()
    failures: Mapping[int, type[msgspec.Struct]] = {}
    limited: bool = False
    text: bool = False


#: What any request can be answered with: a mistake of ours, and the end of the service.
COMMON: tuple[type[errors.ServiceError], ...] = (errors.ServiceError, errors.UpstreamUnavailable)
#: Where a body is read and a model is asked for.
_BODY = (
    errors.InvalidRequest,
    errors.ConfigurationError,
    errors.ModelNotFound,
    errors.RequestTimeout,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
)
#: Where Triton is asked too.
_UPSTREAM = (
    *_BODY,
    errors.UnsupportedParameter,
    errors.ContextLengthExceeded,
    errors.Overloaded,
    errors.ServiceOverloaded,
    errors.UpstreamError,
    errors.UpstreamTimeout,
    errors.NotImplementedUpstream,
)

#: Where models are loaded and unloaded.
_CONTROL = (
    errors.InvalidRequest,
    errors.ManagementDisabled,
    errors.ModelNotFound,
    errors.ModelConflict,
    errors.RequestTimeout,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.UpstreamError,
    errors.UpstreamTimeout,
    errors.NotImplementedUpstream,
)

OPERATIONS: Mapping[Handler, Operation] = {
    chat.handle: Operation(
        name="create_chat_completion",
        group="chat",
        request=chat.ChatRequest,
        answer=ChatCompletion,
        event=shapes.ChatCompletionChunk,
        refused=chat.REFUSED,
        errors=(*_UPSTREAM, errors.LoraNotLoaded),
        limited=True,
    ),
    completions.handle: Operation(
        name="create_completion",
        group="completions",
        request=completions.CompletionRequest,
        answer=completions.Completion,
        event=shapes.CompletionChunk,
        refused=completions.REFUSED,
        errors=(*_UPSTREAM, errors.LoraNotLoaded),
        limited=True,
    ),
    embeddings.handle: Operation(
        name="create_embeddings",
        group="embeddings",
        request=embeddings.EmbeddingsRequest,
        answer=embeddings.EmbeddingList,
        errors=_UPSTREAM,
        limited=True,
    ),
    rerank.handle: Operation(
        name="rerank",
        group="scores",
        request=rerank.RerankRequest,
        answer=rerank.Reranked,
        refused=rerank.REFUSED,
        errors=_UPSTREAM,
        limited=True,
    ),
    score.handle: Operation(
        name="score",
        group="scores",
        request=score.ScoreRequest,
        answer=score.ScoreList,
        refused=scoring.REFUSED,
        errors=_UPSTREAM,
        limited=True,
    ),
    tokenize.tokenize: Operation(
        name="tokenize",
        group="tokens",
        request=tokenize.TokenizeRequest,
        answer=tokenize.TokenizeAnswer,
        errors=_BODY,
    ),
    tokenize.detokenize: Operation(
        name="detokenize",
        group="tokens",
        request=tokenize.DetokenizeRequest,
        answer=tokenize.DetokenizeAnswer,
        errors=_BODY,
    ),
    models.list_models: Operation(name="list_models", group="models", answer=models.ModelList),
    models.get_model: Operation(
        name="get_model", group="models", answer=models.ModelObject, errors=(errors.ModelNotFound,)
    ),
    model_control.load: Operation(
        name="load_model", group="models", request=model_control.LoadRequest, answer=models.ModelObject, errors=_CONTROL
    ),
    model_control.unload: Operation(
        name="unload_model",
        group="models",
        request=model_control.UnloadRequest,
        answer=model_control.Unloaded,
        errors=_CONTROL,
    ),
    metrics.metrics: Operation(name="metrics", group="service", text=True, errors=(errors.EndpointNotFound,)),
    health.live: Operation(name="live", group="health", answer=shapes.Live),
    health.ready: Operation(name="ready", group="health", answer=shapes.Ready, failures={503: shapes.NotReady}),
    version.version: Operation(name="version", group="service", answer=version.Version),
    # It describes itself: its answer is what the OpenAPI Initiative's own schema says.
    published.openapi: Operation(name="openapi", group="service"),
}

#: What types are called whose own name another has too.
NAMES: Mapping[type, str] = {
    ChatChoice: "ChatChoice",
    completions.Choice: "CompletionChoice",
    messages.FunctionCall: "MessageFunctionCall",
    messages.ToolCall: "MessageToolCall",
}
