"""
``POST /v1/embeddings``, and the scores of pairs of texts: ``POST /v1/rerank`` and ``POST /v1/score``.

Source of the wire format: OpenAI's ``embedding`` object (openai-openapi 2.3.0). The official client asks for base64
by default: little-endian float32. A cross-encoder scores a pair itself. For a model of embeddings a score is
the cosine of the angle between the two, as vLLM's server has it.
"""

from __future__ import annotations

import asyncio
import base64
import math
from array import array
from collections.abc import Mapping, Sequence
from operator import mul
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from triton_openai import errors, offload
from triton_openai.answer.fan_out import too_long
from triton_openai.answer.limits import check_size, too_many_tokens
from triton_openai.answer.prepare import check_ids, no_tokenizer
from triton_openai.answer.run import Sender
from triton_openai.api.bodies import MAX_ITEMS, ModelRequest, json_response, separated
from triton_openai.api.parameters import TruncatedRequest, accepting, ignoring, neutral_values, refusing, truncation
from triton_openai.api.service import RequestContext, begin, new_id, now
from triton_openai.generation import EmbeddingJob, EmbeddingResult, ScoreJob, ScoreResult
from triton_openai.models.served import ServedModel
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.truncation import Truncation, cut_encoded, cut_ids, cut_text
from triton_openai.serving.connections import WholeResponse
from triton_openai.triton.status import no_answer
from triton_openai.triton.tensors import InferRequest, InferResponse

_encode = msgspec.json.Encoder().encode
# Requests of one call that are sent to Triton at the same time: enough to fill its batcher.
_PARALLEL_REQUESTS = 16
_LANGCHAIN = " (With LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.)"


# All but one are names of vLLM's server; those that are refused would change the answer.
@accepting("user", "request_id")
@ignoring("cache_salt", "priority")
@refusing(add_special_tokens=True, mm_processor_kwargs={})
class InputRequest(TruncatedRequest, kw_only=True):
    """Base of the requests with ``input``: a text, texts, token ids, or lists of token ids."""

    input: str | list[str | int | list[int]]


# Names of vLLM's server. Embedding models normalize by themselves, or vLLM does it for them.
@refusing(embed_dtype="float32", endianness=("native", "little"), normalize=True, use_activation=True)
class EmbeddingsRequest(InputRequest, kw_only=True):
    """The request; ``input`` is a text, texts, token ids, or lists of token ids."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """One vector, as numbers or as base64 text."""

    object: Literal["embedding"] = msgspec.field(name="object", default="embedding")
    index: int
    embedding: Sequence[float] | str


class InputUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request for vectors or scores: what was sent to the model."""

    prompt_tokens: int
    total_tokens: int


def input_usage(tokens: int | None) -> InputUsage | msgspec.UnsetType:
    """Return the usage, left out if the tokens are not known."""
    return msgspec.UNSET if tokens is None else InputUsage(prompt_tokens=tokens, total_tokens=tokens)


class EmbeddingList(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    object: Literal["list"] = msgspec.field(name="object", default="list")
    data: Sequence[Embedding]
    model: str
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET


async def handle(request: web.Request) -> web.StreamResponse:
    """Create embeddings of texts."""
    context = await begin(request, EmbeddingsRequest, "embeddings")
    body, model, observation = context.body, context.model, context.observation
    if not model.adapter.capabilities.embed:
        raise errors.InvalidRequest(f"The model '{body.model}' does not make embeddings.", param="model")
    inputs = await as_taken(model, inputs_of(body), truncation(body, side="right"))
    job = EmbeddingJob(id=new_id("embd"), inputs=inputs, dimensions=body.dimensions)
    observation.response_id = job.id
    result = await context.admitted(lambda context: embed(context, job), param="input")
    tokens = observation.input_tokens = await count_inputs(model, inputs, result.prompt_tokens)
    as_text = body.encoding_format == "base64"

    def answer() -> bytes:
        data = [_rendered(index, vector, as_text) for index, vector in enumerate(result.vectors)]
        return _encode(EmbeddingList(data=data, model=body.model, usage=input_usage(tokens)))

    content = await offload.run(answer, cost=offload.JSON * sum(map(len, result.vectors)))
    return WholeResponse(body=content, content_type="application/json")


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


async def as_taken(
    model: ServedModel, inputs: Sequence[str] | Sequence[Sequence[int]], cut: Truncation | None
) -> Sequence[str] | Sequence[Sequence[int]]:
    """Return *inputs*, truncated as *cut* says, in the form that the model takes. Raises :class:`ServiceError`."""
    takes_ids, encodes = model.adapter.capabilities.token_inputs, model.adapter.capabilities.encoded
    decodes = not takes_ids and not isinstance(inputs[0], str)
    hint = _LANGCHAIN if model.adapter.capabilities.embed else ""
    if cut is None and not decodes and not encodes:
        return inputs
    tokenizer = (await model.prompter()).tokenizer
    if tokenizer is None and encodes:
        raise no_tokenizer(model)
    if tokenizer is None:
        raise errors.UnsupportedParameter(
            f"The model '{model.name}' takes text, not token ids, and its tokenizer is not configured (--tokenizer)."
            f"{hint}"
            if decodes
            else "'truncate_prompt_tokens' needs the model's tokenizer, which is not configured (--tokenizer).",
            param="input" if decodes else "truncate_prompt_tokens",
        )
    longest = model.settings.max_model_len or tokenizer.model_max_length
    cut = cut if cut is None else cut.within(longest).checked(longest)
    if cut is None:
        await check_sizes(model, inputs)
    taken: list[Any] = []
    for item in inputs:
        if isinstance(item, str):
            if cut is None:
                taken.append(await tokenizer.encode_async(item, True))
            elif takes_ids:
                taken.append(await cut_encoded(tokenizer, item, cut))
            else:
                taken.append(await cut_text(tokenizer, item, cut, special=True))
        else:
            value: Any = item if cut is None else cut_ids(item, cut)
            if decodes or encodes:
                check_ids(value, tokenizer, "input", hint)
            if decodes:
                # Without special tokens, which the backend adds.
                value = await tokenizer.decode_async(value)
                if not value:
                    raise errors.InvalidValue("'input' must not hold an empty item.", "input")
            taken.append(value)
        # Thousands of short inputs are as much work as a long one.
        await asyncio.sleep(0)
    return taken


async def answers_of(
    sender: Sender, model: ServedModel, requests: Sequence[InferRequest], *, timeout: float | None
) -> Sequence[InferResponse]:
    """Return the first answer to each of *requests*, in their order. Raises :class:`ServiceError`."""
    slots = asyncio.Semaphore(_PARALLEL_REQUESTS)

    async def answer(request: InferRequest) -> InferResponse:
        async with slots:
            responses = await sender.ask(request)
        if not responses:
            raise no_answer(model.name)
        return responses[0]

    tasks: list[asyncio.Task[InferResponse]] = []
    try:
        async with asyncio.timeout(timeout):
            for request in requests:
                tasks.append(asyncio.create_task(answer(request)))
                # Thousands of them take long to send: not in one turn of the event loop.
                await asyncio.sleep(0)
            return await asyncio.gather(*tasks)
    except TimeoutError as error:
        raise too_long(timeout) from error
    finally:
        for task in tasks:
            task.cancel()


async def check_sizes(model: ServedModel, inputs: Sequence[str] | Sequence[Sequence[int]]) -> None:
    """Raise :class:`ContextLengthExceeded` for token ids, and texts with any tokens, that exceed the context length."""
    # The tokenizer's own limit does not count here: models that make embeddings often cut what is longer.
    limit = model.settings.max_model_len
    tokenizer = None if limit is None else (await model.prompter()).tokenizer
    if limit is None or tokenizer is None:
        return
    for item in inputs:
        if isinstance(item, str):
            check_size(item, tokenizer, limit)
        elif len(item) > limit:
            raise too_many_tokens(limit, f"your input has {len(item)} tokens", tokens=len(item), param="input")


async def embed(context: RequestContext[Any], job: EmbeddingJob) -> EmbeddingResult:
    """Return the vectors of *job*. Raises :class:`ServiceError`, also when the time of *context* is over."""
    model = context.model
    await check_sizes(model, job.inputs)
    adapter, size = model.adapter, sum(map(len, job.inputs))
    requests = await offload.run(lambda: adapter.encode_embeddings(job), cost=offload.JSON * size)
    answers = await answers_of(context.sender, model, requests, timeout=context.limits.total)
    return await offload.run(lambda: adapter.decode_embeddings(job, answers), cost=offload.VECTOR * len(job.inputs))


async def count_inputs(
    model: ServedModel, inputs: Sequence[str] | Sequence[Sequence[int]], counted: int | None
) -> int | None:
    """Return the tokens of *inputs*: as the backend *counted* them, else by the tokenizer, ``None`` without one."""
    if counted is not None:
        return counted
    texts = [item for item in inputs if isinstance(item, str)]
    ids = sum(len(item) for item in inputs if not isinstance(item, str))
    tokenizer = (await model.prompter()).tokenizer if texts else None
    if tokenizer is None:
        return None if texts else ids
    return ids + await tokenizer.count_async(texts, True, refusable=False)


def _rendered(index: int, vector: bytes, as_text: bool) -> Any:
    """Return one embedding as JSON: all at once would keep the interpreter lock for long."""
    values = array("f", vector)
    if not math.isfinite(sum(values)):
        raise errors.UpstreamError("The model sent an embedding with values that are not numbers.")
    embedding = base64.b64encode(vector).decode("ascii") if as_text else values.tolist()
    return msgspec.Raw(_encode(Embedding(index=index, embedding=embedding)))


Pairs = Sequence[tuple[str, str]]
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

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None


def _texts(value: Text | list[Text], place: str) -> list[str]:
    """Return one text or several. Raises :class:`UnsupportedParameter` for images and other content."""
    if isinstance(value, list):
        return [text for index, item in enumerate(value) for text in _texts(item, f"{place}[{index}]")]
    if isinstance(value, str):
        return [value]
    if any(getattr(value, name) is not None for name in neutral_values(TextObject)):
        raise errors.UnsupportedParameter("Only text can be scored.", param=place)
    return [value.text]


async def score(context: RequestContext[_Request], job_id: str, pairs: Pairs, *, param: str) -> ScoreResult:
    """Return the scores of *pairs*; *param* is the client's name of the documents. Raises :class:`ServiceError`."""
    model, request = context.model, context.body
    capabilities = model.adapter.capabilities
    if not (capabilities.score or capabilities.embed):
        raise errors.InvalidRequest(
            f"The model '{request.model}' scores no texts and makes no embeddings.", param="model"
        )
    if request.truncate_prompt_tokens is not None and not capabilities.encoded:
        raise errors.UnsupportedParameter(
            "'truncate_prompt_tokens' is not supported with this model, because it takes texts.",
            param="truncate_prompt_tokens",
        )
    most = context.service.settings.server.max_body_size
    if capabilities.score and sum(len(query) + len(document) for query, document in pairs) > most:
        # A long query and many documents are a short body, and a query is sent along with every document.
        raise errors.InvalidValue(
            f"The query, once for each document, and the documents have more than {most} characters together.", param
        )
    ask = _crossed if capabilities.score else _compared
    result = await context.admitted(lambda context: ask(context, job_id, pairs), param=param)
    if not all(map(math.isfinite, result.scores)):
        raise errors.UpstreamError("The model sent a score that is not a number.")
    context.observation.input_tokens = result.prompt_tokens
    return result


async def _crossed(context: RequestContext[_Request], job_id: str, pairs: Pairs) -> ScoreResult:
    """Return the scores of a cross-encoder."""
    model, request = context.model, context.body
    activated = model.settings.score_activation == "sigmoid"
    if request.use_activation is not None and not activated:
        raise errors.UnsupportedParameter(
            "Whether this model's scores are activated is not known here: they are given as they are. (If they are "
            "logits, say so with score_activation.)",
            param="use_activation",
        )
    adapter = model.adapter
    job = ScoreJob(id=job_id, pairs=pairs)
    tokenizer = (await model.prompter()).tokenizer
    if adapter.capabilities.encoded:
        if tokenizer is None:
            raise no_tokenizer(model)
        job = await _encoded(model, tokenizer, request, job)
    size = sum(len(pair.ids) for pair in job.encoded)
    # Three tensors at most, of which padding may double two.
    cost = offload.TEXT * len(pairs) + 6 * offload.INTEGER * size
    requests = await offload.run(adapter.encode_scores, job, cost=cost)
    answers = await answers_of(context.sender, model, requests, timeout=context.limits.total)
    result = adapter.decode_scores(job, answers)
    scores, tokens = result.scores, result.prompt_tokens
    if activated and request.use_activation is not False:
        scores = [sigmoid(score) for score in scores]
    if tokens is None and tokenizer is not None:
        tokens = sum(len(pair.ids) for pair in job.encoded or await tokenizer.encode_pairs_async(pairs))
    return ScoreResult(scores=scores, prompt_tokens=tokens)


async def _encoded(model: ServedModel, tokenizer: Tokenizer, request: ScoringRequest, job: ScoreJob) -> ScoreJob:
    cut, longest = request.truncate_prompt_tokens, model.settings.max_model_len
    if cut == -1:
        cut = longest or tokenizer.model_max_length
        if cut is None:
            raise errors.UnsupportedParameter(
                "The model's context length is not known: set --max-model-len.", param="truncate_prompt_tokens"
            )
    if cut is None and longest is not None:
        for text in {text for pair in job.pairs for text in pair}:
            check_size(text, tokenizer, longest)
    encoded = await tokenizer.encode_pairs_async(job.pairs, cut)
    most = max(len(pair.ids) for pair in encoded)
    if longest is not None and most > longest:
        raise too_many_tokens(longest, f"a query and its document have {most} tokens together")
    return ScoreJob(id=job.id, pairs=job.pairs, encoded=encoded, pad_id=tokenizer.special_id("pad_token"))


async def _compared(context: RequestContext[_Request], job_id: str, pairs: Pairs) -> ScoreResult:
    """Return the cosines of embeddings. No text is embedded twice; an activation changes no angle."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    job = EmbeddingJob(id=job_id, inputs=texts)
    result = await embed(context, job)
    vectors = dict(zip(texts, result.vectors, strict=True))
    size = len(pairs) * len(result.vectors[0]) // 4
    scores = await offload.run(lambda: _cosines(vectors, pairs), cost=offload.PRODUCT * size)
    return ScoreResult(scores=scores, prompt_tokens=await count_inputs(context.model, texts, result.prompt_tokens))


def _cosines(vectors: Mapping[str, bytes], pairs: Pairs) -> list[float]:
    units = {text: _unit(vector) for text, vector in vectors.items()}
    return [sum(map(mul, units[query], units[document])) for query, document in pairs]


def _unit(vector: bytes) -> Sequence[float]:
    """Return *vector* at length one; one of length zero has no direction, and stays what it is."""
    values = array("f", vector)
    length = math.sqrt(sum(map(mul, values, values)))
    return values if length == 0 else array("d", [value / length for value in values])


def sigmoid(value: float) -> float:
    """Return the logistic function of *value*, computed so that nothing overflows."""
    return math.exp(min(value, 0.0)) / (1 + math.exp(-abs(value)))


# Cohere's and Jina's.
@refusing(rank_fields=["text"], max_chunks_per_doc=None, max_tokens_per_doc=None)
class RerankRequest(ScoringRequest, kw_only=True):
    """
    The request. Texts are strings, or objects with ``text``.

    ``top_n`` is how many results to give; 0 is all. ``return_documents`` false leaves their texts out.
    """

    query: Text
    documents: Text | TextList
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The text of a document."""

    text: str


class RerankResult(msgspec.Struct, frozen=True, kw_only=True):
    """One document's relevance."""

    index: int
    document: Document | msgspec.UnsetType = msgspec.UNSET
    relevance_score: float


class Reranked(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    id: str
    model: str
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET
    results: Sequence[RerankResult]


async def handle_rerank(request: web.Request) -> web.StreamResponse:
    """Rank documents by their relevance to a query."""
    context = await begin(request, RerankRequest, "rerank")
    body = context.body
    (query,), documents = _texts(body.query, "query"), _texts(body.documents, "documents")
    if not query:
        raise errors.InvalidValue("'query' must not be empty.", "query")
    rerank_id = context.observation.response_id = new_id("rerank")
    result = await score(context, rerank_id, [(query, document) for document in documents], param="documents")
    # Equal scores keep the order of their documents.
    ranked = sorted(range(len(documents)), key=result.scores.__getitem__, reverse=True)
    answer = Reranked(
        id=rerank_id,
        model=body.model,
        usage=input_usage(result.prompt_tokens),
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
    """The whole answer; ``usage`` is left out if the tokens are not known."""

    id: str
    object: Literal["list"] = msgspec.field(name="object", default="list")
    created: int
    model: str
    data: Sequence[Score]
    usage: InputUsage | msgspec.UnsetType = msgspec.UNSET


async def handle_score(request: web.Request) -> web.StreamResponse:
    """Score one text against each of several, or texts pair by pair."""
    context = await begin(request, ScoreRequest, "score")
    pairs, second = _pairs(context.body)
    score_id = context.observation.response_id = new_id("score")
    result = await score(context, score_id, pairs, param=second)
    answer = ScoreList(
        id=score_id,
        created=now(),
        model=context.body.model,
        data=[Score(index=index, score=value) for index, value in enumerate(result.scores)],
        usage=input_usage(result.prompt_tokens),
    )
    return json_response(answer)


def _pairs(body: ScoreRequest) -> tuple[list[tuple[str, str]], str]:
    """Return the pairs, and what the client calls the second side. Raises :class:`InvalidRequest`."""
    given = [name for name in dict.fromkeys(name for side in SIDES for name in side) if getattr(body, name) is not None]
    names = next((side for side in SIDES if set(side) == set(given)), None)
    if names is None:
        known = ", ".join(f"'{first}' and '{second}'" for first, second in SIDES)
        raise errors.InvalidRequest(
            f"Give the two sides under one pair of names: {known}.",
            param=given[0] if given else SIDES[-1][0],
            code="missing_required_parameter" if len(given) < 2 else "invalid_value",
        )
    first, second = (_texts(getattr(body, name), name) for name in names)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise errors.InvalidValue(
            f"'{names[0]}' must be one text, or as many as '{names[1]}': there are {len(first)} and {len(second)}.",
            names[0],
        )
    return list(zip(first, second, strict=True)), names[1]
