"""
Every path that is served, in one table.

The application's routes are made from it, and with the types ``GET /openapi.json``: OpenAPI 3.1 of what is served.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from http import HTTPStatus
from typing import Any

import msgspec

from triton_openai import __version__, errors
from triton_openai.access.keys import INFERENCE_GROUPS, Restrictions
from triton_openai.api import (
    chat,
    classify,
    completions,
    embeddings,
    info,
    moderations,
    pooling,
    speech,
    stored_chats,
    tokenize,
    transcriptions,
)
from triton_openai.api.batch_routes import BATCH_OPERATIONS, NEEDS_LINE_GROUPS, PAGE, openai_routes, stored_row
from triton_openai.api.bodies import IGNORED_HEADER, REPAIRED_HEADER, FileField, ModelRequest
from triton_openai.api.chat_tools import ToolDefinition
from triton_openai.api.messages import operations as messages
from triton_openai.api.messages import types as message_types
from triton_openai.api.messages.message_events import (
    OVERLOADED,
    AnthropicEnvelope,
    anthropic_error_type,
    anthropic_status,
)
from triton_openai.api.realtime import session as realtime
from triton_openai.api.responses import conversations, retrieve
from triton_openai.api.responses import create as responses
from triton_openai.api.responses import objects as response_types
from triton_openai.api.responses.session import ResponsesSession
from triton_openai.api.service import Service
from triton_openai.config.tree import ApiGroup, Settings
from triton_openai.generation import Generation
from triton_openai.jobs import (
    ClassificationJob,
    EmbeddingJob,
    ScoreJob,
    SynthesisJob,
    TokenClassificationJob,
    TokenEmbeddingJob,
    TranscriptionJob,
    TranslationJob,
)
from triton_openai.media.speech_formats import MEDIA_TYPES
from triton_openai.operations import BodyKind, Call, Operation, Query, Reply, Whole


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong: a sentence for people, and for programs its class, the field to blame and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, kw_only=True):
    """Every error, as the body of an answer or as the last event of a stream."""

    error: ErrorObject


_ABOUT = (
    "The OpenAI API in front of NVIDIA Triton Inference Server.\n\nWhat cannot be read as a request is answered with "
    "errors of the form of those below: 400 (`invalid_http`), 408 (`request_timeout`) or 431 (`headers_too_large`). "
    "Without API keys, requests for foreign hosts and from web pages of other sites are answered with 403 "
    "(`host_not_allowed`, `origin_not_allowed`)."
)
_STREAM = (
    "With `stream`: server-sent events, each the JSON of one chunk; the last one is `[DONE]`. What goes wrong after "
    "the first one is an event with the name `error`, after which the body breaks off. Lines that begin with a colon "
    "are comments."
)
_NAMED_STREAM = (
    "With `stream`: server-sent events, each named like the `type` of its JSON. What goes wrong after the first one is "
    "an event with an error, and ends the stream."
)
_AUDIO_STREAM = (
    "It is sent while it is made; what goes wrong after its beginning breaks it off. With `stream_format` `sse`: "
    "server-sent events, each the JSON of a part; what goes wrong is an event with the name `error`."
)
_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_SCHEMES: Mapping[str, Mapping[str, str]] = {
    "BearerKey": {"type": "http", "scheme": "bearer", "description": "An API key, as OpenAI's clients send it."},
    "ApiKeyHeader": {"type": "apiKey", "in": "header", "name": "api-key", "description": "As Azure's clients send it."},
    "XApiKeyHeader": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "As Anthropic's send it."},
}
# Headers of answers.
_ALWAYS = {
    "x-request-id": {
        "description": "The request's id: the client's own `x-request-id`, or one that was made for it.",
        "required": True,
        "schema": _STRING,
    },
    "openai-processing-ms": {
        "description": "Milliseconds from the request to the head of its answer.",
        "schema": _COUNT,
    },
}
_IGNORED = {
    "description": "What of the request had no effect: parameters, types of tools and items.",
    "schema": _STRING,
}
_REPAIRED = {
    "description": "The functions of past calls whose arguments were broken, and were repaired for the model.",
    "schema": _STRING,
}
_AUTHENTICATE = {"description": "How a key is given.", "schema": {"const": "Bearer"}}
_RETRY_AFTER = {"description": "Seconds after which trying again may work.", "schema": {**_COUNT, "minimum": 1}}
_RATE_LIMITS: Mapping[str, Mapping[str, Any]] = {
    f"x-ratelimit-{what}-{kind}": {"description": f"{text}: {kind}, for a key with such a limit.", "schema": schema}
    for kind in ("requests", "tokens")
    for what, text, schema in (
        ("limit", "What the key may use in a minute", _COUNT),
        ("remaining", "What is left of it", _COUNT),
        ("reset", "Time until all of it is there again, as `1s` or `6m0s`", _STRING),
    )
}


def describe(settings: Settings) -> dict[str, Any]:
    """
    Return the OpenAPI document of a service with *settings*.

    The headers that open restricted groups are left out: the operator tells them to those who may know them. So is
    HEAD, which is like GET.
    """
    access = settings.access
    keys = bool(access.api_key) or access.api_keys_file is not None
    restricted = frozenset(Restrictions(access.openai_restricted_api).groups)
    paths: dict[str, dict[str, Any]] = {}
    raised: dict[tuple[str, int], dict[type[errors.ServiceError], None]] = {}
    for operation in OPERATIONS:
        form = _error_form(operation)
        failures: dict[int, dict[str, Any]] = {}
        for kind in _errors(operation, keys=keys, restricted=not restricted.isdisjoint(_groups_needed(operation))):
            status = kind.status
            if operation.anthropic:
                status = anthropic_status(kind)
            raised.setdefault((form, status), {})[kind] = None
            failures[status] = {"$ref": f"#/components/responses/{form}Error{status}"}
        if operation.failure is not None and operation.answer is not None:
            either = {"anyOf": [_schema(operation.answer), _schema(ErrorEnvelope)]}
            failures[operation.failure] = _failure(operation.failure, (), either)
        described = _described(operation, failures, keys=keys)
        for number, route in enumerate(operation.routes):
            method, path = re.sub(r":[^}]+", "", route).split()
            one = {**described, "parameters": list(_parameters(operation, path, settings))}
            if _at_azure(operation, path):
                one["servers"] = [{"url": "/"}, {"url": _AZURE}]
            if number:
                one["operationId"] += "_" + re.sub(r"[^a-z0-9]+", "_", f"{method}{path}".lower()).rstrip("_")
                one["description"] = f"The same as `{re.sub(':[^}]+', '', operation.routes[0])}`."
            paths.setdefault(path, {})[method.lower()] = one
    envelopes: dict[str, dict[str, Any]] = {"": _schema(ErrorEnvelope), "Anthropic": _schema(AnthropicEnvelope)}
    envelopes["Either"] = {"anyOf": list(envelopes.values())}
    responses = {
        f"{form}Error{status}": _failure(status, kinds, envelopes[form], keys=keys, anthropic=form == "Anthropic")
        for (form, status), kinds in sorted(raised.items())
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "triton-openai",
            "version": __version__,
            "description": _ABOUT,
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": group} for group in dict.fromkeys(operation.group for operation in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": _schemas(strict=settings.api.strict_parameters),
            "responses": responses,
            **({"securitySchemes": _SCHEMES} if keys else {}),
        },
    }


def _error_form(operation: Operation) -> str:
    """Return the name of the form that the errors of *operation* have."""
    if operation.anthropic:
        return "Anthropic"
    if operation.shared is not None:
        return "Either"
    return ""


def _described(operation: Operation, failures: Mapping[int, Any], *, keys: bool) -> dict[str, Any]:
    """Return the description of *operation*, with its *failures* by status, for all of its paths."""
    headers: dict[str, Any] = {**_ALWAYS}
    if operation.request is not None:
        headers[IGNORED_HEADER] = _IGNORED
    if operation.label == "chat":
        headers[REPAIRED_HEADER] = _REPAIRED
    if keys and operation.group in INFERENCE_GROUPS:
        headers |= _RATE_LIMITS
    responses: dict[str, Any] = {"200": {**_content(operation), "headers": headers}}
    if operation.media and not operation.jobs:
        part = {**_content(operation), "headers": _ALWAYS}
        responses["206"] = {**part, "description": "The part that was asked for."}
        responses["304"] = {"description": "It is what the client has already.", "headers": _ALWAYS}
        responses["416"] = {**part, "description": "The file has no such part."}
    responses |= {str(status): failures[status] for status in sorted(failures)}
    summary, _, more = prose(operation.function.__doc__).partition("\n\n")
    described: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.group],
        "summary": summary,
        "responses": responses,
    }
    if more:
        described["description"] = more
    if keys and operation.group == "health":
        described["security"] = []
    elif keys:
        # Any one of them is enough.
        described["security"] = [{name: []} for name in _SCHEMES]
    if operation.request is not None:
        media_type = "application/json"
        if operation.body_kind is BodyKind.FORM:
            media_type = "multipart/form-data"
        content = {media_type: {"schema": _schema(operation.request)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _errors(operation: Operation, *, keys: bool, restricted: bool) -> Sequence[type[errors.ServiceError]]:
    group = operation.group
    body = operation.request
    rules: Sequence[tuple[bool, Sequence[type[errors.ServiceError]]]] = (
        (True, (errors.ServiceError, errors.UpstreamUnavailable)),
        (keys and group != "health", (errors.InvalidApiKey,)),
        (keys and group == "metrics", (errors.KeyNotSufficient,)),
        (keys and group in INFERENCE_GROUPS, (errors.RateLimited,)),
        (restricted, (errors.ApiRestricted,)),
        (body is not None, _READ),
        (body is not None and issubclass(body, ModelRequest), _MODEL),
        (bool(operation.jobs), _INFERENCE),
        (True, operation.errors),
    )
    return [kind for applies, kinds in rules if applies for kind in kinds]


def _groups_needed(operation: Operation) -> Collection[ApiGroup]:
    """Return the groups that a request for *operation* may need: a batch also needs those of its lines."""
    if operation.function in NEEDS_LINE_GROUPS:
        return {operation.group, *INFERENCE_GROUPS}
    return {operation.group}


def _schema(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _content(operation: Operation) -> dict[str, Any]:
    """Return the description and the content of the answer to *operation*."""
    if operation.text and operation.answer is None:
        kinds = ("text/plain", "application/openmetrics-text")
        return {"description": "The answer.", "content": {kind: {"schema": _STRING} for kind in kinds}}
    schema: dict[str, Any] = {"type": "object"} if operation.answer is None else _schema(operation.answer)
    if operation.shared is not None:
        schema = {"anyOf": [schema, _schema(operation.shared)]}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if operation.media:
        content = {kind: {"schema": {**_STRING, "format": "binary"}} for kind in operation.media}
    if operation.text:
        content["text/plain"] = {"schema": _STRING}
    if operation.event is None:
        return {"description": "The answer.", "content": content}
    failure = AnthropicEnvelope if operation.anthropic else ErrorEnvelope
    content["text/event-stream"] = {"schema": {"anyOf": [_schema(operation.event), _schema(failure)]}}
    if operation.anthropic:
        about = _NAMED_STREAM
    elif operation.media:
        about = _AUDIO_STREAM
    else:
        about = _STREAM
    return {"description": f"The answer. {about}", "content": content}


def _failure(
    status: int,
    kinds: Iterable[type[errors.ServiceError]],
    schema: dict[str, Any],
    *,
    keys: bool = False,
    anthropic: bool = False,
) -> dict[str, Any]:
    """Return the answer with *status*, whose body is of *schema*; *kinds* are the errors that have it."""
    lines = ["Overloaded." if status == OVERLOADED else f"{HTTPStatus(status).phrase}."]
    lines += [
        f"- `{anthropic_error_type(status) if anthropic else kind.code}`: {prose(kind.__doc__).partition(chr(10))[0]}"
        for kind in kinds
    ]
    headers: dict[str, Any] = {**_ALWAYS}
    if status == 401:
        headers["WWW-Authenticate"] = _AUTHENTICATE
    if status == 429 and keys:
        headers |= _RATE_LIMITS
    if status in (429, 503, OVERLOADED):
        headers["Retry-After"] = _RETRY_AFTER
    return {"description": "\n".join(lines), "headers": headers, "content": {"application/json": {"schema": schema}}}


def _parameters(operation: Operation, path: str, settings: Settings) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"\{(\w+)\}", path):
        yield {"name": name, "in": "path", "required": True, "schema": {**_STRING, "minLength": 1}}
    for name, (text, schema) in operation.query.items():
        yield {"name": name, "in": "query", "description": text, "schema": schema}
    yield {"name": "x-request-id", "in": "header", "description": "A name for the request.", "schema": _STRING}
    if operation.shared is not None:
        about = "With it, answers and errors have the form of Anthropic's API."
        yield {"name": "anthropic-version", "in": "header", "description": about, "schema": _STRING}
        for name in () if "{" in path else ("after_id", "before_id", "limit"):
            about = "For Anthropic's API: the page of the list."
            yield {"name": name, "in": "query", "description": about, "schema": _STRING}
    triton = settings.triton
    seconds: dict[str, tuple[str, float]] = {}
    if operation.jobs:
        seconds["request"] = "Longest time that the answer may take", triton.request_timeout
    if operation.jobs and operation.event is not None:
        seconds["request"] = seconds["request"][0], max(triton.request_timeout, triton.stream_timeout or math.inf)
        seconds["first-token"] = "Longest wait for the first token", triton.first_token_timeout
        seconds["idle"] = "Longest silence between two tokens", triton.idle_timeout
    for name, (text, most) in seconds.items():
        limits = {"type": "number", "exclusiveMinimum": 0, **({"maximum": most} if most < math.inf else {})}
        yield {"name": f"x-{name}-timeout", "in": "header", "description": f"{text}, in seconds.", "schema": limits}


@cache
def _schemas(*, strict: bool) -> dict[str, Any]:
    """
    Return the schemas of all types by name, as msgspec makes them from the types.

    A request may hold unknown fields unless requests are *strict*, and may leave out every field with a default. An
    answer always has a field with a default; one that can be missing has ``UNSET`` as default, of which msgspec makes
    none.
    """
    bodies = [operation.request for operation in OPERATIONS if operation.request is not None]
    kinds = dict.fromkeys(
        kind for each in OPERATIONS for kind in (each.answer, each.shared, each.event) if kind is not None
    )
    template = "#/components/schemas/{name}"
    _, asked = msgspec.json.schema_components([*bodies, ToolDefinition], ref_template=template)
    _, answered = msgspec.json.schema_components([ErrorEnvelope, AnthropicEnvelope, *kinds], ref_template=template)
    for schema in answered.values():
        for name, field in schema.get("properties", {}).items():
            if "default" in field:
                schema["required"].append(name)
    if both := [name for name in asked.keys() & answered.keys() if asked[name] != answered[name]]:
        raise ValueError(f"types of requests and of answers have the same names: {sorted(both)}")
    for kind in bodies:
        if issubclass(kind, ModelRequest) and not strict:
            asked[kind.__name__].pop("additionalProperties", None)
    if FileField.__name__ in asked:
        asked[FileField.__name__] = {"type": "string", "format": "binary", "description": "A file."}
    components = dict(sorted({**asked, **answered}.items()))
    for schema in components.values():
        if "description" in schema:
            schema["description"] = prose(schema["description"])
        if not schema.get("required", True):
            del schema["required"]
        for field in schema.get("properties", {}).values():
            field.pop("default", None)
    return components


def prose(docstring: str | None) -> str:
    """Return a docstring as text for people, in CommonMark, without what a function raises."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", re.sub(r"``([^`]*)``", r"`\1`", docstring or ""))
    text = re.sub(r"(?<!\*)\*(\w+)\*(?!\*)", r"`\1`", text)
    text = re.sub(r"\bRaises `.*?\.(?=\s|$)", "", text, flags=re.DOTALL)
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n")).strip()


async def openapi(service: Service, call: Call[None]) -> Reply:
    """Describe this API, as OpenAPI 3.1."""
    settings = service.settings
    # The first time it is some hundredths of a second of work, which are not to be taken from running streams.
    body = await asyncio.to_thread(lambda: msgspec.json.encode(describe(settings)))
    return Whole(body)


# What precedes the paths of OpenAI's API at Azure, and the model, which some of them name, by its deployment.
_AZURE = "/openai"
_DEPLOYMENT = f"{_AZURE}/deployments/{{deployment:.+}}"


def _deployed(route: str) -> tuple[str, ...]:
    """Return *route* as Azure's clients have it, too: the model is in the path."""
    return (*openai_routes(route), route.replace(" ", f" {_DEPLOYMENT}"))


def _at_azure(operation: Operation, path: str) -> bool:
    """Return whether *path* is also served behind Azure's prefix."""
    return operation.path.startswith("/v1/") and not (operation.anthropic or path.startswith(_AZURE))


_READ = (errors.InvalidRequest, errors.RequestTimeout, errors.PayloadTooLarge, errors.UnsupportedMediaType)
_MODEL = (errors.ConfigurationError, errors.ModelNotFound)
_TRITON = (errors.UpstreamError, errors.UpstreamTimeout, errors.NotImplementedUpstream)
_INFERENCE = (
    *(*_TRITON, errors.UnsupportedParameter, errors.ContextLengthExceeded, errors.LoraNotLoaded),
    *(errors.Overloaded, errors.ServiceOverloaded),
)
_CONTROL = (*_TRITON, errors.ManagementDisabled, errors.KeyNotSufficient, errors.ModelNotFound, errors.ModelConflict)

_AGAIN: Query = {
    "stream": ("Whether the events are wanted, of a response in the background.", {"enum": ["true", "false"]}),
    "starting_after": ("The number of the event that the stream goes on from.", {"type": "integer", "minimum": -1}),
}
_OLDEST_FIRST = {**PAGE, "order": (PAGE["order"][0], {"enum": ["asc", "desc"], "default": "asc"})}
_CHATS = {**_OLDEST_FIRST, "model": ("The model that answered.", _STRING)}
_VOICES_OF: Query = {"model": ("The model whose voices are wanted; all without it.", _STRING)}
_ENDPOINT: Query = {"endpoint": ("The Triton that is meant; all of them without it.", _STRING)}
_KEPT = (errors.UnsupportedParameter, errors.ObjectNotFound, errors.ConversationBusy, errors.StoreUnavailable)
_CHAT = "/chat/completions/{completion:[^/]+}"
_RESPONSE = "/responses/{response:[^/]+}"
_CONVERSATION = "/conversations/{conversation:[^/]+}"
_ITEM = _CONVERSATION + "/items/{item:[^/]+}"
_kept = partial(stored_row, "inference", _KEPT)
OPERATIONS = (
    Operation(chat.create, _deployed("POST /chat/completions"), "create_chat_completion", "inference",
              chat.ChatRequest, chat.ChatCompletion, event=chat.ChatCompletionChunk, jobs=(Generation,), label="chat"),
    _kept(stored_chats.list_all, "GET /chat/completions", "list_chat_completions", answer=response_types.ItemList,
          query=_CHATS),
    _kept(stored_chats.retrieve, f"GET {_CHAT}", "get_chat_completion", answer=chat.ChatCompletion),
    _kept(stored_chats.update, f"POST {_CHAT}", "update_chat_completion", stored_chats.CompletionUpdate,
          chat.ChatCompletion, strict=True),
    _kept(stored_chats.delete, f"DELETE {_CHAT}", "delete_chat_completion", answer=response_types.Deleted),
    _kept(stored_chats.list_messages, f"GET {_CHAT}/messages", "list_chat_messages", answer=response_types.ItemList,
          query=_OLDEST_FIRST),
    Operation(completions.create, _deployed("POST /completions"), "create_completion", "inference",
              completions.CompletionRequest, completions.Completion, event=completions.Completion, jobs=(Generation,),
              label="text_completion"),
    _kept(responses.create, "POST /responses", "create_response", response_types.ResponsesRequest,
          response_types.ResponseObject, event=response_types.ResponseEvent, jobs=(Generation,), label="chat"),
    _kept(responses.count_tokens, "POST /responses/input_tokens", "count_input_tokens", response_types.ResponsesRequest,
          response_types.InputTokens, label="chat"),
    _kept(responses.compact, "POST /responses/compact", "compact_response", response_types.CompactRequest,
          response_types.CompactedResponse, jobs=(Generation,), label="chat", errors=(errors.NoSummary,)),
    _kept(retrieve.retrieve, f"GET {_RESPONSE}", "get_response", answer=response_types.ResponseObject,
          event=response_types.ResponseEvent, query=_AGAIN, reads=BodyKind.OPTIONAL_JSON,
          hidden_request=retrieve.Retrieval, strict=False),
    _kept(retrieve.delete, f"DELETE {_RESPONSE}", "delete_response", answer=response_types.Deleted),
    _kept(retrieve.cancel, f"POST {_RESPONSE}/cancel", "cancel_response", answer=response_types.ResponseObject),
    _kept(retrieve.list_input, f"GET {_RESPONSE}/input_items", "list_input_items", answer=response_types.ItemList,
          query=PAGE),
    _kept(conversations.create, "POST /conversations", "create_conversation", conversations.ConversationRequest,
          conversations.ConversationObject, reads=BodyKind.OPTIONAL_JSON, strict=True,
          check=conversations.check_store),
    _kept(conversations.retrieve, f"GET {_CONVERSATION}", "get_conversation", answer=conversations.ConversationObject),
    _kept(conversations.update, f"POST {_CONVERSATION}", "update_conversation", conversations.ConversationUpdate,
          conversations.ConversationObject, strict=True, check=conversations.check_store),
    _kept(conversations.delete, f"DELETE {_CONVERSATION}", "delete_conversation", answer=response_types.Deleted),
    _kept(conversations.list_items, f"GET {_CONVERSATION}/items", "list_items", answer=response_types.ItemList,
          query=PAGE),
    _kept(conversations.add_items, f"POST {_CONVERSATION}/items", "add_items", conversations.NewItems,
          response_types.ItemList, strict=True, check=conversations.check_store),
    _kept(conversations.retrieve_item, f"GET {_ITEM}", "get_item"),
    _kept(conversations.delete_item, f"DELETE {_ITEM}", "delete_item", answer=conversations.ConversationObject),
    Operation(responses.refuse_get, openai_routes("GET /responses"), "connect_responses", "inference",
              session=ResponsesSession, errors=(errors.MethodNotAllowed,)),
    Operation(messages.create, openai_routes("POST /messages"), "create_message", "inference",
              message_types.MessagesRequest, message_types.MessageObject, event=message_types.MessageEvent,
              jobs=(Generation,), label="chat"),
    Operation(messages.count_tokens, openai_routes("POST /messages/count_tokens"), "count_message_tokens", "inference",
              message_types.CountTokensRequest, message_types.TokenCount),
    Operation(embeddings.create, _deployed("POST /embeddings"), "create_embeddings", "embedding",
              embeddings.EmbeddingsRequest, embeddings.EmbeddingList, jobs=(EmbeddingJob,), label="embeddings"),
    # The last path is that of the second version of Cohere's client.
    Operation(embeddings.rerank, (*openai_routes("POST /rerank"), "POST /v2/rerank"), "rerank", "embedding",
              embeddings.RerankRequest, embeddings.Reranked, jobs=(ScoreJob, EmbeddingJob)),
    Operation(embeddings.score, openai_routes("POST /score"), "score", "embedding", embeddings.ScoreRequest,
              embeddings.ScoreList, jobs=(ScoreJob, EmbeddingJob)),
    Operation(classify.create, openai_routes("POST /classify"), "classify", "embedding", classify.ClassifyRequest,
              classify.ClassificationList, jobs=(ClassificationJob,)),
    Operation(pooling.create, openai_routes("POST /pooling"), "pooling", "embedding", pooling.PoolingRequest,
              pooling.PooledList, jobs=(TokenEmbeddingJob, TokenClassificationJob)),
    Operation(moderations.handle, openai_routes("POST /moderations"), "create_moderation", "embedding",
              moderations.ModerationRequest, moderations.Moderation, jobs=(ClassificationJob,), label="moderation"),
    Operation(speech.create, _deployed("POST /audio/speech"), "create_speech", "inference", speech.SpeechRequest,
              event=speech.SpeechEvent, media=tuple(MEDIA_TYPES.values()), jobs=(SynthesisJob,), label="speech"),
    Operation(speech.list_voices, openai_routes("GET /audio/voices"), "list_voices", "model-repository",
              answer=speech.VoiceList, errors=(errors.InvalidRequest, errors.ModelNotFound), query=_VOICES_OF),
    Operation(transcriptions.transcribe, _deployed("POST /audio/transcriptions"), "create_transcription", "inference",
              transcriptions.TranscriptionRequest, transcriptions.TranscriptObject,
              event=transcriptions.TranscriptEvent, text=True, jobs=(TranscriptionJob,), label="transcription",
              reads=BodyKind.FORM, line_request=transcriptions.TranscriptionLine,
              line_function=transcriptions.transcribe_line),
    Operation(realtime.refuse_get, openai_routes("GET /realtime"), "connect_realtime", "inference",
              session=realtime.RealtimeSession, query=realtime.QUERY, errors=(errors.InvalidRequest,)),
    Operation(transcriptions.translate, _deployed("POST /audio/translations"), "create_translation", "inference",
              transcriptions.TranslationRequest, transcriptions.TranscriptObject, text=True, jobs=(TranslationJob,),
              label="translation", reads=BodyKind.FORM),
    *BATCH_OPERATIONS,
    Operation(tokenize.tokenize, openai_routes("POST /tokenize"), "tokenize", "inference", tokenize.TokenizeRequest,
              tokenize.TokenizeAnswer),
    Operation(tokenize.detokenize, openai_routes("POST /detokenize"), "detokenize", "inference",
              tokenize.DetokenizeRequest, tokenize.DetokenizeAnswer),
    # Some clients post to list models.
    Operation(info.list_models, openai_routes("GET /models", "POST /models"), "list_models", "model-repository",
              answer=info.ModelList, errors=(errors.InvalidRequest,), shared=message_types.ModelPage),
    Operation(info.get_model, openai_routes("GET /models/{model:.+}"), "get_model", "model-repository",
              answer=info.ModelObject, errors=(errors.ModelNotFound,), shared=message_types.ModelInfo),
    Operation(info.load, openai_routes("POST /models/{model:.*}/load"), "load_model", "model-repository",
              info.LoadRequest, info.ModelObject, reads=BodyKind.OPTIONAL_JSON, strict=True,
              check=info.check_may_manage, query=_ENDPOINT, errors=_CONTROL),
    Operation(info.unload, openai_routes("POST /models/{model:.*}/unload"), "unload_model", "model-repository",
              info.UnloadRequest, info.Unloaded, reads=BodyKind.OPTIONAL_JSON, strict=True,
              check=info.check_may_manage, query=_ENDPOINT, errors=_CONTROL),
    Operation(info.version, ("GET /version",), "version", "info", answer=info.Version),
    Operation(info.status, ("GET /status",), "status", "model-repository", answer=info.Status),
    # The OpenAPI Initiative's own schema describes this answer.
    Operation(openapi, ("GET /openapi.json",), "openapi", "info"),
    Operation(info.live, ("GET /health/live",), "live", "health", answer=info.Health),
    Operation(info.ready, ("GET /health/ready", "GET /health", "GET /v1/health", "GET /health_check"), "ready",
              "health", answer=info.Health, failure=503),
    Operation(info.metrics, ("GET /metrics",), "metrics", "metrics", text=True, errors=(errors.EndpointNotFound,)),
)  # fmt: skip
#: What logs, metrics and spans call the operations that ask a model.
RECORDED = tuple(dict.fromkeys(operation.label or operation.name for operation in OPERATIONS if operation.jobs))


def prefixes(operation: Operation, path: str) -> tuple[str, ...]:
    """Return what precedes *path* of *operation* where it is served."""
    if _at_azure(operation, path):
        return ("", _AZURE)
    return ("",)
