"""
Models of speech for Triton's Python backend that compute nothing: one hears the same words in everything, the other one
says the same tone to everything, and notes when.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb  # type: ignore[import-not-found]  # exists inside Triton only

# Seconds of a part of what is said, and from a request to the first one.
_PART = 0.5
_WORK = 0.05
_RATE = 24_000


class TritonPythonModel:
    """The model, which is the speaker if its config names a file for the time of its first part."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the config."""
        self._note = json.loads(args["model_config"]).get("parameters", {}).get("note", {}).get("string_value")
        time_of = np.arange(int(_PART * _RATE)) / _RATE
        self._part = (0.3 * np.sin(2 * np.pi * 440 * time_of)).astype(np.float32)

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer."""
        if self._note is None:
            words = pb.Tensor("OUTPUT_0", np.array([b"never tried ever failed no matter"], dtype=np.object_))
            return [pb.InferenceResponse([words]) for _ in requests]
        for request in requests:
            sender = request.get_response_sender()
            time.sleep(_WORK)
            response = pb.InferenceResponse([pb.Tensor("waveform", self._part)])
            Path(self._note).write_text(str(time.monotonic_ns()))
            sender.send(response)
            sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return None
