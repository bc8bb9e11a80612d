"""
What k2-fsa/sherpa's ``infer_bls`` is to its ``whisper``: a text in front of the decoder's prompt in, the text out.

As there, only the first row is read, and an empty prefix means Korean.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

from .tensors import scalar, strings

_KOREAN = "<|startoftranscript|><|ko|><|transcribe|><|notimestamps|>"
_END = 50257


class TritonPythonModel:
    """Asks the engine for each request."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the tokenizer."""
        self._tokenizer = Tokenizer.from_file(str(Path(args["model_repository"], "tokenizer", "tokenizer.json")))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        prefix = scalar(request, "TEXT_PREFIX") or _KOREAN
        ids = self._tokenizer.encode(prefix, add_special_tokens=False).ids
        inputs = [pb.get_input_tensor_by_name(request, name) for name in ("WAV", "WAV_LENS")]
        call = pb.InferenceRequest(
            model_name="whisper",
            requested_output_names=["OUTPUT_IDS"],
            inputs=[*inputs, pb.Tensor("DECODER_INPUT_IDS", np.array([ids], np.int32))],
        )
        answer = call.exec()
        if answer.has_error():
            raise pb.TritonModelException(answer.error().message())
        output_ids = pb.get_output_tensor_by_name(answer, "OUTPUT_IDS").as_numpy().reshape(-1)[len(ids) :]
        text = self._tokenizer.decode([int(number) for number in output_ids if number != _END])
        return pb.InferenceResponse([pb.Tensor("TRANSCRIPTS", strings([text.strip()]))])
