"""An encoder as it is exported from Hugging Face: token ids in, a vector for each token out."""

from __future__ import annotations

from typing import Any

import numpy as np

from .batched import BatchedModel
from .tensors import array


class TritonPythonModel(BatchedModel):
    """Each token has the vector (id, 1, position); padding has one that would show in any sum."""

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return the vectors of all tokens of each row."""
        ids = array(request, "input_ids")
        mask = array(request, "attention_mask")
        positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
        vectors = np.stack([ids, np.ones_like(ids), positions], axis=-1).astype(np.float32)
        vectors[mask == 0] = 1e6
        return {"last_hidden_state": vectors}
