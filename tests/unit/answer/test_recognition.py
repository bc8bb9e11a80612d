"""A recognizer is not asked about audio without speech, and is asked again where its answer is not likely."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.cases import every_case
from tests.hearing import model, transcribe
from tests.speech import RATE, say_vowels
from tests.unit.adapters.test_profiles import spec_of
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.answer import recognition
from triton_openai.answer.recognition import TranscriptionOptions
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import TranscriptionJob
from triton_openai.media import voice_activity
from triton_openai.media.cutting import chunk_of
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonResponse, ModelConfig

WAV = ("WAV FP32 [-1]", "WAV_LENS INT32 [1]")
TEXT = ("TRANSCRIPTS STRING [1]",)
NOISE = np.random.default_rng(1).normal(0, 0.1, 4 * RATE).astype(np.float32)


class Answering:
    """Answers each request with the next of some answers, and the last one again and again."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.temperatures: list[float] = []
        self.requests = 0
        self._answers = list(answers)

    async def ask(self, request: InferRequest, on_responses: Any = None) -> Sequence[InferResponse]:
        """Return the next answer to a *request*."""
        answer = self._answers[min(self.requests, len(self._answers) - 1)]
        self.requests += 1
        self.temperatures += [float(tensor.values[0]) for tensor in request.inputs if tensor.name == "HEAT"]
        return [JsonResponse(values=answer)]


def described(*outputs: str) -> Any:
    """Return a model that takes a temperature and has these *outputs* beside the text."""
    names = {"LOGPROB FP32 [1]": "avg_logprob", "SILENCE FP32 [1]": "no_speech_prob", "PARTS STRING [1]": "segments"}
    mapping = TensorMapping(
        inputs={"audio": "SPEECH", "temperature": "HEAT"},
        outputs={"text": "TEXT", **{names[each]: each.split()[0] for each in outputs}},
        audio=AudioFormat(sample_rate=RATE),
    )
    config = ModelConfig(
        name="m",
        inputs={spec.name: spec for spec in map(spec_of, ("SPEECH FP32 [-1]", "HEAT FP32 [1]"))},
        outputs={spec.name: spec for spec in map(spec_of, ("TEXT STRING [1]", *outputs))},
    )
    served = model(WAV, TEXT, None)
    served.adapter = Transcriber.described(config, {}, mapping)
    return served


def whisper() -> Any:
    """Return sherpa's model of texts."""
    return model((*WAV, "TEXT_PREFIX STRING [1]"), TEXT, None, rate=RATE)


@pytest.mark.usefixtures("silero")
async def test_noise_is_not_sent() -> None:
    """Whisper invents text for it; other models write nothing, and get all audio."""
    speech = np.concatenate([NOISE, say_vowels("aiuoaiou"), NOISE])
    for samples, served, expected in (
        (NOISE, whisper(), 0),
        (speech, whisper(), 1),
        (np.concatenate([NOISE] * 6 + [speech]), whisper(), 1),
        (NOISE, model(WAV, TEXT, None, rate=RATE), 1),
    ):
        answering = Answering({"TRANSCRIPTS": "Thank you."})
        found = await transcribe(answering, served, samples)
        assert expected == answering.requests
        assert ("Thank you." if expected else "") == found.text


async def test_one_thread_looks_for_speech(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are asked for together, and the detector has a state: two threads in it would end the process."""
    both = threading.Barrier(2)
    overlaps = []

    class Detector:
        """Waits a moment for another thread."""

        seconds = 1.0

        def __init__(self, rate: int) -> None:
            pass

        def reset(self) -> None:
            pass

        def rate_moments(self, samples: Any) -> Sequence[float]:
            try:
                both.wait(0.1)
            except threading.BrokenBarrierError:
                both.reset()
                return [1.0]
            overlaps.append(samples)
            return [1.0]

    monkeypatch.setattr(voice_activity, "silero_available", lambda: True)
    monkeypatch.setattr(voice_activity, "SileroDetector", Detector)
    upstream: Any = Answering({"TRANSCRIPTS": ""})
    options = TranscriptionOptions(job=TranscriptionJob(id="t", samples=b""))
    recognizer = recognition.Recognizer(upstream, whisper(), options)
    chunk = chunk_of(NOISE, 0, RATE)
    silent = await asyncio.gather(recognizer.is_silent(chunk), recognizer.is_silent(chunk))
    assert (False, False) == tuple(silent)
    assert [] == overlaps


async def test_silence_is_not_sent() -> None:
    """It is not, whatever the detector."""
    answering = Answering({"TRANSCRIPTS": "Thank you."})
    await transcribe(answering, whisper(), np.zeros(RATE, np.float32))
    assert 0 == answering.requests


@every_case(
    "answers, temperatures, text",
    [
        ([{"TEXT": "never", "LOGPROB": [-0.2]}], [0.0], "never"),
        ([{"TEXT": "ever", "LOGPROB": [-1.5]}, {"TEXT": "never", "LOGPROB": [-0.9]}], [0.0, 0.2], "never"),
        ([{"TEXT": "4-" * 60, "LOGPROB": [-0.1]}, {"TEXT": "four", "LOGPROB": [-0.1]}], [0.0, 0.2], "four"),
        # All are tried; the last one counts.
        ([{"TEXT": "ever", "LOGPROB": [-1.5]}], [0.0, 0.2, 0.4, 0.6, 0.8, 1.0], "ever"),
    ],
)
async def test_temperatures(answers: Sequence[dict[str, Any]], temperatures: Sequence[float], text: str) -> None:
    """Further ones are tried while an answer is improbable or repeats itself."""
    answering = Answering(*answers)
    found = await transcribe(answering, described("LOGPROB FP32 [1]"), NOISE)
    assert temperatures == [round(each, 2) for each in answering.temperatures]
    assert text == found.text
    assert answers[-1]["LOGPROB"][0] == found.segments[0].avg_logprob
    assert found.segments[0].no_speech_prob is None


@every_case(
    "logprob, silence, text",
    [(-2.0, 0.9, ""), (-0.5, 0.9, "Thank you."), (-2.0, 0.5, "Thank you."), (None, 0.9, "")],
)
async def test_no_speech(logprob: float | None, silence: float, text: str) -> None:
    """What the model takes for no speech is left out, unless it is sure of the words."""
    answer: dict[str, Any] = {"TEXT": "Thank you.", "SILENCE": [silence]}
    if logprob is not None:
        answer["LOGPROB"] = [logprob]
    served = described("SILENCE FP32 [1]", "LOGPROB FP32 [1]")
    assert text == (await transcribe(Answering(answer), served, NOISE)).text


async def test_segments_without_speech() -> None:
    """Of several segments, only those are left out."""
    parts = (
        '[{"start": 0, "end": 1, "text": "never", "avg_logprob": -0.2, "no_speech_prob": 0.1},'
        '{"start": 1, "end": 2, "text": "Thank you.", "avg_logprob": -1.2, "no_speech_prob": 0.8},'
        '{"start": 2, "end": 3, "text": "again"}]'
    )
    answering = Answering({"TEXT": "never Thank you. again", "PARTS": parts})
    found = await transcribe(answering, described("PARTS STRING [1]"), NOISE)
    assert "never again" == found.text
    assert [("never", -0.2, 0.1), ("again", None, None)] == [
        (segment.text, segment.avg_logprob, segment.no_speech_prob) for segment in found.segments
    ]
    assert [0.0, 0.0] == [segment.temperature for segment in found.segments]
