"""
``POST /pooling``: a vector for each token of a text.

Source of the wire format: ``/pooling`` of vLLM's server, with its tasks ``token_embed`` and ``token_classify``, as
Haystack's ``VLLMMultivectorTextEmbedder`` asks for it. Vectors of whole texts are those of ``/v1/embeddings``.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from triton_openai import errors, offload
from triton_openai.api.bodies import encode_each, json_reply_of, new_id, now
from triton_openai.api.embeddings import InputRequest, ListOf, input_usage, inputs_of
from triton_openai.api.parameters import refusing, truncation
from triton_openai.api.service import Service, begin
from triton_openai.jobs import TokenClassificationJob, TokenEmbeddingJob
from triton_openai.models.served import ServedModel
from triton_openai.operations import Call, Reply

_JOBS = (TokenEmbeddingJob, TokenClassificationJob)
# What vLLM's server does on this path for models of other kinds, and where this service does it.
_ELSEWHERE = {"embed": "/v1/embeddings", "classify": "/v1/classify"}

# Bytes of whole numbers, and of whole groups of base64.
_PIECE = 12 * 64 * 1024


# Names of vLLM's server that would change the answer.
@refusing(
    messages=None,
    data=None,
    dimensions=None,
    embed_dtype="float32",
    endianness=("native", "little"),
    normalize=True,
    padding="do_not_pad",
)
class PoolingRequest(InputRequest, kw_only=True):
    """
    The request; ``task`` is ``token_embed`` or ``token_classify``, and by default what the model does.

    ``use_activation`` false returns vectors as they are before the model's activation.
    """

    task: str | None = None
    use_activation: bool | None = None
    encoding_format: Literal["float", "base64"] | None = None


class Pooled(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors of one input's tokens: lists of numbers, or all of them together as base64 text."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: Sequence[Sequence[float]] | str


class PooledList(ListOf[Pooled], frozen=True, kw_only=True):
    """The whole answer; ``usage`` is left out if the tokens are not known."""


async def create(service: Service, call: Call[PoolingRequest]) -> Reply:
    """Return a vector for each token of texts."""
    context = await begin(service, call)
    body = context.body
    kind = _job_of(context.model, body.task)
    job = kind(id=new_id("pool"), inputs=inputs_of(body), activate=body.use_activation is not False)
    result = await context.result_of(job, cut=truncation(body, side="right"))
    as_text = body.encoding_format == "base64"

    def answer() -> PooledList:
        data = encode_each(_pooled(index, rows, as_text) for index, rows in enumerate(result.vectors))
        usage = input_usage(result.prompt_tokens)
        return PooledList(id=job.id, created=now(), model=body.model, data=data, usage=usage)

    return await json_reply_of(answer, cost=offload.BYTE * sum(len(row) for rows in result.vectors for row in rows))


def _job_of(model: ServedModel, task: str | None) -> type[TokenEmbeddingJob]:
    """Return the kind of job that *task* asks of *model*. Raises :class:`InvalidValue`."""
    kinds = [kind for kind in _JOBS if kind in model.jobs]
    if task is None:
        return kinds[0]
    for kind in kinds:
        if task in kind.tasks:
            return kind
    there = ""
    if task in _ELSEWHERE:
        there = f" For '{task}', use {_ELSEWHERE[task]} with a model that does it."
    raise errors.InvalidValue(
        f"The model '{model.name}' does not do the task '{task[:50]}', but '{kinds[0].tasks[0]}'.{there}", "task"
    )


def _pooled(index: int, rows: Sequence[bytes], as_text: bool) -> Pooled:
    if as_text:
        return Pooled(index=index, data=_as_base64(b"".join(rows)))
    return Pooled(index=index, data=encode_each(_numbers(row) for row in rows))


def _as_base64(vectors: bytes) -> Any:
    """Return *vectors* in base64 as JSON, made in pieces: one call over megabytes would hold the event loop."""
    pieces = []
    for start in range(0, len(vectors), _PIECE):
        piece = vectors[start : start + _PIECE]
        _check_numbers(array("f", piece))
        pieces.append(base64.b64encode(piece))
    return msgspec.Raw(b'"' + b"".join(pieces) + b'"')


def _numbers(row: bytes) -> list[float]:
    values = array("f", row)
    _check_numbers(values)
    return values.tolist()


def _check_numbers(values: Sequence[float]) -> None:
    """Raise :class:`InvalidAnswer` for values that JSON does not have."""
    if not math.isfinite(sum(values)):
        raise errors.InvalidAnswer("a vector has values that are not numbers")
