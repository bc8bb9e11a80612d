"""An embedding model like one exported from PyTorch or ONNX: it returns a row of numbers for each text."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, as_text
from .vectors import embedder_for


class TritonPythonModel:
    """Embeds every text of every batch."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record and load the model."""
        self._settings = settings.load(args)
        self._recorder = Recorder(self._settings.record, self._settings.name)
        self._embedder = embedder_for(self._settings)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request of a batch."""
        answers = []
        for request in requests:
            self._recorder.request(request)
            vectors = self._embedder.embed([as_text(text) for text in array(request, "text").reshape(-1)])
            answers.append(pb.InferenceResponse([pb.Tensor("embedding", vectors)]))
            self._recorder.ended("finished", request.request_id(), 0)
        return answers
