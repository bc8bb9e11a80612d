"""
TensorRT-LLM's ``llmapi`` model: a Python model over the LLM API, text in and text out.

Source of the facts: ``triton_backend/all_models/llmapi`` of TensorRT-LLM 0.19 to 1.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec
import structlog
import yaml

from triton_openai.adapters._common.base import (
    ModelFiles,
    ModelMetadata,
    Parameter,
    Rule,
    bind,
    requires_only,
    with_engine_arguments,
)
from triton_openai.adapters._common.decoding import TextDecoder
from triton_openai.adapters._common.trtllm_family import TrtllmAdapter
from triton_openai.errors import ConfigurationError, PromptRefused
from triton_openai.generation import Generation, Lora
from triton_openai.triton.tensors import InferRequest, ModelConfig, Tensor

_log = structlog.get_logger(__name__)

_PREFIX = "sampling_param_"
PARAMETERS: tuple[Parameter, ...] = (
    Parameter("max_tokens", (f"{_PREFIX}max_tokens",)),
    Parameter("temperature", (f"{_PREFIX}temperature",), note="0 is sent as top_k 1", special=True),
    Parameter("top_p", (f"{_PREFIX}top_p",), note="0 is sent as top_k 1", special=True),
    Parameter("top_k", (f"{_PREFIX}top_k",), note="-1 (off) is sent as 0", special=True),
    Parameter("seed", (f"{_PREFIX}seed",)),
    Parameter("frequency_penalty", (f"{_PREFIX}frequency_penalty",)),
    Parameter("presence_penalty", (f"{_PREFIX}presence_penalty",)),
    # The backend hands its stop strings to the tokenizer as bytes, which fails the request.
    Parameter("stop", otherwise=Rule.SERVICE),
    Parameter("include_stop_str_in_output", otherwise=Rule.SERVICE),
)
_EXCLUDE = f"{_PREFIX}exclude_input_from_output"
_SUPPLIED = frozenset({"text_input", "streaming", "return_finish_reason", _EXCLUDE, f"{_PREFIX}max_tokens"})
_IMAGES = "image_url"
# The first three go together or not at all; without the last, the files are Hugging Face's.
_LORA = ("lora_id", "lora_name", "lora_path", "lora_ckpt_source")
# An input that a release brought, the newest first.
_RELEASES = (
    ("lora_id", "1.3 or newer"),
    ("stop", "1.0 to 1.2"),
    (f"{_PREFIX}best_of", "0.20 or 0.21"),
    ("text_input", "0.19"),
)


class TrtllmLlmapi(TrtllmAdapter):
    """
    The whole text at every step, and the finish reason with the last; there are no counts.

    Up to 1.2 a stream is one response with everything, because the model passes ``streaming`` on as the LoRA adapter.
    Since 1.3 a request that the engine refuses is never answered, so nothing is sent that it is known to refuse.
    Cancelled by closing the stream: the model's stop request leaves requests that do not stream without an answer.
    """

    name = "trtllm-llmapi"
    cumulative = True
    prefers_grpc = True
    # The special tokens are those of a tokenizer that the config does not name. Images are ignored, without an error,
    # unless the model's files turn them on.
    metadata = ModelMetadata(adds_bos=True, images=False)

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self.parameters = bind(PARAMETERS, config)
        newer = _LORA[0] in config.inputs
        self.capabilities = self.capabilities_with(
            streaming=config.decoupled and newer,
            echoes=_EXCLUDE not in config.inputs,
            finish_reason="return_finish_reason" in config.inputs and "finish_reason" in config.outputs,
            lora="path" if set(_LORA) <= config.inputs.keys() else None,
            images=math.inf if _IMAGES in config.inputs else 0,
            images_as_turn=True,
        )
        if config.decoupled and not newer:
            self.notes = ("this release answers a stream with one response: TensorRT-LLM streams since 1.3",)

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the LLM API's sampling inputs that require nothing else."""
        claimed = {"text_input", f"{_PREFIX}max_tokens"} <= config.inputs.keys() and "text_output" in config.outputs
        if not claimed or not requires_only(config, _SUPPLIED):
            return None
        release = next(release for name, release in _RELEASES if name in config.inputs)
        return f"inputs text_input and {_PREFIX}max_tokens and output text_output; TensorRT-LLM {release}"

    def metadata_with(self, files: ModelFiles) -> ModelMetadata:
        """Return what ``model.yaml``, the arguments of the LLM API, says."""
        try:
            arguments = yaml.safe_load(files(self.config.name, "model.yaml") or b"")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            _log.warning("model.yaml cannot be read", model=self.config.name, reason=str(error))
            return self.metadata
        if not isinstance(arguments, dict):
            return self.metadata
        own = arguments.get("triton_config")
        max_num_tokens = arguments.get("max_num_tokens")
        # A prompt is read in one step unless it may be read in chunks.
        max_prompt_len = max_num_tokens
        if type(max_num_tokens) is not int or arguments.get("enable_chunked_prefill"):
            max_prompt_len = None
        lora = arguments.get("lora_config")
        max_loras = None
        if isinstance(lora, dict):
            max_loras = lora.get("max_loras")
        return msgspec.structs.replace(
            with_engine_arguments(self.metadata, arguments, length="max_seq_len"),
            max_prompt_len=max_prompt_len,
            loras=bool(arguments.get("enable_lora") or lora),
            max_loras=max_loras if type(max_loras) is int else None,
            images=isinstance(own, dict) and own.get("multimodal") is True,
        )

    def returns_whole(self, generation: Generation) -> bool:
        """Return whether the answer comes in one response: up to 1.2 it does, decoupled or not."""
        return not self.capabilities.streaming

    def no_answer_cause(self, generation: Generation) -> str | None:
        """Return which errors the model does not report, as of 1.3, of those that this service cannot detect."""
        if _LORA[0] not in self.config.inputs:
            return None
        if generation.lora is not None:
            files = ", or the LoRA adapter's files are not on its machine"
        else:
            files = ""
        return f"It leaves requests that it refuses without an answer: maybe the prompt is too long for it{files}."

    def encode(self, generation: Generation, /) -> Sequence[InferRequest]:
        """
        Return the request: the prompt, the flags that are always set, and what the client asked for.

        Raises :class:`PromptRefused` for an empty prompt.
        """
        if not generation.prompt:
            raise PromptRefused("The prompt is empty: there is nothing to continue.")
        flags = {"streaming": self.capabilities.streaming, _EXCLUDE: True, "return_finish_reason": True}
        inputs = [self.tensor("text_input", generation.prompt), *self.declared_tensors(**flags)]
        if generation.images:
            kinds = [image.media_type.removeprefix("image/") for image in generation.images]
            pairs = zip(kinds, generation.images, strict=True)
            inputs.append(self.tensor(_IMAGES, *(f"data:image/{kind};base64,{image.base64}" for kind, image in pairs)))
        return [self.generation_request(generation, inputs, ("text_output", "finish_reason"))]

    def lora_tensors(self, lora: Lora | None) -> list[Tensor]:
        """Return the inputs that name a LoRA adapter and the path from which the model reads it."""
        if lora is None:
            return []
        if lora.number is None or lora.path is None:
            raise ConfigurationError(f"The LoRA adapter '{lora.name}' has no path.", param="model")
        values = (lora.number, lora.name, lora.path, lora.ckpt_source)
        return [self.tensor(name, value) for name, value in zip(_LORA, values, strict=True) if value is not None]

    def decoder(self, generation: Generation) -> TextDecoder:
        finish = None
        if self.capabilities.finish_reason:
            finish = "finish_reason"
        return TextDecoder(self.text_stage(generation), finish=finish, readers=self.readers(generation))
