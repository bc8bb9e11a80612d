"""Reads the vectors that a companion model returns: of whole inputs, and of each of their tokens."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Sequence
from typing import Any

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.jobs import TokenEmbeddingJob
from triton_openai.triton.tensors import InferResponse

#: The bytes of a number in a vector.
FLOAT = 4
#: The most bytes of the vectors of a request's tokens. As JSON they are five times as long, and one copy of that holds
#: the interpreter lock for 25 ms.
MAX_VECTOR_BYTES = 8 * 1024 * 1024
# The most tokens of a request that gets a vector for each.
_MAX_VECTORS = 16_384


class Vector(msgspec.Struct):
    """The answer to a job."""

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
