"""
``POST /v1/rerank``, also ``/rerank`` and ``/v2/rerank``.

The shape is Jina's and Cohere's, as vLLM's server has it: results by falling relevance, each with the index of its
document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.access import model_of
from triton_openai.api.bodies import read_json
from triton_openai.api.documented import OneText, Texts
from triton_openai.api.parameters import refuse
from triton_openai.api.scoring import REFUSED as SHARED_REFUSED
from triton_openai.api.scoring import ScoringRequest, ScoringUsage, score, text_of, texts_of, usage_of
from triton_openai.api.service import new_id, service_of
from triton_openai.errors import InvalidRequest
from triton_openai.telemetry.observation import observe
from triton_openai.time_limits import TimeLimits

_encode = msgspec.json.Encoder().encode


class RerankRequest(ScoringRequest, kw_only=True):
    """
    The request. Texts are strings, or objects with ``text``.

    ``top_n`` is how many results to give; 0 is all. ``return_documents`` false leaves their texts out.
    """

    query: OneText
    documents: Texts
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    # Cohere's and Jina's, and not honoured: refused.
    rank_fields: Any = None
    max_chunks_per_doc: Any = None
    max_tokens_per_doc: Any = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    **SHARED_REFUSED,
    "rank_fields": (["text"],),
    "max_chunks_per_doc": (),
    "max_tokens_per_doc": (),
}


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document's relevance."""

    index: int
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    id: str
    model: str
    usage: ScoringUsage | msgspec.UnsetType = msgspec.UNSET
    results: Sequence[RerankResult]


async def handle(request: web.Request) -> web.StreamResponse:
    """Order documents by how well they fit a query."""
    service = service_of(request)
    body = await read_json(request, RerankRequest, strict=service.settings.api.strict_parameters)
    model = await model_of(request, body)
    observation = observe(request, "rerank", model=model)
    observation.parameters = body
    refuse(body, REFUSED)
    query, documents = text_of(body.query, "query"), texts_of(body.documents, "documents")
    if not query:
        raise InvalidRequest("'query' must not be empty.", param="query", code="invalid_value")
    rerank_id = observation.response_id = new_id("rerank")
    pairs = [(query, document) for document in documents]
    limits = TimeLimits.of(service.settings.triton, request.headers, stream=False)
    async with service.admission.enter(model.owner, observation, patience=limits.patience):
        limits = limits.after(observation.queued_seconds)
        result = await score(service, model, body, rerank_id, pairs, param="documents", timeout=limits.total)
    observation.input_tokens = result.prompt_tokens
    # Equal scores keep the order of their documents.
    ranked = sorted(range(len(documents)), key=result.scores.__getitem__, reverse=True)
    answer = Reranked(
        id=rerank_id,
        model=body.model,
        usage=usage_of(result),
        results=[
            RerankResult(
                index=index,
                document=msgspec.UNSET if body.return_documents is False else Document(text=documents[index]),
                relevance_score=result.scores[index],
            )
            for index in ranked[: body.top_n or None]
        ],
    )
    return web.Response(body=_encode(answer), content_type="application/json")
