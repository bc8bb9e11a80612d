"""
The steps of published ensembles that recognize speech, with exactly their tensors, for the speech of :mod:`tones`.

Each step hands the samples on in its tensors of numbers, as many as fit: features, what an encoder makes of them, and
so on. The last step hears them. As a step of a streaming ensemble, it keeps what it heard of each sequence. A streaming
Paraformer (its last step takes ``alphas``) answers with new words only, the others with all words so far.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, scalar, strings
from .tones import RATE, hear

# One of so many samples is handed on: the tones stay below half of that rate, and a part fits into features.
_STRIDE = 3
_RATE = RATE // _STRIDE
# FP16 has whole numbers up to 2048: a count takes two.
_DIGIT = 1024
_MARGIN = 240


class TritonPythonModel:
    """Takes one step."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read what the model's tensors are."""
        loaded = settings.load(args)
        config = json.loads(args["model_config"])
        self._recorder = Recorder(loaded.record, loaded.name)
        self._inputs = [each["name"] for each in config["input"]]
        self._outputs = config["output"]
        self._sequences = "sequence_batching" in config
        # By sequence: the words that have ended, the samples behind them, and how many words have been told.
        self._states: dict[Any, tuple[list[str], np.ndarray, int]] = {}

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        self._recorder.request(request, but=tuple(self._inputs))
        try:
            samples = self._samples(request)
            tensors = [self._tensor(request, each, samples) for each in self._outputs]
        except ValueError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error)))
        return pb.InferenceResponse(tensors)

    def _samples(self, request: Any) -> np.ndarray:
        if "wav" in self._inputs:
            samples = array(request, "wav")[0].astype(np.float32)
            length = int(scalar(request, "wav_lens"))
            if length > len(samples):
                raise ValueError("wav_lens is longer than wav")
            return samples[:length:_STRIDE]
        packed = array(request, self._inputs[0]).astype(np.float32).reshape(-1)
        return packed[2 : 2 + int(packed[0] * _DIGIT + packed[1])]

    def _tensor(self, request: Any, output: dict[str, Any], samples: np.ndarray) -> Any:
        name, kind, dims = output["name"], output["data_type"], [int(dim) for dim in output["dims"]]
        if kind == "TYPE_STRING":
            return pb.Tensor(name, strings(self._words(request, samples)).reshape(1, -1))
        dtype = pb.triton_string_to_numpy(kind)
        if output is not self._outputs[0]:
            small = [1 if dim < 0 else dim for dim in ([] if output.get("reshape") is not None else dims)]
            return pb.Tensor(name, np.ones([1, *small], dtype))
        packed = np.concatenate([[len(samples) // _DIGIT, len(samples) % _DIGIT], samples])
        width = dims[-1] if dims[-1] > 0 else 512
        rows = dims[0] if dims[0] > 0 else -(-len(packed) // width)
        if len(packed) > rows * width:
            raise ValueError(f"{len(packed)} numbers do not fit into {rows} times {width}")
        values = np.zeros(rows * width)
        values[: len(packed)] = packed
        return pb.Tensor(name, values.reshape(1, rows, width).astype(dtype))

    def _words(self, request: Any, new: np.ndarray) -> list[str]:
        if not self._sequences:
            return [" ".join(word for _, _, word in hear(new, _RATE))]
        sequence = scalar(request, "CORRID")
        if scalar(request, "START"):
            self._states[sequence] = ([], np.zeros(0, np.float32), 0)
        if sequence not in self._states:
            raise ValueError(f"the sequence {sequence!r} has not begun")
        ended, before, told = self._states[sequence]
        samples = np.concatenate([before, new])
        heard = hear(samples, _RATE)
        words = [*ended, *(word for _, _, word in heard)]
        passed = [(round(end * _RATE), word) for _, end, word in heard if round(end * _RATE) < len(samples) - _MARGIN]
        if scalar(request, "END"):
            passed = [(len(samples), word) for _, _, word in heard]
        rest = samples[passed[-1][0] :] if passed else samples
        ended = [*ended, *(word for _, word in passed)]
        self._states[sequence] = (ended, rest, len(ended))
        if scalar(request, "END"):
            del self._states[sequence]
        if "alphas" in self._inputs:
            return ["".join(f" {word}" for word in ended[told:])]
        return words
