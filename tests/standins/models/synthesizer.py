"""
Synthesizers with the tensors of the public ones, whose samples can be computed: those of CosyVoice, F5-TTS and
Spark-TTS, and some with tensors of their own.

Words of a text are orders: ``<nothing>`` gives no audio, ``<die>`` fails after the first part, ``<nan>`` gives numbers
that are none, and ``<endless>`` goes on until it is cancelled.
"""

from __future__ import annotations

import io
import json
import time
import wave
import zlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, scalar

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_PER_LETTER = 240
_PARTS = 3
_ENDLESS_SECONDS = 120.0


def spoken(text: str) -> Any:
    """Return the samples of *text*: multiples of 2 to the power of -15, so that no type rounds them."""
    steps = np.arange(_PER_LETTER * len(text)) * 37 + zlib.crc32(text.encode()) % 1999
    return ((steps % 1999 - 999) / 32_768).astype(np.float32)


class TritonPythonModel:
    """Answers one request after the other."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Open the record, and read how to answer."""
        self._settings = settings.load(args)
        self._recorder = Recorder(self._settings.record, self._settings.name)
        config = json.loads(args["model_config"])
        (output,) = config["output"]
        self._output, self._type = output["name"], output["data_type"].removeprefix("TYPE_")
        self._decoupled = config["model_transaction_policy"]["decoupled"]
        parameters = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._batching = config["max_batch_size"] > 0
        self._overlap = round(float(parameters.get("audio_chunk_overlap_duration", 0)) * 16_000)

    def execute(self, requests: list[Any]) -> Any:
        """Answer each request."""
        if not self._decoupled:
            return [self._whole(request) for request in requests]
        for request in requests:
            self._recorder.request(request)
            sender = request.get_response_sender()
            how, parts = self._stream(self._text(request), sender)
            self._recorder.ended(how, request.request_id(), parts)
        return None

    @staticmethod
    def _text(request: Any) -> str:
        return str(scalar(request, "target_text") or scalar(request, "text") or "")

    def _whole(self, request: Any) -> Any:
        self._recorder.request(request)
        text = self._text(request)
        if "<die>" in text:
            return pb.InferenceResponse(error=pb.TritonError("CUDA error: an illegal memory access was encountered"))
        samples = spoken(text)
        if "<nothing>" in text:
            samples = samples[:0]
        if "<nan>" in text:
            samples[7] = np.nan
        return self._response(samples)

    def _stream(self, text: str, sender: Any) -> tuple[str, int]:
        samples, sent = spoken(text), 0
        if "<nothing>" in text:
            sender.send(flags=_FINAL)
            return "finished", 0
        size = -(-len(samples) // _PARTS)
        ends = time.monotonic() + _ENDLESS_SECONDS
        while sent < _PARTS or ("<endless>" in text and time.monotonic() < ends):
            if sender.is_cancelled():
                sender.send(flags=_FINAL)
                return "cancelled", sent
            if sent == 1 and "<die>" in text:
                error = pb.TritonError("CUDA error: an illegal memory access was encountered")
                sender.send(pb.InferenceResponse(error=error), flags=_FINAL)
                return "failed", sent
            start = sent % _PARTS * size
            # Each part but the last one goes on into the next.
            sender.send(self._response(samples[start : start + size + self._overlap]))
            sent += 1
            if "<endless>" in text:
                time.sleep(0.002)
        # As CosyVoice ends: with an empty one.
        sender.send(flags=_FINAL)
        return "finished", sent

    def _response(self, samples: Any) -> Any:
        if self._type == "STRING":
            values = np.array([_wav(samples)], dtype=np.object_)
        elif self._type == "UINT8":
            values = np.frombuffer(_wav(samples), np.uint8)
        elif self._type == "INT16":
            values = np.rint(samples * 32_768).astype(np.int16)
        else:
            values = samples.astype({"FP32": np.float32, "FP16": np.float16}[self._type])
        return pb.InferenceResponse([pb.Tensor(self._output, values[np.newaxis] if self._batching else values)])


def _wav(samples: Any) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(24_000)
        made.writeframes(np.rint(samples * 32_768).astype("<i2").tobytes())
    return file.getvalue()
