"""What the models share that answer every request of a batch at once: embeddings, cross-encoders and classifiers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder
from .text import Vocabulary
from .vectors import embedder_for


class BatchedModel(ABC):
    """A model with an embedder; a subclass makes the answer to one request."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record and load the embedder."""
        self.settings = settings.load(args)
        self.embedder = embedder_for(self.settings)
        self._recorder = Recorder(self.settings.record, self.settings.name)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer."""
        return Vocabulary(self.settings.tokenizer)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request; Triton has gathered them into one call."""
        answers = []
        for request in requests:
            self._recorder.request(request)
            tensors = [pb.Tensor(name, values) for name, values in self.outputs(request).items()]
            answers.append(pb.InferenceResponse(tensors))
            self._recorder.ended("finished", request.request_id(), 0)
        return answers

    @abstractmethod
    def outputs(self, request: Any) -> dict[str, Any]:
        """Return the tensors of the answer to *request*."""
