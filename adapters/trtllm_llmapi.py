"""
TensorRT-LLM's ``llmapi`` model: a Python model over the LLM API, text in and text out.

Source of the facts: ``triton_backend/all_models/llmapi`` of TensorRT-LLM 0.19 to 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping

import structlog
import yaml

from triton_openai.adapters._common.base import (
    Hints,
    ModelFiles,
    Parameter,
    Rule,
    bind,
    requires_only,
    with_engine_arguments,
)
from triton_openai.adapters._common.decoding import CumulativeText, PromptEcho, TextDecoder
from triton_openai.adapters._common.trtllm import TrtllmAdapter
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferRequest, ModelConfig

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


class TrtllmLlmapi(TrtllmAdapter):
    """
    The whole text at every step, and the finish reason with the last; there are no counts.

    Up to 1.2 a stream is one response with everything. Cancelled by closing the stream: the model's stop request leaves
    requests that do not stream without an answer.
    """

    name = "trtllm-llmapi"
    # Those of a tokenizer that the config does not name.
    hints = Hints(adds_bos=True)

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self.parameters = bind(PARAMETERS, config)
        self.capabilities = self.capabilities_with(
            echoes=_EXCLUDE not in config.inputs,
            finish_reason="return_finish_reason" in config.inputs and "finish_reason" in config.outputs,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the LLM API's sampling inputs that require nothing else."""
        claimed = {"text_input", f"{_PREFIX}max_tokens"} <= config.inputs.keys() and "text_output" in config.outputs
        if not claimed or not requires_only(config, _SUPPLIED):
            return None
        return f"inputs text_input and {_PREFIX}max_tokens and output text_output"

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return what ``model.yaml``, the arguments of the LLM API, says."""
        try:
            arguments = yaml.safe_load(files(self.config.name, "model.yaml") or b"")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            _log.warning("model.yaml cannot be read", model=self.config.name, reason=str(error))
            return self.hints
        if not isinstance(arguments, dict):
            return self.hints
        return with_engine_arguments(self.hints, arguments, length="max_seq_len")

    def encode(self, generation: Generation) -> InferRequest:
        """Return the request: the prompt, the flags that are always set, and what the client asked for."""
        flags = {"streaming": self.config.decoupled, _EXCLUDE: True, "return_finish_reason": True}
        inputs = [self.tensor("text_input", generation.prompt), *self.declared_tensors(**flags)]
        return self.generation_request(generation, inputs, ("text_output", "finish_reason"))

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return a decoder for one request."""
        stage: CumulativeText | PromptEcho | None = None
        if self.config.decoupled:
            stage = CumulativeText()
        elif self.capabilities.echoes:
            stage = PromptEcho(generation.prompt, generation.prompt_echo)
        finish = "finish_reason" if self.capabilities.finish_reason else None
        return TextDecoder(stage, finish=finish, readers=self.readers(generation))
