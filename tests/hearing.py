"""
A stand-in for Whisper that hears exactly what the samples say, and the recordings for it.

A word is a stretch of samples with the same value, which no other word has; a pause has zeros. So tests know the words
of a recording and their places, at a rate that costs next to nothing. It answers as Whisper does, with times. Words
that begin in the last seconds of a window are left for the next one, unless there are no others, and two times say so.
An answer has no end where its tokens are used up.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.speech import WORDS
from tests.unit.adapters.test_profiles import spec_of
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.answer.recognition import TranscriptionOptions
from triton_openai.answer.transcription import Transcription
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import TranscriptionJob
from triton_openai.media.cutting import Chunk, Cutter
from triton_openai.media.voice_activity import Samples
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonResponse, ModelConfig

#: Samples a second.
RATE = 1000
_FIRST_VALUE, _STEP_OF_VALUES = 0.3, 0.05
_START, _END, _NO_TIMES, _FIRST_TIME = 50_258, 50_257, 50_363, 50_364
_SECONDS_OF_A_TIME = 0.02
# How near to the end of a window words are left for the next one.
_OPEN_SECONDS = 3.0
# Samples of a word at least: a time is rounded, so some of the word before may be behind it.
_MIN_LENGTH = 30


def record(words: Sequence[tuple[str, int, int]]) -> Samples:
    """Return the samples of *words*, each with its length and that of the pause behind it in hundredths of a second."""
    parts = []
    for word, length, pause in words:
        value = _FIRST_VALUE + _STEP_OF_VALUES * WORDS.index(word)
        parts.append(np.full(length * RATE // 100, value, np.float32))
        parts.append(np.zeros(pause * RATE // 100, np.float32))
    return np.concatenate(parts)


def words_in(samples: Samples) -> list[tuple[float, float, str]]:
    """Return the words in *samples* with the seconds at which each begins and ends."""
    bounds = np.flatnonzero(np.diff(np.concatenate(([0.0], samples, [0.0])))).tolist()
    found = []
    for begin, end in pairwise(bounds):
        value = float(samples[begin])
        if value and end - begin >= _MIN_LENGTH:
            word = WORDS[round((value - _FIRST_VALUE) / _STEP_OF_VALUES)]
            found.append((begin / RATE, end / RATE, word))
    return found


class Whisper:
    """
    Answers requests as Triton does.

    *max_tokens* limits an answer. In windows of more than *max_sound_seconds*, it repeats its last word to the limit.
    In those of more than *max_heard_seconds*, it passes over all words but the last two.
    """

    def __init__(
        self, *, max_tokens: int = 224, max_sound_seconds: float = 1000, max_heard_seconds: float = 1000
    ) -> None:
        self.requests = 0
        #: The seconds of each window that it got.
        self.seconds: list[float] = []
        self._max_tokens = max_tokens
        self._max_sound_seconds = max_sound_seconds
        self._max_heard_seconds = max_heard_seconds

    async def ask(self, request: InferRequest, on_responses: Any = None) -> Sequence[InferResponse]:
        """Return the answer to *request*."""
        await asyncio.sleep(0)
        self.requests += 1
        values = {tensor.name: _numbers(tensor.values) for tensor in request.inputs}
        samples = np.array(values["WAV"], np.float32)[: int(values["WAV_LENS"][0])]
        self.seconds.append(len(samples) / RATE)
        if "DECODER_INPUT_IDS" not in values:
            heard = words_in(samples)
            if len(samples) / RATE > self._max_heard_seconds:
                heard = heard[:2]
            text = " ".join(word for _, _, word in heard)
            return [JsonResponse(values={"TRANSCRIPTS": text})]
        prompt = [int(number) for number in values["DECODER_INPUT_IDS"]]
        assert _NO_TIMES not in prompt
        ids = self._answer(samples)[: self._max_tokens]
        ids += [_END] * (self._max_tokens - len(ids))
        return [JsonResponse(values={"OUTPUT_IDS": [*prompt, *ids]})]

    def _answer(self, samples: Samples) -> list[int]:
        seconds = len(samples) / RATE
        words = words_in(samples)
        written = [word for word in words if word[0] < seconds - _OPEN_SECONDS] or words
        ids = []
        if seconds > self._max_heard_seconds:
            written = written[-2:]
            written[0] = (0.0, written[0][1], written[0][2])
        for begin, end, word in written:
            ids += [_time(begin), WORDS.index(word), _time(end)]
        if len(written) < len(words):
            ids.append(ids[-1])
        if seconds > self._max_sound_seconds and words:
            ids += [WORDS.index(words[-1][2])] * self._max_tokens
        return ids


def _time(seconds: float) -> int:
    return _FIRST_TIME + round(seconds / _SECONDS_OF_A_TIME)


def _numbers(values: Any) -> Sequence[float]:
    if isinstance(values, bytes):
        return array("f", values)
    return list(values) if not isinstance(values[0], str) else []


def model(
    inputs: Sequence[str], outputs: Sequence[str], tokenizer: Tokenizer | None, *, rate: int = RATE, **audio: Any
) -> Any:
    """Return a served model with these tensors, which takes audio at *rate*."""
    config = ModelConfig(
        name="m",
        inputs={spec.name: spec for spec in map(spec_of, inputs)},
        outputs={spec.name: spec for spec in map(spec_of, outputs)},
    )
    mapping = TensorMapping(audio=AudioFormat(sample_rate=rate, pad_seconds=0, **audio))
    adapter = Transcriber.described(config, {}, mapping)

    async def prompter() -> Any:
        return SimpleNamespace(tokenizer=tokenizer)

    return SimpleNamespace(name="m", triton_model="m", adapter=adapter, prompter=prompter)


class _Recording:
    """Samples in place of a file."""

    def __init__(self, samples: Samples, rate: int, max_seconds: float) -> None:
        self._samples = samples
        self._rate = rate
        self._max_seconds = max_seconds

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield what :class:`Recording` yields."""
        cutter = Cutter(self._rate, self._max_seconds, None)
        for start in range(0, len(self._samples), 4096):
            for chunk in cutter.feed(self._samples[start : start + 4096]):
                yield chunk
        for chunk in cutter.rest():
            yield chunk


async def transcribe(whisper: Any, served: Any, samples: Samples, **options: Any) -> Transcription:
    """Return the transcription of *samples* by *whisper*, asked as the model *served*."""
    job = TranscriptionJob(id="t", samples=b"", language="en")
    transcription = Transcription(whisper, served, TranscriptionOptions(job=job, **options))
    recognition = served.adapter.capabilities.recognition
    recording: Any = _Recording(samples, recognition.sample_rate, recognition.max_seconds)
    pieces = [piece async for piece in transcription.deltas(recording)]
    assert "".join(pieces) == transcription.text
    return transcription
