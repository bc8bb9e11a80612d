"""
Cross-encoders, with three common kinds of inputs.

Two texts get the answer of NVIDIA's reranking NIM: logits in descending order, with the index of each. Pairs in one
tensor, and an exported model's token ids, get scores in the order of the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from .batched import BatchedModel
from .tensors import array, as_text

# Makes some logits positive and some negative.
_STEEPNESS = 8.0


class TritonPythonModel(BatchedModel):
    """Scores every pair."""

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return a score for each pair, in the tensors that this model declares."""
        inputs = self.settings.inputs()
        if "INPUT_PAIRS" in inputs:
            pairs = [[as_text(text) for text in row] for row in array(request, "INPUT_PAIRS")]
            return {"SCORES": np.array([self._logit(*pair) for pair in pairs], dtype=np.float32)}
        if "input_ids" in inputs:
            scores = [self._score_ids(ids, mask) for ids, mask in self._rows(request)]
            return {"logits": np.array(scores, dtype=np.float32).reshape(-1, 1)}
        texts = [[as_text(text) for text in array(request, name).reshape(-1)] for name in ("query", "passage")]
        pairs = list(zip(*texts, strict=True))
        scores = [self._logit(*pair) for pair in pairs]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])
        counts = [sum(len(self.vocabulary.encode(text)) for text in pair) for pair in pairs]
        return {
            "index": np.array(order, dtype=np.int32).reshape(-1, 1),
            "logit": np.array([scores[place] for place in order], dtype=np.float32).reshape(-1, 1),
            "token_count": np.array(counts, dtype=np.int32),
        }

    def _logit(self, query: str, document: str) -> float:
        """Return a score for the similarity of the two texts."""
        return _STEEPNESS * (float(np.dot(*self.embedder.embed([query, document]))) - 0.5)

    def _rows(self, request: Any) -> Any:
        ids, mask, segments = (array(request, name) for name in ("input_ids", "attention_mask", "token_type_ids"))
        if not ids.shape == mask.shape == segments.shape:
            raise pb.TritonModelException("the inputs differ in shape")
        return zip(ids, mask, strict=True)

    def _score_ids(self, ids: Any, mask: Any) -> float:
        kept = [int(number) for number, wanted in zip(ids, mask, strict=True) if wanted]
        # The demo's tokenizer puts the same token in front of both texts.
        start = kept[0]
        second = kept.index(start, 1)
        decode = self.vocabulary.decode
        return self._logit(decode(kept[1:second]), decode(kept[second + 1 :]))
