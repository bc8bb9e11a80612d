"""TensorRT-LLM's ``ensemble``: preprocessing, tensorrt_llm and postprocessing as one model of text in and text out."""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.adapters._common.base import Hints
from triton_openai.adapters._common.trtllm import ENGINE_INPUTS, adds_special_tokens, stop_request
from triton_openai.adapters._common.trtllm_text import TrtllmText, is_text_model
from triton_openai.generation import Generation
from triton_openai.triton.tensors import InferRequest, ModelConfig

# An input of each of the three steps that every release has.
_STAGES = ("QUERY", "request_output_len", "TOKENS_BATCH")


class TrtllmEnsemble(TrtllmText):
    """Text deltas, one response per step; cancelled by the engine's own stop request."""

    name = "trtllm-ensemble"

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim ensembles with TensorRT-LLM's text tensors, whatever their steps are called."""
        if is_text_model(config) and config.platform == "ensemble":
            return "an ensemble with inputs text_input and max_tokens and output text_output"
        return None

    @property
    def engine(self) -> ModelConfig | None:
        """Return the step that takes stop requests: the one with token-level inputs."""
        for step in self.config.steps:
            config = self._repository.get(step.model)
            if config is not None and config.inputs.keys() >= ENGINE_INPUTS:
                return config
        return None

    @property
    def token_level(self) -> ModelConfig | None:
        """The engine, unless more takes part than the three steps of every release."""
        known = [self._repository.get(step.model) for step in self.config.steps]
        plain = all(config is not None and any(name in config.inputs for name in _STAGES) for config in known)
        return super().token_level if plain else None

    @property
    def unread(self) -> Mapping[str, str]:
        """The bad words of 0.5, which its preprocessing encodes and nobody hands to the engine."""
        for step in self.config.steps:
            if "request_output_len" in step.input_map and "bad_words_list" not in step.input_map:
                return {"bad_words": "this ensemble does not hand them to its engine"}
        return {}

    @property
    def hints(self) -> Hints:
        """The tokenizer of the step that tokenizes."""
        for step in self.config.steps:
            config = self._repository.get(step.model)
            if config is not None and "QUERY" in config.inputs:
                return Hints(
                    tokenizer_dir=config.parameter("tokenizer_dir"),
                    adds_bos=adds_special_tokens(config),
                )
        return Hints()

    def cancel(self, generation: Generation) -> InferRequest | None:
        """
        Return the engine's stop request.

        Triton does not tell a running step that the ensemble was cancelled, but it gives every step the ensemble's
        request id, and the engine ends the request whose id comes with ``stop`` set.
        """
        engine = self.engine
        return None if engine is None else stop_request(engine, generation.id)
