"""
Classifiers, in two of the ways in which people deploy them: texts and logits, with labels that Triton knows, and the
token ids of an exported model and probabilities.

A text is the more of a class, the more it shares with the class's label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, as_text
from .text import Vocabulary
from .vectors import embedder_for

# So that the classes differ.
_STEEPNESS = 8.0


class TritonPythonModel:
    """Classifies every text of every batch."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record and read the labels."""
        self._settings = settings.load(args)
        self._recorder = Recorder(self._settings.record, self._settings.name)
        self._vocabulary = Vocabulary(self._settings.tokenizer)
        self._embedder = embedder_for(self._settings)
        labels = Path(args["model_repository"], "labels.txt").read_text().splitlines()
        self._classes = self._embedder.embed(labels)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; Triton has gathered them into one call."""
        answers = []
        for request in requests:
            self._recorder.request(request)
            texts = array(request, "text")
            by_ids = texts is None
            read = self._decoded(request) if by_ids else [as_text(text) for text in texts.reshape(-1)]
            logits = _STEEPNESS * self._embedder.embed(read) @ self._classes.T
            values = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) if by_ids else logits
            name = "probabilities" if by_ids else "logits"
            answers.append(pb.InferenceResponse([pb.Tensor(name, values.astype(np.float32))]))
            self._recorder.ended("finished", request.request_id(), 0)
        return answers

    def _decoded(self, request: Any) -> list[str]:
        rows = zip(array(request, "input_ids"), array(request, "attention_mask"), strict=True)
        return [self._vocabulary.decode([int(number) for number in ids[mask == 1]]) for ids, mask in rows]
