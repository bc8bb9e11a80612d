"""
The logits of ``tensorrt_llm``: those of generated tokens, and those of the prompt's.

An engine sends them only when it was built to gather them, which no config tells. ``generation_logits`` is
``[1, beams, tokens, vocabulary]`` in a whole answer, with rows to spare, and ``[1, tokens, beams, vocabulary]``
with the new tokens' rows in a stream; with one beam the rows stand in the same order. ``context_logits`` is
``[1, tokens, vocabulary]`` for the prompt's tokens, and a stream would repeat it at every step.

Source of the facts: ``tensorrt_llm/executor/executor.h`` and ``all_models/inflight_batcher_llm``.
"""

from __future__ import annotations

import math

from triton_openai.errors import InvalidRequest, UnsupportedParameter, UpstreamError
from triton_openai.generation import Logits
from triton_openai.triton.tensors import InferResponse, ModelConfig

GENERATION = "generation_logits"
CONTEXT = "context_logits"
#: As many alternatives as OpenAI allows: any number could be made from logits.
MOST_ALTERNATIVES = 20
# Protocol buffers end at 2 GiB, and this process has to hold it.
_MOST_BYTES = 2**30
_SIZES = {"FP32": 4, "FP16": 2, "BF16": 2}


def available(config: ModelConfig, name: str) -> bool:
    """Return whether the model *config* can be asked for the logits *name*."""
    return f"return_{name}" in config.inputs and name in config.outputs


def check_size(config: ModelConfig, name: str, *, tokens: int, vocabulary: int, param: str | None) -> None:
    """Raise :class:`InvalidRequest` for more *tokens* than one response should hold the logits of."""
    most = _MOST_BYTES // (vocabulary * _SIZES.get(config.outputs[name].datatype, 4))
    if tokens > most:
        raise InvalidRequest(
            f"The model sends {vocabulary} numbers for each token, and for {most} tokens at once at most;"
            f" this request has {tokens}.",
            param=param,
            code="invalid_value",
        )


def read(response: InferResponse, name: str, *, count: int, total: int) -> Logits:
    """
    Return the logits of the *count* new tokens, of *total* so far.

    Raises :class:`UnsupportedParameter` where there are none, :class:`UpstreamError` where they do not fit.
    """
    tensor = response.tensor(name)
    if tensor is None or not tensor.data:
        raise UnsupportedParameter(
            f"The model's engine sends no {name.replace('_', ' ')}, which this needs: it has to be built with"
            f" gather_{name}.",
            param="logprobs",
        )
    width = tensor.shape[-1] if tensor.shape else 0
    rows = math.prod(tensor.shape[:-1])
    if width < 2 or len(tensor.data) != rows * width * _SIZES.get(tensor.datatype, 0):
        raise UpstreamError(f"The model sent malformed {name.replace('_', ' ')}.")
    if rows == count:
        first = 0
    elif rows >= total:
        first = total - count
    else:
        raise UpstreamError("The model sent logits that do not match its tokens.")
    return Logits(data=tensor.data, datatype=tensor.datatype, width=width, first=first)
