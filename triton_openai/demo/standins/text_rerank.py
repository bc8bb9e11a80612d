"""A cross-encoder that answers as NVIDIA's reranking NIM: logits in descending order, with the index of each."""

from __future__ import annotations

from typing import Any

import numpy as np

from .batched import BatchedModel
from .tensors import array, as_text

# Makes some logits positive and some negative.
_STEEPNESS = 8.0


class TritonPythonModel(BatchedModel):
    """Scores every pair."""

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return a score for each pair."""
        texts = [[as_text(text) for text in array(request, name).reshape(-1)] for name in ("query", "passage")]
        pairs = list(zip(*texts, strict=True))
        scores = [self.logit(*pair) for pair in pairs]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        counts = [sum(len(self.vocabulary.encode(text)) for text in pair) for pair in pairs]
        return {
            "index": np.array(order, dtype=np.int32).reshape(-1, 1),
            "logit": np.array([scores[index] for index in order], dtype=np.float32).reshape(-1, 1),
            "token_count": np.array(counts, dtype=np.int32),
        }

    def logit(self, query: str, document: str) -> float:
        """Return a score for the similarity of the two texts."""
        return _STEEPNESS * (float(np.dot(*self.embedder.embed([query, document]))) - 0.5)
