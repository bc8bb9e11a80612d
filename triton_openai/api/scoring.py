"""
What ``/v1/rerank`` and ``/v1/score`` share: pairs of texts in, one score each out.

A cross-encoder scores a pair itself. For a model of embeddings a score is the cosine of the angle between the two, as
vLLM's server has it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.batches import answers_of
from triton_openai.api.bodies import ModelRequest, json_response
from triton_openai.api.context import RequestContext, begin
from triton_openai.api.embeddings import count_inputs, embed
from triton_openai.api.fields import ABSENT, Accepted, OneText, Texts, TextsOrNull
from triton_openai.api.parameters import check_size
from triton_openai.api.service import Service, new_id, now
from triton_openai.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import EmbeddingJob, ScoreJob, ScoreResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import Tokenizer

#: As many as an embeddings request takes.
MAX_PAIRS = 2048
# Products of numbers that are computed on the event loop: about a millisecond.
_INLINE_PRODUCTS = 30_000

Pairs = Sequence[tuple[str, str]]
_Request = TypeVar("_Request", bound="ScoringRequest")


class ScoringRequest(ModelRequest, kw_only=True):
    """Base of both requests, with what vLLM's server takes beside the texts."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None
    user: Accepted = ABSENT
    # In common use, and not honoured: refused unless neutral (see REFUSED).
    activation: Any = None
    softmax: Any = None
    truncation_side: Any = None
    padding: Any = None
    mm_processor_kwargs: Any = None
    priority: Any = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "activation": (),
    "softmax": (),
    "truncation_side": ("right",),
    "padding": ("do_not_pad",),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
}


class ScoringUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of what was sent to the model."""

    prompt_tokens: int
    total_tokens: int


def usage_of(result: ScoreResult) -> ScoringUsage | msgspec.UnsetType:
    """Return the usage, to be left out where nobody counted."""
    tokens = result.prompt_tokens
    return msgspec.UNSET if tokens is None else ScoringUsage(prompt_tokens=tokens, total_tokens=tokens)


def text_of(value: Any, place: str) -> str:
    """
    Return a text, given bare or as an object with ``text``.

    Raises :class:`UnsupportedParameter` for images and other content, and :class:`InvalidRequest` for what is no text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        if set(value) & {"content", "image", "image_url", "video", "video_url"}:
            raise UnsupportedParameter("Only text can be scored.", param=place)
        if isinstance(value.get("text"), str):
            return str(value["text"])
    raise InvalidRequest(
        f"Invalid type for '{place}': expected a string, or an object with 'text'.", param=place, code="invalid_type"
    )


def texts_of(value: Any, place: str) -> list[str]:
    """Return one text or several. Raises as :func:`text_of`, and :class:`InvalidRequest` for none and too many."""
    if not isinstance(value, list):
        return [text_of(value, place)]
    if not value:
        raise InvalidRequest(f"'{place}' must not be empty.", param=place, code="invalid_value")
    if len(value) > MAX_PAIRS:
        raise InvalidRequest(f"'{place}' takes at most {MAX_PAIRS} texts.", param=place, code="array_above_max_length")
    return [text_of(item, f"{place}[{index}]") for index, item in enumerate(value)]


async def score(context: RequestContext[_Request], job_id: str, pairs: Pairs, *, param: str) -> ScoreResult:
    """
    Return the scores of *pairs*, whose documents the client calls *param*.

    Raises :class:`InvalidRequest` for models that cannot score, :class:`UnsupportedParameter` for what they cannot be
    asked, and :class:`ServiceError` for what goes wrong upstream.
    """
    model, request, timeout = context.model, context.body, context.limits.total
    capabilities = model.adapter.capabilities
    if not (capabilities.score or capabilities.embed):
        raise InvalidRequest(f"The model '{request.model}' scores no texts and makes no embeddings.", param="model")
    if request.truncate_prompt_tokens is not None and not capabilities.token_pairs:
        raise UnsupportedParameter(
            "'truncate_prompt_tokens' is not supported with this model: it is given texts.",
            param="truncate_prompt_tokens",
        )
    most = context.service.settings.server.max_body_size
    if capabilities.score and sum(len(query) + len(document) for query, document in pairs) > most:
        # A long query and many documents are a short body, and a query is sent along with every document.
        raise InvalidRequest(
            f"The query, once for each document, and the documents have more than {most} characters together.",
            param=param,
            code="invalid_value",
        )
    method = _crossed if capabilities.score else _compared
    result = await method(context.service, model, request, job_id, pairs, timeout)
    if not all(map(math.isfinite, result.scores)):
        raise UpstreamError("The model sent a score that is no number.")
    return result


async def _crossed(
    service: Service, model: ServedModel, request: ScoringRequest, job_id: str, pairs: Pairs, timeout: float | None
) -> ScoreResult:
    """Return the scores of a cross-encoder."""
    activated = model.settings.score_activation == "sigmoid"
    if request.use_activation is not None and not activated:
        raise UnsupportedParameter(
            "Whether this model's scores are activated is not known here: they are given as they are. (If they are "
            "logits, say so with score_activation.)",
            param="use_activation",
        )
    adapter = model.adapter
    job = ScoreJob(id=job_id, pairs=pairs)
    tokenizer = (await model.prompter()).tokenizer
    tokens: int | None = None
    if adapter.capabilities.token_pairs:
        if tokenizer is None:
            raise ConfigurationError(
                f"The model '{model.name}' takes token ids: give its tokenizer with --tokenizer {model.owner}=SOURCE."
            )
        job = await _encoded(model, tokenizer, request, job)
        tokens = sum(len(pair.ids) for pair in job.encoded)
    answers = await answers_of(service, model, adapter.encode_scores(job), timeout=timeout)
    result = adapter.decode_scores(job, answers)
    scores = result.scores
    if activated and request.use_activation is not False:
        scores = [_sigmoid(score) for score in scores]
    tokens = tokens if result.prompt_tokens is None else result.prompt_tokens
    if tokens is None and tokenizer is not None:
        tokens = sum(len(pair.ids) for pair in await tokenizer.encode_pairs_async(pairs))
    return ScoreResult(scores=scores, prompt_tokens=tokens)


async def _encoded(model: ServedModel, tokenizer: Tokenizer, request: ScoringRequest, job: ScoreJob) -> ScoreJob:
    cut, longest = request.truncate_prompt_tokens, model.settings.max_model_len
    if cut == -1:
        cut = longest or tokenizer.model_max_length
        if cut is None:
            raise UnsupportedParameter(
                "How much the model takes is not known: give it with --max-model-len.", param="truncate_prompt_tokens"
            )
    if cut is None and longest is not None:
        for text in {text for pair in job.pairs for text in pair}:
            check_size(text, tokenizer, longest)
    encoded = await tokenizer.encode_pairs_async(job.pairs, cut)
    most = max(len(pair.ids) for pair in encoded)
    if longest is not None and most > longest:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {longest} tokens. However, a query and its document have {most} "
            "tokens together."
        )
    pad = tokenizer.special_tokens.get("pad_token")
    return ScoreJob(
        id=job.id, pairs=job.pairs, encoded=encoded, pad_id=None if pad is None else tokenizer.token_id(pad)
    )


async def _compared(
    service: Service, model: ServedModel, request: ScoringRequest, job_id: str, pairs: Pairs, timeout: float | None
) -> ScoreResult:
    """Return the cosines of embeddings. No text is embedded twice; an activation changes no angle."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    job = EmbeddingJob(id=job_id, inputs=texts)
    result = await embed(service, model, job, timeout=timeout)
    vectors = dict(zip(texts, result.vectors, strict=True))
    size = len(pairs) * len(result.vectors[0]) // 4
    scores = await offload.run(lambda: _cosines(vectors, pairs), size=size, threshold=_INLINE_PRODUCTS)
    return ScoreResult(scores=scores, prompt_tokens=await count_inputs(model, job, result))


def _cosines(vectors: Mapping[str, bytes], pairs: Pairs) -> list[float]:
    units = {text: _unit(vector) for text, vector in vectors.items()}
    return [sum(map(mul, units[query], units[document])) for query, document in pairs]


def _unit(vector: bytes) -> Sequence[float]:
    """Return *vector* at length one; one of length zero has no direction, and stays what it is."""
    values = array("f", vector)
    length = math.sqrt(sum(map(mul, values, values)))
    return values if length == 0 else array("d", [value / length for value in values])


def _sigmoid(value: float) -> float:
    """Return the logistic function of *value*, computed so that nothing overflows."""
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    grown = math.exp(value)
    return grown / (1 + grown)


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


RERANK_REFUSED: Mapping[str, tuple[Any, ...]] = {
    **REFUSED,
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


async def handle_rerank(request: web.Request) -> web.StreamResponse:
    """Order documents by how well they fit a query."""
    context = await begin(request, RerankRequest, "rerank", refused=RERANK_REFUSED)
    body, observation = context.body, context.observation
    query, documents = text_of(body.query, "query"), texts_of(body.documents, "documents")
    if not query:
        raise InvalidRequest("'query' must not be empty.", param="query", code="invalid_value")
    rerank_id = observation.response_id = new_id("rerank")
    pairs = [(query, document) for document in documents]
    async with context.admitted(param="documents"):
        result = await score(context, rerank_id, pairs, param="documents")
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
    return json_response(answer)


#: What the two sides are called, in the order in which vLLM's server tries them.
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


class ScoreRequest(ScoringRequest, kw_only=True):
    """The request: two sides under one pair of names (see :data:`SIDES`), each a text or several."""

    queries: TextsOrNull = None
    documents: TextsOrNull = None
    items: TextsOrNull = None
    data_1: TextsOrNull = None
    data_2: TextsOrNull = None
    text_1: TextsOrNull = None
    text_2: TextsOrNull = None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = msgspec.field(name="object", default="score")
    score: float


class ScoreList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out where nobody counted."""

    id: str
    object: Literal["list"] = msgspec.field(name="object", default="list")
    created: int
    model: str
    data: Sequence[Score]
    usage: ScoringUsage | msgspec.UnsetType = msgspec.UNSET


async def handle_score(request: web.Request) -> web.StreamResponse:
    """Score one text against each of several, or texts pair by pair."""
    context = await begin(request, ScoreRequest, "score", refused=REFUSED)
    body, observation = context.body, context.observation
    pairs, second = _pairs(body)
    score_id = observation.response_id = new_id("score")
    async with context.admitted(param=second):
        result = await score(context, score_id, pairs, param=second)
    observation.input_tokens = result.prompt_tokens
    answer = ScoreList(
        id=score_id,
        created=now(),
        model=body.model,
        data=[Score(index=index, score=value) for index, value in enumerate(result.scores)],
        usage=usage_of(result),
    )
    return json_response(answer)


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs, and what the client calls the second side. Raises :class:`InvalidRequest`."""
    given = [name for name in dict.fromkeys(name for side in SIDES for name in side) if getattr(body, name) is not None]
    names = next((side for side in SIDES if set(side) == set(given)), None)
    if names is None:
        known = ", ".join(f"'{first}' and '{second}'" for first, second in SIDES)
        raise InvalidRequest(
            f"Give the two sides under one pair of names: {known}.",
            param=given[0] if given else SIDES[-1][0],
            code="missing_required_parameter" if len(given) < 2 else "invalid_value",
        )
    first, second = (texts_of(getattr(body, name), name) for name in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidRequest(
            f"'{names[0]}' must be one text, or as many as '{names[1]}': there are {len(first)} and {len(second)}.",
            param=names[0],
            code="invalid_value",
        )
    return list(zip(first, second, strict=True)), names[1]
