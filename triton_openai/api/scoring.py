"""
``POST /v1/rerank`` and ``POST /v1/score``: pairs of texts in, one score each out.

A cross-encoder scores a pair itself. For a model of embeddings a score is the cosine of the angle between the two, as
vLLM's server has it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai.api.bodies import MAX_ITEMS, ModelRequest, json_response
from triton_openai.api.context import RequestContext, begin
from triton_openai.api.embeddings import InputUsage, answers_of, count_inputs, embed, usage_of
from triton_openai.api.parameters import ABSENT, Accepted, check_size, neutral_values, unused
from triton_openai.api.service import new_id, now
from triton_openai.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    InvalidValue,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import EmbeddingJob, ScoreJob, ScoreResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts import offload
from triton_openai.prompts.tokenizer import Tokenizer

# Products of numbers that are computed on the event loop: about a millisecond.
_INLINE_PRODUCTS = 30_000

Pairs = Sequence[tuple[str, str]]
_Request = TypeVar("_Request", bound="ScoringRequest")


class TextObject(msgspec.Struct):
    """A text as an object; other content is not supported."""

    text: str
    content: Annotated[Any, unused()] = None
    image: Annotated[Any, unused()] = None
    image_url: Annotated[Any, unused()] = None
    video: Annotated[Any, unused()] = None
    video_url: Annotated[Any, unused()] = None


Text: TypeAlias = str | TextObject
TextList: TypeAlias = Annotated[list[Text], Meta(min_length=1, max_length=MAX_ITEMS)]
#: One side of a score request: a text, or several.
Side: TypeAlias = Text | TextList | None


class ScoringRequest(ModelRequest, kw_only=True):
    """Base of both requests, with what vLLM's server takes beside the texts."""

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None
    user: Accepted = ABSENT
    # In common use, and not honoured.
    activation: Annotated[Any, unused()] = None
    softmax: Annotated[Any, unused()] = None
    truncation_side: Annotated[Any, unused("right")] = None
    padding: Annotated[Any, unused("do_not_pad")] = None
    mm_processor_kwargs: Annotated[Any, unused({})] = None
    priority: Annotated[Any, unused(0)] = None


def _texts(value: Text | list[Text], place: str) -> list[str]:
    """Return one text or several. Raises :class:`UnsupportedParameter` for images and other content."""
    if isinstance(value, list):
        return [text for index, item in enumerate(value) for text in _texts(item, f"{place}[{index}]")]
    if isinstance(value, str):
        return [value]
    if any(getattr(value, name) is not None for name in neutral_values(TextObject)):
        raise UnsupportedParameter("Only text can be scored.", param=place)
    return [value.text]


async def score(context: RequestContext[_Request], job_id: str, pairs: Pairs, *, param: str) -> ScoreResult:
    """
    Return the scores of *pairs*, whose documents the client calls *param*.

    Raises :class:`InvalidRequest` for models that cannot score, :class:`UnsupportedParameter` for what they cannot be
    asked, and :class:`ServiceError` for what goes wrong upstream.
    """
    model, request = context.model, context.body
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
        raise InvalidValue(
            f"The query, once for each document, and the documents have more than {most} characters together.", param
        )
    async with context.admitted(param=param):
        result = await (_crossed if capabilities.score else _compared)(context, job_id, pairs)
    if not all(map(math.isfinite, result.scores)):
        raise UpstreamError("The model sent a score that is no number.")
    context.observation.input_tokens = result.prompt_tokens
    return result


async def _crossed(context: RequestContext[_Request], job_id: str, pairs: Pairs) -> ScoreResult:
    """Return the scores of a cross-encoder."""
    model, request = context.model, context.body
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
    if adapter.capabilities.token_pairs:
        if tokenizer is None:
            raise ConfigurationError(
                f"The model '{model.name}' takes token ids: give its tokenizer with --tokenizer {model.owner}=SOURCE."
            )
        job = await _encoded(model, tokenizer, request, job)
    requests = adapter.encode_scores(job)
    answers = await answers_of(context.service, model, requests, timeout=context.limits.total)
    result = adapter.decode_scores(job, answers)
    scores, tokens = result.scores, result.prompt_tokens
    if activated and request.use_activation is not False:
        scores = [_sigmoid(score) for score in scores]
    if tokens is None and tokenizer is not None:
        tokens = sum(len(pair.ids) for pair in job.encoded or await tokenizer.encode_pairs_async(pairs))
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
    pad_id = None if pad is None else tokenizer.token_id(pad)
    return ScoreJob(id=job.id, pairs=job.pairs, encoded=encoded, pad_id=pad_id)


async def _compared(context: RequestContext[_Request], job_id: str, pairs: Pairs) -> ScoreResult:
    """Return the cosines of embeddings. No text is embedded twice; an activation changes no angle."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    job = EmbeddingJob(id=job_id, inputs=texts)
    result = await embed(context.service, context.model, job, timeout=context.limits.total)
    vectors = dict(zip(texts, result.vectors, strict=True))
    size = len(pairs) * len(result.vectors[0]) // 4
    scores = await offload.run(lambda: _cosines(vectors, pairs), size=size, threshold=_INLINE_PRODUCTS)
    return ScoreResult(scores=scores, prompt_tokens=await count_inputs(context.model, job, result))


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
    return math.exp(min(value, 0.0)) / (1 + math.exp(-abs(value)))


class RerankRequest(ScoringRequest, kw_only=True):
    """
    The request. Texts are strings, or objects with ``text``.

    ``top_n`` is how many results to give; 0 is all. ``return_documents`` false leaves their texts out.
    """

    query: Text
    documents: Text | TextList
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    # Cohere's and Jina's, and not honoured.
    rank_fields: Annotated[Any, unused(["text"])] = None
    max_chunks_per_doc: Annotated[Any, unused()] = None
    max_tokens_per_doc: Annotated[Any, unused()] = None


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
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET
    results: Sequence[RerankResult]


async def handle_rerank(request: web.Request) -> web.StreamResponse:
    """Order documents by how well they fit a query."""
    context = await begin(request, RerankRequest, "rerank", refused=neutral_values(RerankRequest))
    body = context.body
    (query,), documents = _texts(body.query, "query"), _texts(body.documents, "documents")
    if not query:
        raise InvalidValue("'query' must not be empty.", "query")
    rerank_id = context.observation.response_id = new_id("rerank")
    result = await score(context, rerank_id, [(query, document) for document in documents], param="documents")
    # Equal scores keep the order of their documents.
    ranked = sorted(range(len(documents)), key=result.scores.__getitem__, reverse=True)
    answer = Reranked(
        id=rerank_id,
        model=body.model,
        usage=usage_of(result.prompt_tokens),
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

    queries: Side = None
    documents: Side = None
    items: Side = None
    data_1: Side = None
    data_2: Side = None
    text_1: Side = None
    text_2: Side = None


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
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET


async def handle_score(request: web.Request) -> web.StreamResponse:
    """Score one text against each of several, or texts pair by pair."""
    context = await begin(request, ScoreRequest, "score", refused=neutral_values(ScoreRequest))
    pairs, second = _pairs(context.body)
    score_id = context.observation.response_id = new_id("score")
    result = await score(context, score_id, pairs, param=second)
    answer = ScoreList(
        id=score_id,
        created=now(),
        model=context.body.model,
        data=[Score(index=index, score=value) for index, value in enumerate(result.scores)],
        usage=usage_of(result.prompt_tokens),
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
    first, second = (_texts(getattr(body, name), name) for name in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise InvalidValue(
            f"'{names[0]}' must be one text, or as many as '{names[1]}': there are {len(first)} and {len(second)}.",
            names[0],
        )
    return list(zip(first, second, strict=True)), names[1]
