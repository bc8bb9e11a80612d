"""
``POST /v1/embeddings``, and the scores of pairs of texts: ``POST /v1/rerank`` and ``POST /v1/score``.

Source of the wire format: OpenAI's ``embedding`` object (openai-openapi 2.3.0). The official client asks for base64
by default: little-endian float32. Scores are those of vLLM's server.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai import errors, offload
from triton_openai.api.bodies import (
    MAX_ITEMS,
    ModelRequest,
    NotNegative,
    Positive,
    encode_each,
    json_reply,
    json_reply_of,
    new_id,
    now,
    separated,
)
from triton_openai.api.parameters import (
    Limit,
    TruncatedRequest,
    accepting,
    ignoring,
    neutral_values,
    refusing,
    truncation,
)
from triton_openai.api.service import RequestContext, Service, begin
from triton_openai.jobs import EmbeddingJob, ScoreJob, ScoreResult
from triton_openai.operations import Call, Reply
from triton_openai.prompts.truncation import Truncation


# All but one are names of vLLM's server; those that are refused would change the answer.
@accepting("user", "request_id")
@ignoring("cache_salt", "priority")
@refusing(add_special_tokens=True, mm_processor_kwargs={})
class InputRequest(TruncatedRequest, kw_only=True):
    """Base of the requests with ``input``: a text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]


# Names of vLLM's server. Embedding models normalize by themselves, or vLLM does it for them.
@refusing(embed_dtype="float32", endianness=("native", "little"), normalize=True)
class EmbeddingsRequest(InputRequest, kw_only=True):
    """
    The request; ``input`` is a text, texts, token ids, or lists of token ids.

    ``use_activation`` false returns vectors as they are before the model's activation, usually not normalized.
    """

    use_activation: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Positive | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or as base64 text."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: Sequence[float] | str


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request for vectors or scores: what was sent to the model."""

    prompt_tokens: int
    total_tokens: int


def input_usage(tokens: int | None) -> InputUsage | UnsetType:
    """Return the usage, left out if the tokens are not known."""
    if tokens is None:
        return UNSET
    return InputUsage(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    object: Literal["list"] = "list"
    data: Sequence[Embedding]
    model: str
    usage: InputUsage | UnsetType = UNSET


async def create(service: Service, call: Call[EmbeddingsRequest]) -> Reply:
    """Create embeddings of texts."""
    context = await begin(service, call)
    body = context.body
    activate = body.use_activation is not False
    if not activate and not context.model.adapter.capabilities.activation:
        raise errors.UnsupportedParameter(
            "'use_activation' is not supported with this model: its vectors are returned as the model computes them.",
            param="use_activation",
        )
    job = EmbeddingJob(id=new_id("embd"), inputs=inputs_of(body), dimensions=body.dimensions, activate=activate)
    result = await context.result_of(job, cut=truncation(body, side="right"))
    as_text = body.encoding_format == "base64"

    def answer() -> EmbeddingList:
        data = encode_each(_embedding(index, vector, as_text) for index, vector in enumerate(result.vectors))
        return EmbeddingList(data=data, model=body.model, usage=input_usage(result.prompt_tokens))

    return await json_reply_of(answer, cost=offload.BYTE * sum(map(len, result.vectors)))


def inputs_of(body: InputRequest) -> list[str] | list[list[int]]:
    """Return the inputs one by one. Raises :class:`InvalidRequest` for empty and for mixed ones."""
    items = separated(body.input, "input")
    if not all(items):
        raise errors.InvalidValue("'input' must not hold an empty item.", "input")
    if len(set(map(type, items))) > 1:
        raise errors.InvalidRequest(
            "'input' must hold either texts or lists of token ids.", param="input", code="invalid_type"
        )
    return items


def _embedding(index: int, vector: bytes, as_text: bool) -> Embedding:
    values = array("f", vector)
    if not math.isfinite(sum(values)):
        raise errors.InvalidAnswer("its embedding has values that are not numbers")
    if as_text:
        return Embedding(index=index, embedding=base64.b64encode(vector).decode())
    return Embedding(index=index, embedding=values.tolist())


_T = TypeVar("_T")
_Request = TypeVar("_Request", bound="ScoringRequest")


@refusing(content=None, image=None, image_url=None, video=None, video_url=None)
class TextObject(msgspec.Struct):
    """A text as an object; other content is not supported."""

    text: str


Text: TypeAlias = str | TextObject
TextList: TypeAlias = Annotated[list[Text], Meta(min_length=1, max_length=MAX_ITEMS)]
#: One side of a score request: a text, or several.
Side: TypeAlias = Text | TextList | None


@accepting("user")
@refusing(
    activation=None, softmax=None, truncation_side="right", padding="do_not_pad", mm_processor_kwargs={}, priority=0
)
class ScoringRequest(ModelRequest, kw_only=True):
    """Base of both requests, with what vLLM's server takes beside the texts."""

    truncate_prompt_tokens: Limit | None = None
    use_activation: bool | None = None


def _texts(value: Text | list[Text], param: str) -> list[str]:
    """Return one text or several. Raises :class:`UnsupportedParameter` for images and other content."""
    if isinstance(value, list):
        return [_text(item, f"{param}[{index}]") for index, item in enumerate(value)]
    return [_text(value, param)]


def _text(value: Text, param: str) -> str:
    if isinstance(value, str):
        return value
    for name in neutral_values(TextObject):
        if getattr(value, name) is not None:
            raise errors.UnsupportedParameter("Only text can be scored.", param=param)
    return value.text


async def _score(
    context: RequestContext[_Request], job_id: str, pairs: Sequence[tuple[str, str]], *, param: str
) -> ScoreResult:
    """Return the scores of *pairs*; *param* is the client's name of the documents. Raises :class:`ServiceError`."""
    model = context.model
    request = context.body
    crosses = ScoreJob in model.jobs
    cut = request.truncate_prompt_tokens
    if cut is not None and not (crosses and model.adapter.capabilities.tokens):
        raise errors.UnsupportedParameter(
            "'truncate_prompt_tokens' is not supported with this model, because it takes texts.",
            param="truncate_prompt_tokens",
        )
    switchable = model.settings.score_activation == "sigmoid" or model.adapter.capabilities.activation
    if crosses and request.use_activation is not None and not switchable:
        raise errors.UnsupportedParameter(
            "'use_activation' is not supported with this model: its scores are returned as the model computes them. If "
            "they are logits, the operator has to configure it (score_activation).",
            param="use_activation",
        )
    max_size = context.service.settings.server.max_body_size
    if crosses and sum(len(query) + len(document) for query, document in pairs) > max_size:
        # A long query and many documents are a short body, and a query is sent along with every document.
        raise errors.InvalidValue(
            f"The query, once for each document, and the documents have more than {max_size} characters together.",
            param,
        )
    job = ScoreJob(id=job_id, pairs=pairs, activate=request.use_activation is not False)
    truncation = None
    if cut is not None:
        truncation = Truncation(tokens=cut)
    return await context.result_of(job, cut=truncation, param=param)


# Cohere's and Jina's.
@refusing(rank_fields=["text"], max_chunks_per_doc=None, max_tokens_per_doc=None)
class RerankRequest(ScoringRequest, kw_only=True):
    """
    The request. Texts are strings, or objects with ``text``.

    ``top_n`` is how many results to give; 0 is all. ``return_documents`` false leaves their texts out.
    """

    query: Text
    documents: Text | TextList
    top_n: NotNegative | None = None
    return_documents: bool | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document's relevance."""

    index: int
    document: Document | UnsetType = UNSET
    relevance_score: float


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    id: str
    model: str
    usage: InputUsage | UnsetType = UNSET
    results: Sequence[RerankResult]


async def rerank(service: Service, call: Call[RerankRequest]) -> Reply:
    """Rank documents by their relevance to a query."""
    context = await begin(service, call)
    body = context.body
    query = _text(body.query, "query")
    documents = _texts(body.documents, "documents")
    if not query:
        raise errors.InvalidValue("'query' must not be empty.", "query")
    rerank_id = new_id("rerank")
    result = await _score(context, rerank_id, [(query, document) for document in documents], param="documents")
    # Equal scores keep the order of their documents.
    ranked = sorted(range(len(documents)), key=result.scores.__getitem__, reverse=True)
    results = []
    for index in ranked[: body.top_n or None]:
        document: Document | UnsetType = UNSET
        if body.return_documents is not False:
            document = Document(text=documents[index])
        results.append(RerankResult(index=index, document=document, relevance_score=result.scores[index]))
    usage = input_usage(result.prompt_tokens)
    return json_reply(Reranked(id=rerank_id, model=body.model, usage=usage, results=results))


#: What the two sides are called, in the order in which vLLM's server tries them.
SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
_SIDE_NAMES = ("queries", "documents", "items", "data_1", "data_2", "text_1", "text_2")


class ScoreRequest(ScoringRequest, kw_only=True):
    """The request: two sides under one pair of names (see :data:`SIDES`), each a text or several."""

    queries: Side = None
    documents: Side = None
    items: Side = None
    data_1: Side = None
    data_2: Side = None
    text_1: Side = None
    text_2: Side = None


class ListOf(msgspec.Struct, Generic[_T], frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Sequence[_T]
    usage: InputUsage | UnsetType = UNSET


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The score of one pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(ListOf[Score], frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""


async def score(service: Service, call: Call[ScoreRequest]) -> Reply:
    """Score one text against each of several, or texts pair by pair."""
    context = await begin(service, call)
    pairs, second = _pairs(context.body)
    score_id = new_id("score")
    result = await _score(context, score_id, pairs, param=second)
    answer = ScoreList(
        id=score_id,
        created=now(),
        model=context.body.model,
        data=[Score(index=index, score=value) for index, value in enumerate(result.scores)],
        usage=input_usage(result.prompt_tokens),
    )
    return json_reply(answer)


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs, and what the client calls the second side. Raises :class:`InvalidRequest`."""
    used = [name for name in _SIDE_NAMES if getattr(body, name) is not None]
    for first_name, second_name in SIDES:
        if {first_name, second_name} == set(used):
            break
    else:
        raise _sides_error(used)
    first = _texts(getattr(body, first_name), first_name)
    second = _texts(getattr(body, second_name), second_name)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise errors.InvalidValue(
            f"'{first_name}' must be one text, or as many as '{second_name}': there are {len(first)} and "
            f"{len(second)}.",
            first_name,
        )
    return list(zip(first, second, strict=True)), second_name


def _sides_error(used: Sequence[str]) -> errors.InvalidRequest:
    """Return the error for a request with the sides *used*, which are no pair."""
    known = ", ".join(f"'{first}' and '{second}'" for first, second in SIDES)
    if used:
        param = used[0]
    else:
        param = SIDES[-1][0]
    if len(used) < 2:
        code = "missing_required_parameter"
    else:
        code = "invalid_value"
    return errors.InvalidRequest(f"Give the two sides under one pair of names: {known}.", param=param, code=code)
