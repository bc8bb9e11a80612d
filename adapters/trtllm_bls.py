"""TensorRT-LLM's ``tensorrt_llm_bls``: a Python model that calls the same three models as the ensemble."""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.adapters._common.base import Hints
from triton_openai.adapters._common.trtllm import tokenizing_hints
from triton_openai.adapters.trtllm_ensemble import TrtllmText, is_text_model
from triton_openai.triton.tensors import ModelConfig


class TrtllmBls(TrtllmText):
    """
    Streams have deltas, or with ``accumulate_tokens`` the whole text at every step (which is right about characters
    split over tokens).

    Its inner request has an id of its own and it never looks whether it was cancelled: work that is abandoned runs to
    its end.
    """

    name = "trtllm-bls"

    @classmethod
    def matches(cls, config: ModelConfig) -> str | None:
        """Claim models that are no ensembles and have TensorRT-LLM's text tensors."""
        if is_text_model(config) and config.platform != "ensemble":
            return "not an ensemble, with inputs text_input and max_tokens and output text_output"
        return None

    @property
    def engine(self) -> ModelConfig | None:
        """The model that the parameter ``tensorrt_llm_model_name`` names, by default ``tensorrt_llm``."""
        return self.repository.get(self.config.parameter("tensorrt_llm_model_name") or "tensorrt_llm")

    @property
    def cumulative(self) -> bool:
        """Whether ``accumulate_tokens`` is on; it only acts on a decoupled model."""
        flag = self.config.parameter("accumulate_tokens") or ""
        return self.config.decoupled and flag.lower() in ("true", "yes", "1", "t")

    @property
    def splits_characters(self) -> bool:
        """Whether ``accumulate_tokens`` is there and not on. A model without it decodes in a way of its own."""
        return "accumulate_tokens" in self.config.parameters and not self.cumulative

    @property
    def unread(self) -> Mapping[str, str]:
        """The temperature up to 0.12; 0.13 brings ``prompt_table_extra_id``."""
        if "prompt_table_extra_id" in self.config.inputs:
            return {}
        return {"temperature": "this release of the model drops every value but 0 and 1"}

    @property
    def hints(self) -> Hints:
        """The tokenizer of ``preprocessing``, a name that the BLS has built in."""
        return tokenizing_hints([self.repository.get("preprocessing")]) or Hints()
