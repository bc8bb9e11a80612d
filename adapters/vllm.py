"""
Triton's vLLM backend.

Source of the facts: ``src/model.py`` of vllm_backend, releases 23.10 to 26.01.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from triton_openai.adapters.base import Adapter, Capabilities, Hints
from triton_openai.adapters.decoding import TextDecoder
from triton_openai.adapters.parameters import BoundParameter, Rule, check_range, refused
from triton_openai.adapters.vllm_embedding import decode_embedding, embedding_request
from triton_openai.adapters.vllm_logprobs import MOST, VllmLogprobs
from triton_openai.errors import InvalidRequest
from triton_openai.generation import EmbeddingJob, EmbeddingResult, Generation, Guide
from triton_openai.triton.tensors import InferRequest, InferResponse, ModelConfig, Tensor

_KEYS = "sampling_parameters"
# What vLLM's SamplingParams calls it, and the integer range it takes. Unknown keys fail the request, so this is a
# whitelist.
_SAMPLING: tuple[tuple[str, str | None], ...] = (
    ("max_tokens", "INT32"),
    ("temperature", None),
    ("top_p", None),
    ("top_k", "INT32"),
    ("min_tokens", "INT32"),
    ("seed", "INT64"),
    ("frequency_penalty", None),
    ("presence_penalty", None),
    ("repetition_penalty", None),
    ("stop", None),
    ("include_stop_str_in_output", None),
    ("stop_token_ids", None),
    ("ignore_eos", None),
    ("min_p", None),
    ("bad_words", None),
    ("skip_special_tokens", None),
    ("logprobs", "INT32"),
)
PARAMETERS: tuple[BoundParameter, ...] = (
    *(
        BoundParameter(name=name, rule=Rule.MAPPED, target=f"{_KEYS}.{name}", datatype=datatype)
        for name, datatype in _SAMPLING
    ),
    refused("length_penalty"),
    # JSON makes text of the token ids, which fails the request.
    refused("logit_bias", "Triton's vLLM backend cannot read it"),
)
_FLAGS = ("exclude_input_in_output", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
_SUPPLIED = frozenset({"text_input", "stream", _KEYS, *_FLAGS})
_OUTPUTS = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_CUMULATIVE = "cumulative_logprob"


_GUIDE_FIELDS: Mapping[str, str] = {
    "json": "json_object",
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


def _guide_key(config: ModelConfig) -> str | None:
    """
    Return what the backend's release calls guided decoding, by the inputs that came with it.

    ``structured_outputs`` since 25.11 (which brought ``embedding_request``), ``guided_decoding`` in 25.01 to 25.10.
    24.12, the first with ``return_finish_reason``, cannot be told from 25.01: it refuses the key, and so the request.
    """
    if "embedding_request" in config.inputs:
        return "structured_outputs"
    return "guided_decoding" if "return_finish_reason" in config.inputs else None


def _guide_fields(guide: Guide) -> dict[str, Any]:
    name = _GUIDE_FIELDS[guide.kind]
    if guide.kind == "json":
        return {name: True}
    if guide.kind in ("json_schema", "choice"):
        return {name: msgspec.Raw(guide.value.encode())}
    return {name: guide.value}


class Vllm(Adapter):
    """Text deltas with finish reason and counts; embeddings where the release has ``embedding_request``."""

    name = "vllm"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self._constant = tuple(self.tensor(name, True) for name in _FLAGS if name in config.inputs)
        # Before 24.03 every response holds the prompt and all text so far, and nothing can be done about it.
        self._repeats = "exclude_input_in_output" not in config.inputs
        self._finish = "return_finish_reason" in config.inputs and "finish_reason" in config.outputs
        self._counts = "return_num_output_tokens" in config.inputs and "num_output_tokens" in config.outputs
        self._logprobs = "return_logprobs" in config.inputs and "logprobs" in config.outputs
        self._scores = "return_cumulative_logprob" in config.inputs and _CUMULATIVE in config.outputs
        self._parameters = tuple(
            parameter if parameter.name != "logprobs" or self._logprobs else refused("logprobs")
            for parameter in PARAMETERS
        )
        self._guide_key = _guide_key(config)
        self._capabilities = Capabilities(
            generate=True,
            embed="embedding_request" in config.inputs,
            streaming=config.decoupled,
            stop=True,
            usage=self._counts,
            finish_reason=self._finish,
            dimensions=True,
            token_inputs=True,
            guides=frozenset(_GUIDE_FIELDS) if self._guide_key is not None else frozenset(),
            logprobs=self._logprobs,
            top_logprobs=MOST if self._logprobs else 0,
            cumulative_logprob=self._scores,
            token_ids=self._logprobs,
            lora=True,
            # Declared for every model, also for those that see nothing: their chat templates take no images.
            images="image" in config.inputs,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """
        Claim models with vLLM's tensors (also when wrapped in an ensemble), then any model of the backend ``vllm``.
        """
        inputs = config.inputs
        if not all(spec.optional or name in _SUPPLIED for name, spec in inputs.items()):
            return None
        if {"text_input", _KEYS} <= inputs.keys() and "text_output" in config.outputs:
            return "inputs text_input and sampling_parameters and output text_output"
        if config.backend == "vllm" and "text_input" in inputs and "text_output" in config.outputs:
            return "backend vllm"
        return None

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._capabilities

    @property
    def hints(self) -> Hints:
        """
        vLLM adds the special tokens of its tokenizer to every text prompt; where that tokenizer is, Triton does not
        tell.
        """
        return Hints(adds_bos=True)

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """Every key of ``sampling_parameters``."""
        return self._parameters

    def encode(self, generation: Generation) -> InferRequest:
        """
        Return the request; sampling goes as JSON text.

        That tensor is always sent: without it the backend takes the request's parameters for sampling parameters.
        Keys that are not asked for are left out, because an explicit null fails the request.
        """
        sampling: dict[str, Any] = {}
        for parameter in self._parameters:
            if parameter.target is None:
                continue
            value = getattr(generation.sampling, parameter.name)
            if value is not None and value != ():
                check_range(parameter.name, value, parameter.datatype)
                sampling[parameter.name] = value
        if sampling.get("top_p") == 0:
            # vLLM takes no 0, which means the likeliest token alone.
            del sampling["top_p"]
            sampling["top_k"] = 1
        if generation.token_ids or generation.scored:
            # The ids are told with the log probabilities, and nothing is scored without them.
            sampling.setdefault("logprobs", 0)
        guide = generation.guide
        if guide is not None and self._guide_key is not None:
            # The value is JSON text inside the JSON: an object there fails the request.
            sampling[self._guide_key] = msgspec.json.encode(_guide_fields(guide)).decode()
        if generation.lora is not None:
            sampling["lora_name"] = generation.lora.name
        inputs: list[Tensor] = [
            self.tensor("text_input", generation.prompt),
            self.tensor(_KEYS, msgspec.json.encode(sampling).decode()),
            *self._constant,
        ]
        if "stream" in self.config.inputs:
            inputs.append(self.tensor("stream", self.config.decoupled))
        if generation.images:
            inputs.append(self.tensor("image", *(image.base64 for image in generation.images)))
        outputs: tuple[str, ...] = _OUTPUTS
        if generation.sampling.logprobs is not None or generation.token_ids:
            inputs.append(self.tensor("return_logprobs", True))
            outputs += ("logprobs",)
        if generation.scored:
            inputs.append(self.tensor(f"return_{_CUMULATIVE}", True))
            outputs += (_CUMULATIVE,)
        return self.request(generation.id, inputs, outputs)

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return a decoder for one request."""
        count = generation.sampling.logprobs
        return TextDecoder(
            cumulative=self._repeats,
            skip=len(generation.prompt) if self._repeats else 0,
            prompt_count="num_input_tokens" if self._counts else None,
            token_count="num_output_tokens" if self._counts else None,
            finish="finish_reason" if self._finish else None,
            logprobs=VllmLogprobs(count or 0) if count is not None or generation.token_ids else None,
            token_ids=generation.token_ids,
            ids_only=count is None,
            cumulative_logprob=_CUMULATIVE if generation.scored else None,
        )

    def encode_embeddings(self, job: EmbeddingJob) -> Sequence[InferRequest]:
        """Return one request per input: the backend takes one text, or one list of token ids, at a time."""
        if not self._capabilities.embed:
            raise InvalidRequest(f"The model '{self.config.name}' does not make embeddings.", param="model")
        return embedding_request(self, job)

    def decode_embeddings(self, job: EmbeddingJob, responses: Sequence[InferResponse]) -> EmbeddingResult:
        """Return the vectors."""
        return decode_embedding(responses)
