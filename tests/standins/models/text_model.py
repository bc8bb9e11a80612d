"""A text model as people write one for Triton's Python backend, with its own tensors: each response has new text."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .engine import EngineFailure, Options
from .generation import Generation, Step
from .scripted import engine_for
from .tensors import Recorder, scalar, strings
from .text import IncrementalText, Vocabulary

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Answers one request after the other."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record and read the tokenizer."""
        self._settings = settings.load(args)
        self._recorder = Recorder(self._settings.record, self._settings.name)
        self._vocabulary = Vocabulary(self._settings.tokenizer)
        self._engine = engine_for(self._settings, self._vocabulary)

    def execute(self, requests: list[Any]) -> None:
        """Answer each request."""
        for request in requests:
            self._recorder.request(request)
            sender = request.get_response_sender()
            try:
                self._answer(request, sender)
            except (EngineFailure, ValueError) as failure:
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(failure))), flags=_FINAL)
                self._recorder.ended("failed", request.request_id(), 0)

    def _answer(self, request: Any, sender: Any) -> None:
        prompt, limit = scalar(request, "PROMPT"), int(scalar(request, "max_tokens", 32))
        ids = self._vocabulary.encode(prompt, add_special_tokens=True)
        options = Options(
            max_tokens=limit,
            min_tokens=int(scalar(request, "min_tokens", 0)),
            ignore_eos=bool(scalar(request, "ignore_eos", False)),
        )
        answer = self._engine.answer(prompt, ids, options)
        generation = Generation(answer, end_id=self._vocabulary.eos_id, max_tokens=limit)
        text = IncrementalText(self._vocabulary, skip_special_tokens=bool(scalar(request, "skip_special_tokens", True)))
        finish = None
        while finish is None:
            step = generation.step()
            finish = step.finish
            sender.send(self._response(step, text, len(ids)), flags=_FINAL if finish else 0)
        generation.close()
        self._recorder.ended("finished", request.request_id(), len(generation.ids))

    @staticmethod
    def _response(step: Step, text: IncrementalText, prompt_tokens: int) -> Any:
        texts = {"TEXT": "".join(map(text.feed, step.ids)), "finish_reason": step.finish or ""}
        counts = {"completion_tokens": len(step.ids), "prompt_tokens": prompt_tokens}
        outputs = [pb.Tensor(name, strings([value])) for name, value in texts.items()]
        outputs += [pb.Tensor(name, np.array([value], dtype=np.int32)) for name, value in counts.items()]
        return pb.InferenceResponse(outputs)
