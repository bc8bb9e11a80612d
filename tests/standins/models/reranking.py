"""
Cross-encoders that take pairs in one tensor, or an exported model's token ids.

Their scores are in the order of the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import text_rerank
from .tensors import array, as_text


class TritonPythonModel(text_rerank.TritonPythonModel):
    """Scores every pair."""

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return a score for each pair, in the tensors that this model declares."""
        if "INPUT_PAIRS" in self.settings.inputs():
            pairs = [[as_text(text) for text in row] for row in array(request, "INPUT_PAIRS")]
            return {"SCORES": np.array([self.logit(*pair) for pair in pairs], dtype=np.float32)}
        scores = [self._score_ids(ids, mask) for ids, mask in self._rows(request)]
        return {"logits": np.array(scores, dtype=np.float32).reshape(-1, 1)}

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
        return self.logit(decode(kept[1:second]), decode(kept[second + 1 :]))
