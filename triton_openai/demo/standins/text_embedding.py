"""An embedding model like one exported from PyTorch or ONNX: it returns a row of numbers for each text."""

from __future__ import annotations

from typing import Any

from .batched import BatchedModel
from .tensors import array, as_text


class TritonPythonModel(BatchedModel):
    """Embeds every text."""

    def outputs(self, request: Any) -> dict[str, Any]:
        """Return a vector for each text."""
        return {"embedding": self.embedder.embed([as_text(text) for text in array(request, "text").reshape(-1)])}
