"""Reads what a companion model returns: the tokens of an answer, vectors, transcripts and errors."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.generation import Alternative, Delta, FinishReason, Generation, TokenLogprob
from triton_openai.jobs import TokenEmbeddingJob
from triton_openai.triton.tensors import CarriedResponse, InferResponse, Scored

_FINISHES: Mapping[str, FinishReason] = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
#: The bytes of a number in a vector.
FLOAT = 4
#: The most bytes of the vectors of a request's tokens. As JSON they are five times as long, and one copy of that holds
#: the interpreter lock for 25 ms.
MAX_VECTOR_BYTES = 8 * 1024 * 1024
# The most tokens of a request that gets a vector for each.
_MAX_VECTORS = 16_384


class Fault(msgspec.Struct):
    """Why a job was not done."""

    kind: str = "engine"
    message: str = ""
    param: str | None = None


class Spoken(msgspec.Struct):
    """The answer to a transcription: token ids, or a text."""

    ids: list[int] = []
    text: str = ""
    complete: bool = True
    logprob: float = 0.0
    prompt: int | None = None
    error: Any = msgspec.field(name="e", default=None)


class Vector(msgspec.Struct):
    """The answer to another job: one vector, or one for each token."""

    vector: str = ""
    #: Of a vector for each token: how many there are, and of how many numbers each; and whether the input has more.
    shape: list[int] = []
    more: bool = False
    prompt: int | None = None
    error: Any = msgspec.field(name="e", default=None)


def raw_numbers(response: InferResponse, text: str) -> bytes:
    """Return the numbers of a vector. Raises :class:`InvalidAnswer`."""
    try:
        raw = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise response.invalid("its vector is no base64") from error
    if not raw or len(raw) % FLOAT:
        raise response.invalid("its vector ends within a number")
    return raw


def rows_of(response: InferResponse, vector: Vector) -> Sequence[bytes]:
    """Return the vectors of an input's tokens. Raises :class:`InvalidAnswer`."""
    raw = raw_numbers(response, vector.vector)
    if len(vector.shape) != 2 or min(vector.shape) < 1 or math.prod(vector.shape) * FLOAT != len(raw):
        raise response.invalid("its vectors have another shape than it says")
    width = vector.shape[1] * FLOAT
    return [raw[start : start + width] for start in range(0, len(raw), width)]


def check_tokens(job: TokenEmbeddingJob) -> None:
    """Raise :class:`InvalidRequest` for inputs whose vectors would be too many for one answer."""
    tokens = sum(map(len, job.inputs))
    if tokens > _MAX_VECTORS:
        raise InvalidRequest(
            f"The inputs have {tokens} tokens together, and a request gets vectors for at most {_MAX_VECTORS}: send "
            "several requests.",
            param="input",
        )


class DeliveryDecoder:
    """Reads what a carrier brings for one answer: token ids, log probabilities, and why the answer ends."""

    def __init__(self, generation: Generation) -> None:
        self._logprobs = generation.sampling.logprobs
        self._prompt: int | None = len(generation.prompt_ids or ())
        self._total = 0.0
        self._sums = generation.cumulative_logprob

    def feed(self, response: InferResponse) -> Delta:
        """Return what *response* adds."""
        if not isinstance(response, CarriedResponse):
            raise response.invalid("it did not come over a carrier")
        delivery = response.delivery
        ids = delivery.ids
        delta = Delta(token_ids=ids, tokens=len(ids))
        if self._prompt is not None:
            delta.prompt_tokens = self._prompt
            self._prompt = None
        scores = delivery.logprobs
        if scores is not None:
            if self._logprobs is not None:
                count = self._logprobs
                delta.logprobs = [token_logprob(scored, count) for scored in scores]
            if self._sums:
                self._total += sum([scored[1] for scored in scores])
                delta.cumulative_logprob = self._total
        if delivery.finish is not None:
            delta.finish_reason = _FINISHES.get(delivery.finish)
            if delivery.usage is not None:
                delta.prompt_tokens, delta.cached_tokens, _ = delivery.usage
        return delta

    def flush(self) -> str:
        """Return nothing: ids are never held back."""
        return ""


def token_logprob(scored: Scored, count: int) -> TokenLogprob:
    """Return a token's log probability with *count* alternatives. Names are added where the tokenizer is."""
    number, logprob, rank, top = scored
    alternatives = [Alternative("", value, id=token) for token, value in top[:count]]
    return TokenLogprob("", logprob, id=number, rank=rank, top=tuple(alternatives))
