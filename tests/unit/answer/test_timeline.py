"""Whatever a model answers: times are in order and in the audio, and no block of subtitles is empty."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hearing import RATE, model, transcribe
from tests.speech import WORDS, write_whisper_tokenizer
from tests.unit.adapters.test_profiles import spec_of
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.answer.transcription import Transcription
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonResponse, ModelConfig

WAV = ("WAV FP32 [-1]", "WAV_LENS INT32 [1]")
_FIRST_TIME, _LAST_TIME, _END = 50_364, 51_864, 50_257
# Words, times, and ends, in any order.
TOKENS = st.lists(
    st.integers(0, len(WORDS) - 1) | st.integers(_FIRST_TIME, _LAST_TIME) | st.just(_END), max_size=30
)  # fmt: skip
SECONDS = st.floats(0, 100) | st.just(0.0)
PARTS = st.lists(st.tuples(SECONDS, SECONDS, st.sampled_from([*WORDS, "", "  ", "\n\n"])), max_size=6)


class Answering:
    """Answers each request with the next of some answers, in turn."""

    def __init__(self, answers: Sequence[Any], values: Any) -> None:
        self.requests = 0
        self._answers = answers
        self._values = values

    async def ask(self, request: InferRequest, on_responses: Any = None) -> Sequence[InferResponse]:
        """Return the next answer to a *request*."""
        answer = self._answers[self.requests % len(self._answers)]
        self.requests += 1
        return [JsonResponse(values=self._values(request, answer))]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whisper's special tokens, and the words."""
    folder: Path = tmp_path_factory.mktemp("whisper") / "tokenizer"
    return Tokenizer.load(str(write_whisper_tokenizer(folder)))


def sound(seconds: float) -> Any:
    """Return noise with pauses, in which something can be heard all the time."""
    count = int(seconds * RATE)
    noise = np.random.default_rng(1).normal(0, 0.1, count).astype(np.float32)
    return noise * np.where(np.arange(count) % 700 < 600, 1, 0.1).astype(np.float32)


def check(transcription: Transcription, seconds: float) -> None:
    """Fail unless segments and words are in order and in *seconds* of audio, and each segment can be shown."""
    segments = transcription.segments
    for segment in segments:
        assert segment.text.strip()
        assert 0 <= round(segment.start * 1000) < round(segment.end * 1000)
        assert segment.end <= seconds + 1e-6
    assert all(before.end <= after.start for before, after in pairwise(segments))
    spoken = [word for segment in segments for word in segment.text.split()]
    assert spoken == transcription.text.split()
    times = [time for word in transcription.words for time in (word.start, word.end)]
    assert times == sorted(times)
    assert all(0 <= time <= seconds + 1e-6 for time in times)


@settings(max_examples=60)
@given(st.lists(TOKENS, min_size=1, max_size=4), st.sampled_from([0.2, 5, 28.5, 31, 70]))
async def test_any_tokens(tokenizer: Tokenizer, answers: Sequence[Sequence[int]], seconds: float) -> None:
    """Whisper may answer with any tokens: times that go back, that are behind the audio, or that have no text."""
    served = model((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",), tokenizer)

    def values(request: InferRequest, answer: Sequence[int]) -> dict[str, Any]:
        (prompt,) = (tensor.values for tensor in request.inputs if tensor.name == "DECODER_INPUT_IDS")
        return {"OUTPUT_IDS": [*map(int, prompt), *answer]}

    answering = Answering(answers, values)
    check(await transcribe(answering, served, sound(seconds), words=True), seconds)
    assert answering.requests <= 8 + 8 * seconds


@settings(max_examples=60)
@given(st.lists(PARTS, min_size=1, max_size=3), st.lists(PARTS, min_size=1, max_size=3))
async def test_any_segments_and_words(segments: Sequence[Any], words: Sequence[Any]) -> None:
    """So may a model that is described return any segments and words."""
    config = ModelConfig(
        name="m",
        inputs={"A": spec_of("A FP32 [-1]")},
        outputs={name: spec_of(f"{name} STRING [1]") for name in ("TEXT", "PARTS", "WORDS")},
    )
    mapping = TensorMapping(
        inputs={"audio": "A"},
        outputs={"text": "TEXT", "segments": "PARTS", "words": "WORDS"},
        audio=AudioFormat(sample_rate=RATE, max_seconds=30),
    )
    served = model(WAV, ("TRANSCRIPTS STRING [1]",), None)
    served.adapter = Transcriber.described(config, {}, mapping)

    def values(_: InferRequest, answer: tuple[Any, Any]) -> dict[str, Any]:
        parts, spoken = answer
        return {
            "TEXT": " ".join(text.strip() for _, _, text in parts),
            "PARTS": json.dumps([{"start": start, "end": end, "text": text} for start, end, text in parts]),
            "WORDS": json.dumps([{"start": start, "end": end, "word": text} for start, end, text in spoken]),
        }

    answers = [(parts, spoken) for parts in segments for spoken in words]
    check(await transcribe(Answering(answers, values), served, sound(70), words=True), 70)
