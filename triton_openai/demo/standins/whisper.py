"""
Whisper base behind the tensors of k2-fsa/sherpa's ``whisper``: samples and the decoder's prompt in, token ids out.

It is not a stand-in: it hears. CTranslate2 runs it, on the weights in packages that ``demo --speech`` needs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
import triton_python_backend_utils as pb
from tokenizers import Tokenizer

from .tensors import array, scalar

_RATE = 16_000
_WINDOW = 400
_HOP = 160
_BANDS = 80
_SECONDS = 30
_END = 50257
_START = 50258
# With the first id, the decoder's context.
_MAX_IDS = 447


class TritonPythonModel:
    """Hears one request after the other."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Load the model, which :mod:`triton_openai.demo.speech` has put together."""
        folder = Path(args["model_repository"], args["model_version"])
        self._model = ctranslate2.models.Whisper(str(folder), compute_type="int8", intra_threads=2)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._filters = _mel_filters()
        self._window = np.hanning(_WINDOW + 1)[:-1].astype(np.float32)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        prompt = array(request, "DECODER_INPUT_IDS").reshape(-1).tolist()
        samples = array(request, "WAV").reshape(-1)[: scalar(request, "WAV_LENS")].astype(np.float32)
        features = ctranslate2.StorageView.from_array(self._features(samples)[np.newaxis])
        ids = []
        if prompt[-1] == _START:
            # The decoder would go on with the language and the task. This library has the language for itself.
            language = self._model.detect_language(features)[0][0][0]
            ids = [self._tokenizer.token_to_id(token) for token in (language, "<|transcribe|>", "<|notimestamps|>")]
        results = self._model.generate(features, [[*prompt, *ids]], beam_size=5, max_length=_MAX_IDS)
        answer = results[0].sequences_ids[0]
        ids += answer
        # As of sherpa's engine, an answer that was cut has no end. This library cuts it where half of the decoder's
        # context is used up, or all of it together with the prompt.
        if len(answer) < min(_MAX_IDS // 2, _MAX_IDS - len(prompt)):
            ids.append(_END)
        return pb.InferenceResponse([pb.Tensor("OUTPUT_IDS", np.array([[*prompt, *ids]], np.int32))])

    def _features(self, samples: Any) -> Any:
        """Return the logarithm of what each band of each window of *samples* has, as OpenAI's code does."""
        whole = np.zeros(_SECONDS * _RATE, np.float32)
        whole[: len(samples)] = samples[: len(whole)]
        padded = np.pad(whole, _WINDOW // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP][:-1]
        power = np.abs(np.fft.rfft(frames * self._window)) ** 2
        bands = np.log10(np.maximum(self._filters @ power.T, 1e-10))
        return np.ascontiguousarray((np.maximum(bands, bands.max() - 8) + 4) / 4, np.float32)


def _mel_filters() -> Any:
    """Return the weights of the frequencies in each band: triangles that are equal in area (Slaney)."""
    # Linear up to 1000 Hz, and logarithmic from there on.
    edge = 1000.0
    step = 200.0 / 3
    growth = np.log(6.4) / 27
    top = edge / step + np.log(_RATE / 2 / edge) / growth
    mels = np.linspace(0, top, _BANDS + 2)
    low = mels * step
    points = np.where(mels < edge / step, low, edge * np.exp(growth * (mels - edge / step)))
    frequencies = np.linspace(0, _RATE / 2, _WINDOW // 2 + 1)
    rising = (frequencies - points[:-2, None]) / np.diff(points)[:-1, None]
    falling = (points[2:, None] - frequencies) / np.diff(points)[1:, None]
    areas = 2 / (points[2:] - points[:-2])
    return (np.maximum(0, np.minimum(rising, falling)) * areas[:, None]).astype(np.float32)
