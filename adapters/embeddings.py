"""
Plain embedding models, as people deploy them from ONNX, PyTorch or Python.

There is no standard for the tensor names of models of texts, so the shape of the interface decides: exactly one
required input, of BYTES, and a floating output with one vector per text. An encoder that was exported from Hugging
Face takes token ids, which are made here, and returns a vector per text, or one per token, which are pooled here. The
operator describes any other model in its settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_openai.adapters._common import tensor_mapping as tensors
from triton_openai.adapters._common.base import Capabilities
from triton_openai.adapters._common.decoding import checked_vectors
from triton_openai.adapters._common.tensor_mapping import TEXT, Kind, text_or_id_inputs
from triton_openai.errors import ConfigurationError, InvalidRequest, UnsupportedParameter
from triton_openai.generation import TensorMapping
from triton_openai.jobs import EmbeddingJob, EmbeddingResult, Pooling
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, TensorSpec

# Where a model has several floating outputs, the first of these that it has is the embedding.
_PREFERRED = (
    *("embedding", "embeddings", "sentence_embedding", "sentence_embeddings", "text_embedding"),
    *("pooled_output", "pooler_output", "output"),
)


# The vectors of an encoder's tokens.
_HIDDEN = ("last_hidden_state", "token_embeddings", "hidden_states")
_EMBEDDING = "embedding"
# What the settings can name.
_OUTPUTS: Mapping[str, Kind] = {_EMBEDDING: "number", "hidden": "number"}
_TYPES = {"FP32": "<f4", "FP16": "<f2", "FP64": "<f8"}


def _hidden_output(config: ModelConfig) -> TensorSpec | None:
    """Return the output with a vector for each token."""
    for name in _HIDDEN:
        spec = config.outputs.get(name)
        if spec is not None and spec.datatype in tensors.FLOATS and len(config.row_dims(spec)) == 2:
            return spec
    return None


def _encoder_output(config: ModelConfig) -> TensorSpec | None:
    """Return the output of an encoder: a vector for each text, if it has one that it calls so, or for each token."""
    vector = _vector_output(config)
    hidden = _hidden_output(config)
    if hidden is None or (vector is not None and vector.name.startswith(("sentence_embedding", "embedding"))):
        return vector
    return hidden


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


class Embeddings(tensors.RowsAdapter):
    """
    Sends as many inputs at a time as the model batches.

    A model of texts refuses token ids: it has no tokenizer of its own that they could be meant for.
    """

    name = "embeddings"
    jobs = (EmbeddingJob,)

    def _bind(self, mapping: TensorMapping | None) -> None:
        config = self.config
        inputs = text_or_id_inputs(config, mapping)
        if TEXT in inputs:
            output = _vector_output(config)
        else:
            output = _encoder_output(config)
        if mapping is not None:
            required = _EMBEDDING
            if "hidden" in mapping.outputs:
                required = "hidden"
            output = tensors.named_tensors(config, mapping, "outputs", _OUTPUTS, required=required)[required]
        if not inputs or output is None:
            raise ConfigurationError(
                f"The model '{config.name}' has no single BYTES input or token ids, and floating output, which the "
                "adapter 'embeddings' needs: describe its tensors with 'inputs', 'constants' and 'outputs' in its "
                "settings."
            )
        self.inputs = inputs
        self._output = output
        self._pools = len(config.row_dims(output)) == 2
        self.constants = tensors.constants(config, mapping, filled=[spec.name for spec in inputs.values()])
        self.batch = 1
        if config.batching or len(output.dims) >= 2:
            self.batch = config.batch_size(next(iter(inputs.values())))
        self.capabilities = Capabilities(tokens=TEXT not in inputs)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models of one text or of token ids, with a floating output of a vector per text, or per token."""
        inputs = text_or_id_inputs(config)
        if "text_output" in config.outputs or not inputs:
            return None
        names = ", ".join(spec.name for spec in inputs.values())
        if TEXT in inputs:
            vector = _vector_output(config)
            if vector is None:
                return None
            return f"one required BYTES input ({names}) and a vector per text out ({vector.name})"
        output = _encoder_output(config)
        if output is None or output.name not in (*_PREFERRED, *_HIDDEN):
            return None
        if output.name in _HIDDEN:
            return f"token ids ({names}) and a vector per token out ({output.name})"
        return f"token ids ({names}) and a vector per text out ({output.name})"

    def encode(self, job: EmbeddingJob, /) -> Sequence[InferRequest]:
        """
        Return the inputs in batches.

        Raises :class:`InvalidRequest` for token ids where the model takes texts, and :class:`ContextLengthExceeded` for
        what is longer than the model's fixed length.
        """
        if not self.capabilities.tokens and not all(isinstance(item, str) for item in job.inputs):
            raise InvalidRequest(
                f"The model '{self.config.name}' takes text, not token ids.", param="input", code="unsupported_value"
            )
        if job.dimensions not in (None, self._output.dims[-1]):
            raise UnsupportedParameter(
                f"The model '{self.config.name}' cannot change the number of dimensions of its embeddings.",
                param="dimensions",
            )
        requests = []
        for number, rows in enumerate(self.batches(job.inputs, job.pad_id)):
            inputs = self.row_tensors(job.inputs[rows.start : rows.stop], job.pad_id)
            requests.append(self.request(f"{job.id}-{number}", inputs, [self._output.name]))
        return requests

    def decode(self, job: EmbeddingJob, responses: Sequence[InferResponse], /) -> EmbeddingResult:
        vectors: list[bytes] = []
        if self._pools:
            for rows, response in zip(self.batches(job.inputs, job.pad_id), responses, strict=True):
                lengths = [len(row) for row in job.inputs[rows.start : rows.stop]]
                vectors += _pooled(response, self._output.name, lengths, job.pooling)
        else:
            vectors = [vector for response in responses for vector in response.vectors(self._output.name)]
        return EmbeddingResult(vectors=checked_vectors(vectors, len(job.inputs), self.config.name))


def _pooled(response: InferResponse, name: str, lengths: Sequence[int], pooling: Pooling) -> Sequence[bytes]:
    """
    Return one vector for each text of a response, whose output *name* has a vector for each token.

    *lengths* are the tokens of the texts, without padding behind them. Raises :class:`InvalidAnswer`.
    """
    # Imported here: most services have no such model.
    import numpy as np

    output = response.tensor(name)
    if output is None or output.datatype not in _TYPES or len(output.shape) != 3:
        raise response.invalid(f"the output '{name}' is not a vector for each token")
    values = np.frombuffer(output.data, _TYPES[output.datatype])
    rows, width, dimensions = output.shape
    if rows != len(lengths) or width < max(lengths) or values.size != rows * width * dimensions or not values.size:
        raise response.invalid(f"the output '{name}' does not have a vector for each token", detail=str(output.shape))
    vectors = []
    for row, length in zip(values.reshape(output.shape), lengths, strict=True):
        tokens = row[: max(1, length)].astype(np.float64)
        if pooling.mode == "mean":
            vector = tokens.mean(axis=0)
        elif pooling.mode == "cls":
            vector = tokens[0]
        else:
            vector = tokens[-1]
        size = float(np.linalg.norm(vector))
        if pooling.normalize and size > 0:
            vector = vector / size
        vectors.append(vector.astype("<f4").tobytes())
    return vectors
