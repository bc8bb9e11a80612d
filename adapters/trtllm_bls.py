"""TensorRT-LLM's ``tensorrt_llm_bls``: a Python model that calls the same three models as the ensemble."""

from __future__ import annotations

from collections.abc import Mapping

from triton_openai.adapters.trtllm_ensemble import TrtllmText
from triton_openai.triton.tensors import ModelConfig


class TrtllmBls(TrtllmText):
    """
    Streams have deltas, or with ``accumulate_tokens`` the whole text at every step, with every character. A model
    without that parameter decodes in a way of its own.

    Its inner request has an id of its own and it never looks whether it was cancelled: abandoned work goes on.
    """

    name = "trtllm-bls"
    is_ensemble = False

    def __init__(self, config: ModelConfig, repository: Mapping[str, ModelConfig]) -> None:
        self.engine = repository.get(config.parameter("tensorrt_llm_model_name") or "tensorrt_llm")
        # A name that the BLS has built in.
        self.steps = [repository.get("preprocessing")]
        accumulates = (config.parameter("accumulate_tokens") or "").lower() in ("true", "yes", "1", "t")
        # It only acts on a decoupled model.
        self.cumulative = config.decoupled and accumulates
        self.splits_characters = "accumulate_tokens" in config.parameters and not self.cumulative
        # Since 0.13.
        if "prompt_table_extra_id" not in config.inputs:
            self.unread = {"temperature": "this release of the model drops every value but 0 and 1"}
        super().__init__(config, repository)
