"""
Recognizers with the tensors of the public repositories, for the speech of :mod:`tones`.

As sherpa's and TensorRT-LLM's code for Whisper do it, an empty prefix means Korean, only the first row of a batch is
read, and a decoupled model answers with the whole text so far, revises its last word, and ends with an empty response.
Whisper's engine takes and gives token ids, and fills up with the end of the text. Sherpa's code for transducers gives
each word as an element. Words that begin German make all of the audio German.
"""

from __future__ import annotations

import base64
import io
import json
import re
import time
import wave
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from . import settings
from .tensors import Recorder, array, scalar, strings
from .tones import RATE, WORDS, hear

_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_GERMAN = WORDS.index("hallo")
# Of Whisper's vocabulary for 99 languages.
_END, _START, _EN, _DE = 50257, 50258, 50259, 50261
_TRANSLATE, _TRANSCRIBE, _NO_TIMES, _FIRST_TIME = 50358, 50359, 50363, 50364
_STEP, _WIDTH = 0.02, 48
# Seconds between two answers of a model that writes on.
_PACE = 0.01
_TAG = re.compile(r"<\|(\w+)\|>")


class TritonPythonModel:
    """Hears every request."""

    def initialize(self, args: dict[str, Any]) -> None:
        """Read what the model's tensors are."""
        loaded = settings.load(args)
        config = json.loads(args["model_config"])
        self._recorder = Recorder(loaded.record, loaded.name)
        self._decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        self._batches = config["max_batch_size"] > 0
        # The code of sherpa's speech LLM does not read it.
        self._reads_prefix = loaded.name != "speech_llm"
        self._in_words = "elements" in config["parameters"]
        self._outputs = [output["name"] for output in config["output"]]
        inputs = [each["name"] for each in config["input"]]
        self._audio = "WAV" if "WAV" in inputs else inputs[0]

    def execute(self, requests: list[Any]) -> list[Any] | None:
        """Answer each request."""
        answers = [self._answers(request) for request in requests]
        if not self._decoupled:
            return [responses[0] for responses in answers]
        for request, responses in zip(requests, answers, strict=True):
            sender = request.get_response_sender()
            for response in responses:
                sender.send(response)
                time.sleep(_PACE)
            sender.send(flags=_FINAL)
        return None

    def _answers(self, request: Any) -> Sequence[Any]:
        self._recorder.request(request)
        try:
            heard = hear(self._samples(request))
        except ValueError as error:
            return [pb.InferenceResponse(error=pb.TritonError(str(error)))]
        words = [word for _, _, word in heard]
        if words and words[0] == "fail":
            return [pb.InferenceResponse(error=pb.TritonError("the recognizer has failed"))]
        if "OUTPUT_IDS" in self._outputs:
            prompt = array(request, "DECODER_INPUT_IDS").reshape(-1).tolist()
            return [self._response("OUTPUT_IDS", np.array(_tokens(heard, prompt), np.int32))]
        text = _written(request, words) if self._reads_prefix else " ".join(words)
        if self._decoupled:
            texts = text.split()
            so_far = [
                " ".join([*texts[:number], *last])
                for number in range(len(texts))
                for last in ([texts[number][:2] + "..."], [texts[number]])
            ]
            return [*(self._response("TRANSCRIPTS", strings([one])) for one in so_far), self._empty()]
        return [self._text(text, words, heard)]

    def _samples(self, request: Any) -> Any:
        given = array(request, self._audio)
        given = given[0] if self._batches else given.reshape(-1)
        if given.dtype.kind in "OSu":
            data = given.tobytes() if given.dtype.kind == "u" else bytes(given.reshape(-1)[0])
            data = data if data.startswith(b"RIFF") else base64.b64decode(data, validate=True)
            with wave.open(io.BytesIO(data)) as file:
                if file.getframerate() != RATE:
                    raise ValueError("the rate is wrong")
                return np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
        length = scalar(request, "WAV_LENS", len(given))
        if length > len(given):
            raise ValueError("WAV_LENS is longer than WAV")
        scale = 32768 if given.dtype.kind == "i" else 1
        return given[:length].astype(np.float64) / scale

    def _text(self, text: str, words: list[str], heard: list[tuple[float, float, str]]) -> Any:
        found = {self._outputs[0]: text.split() if self._in_words else [text]}
        if "SEGMENTS" in self._outputs:
            found["SEGMENTS"] = [json.dumps([{"start": a, "end": b, "text": word} for a, b, word in heard])]
        if "WORDS" in self._outputs:
            found["WORDS"] = [json.dumps([{"start": a, "end": b, "word": word} for a, b, word in heard])]
        if "SCORES" in self._outputs:
            found["SCORES"] = [json.dumps([{"token": f" {word}", "logprob": -0.25} for word in words])]
        if "SPOKEN" in self._outputs:
            found["SPOKEN"] = ["de" if _is_german(words) else "en"]
        return pb.InferenceResponse([self._tensor(name, strings(values)) for name, values in found.items()])

    def _empty(self) -> Any:
        return self._response("TRANSCRIPTS", strings([""]))

    def _response(self, name: str, values: Any) -> Any:
        return pb.InferenceResponse([self._tensor(name, values)])

    def _tensor(self, name: str, values: Any) -> Any:
        return pb.Tensor(name, values.reshape(1, -1) if self._batches else values)


def _is_german(words: Sequence[str]) -> bool:
    return bool(words) and _GERMAN <= WORDS.index(words[0]) < len(WORDS) - 1


def _written(request: Any, words: Sequence[str]) -> str:
    """Return the text, by what the request says of its language and task."""
    text = " ".join(words)
    language = scalar(request, "LANGUAGE")
    if scalar(request, "TEXT_NORM") is not None:
        known = {0: "de" if _is_german(words) else "en", 3: "zh", 4: "en", 7: "yue", 11: "ja", 12: "ko"}
        return f"<|{known[language]}|><|NEUTRAL|><|Speech|><|woitn|>{text}"
    if language is not None:
        return f"{language}: {text}"
    prefix = scalar(request, "TEXT_PREFIX")
    if prefix is None:
        return text
    if not prefix:
        return f"한국어 {text}"
    before, mark, _ = prefix.partition("<|startoftranscript|>")
    if not mark:
        raise pb.TritonModelException("the prefix has no start")
    tags = _TAG.findall(prefix)
    return f"{before.removeprefix('<|startofprev|>')} {text.upper() if 'translate' in tags else text}".strip()


def _tokens(heard: Sequence[tuple[float, float, str]], prompt: list[int]) -> list[int]:
    """Return the token ids of an answer, which follow their *prompt*."""
    words = [word for _, _, word in heard]
    if prompt[-1] == _START:
        ids = [_DE if _is_german(words) else _EN, _TRANSCRIBE]
    elif _TRANSLATE in prompt:
        ids = []
        heard = [(start, end, "better") for start, end, _ in heard]
    else:
        ids = []
    for start, end, word in heard:
        times = [_FIRST_TIME + round(time / _STEP) for time in (start, end)]
        ids += [WORDS.index(word)] if _NO_TIMES in prompt else [times[0], WORDS.index(word), times[1]]
    ids = [*prompt, *ids]
    return ids + [_END] * max(_WIDTH - len(ids), 1)
