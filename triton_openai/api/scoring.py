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
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from triton_openai.api.batches import answers_of
from triton_openai.api.documented import Accepted
from triton_openai.api.embeddings import count_inputs, embed
from triton_openai.api.service import Service
from triton_openai.chat import offload
from triton_openai.chat.tokenizer import Tokenizer
from triton_openai.errors import (
    ConfigurationError,
    ContextLengthExceeded,
    InvalidRequest,
    UnsupportedParameter,
    UpstreamError,
)
from triton_openai.generation import EmbeddingJob, ScoreJob, ScoreResult
from triton_openai.models import ServedModel

#: As many as an embeddings request takes.
MAX_PAIRS = 2048
# Products of numbers that are computed on the event loop: about a millisecond.
_INLINE_PRODUCTS = 30_000

Pairs = Sequence[tuple[str, str]]


class ScoringRequest(msgspec.Struct, kw_only=True):
    """Base of both requests, with what vLLM's server takes beside the texts."""

    model: str = ""
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    use_activation: bool | None = None
    user: Accepted = None
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


async def score(
    service: Service,
    model: ServedModel,
    request: ScoringRequest,
    job_id: str,
    pairs: Pairs,
    *,
    param: str,
    timeout: float | None,
) -> ScoreResult:
    """
    Return the scores of *pairs*, whose documents the client calls *param*, within *timeout* seconds.

    Raises :class:`InvalidRequest` for models that cannot score, :class:`UnsupportedParameter` for what they cannot be
    asked, and :class:`ServiceError` for what goes wrong upstream.
    """
    capabilities = model.adapter.capabilities
    if not (capabilities.score or capabilities.embed):
        raise InvalidRequest(f"The model '{request.model}' scores no texts and makes no embeddings.", param="model")
    if request.truncate_prompt_tokens is not None and not capabilities.token_pairs:
        raise UnsupportedParameter(
            "'truncate_prompt_tokens' is not supported with this model: it is given texts.",
            param="truncate_prompt_tokens",
        )
    most = service.settings.server.max_body_size
    if capabilities.score and sum(len(query) + len(document) for query, document in pairs) > most:
        # A long query and many documents are a short body, and a query is sent along with every document.
        raise InvalidRequest(
            f"The query, once for each document, and the documents have more than {most} characters together.",
            param=param,
            code="invalid_value",
        )
    try:
        result = await (_crossed if capabilities.score else _compared)(service, model, request, job_id, pairs, timeout)
    except ContextLengthExceeded as error:
        error.param = error.param or param
        raise
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
            "logits, say so with --score-activation.)",
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
            raise ConfigurationError(
                "How much the model takes is not known: give it with --max-model-len.", param="truncate_prompt_tokens"
            )
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
