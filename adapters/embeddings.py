"""
Plain embedding models, as people deploy them from ONNX, PyTorch or Python: text in, one vector per text out.

There is no standard for their tensor names, so the shape of the interface decides: exactly one required input, of
BYTES, and a floating output with one vector per text. The operator describes any other model in its settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from triton_openai.adapters._common import tensor_mapping as tensors
from triton_openai.adapters._common.decoding import checked_vectors
from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter
from triton_openai.generation import TensorMapping
from triton_openai.jobs import EmbeddingJob, EmbeddingResult
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, TensorSpec

# Where a model has several floating outputs, the first of these that it has is the embedding.
_PREFERRED = (
    *("embedding", "embeddings", "sentence_embedding", "sentence_embeddings", "text_embedding"),
    *("pooled_output", "pooler_output", "output"),
)


def _vector_output(config: ModelConfig) -> TensorSpec | None:
    if config.batching:
        rank = 1
    else:
        rank = 2
    floats = [spec for spec in config.outputs.values() if spec.datatype in tensors.FLOATS]
    candidates = {spec.name: spec for spec in floats if len(spec.dims) in (rank, 1)}
    for name in _PREFERRED:
        if name in candidates:
            return candidates[name]
    if len(candidates) == 1:
        return next(iter(candidates.values()))
    return None


class Embeddings(tensors.DescribedAdapter):
    """
    Sends as many texts at a time as the model batches.

    Token ids are refused: the model has no tokenizer of its own that they could be meant for.
    """

    name = "embeddings"
    jobs = (EmbeddingJob,)

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        text = tensors.text_input(config)
        vector = _vector_output(config)
        if mapping is not None:
            named = partial(tensors.named_tensors, config, mapping)
            text = named("inputs", {"text": "text"}, required="text")["text"]
            vector = named("outputs", {"embedding": "number"}, required="embedding")["embedding"]
        if text is None or vector is None:
            raise ConfigurationError(
                f"The model '{config.name}' has no single BYTES input and floating output, which the adapter "
                "'embeddings' needs: describe its tensors with 'inputs', 'constants' and 'outputs' in its settings."
            )
        self._input = text
        self._output = vector
        self._constants = tensors.constants(config, mapping, filled=[text.name])
        if config.batching or len(vector.dims) == 2:
            self._batch = config.batch_size(text)
        else:
            self._batch = 1

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with one required BYTES input and a floating output of one vector per text."""
        text = tensors.text_input(config)
        vector = _vector_output(config)
        if text is None or vector is None or "text_output" in config.outputs:
            return None
        return f"one required BYTES input ({text.name}) and a vector per text out ({vector.name})"

    def encode(self, job: EmbeddingJob, /) -> Sequence[InferRequest]:
        """Return the texts in batches. Raises :class:`InvalidRequest` for token ids."""
        if not all(isinstance(item, str) for item in job.inputs):
            raise InvalidRequest(
                f"The model '{self.config.name}' takes text, not token ids.", param="input", code="unsupported_value"
            )
        if job.dimensions not in (None, self._output.dims[-1]):
            raise UnsupportedParameter(
                f"The model '{self.config.name}' cannot change the number of dimensions of its embeddings.",
                param="dimensions",
            )
        requests = []
        for number, start in enumerate(range(0, len(job.inputs), self._batch)):
            texts: Sequence[Any] = job.inputs[start : start + self._batch]
            constant = tensors.constant_tensors(self.config, self._constants, len(texts))
            inputs = [tensors.text_tensor(self.config, self._input, texts), *constant]
            requests.append(self.request(f"{job.id}-{number}", inputs, [self._output.name]))
        return requests

    def decode(self, job: EmbeddingJob, responses: Sequence[InferResponse], /) -> EmbeddingResult:
        vectors = [vector for response in responses for vector in response.vectors(self._output.name)]
        return EmbeddingResult(vectors=checked_vectors(vectors, len(job.inputs), self.config.name))
