"""
``postprocessing`` of the TensorRT-LLM model repository: token ids to text, without state.

It decodes only the ids of one response, which breaks characters that are spread over tokens. It writes no record,
because a stream calls it once per token.
"""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb

from . import settings
from .tensors import array, strings
from .text import Vocabulary

# Up to 0.13, these tensors pass through this model on their way to the client.
_PASSED_ON = ("CUM_LOG_PROBS", "OUTPUT_LOG_PROBS", "CONTEXT_LOGITS", "GENERATION_LOGITS", "BATCH_INDEX")


class TritonPythonModel:
    """Decodes each beam of each row up to its length."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the tokenizer."""
        self._settings = settings.load(args)
        self._vocabulary = Vocabulary(self._settings.parameter("tokenizer_dir", self._settings.tokenizer))
        self._skip = self._settings.flag("skip_special_tokens", default=True)
        self._passed_on = [name for name in _PASSED_ON if name in self._settings.inputs()]

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request on its own."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        tokens = array(request, "TOKENS_BATCH")
        lengths = array(request, "SEQUENCE_LENGTH")
        texts = [
            self._vocabulary.decode(beam[: lengths[row][index]].tolist(), skip_special_tokens=self._skip)
            for row, beams in enumerate(tokens)
            for index, beam in enumerate(beams)
        ]
        outputs = [pb.Tensor("OUTPUT", strings(texts))]
        for name in self._passed_on:
            value = array(request, name)
            if value is not None:
                outputs.append(pb.Tensor(f"OUT_{name}", value))
        return pb.InferenceResponse(outputs)
