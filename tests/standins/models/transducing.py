"""
Streaming recognizers, for the speech of :mod:`tones`: each keeps the state of every sequence until its end.

Of the two steps of a transducer, the first makes features. As sherpa's and WeNet's code does, it refuses a first part
that is too short for the encoder's window; theirs loses what a further part has beside its chunk, and this one refuses
it. The second step answers with all words so far, each an element. The model of one step answers with the new words.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, scalar, strings
from .tones import RATE, hear

_MEL = 80
# Samples of silence that end a word.
_MARGIN = 640
# Inputs whose values fill a record.
_AUDIO = ("wav", "x", "samples", "SPEECH")


class TritonPythonModel:
    """Takes each request as a part of its sequence."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read what the model's tensors are."""
        loaded = settings.load(args)
        config = json.loads(args["model_config"])
        self._recorder = Recorder(loaded.record, loaded.name)
        self._output = config["output"][0]["name"]
        # By sequence: the words that have ended, the samples behind them, and how many words have been told.
        self._states: dict[Any, tuple[list[str], np.ndarray, int]] = {}
        if self._output == "x":
            told = {name: int(value["string_value"]) for name, value in config["parameters"].items()}
            rate = told["sample_rate"]
            self._window = config["output"][0]["dims"][0]
            shift, length = (told[f"frame_{name}_ms"] * rate // 1000 for name in ("shift", "length"))
            self._chunk = self._first = told["decode_chunk_size"] * 4 * shift
            while 1 + (self._first - length) // shift < self._window:
                self._first += shift

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer each request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        self._recorder.request(request, but=_AUDIO)
        sequence = scalar(request, "CORRID")
        start, ready, end = (bool(scalar(request, name)) for name in ("START", "READY", "END"))
        try:
            if start:
                self._states[sequence] = ([], np.zeros(0, np.float32), 0)
            if not ready or sequence not in self._states:
                raise ValueError(f"the sequence {sequence!r} has not begun")
            tensors = self._features(request, first=start) if self._output == "x" else self._heard(request, sequence)
        except ValueError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error)))
        finally:
            if end:
                self._states.pop(sequence, None)
        return pb.InferenceResponse([pb.Tensor(name, values) for name, values in tensors.items()])

    def _features(self, request: Any, *, first: bool) -> dict[str, Any]:
        samples = array(request, "wav")[:, : scalar(request, "wav_lens")]
        wanted = self._first if first else self._chunk
        if samples.shape[1] != wanted:
            raise ValueError(f"a part has {samples.shape[1]} samples and not {wanted}")
        frames = np.zeros((1, self._window, _MEL), np.float32)
        return {"x": frames, "x_lens": np.array([[self._window]], np.int64), "samples": samples}

    def _heard(self, request: Any, sequence: Any) -> dict[str, Any]:
        ended, before, told = self._states[sequence]
        of_steps = self._output == "OUTPUT0"
        new = array(request, "samples").reshape(-1) if of_steps else array(request, "SPEECH") / 32768
        samples = np.concatenate([before, new])
        heard = hear(samples)
        words = [*ended, *(word for _, _, word in heard)]
        if "fail" in words:
            raise ValueError("the recognizer has failed")
        passed = [(round(end * RATE), word) for _, end, word in heard if round(end * RATE) < len(samples) - _MARGIN]
        rest = samples[passed[-1][0] :] if passed else samples
        self._states[sequence] = ([*ended, *(word for _, word in passed)], rest, len(words))
        texts = words if of_steps else ["".join(f" {word}" for word in words[told:])]
        return {self._output: strings(texts)}
