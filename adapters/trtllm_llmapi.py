"""
TensorRT-LLM's ``llmapi`` model: a Python model over the LLM API, text in and text out.

Source of the facts: ``triton_backend/all_models/llmapi`` of TensorRT-LLM 0.19 to 1.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import structlog
import yaml

from triton_openai.adapters._common.base import (
    Adapter,
    BoundParameter,
    Capabilities,
    Hints,
    ModelFiles,
    Parameter,
    Rule,
    bind,
    named_tokenizer,
    values_of,
)
from triton_openai.adapters._common.decoding import PromptEcho, TextDecoder
from triton_openai.adapters._common.trtllm import RANDOMNESS, CachedTokens, cache_report, randomness
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferRequest, ModelConfig

_log = structlog.get_logger(__name__)

_PREFIX = "sampling_param_"
PARAMETERS: tuple[Parameter, ...] = (
    Parameter(name="max_tokens", inputs=(f"{_PREFIX}max_tokens",)),
    Parameter(name="temperature", inputs=(f"{_PREFIX}temperature",), note="0 is sent as top_k 1"),
    Parameter(name="top_p", inputs=(f"{_PREFIX}top_p",), note="0 is sent as top_k 1"),
    Parameter(name="top_k", inputs=(f"{_PREFIX}top_k",), note="-1 (off) is sent as 0"),
    Parameter(name="seed", inputs=(f"{_PREFIX}seed",)),
    Parameter(name="frequency_penalty", inputs=(f"{_PREFIX}frequency_penalty",)),
    Parameter(name="presence_penalty", inputs=(f"{_PREFIX}presence_penalty",)),
    # The backend hands its stop strings to the tokenizer as bytes, which fails the request.
    Parameter(name="stop", otherwise=Rule.PROXY),
    Parameter(name="include_stop_str_in_output", otherwise=Rule.PROXY),
    Parameter(name="min_tokens"),
    Parameter(name="repetition_penalty"),
    Parameter(name="length_penalty"),
    Parameter(name="bad_words"),
    Parameter(name="logit_bias"),
    Parameter(name="stop_token_ids"),
    Parameter(name="ignore_eos"),
    Parameter(name="skip_special_tokens"),
    Parameter(name="min_p"),
    Parameter(name="logprobs"),
)
_EXCLUDE = f"{_PREFIX}exclude_input_from_output"
_SUPPLIED = frozenset({"text_input", "streaming", "return_finish_reason", _EXCLUDE, f"{_PREFIX}max_tokens"})


class TrtllmLlmapi(Adapter):
    """
    The whole text at every step, and the finish reason with the last; nobody counts.

    Up to 1.2 a stream is one response with everything. Cancelled by closing the stream: the model's stop request leaves
    requests that do not stream without an answer.
    """

    name = "trtllm-llmapi"

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        super().__init__(config, repository)
        self._parameters = bind(PARAMETERS, config)
        self._cache = cache_report(config)
        self._finish = "return_finish_reason" in config.inputs and "finish_reason" in config.outputs
        self._capabilities = Capabilities(
            generate=True,
            streaming=config.decoupled,
            echoes=_EXCLUDE not in config.inputs,
            finish_reason=self._finish,
            fixed_seed=True,
        )

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models with the LLM API's sampling inputs that require nothing else."""
        inputs = config.inputs
        if not {"text_input", f"{_PREFIX}max_tokens"} <= inputs.keys() or "text_output" not in config.outputs:
            return None
        if not all(spec.optional or name in _SUPPLIED for name, spec in inputs.items()):
            return None
        return f"inputs text_input and {_PREFIX}max_tokens and output text_output"

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do."""
        return self._capabilities

    @property
    def hints(self) -> Hints:
        """The LLM API adds the special tokens of its tokenizer; the config does not name that."""
        return Hints(adds_bos=True)

    def hints_with(self, files: ModelFiles) -> Hints:
        """Return what ``model.yaml``, the arguments of the LLM API, tells."""
        content = files(self.config.name, "model.yaml")
        try:
            given = yaml.safe_load(content or b"")
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            _log.warning("model.yaml cannot be read", model=self.config.name, reason=str(error))
            return self.hints
        if not isinstance(given, dict):
            return self.hints
        names = ("model", "revision", "tokenizer", "tokenizer_revision")
        length = given.get("max_seq_len")
        return msgspec.structs.replace(
            self.hints,
            tokenizer=named_tokenizer(**{name: given.get(name) for name in names}),
            max_model_len=length if type(length) is int and length > 0 else None,
        )

    @property
    def parameters(self) -> Sequence[BoundParameter]:
        """The bound table."""
        return self._parameters

    def encode(self, generation: Generation) -> InferRequest:
        """Return the request: the prompt, the flags that are always set, and what the client asked for."""
        inputs = [self.tensor("text_input", generation.prompt)]
        flags = {"streaming": self.config.decoupled, _EXCLUDE: True, "return_finish_reason": True}
        inputs += [self.tensor(name, value) for name, value in flags.items() if name in self.config.inputs]
        for parameter in self._parameters:
            values = values_of(parameter, generation.sampling) if parameter.name not in RANDOMNESS else ()
            if values and parameter.target is not None:
                inputs.append(self.tensor(parameter.target, *values))
        inputs += randomness(self, self._parameters, generation.sampling)
        outputs: tuple[str, ...] = ("text_output", "finish_reason")
        if self._cache is not None and generation.kv_cache_block_size is not None:
            inputs.append(self.tensor(self._cache.flag, True))
            outputs += (self._cache.output,)
        return self.request(generation.id, inputs, outputs)

    def decoder(self, generation: Generation) -> TextDecoder:
        """Return a decoder for one request."""
        echo = None
        if self._capabilities.echoes and not self.config.decoupled:
            echo = PromptEcho(*(form for form in (generation.prompt, generation.prompt_echo) if form))
        return TextDecoder(
            cumulative=self.config.decoupled,
            finish="finish_reason" if self._finish else None,
            echo=echo,
            cached_tokens=CachedTokens.of(self._cache, generation),
        )
