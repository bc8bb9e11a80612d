"""A model that chats about what it hears: vLLM's tensors with one more input, as people add it to the backend."""

from __future__ import annotations

import base64
import io
import wave
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, scalar, strings
from .tones import RATE, hear


class TritonPythonModel:
    """Answers with its prompt and the words in each recording."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record."""
        loaded = settings.load(args)
        self._recorder = Recorder(loaded.record, loaded.name)

    def execute(self, requests: list[Any]) -> None:
        """Answer each request."""
        for request in requests:
            self._recorder.request(request)
            files = array(request, "audio")
            heard = [_words(file) for file in (files.reshape(-1) if files is not None else ())]
            # Without exclude_input_in_output, the backend repeats the prompt.
            text = f"{scalar(request, 'text_input')}{heard} {scalar(request, 'text_input')}"
            sender = request.get_response_sender()
            sender.send(pb.InferenceResponse([pb.Tensor("text_output", strings([text]))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def _words(file: bytes) -> str:
    with wave.open(io.BytesIO(base64.b64decode(file, validate=True))) as recording:
        if (recording.getframerate(), recording.getnchannels(), recording.getsampwidth()) != (RATE, 1, 2):
            raise ValueError("this is no WAV file as it was agreed on")
        samples = np.frombuffer(recording.readframes(recording.getnframes()), np.int16) / 32768
    return " ".join(word for _, _, word in hear(samples))
