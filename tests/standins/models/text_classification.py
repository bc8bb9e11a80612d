"""
Classifiers, in two of the ways in which people deploy them: texts and logits, with labels that Triton knows, and the
token ids of an exported model and probabilities.

A text is the more of a class, the more it shares with the class's label.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from .batched import BatchedModel
from .tensors import array, as_text

# So that the classes differ.
_STEEPNESS = 8.0


class TritonPythonModel(BatchedModel):
    """Classifies every text."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read the labels too."""
        super().initialize(args)
        labels = Path(args["model_repository"], "labels.txt").read_text().splitlines()
        self._classes = self.embedder.embed(labels)

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return a row of logits, or of probabilities, for each text."""
        texts = array(request, "text")
        by_ids = texts is None
        read = self._decoded(request) if by_ids else [as_text(text) for text in texts.reshape(-1)]
        logits = _STEEPNESS * self.embedder.embed(read) @ self._classes.T
        values = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True) if by_ids else logits
        return {"probabilities" if by_ids else "logits": values.astype(np.float32)}

    def _decoded(self, request: Any) -> list[str]:
        rows = zip(array(request, "input_ids"), array(request, "attention_mask"), strict=True)
        return [self.vocabulary.decode([int(number) for number in ids[mask == 1]]) for ids, mask in rows]
