"""Transcripts of audio that is being spoken."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np

from tests.clock import Clock, turns
from tests.unit.answer.test_sequences import FakeTriton, upstream_to
from triton_openai.adapters.transcriber import Transcriber
from triton_openai.answer.live_transcription import LiveTranscription
from triton_openai.generation import AudioFormat, TensorMapping
from triton_openai.jobs import TranscriptionJob
from triton_openai.triton.tensors import InferRequest, InferResponse, JsonResponse, ModelConfig, TensorSpec

_RATE = 16_000
# The first part is longer, and a backend waits for two seconds.
_FIRST, _PART, _IDLE = 0.5, 0.5, 2.0


class Recognizer(FakeTriton):
    """Answers with the number of the words that it has heard: one in each part that is not silent."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[InferRequest] = []
        self.words: list[str] = []

    async def infer(self, request: InferRequest) -> InferResponse:
        """Hear a part."""
        self.parts.append(request)
        samples = np.frombuffer(cast(Any, request.inputs[0].values), "<f4")
        if samples.any():
            self.words.append(f"word{len(self.words)}")
        return JsonResponse({"TEXT": " ".join(self.words)})


class Model:
    """A served model, as far as it is asked."""

    def __init__(self) -> None:
        config = ModelConfig(
            name="m",
            sequences=True,
            sequence_idle=_IDLE,
            inputs={"AUDIO": TensorSpec(name="AUDIO", datatype="FP32", dims=(-1,))},
            outputs={"TEXT": TensorSpec(name="TEXT", datatype="BYTES", dims=(1,))},
        )
        mapping = TensorMapping(
            inputs={"audio": "AUDIO"}, outputs={"text": "TEXT"}, audio=AudioFormat(part_seconds=_PART)
        )
        self.adapter = Transcriber.described(config, {}, mapping)


def spoken(seconds: float) -> bytes:
    """Return speech."""
    return np.ones(int(seconds * _RATE), "<f4").tobytes()


def begun(recognizer: Recognizer) -> tuple[LiveTranscription, list[str], asyncio.Task[None]]:
    """Return a transcription, the pieces of its text so far, and what collects them."""
    job = TranscriptionJob(id="j", samples=b"")
    transcription = LiveTranscription(cast(Any, Model()), job)
    pieces: list[str] = []

    async def collect() -> None:
        async for piece in transcription.deltas(upstream_to(recognizer)):
            pieces.append(piece)  # noqa: PERF401 - the list grows as they come

    return transcription, pieces, asyncio.ensure_future(collect())


async def test_the_text_while_it_is_spoken() -> None:
    """A word is said when the next answer agrees on it, and the rest at the end."""
    recognizer = Recognizer()
    transcription, pieces, collecting = begun(recognizer)
    for _ in range(3):
        await transcription.feed(spoken(_PART))
        await turns(20)
    assert ["word0", " word1"] == pieces
    transcription.finish(spoken(0.1))
    await collecting
    assert "word0 word1 word2 word3" == transcription.text == "".join(pieces)
    assert [True, False, False, False] == [part.parameters["sequence_start"] for part in recognizer.parts]
    assert [False, False, False, True] == [part.parameters["sequence_end"] for part in recognizer.parts]
    sizes = {len(cast(Any, part.inputs[0].values)) for part in recognizer.parts}
    assert {int(_PART * _RATE) * 4} == sizes


async def test_a_pause_of_the_audio(clock: Clock) -> None:
    """Before the backend forgets the sequence it gets silence, as often as that takes; then the audio goes on."""
    recognizer = Recognizer()
    transcription, _, collecting = begun(recognizer)
    await transcription.feed(spoken(0.7))
    await turns(20)
    assert 1 == len(recognizer.parts)
    for expected in (2, 3):
        await clock.elapse(_IDLE * 0.7)
        await turns(20)
        assert expected - 1 == len(recognizer.parts)
        await clock.elapse(_IDLE * 0.2)
        await turns(20)
        assert expected == len(recognizer.parts)
    transcription.finish(spoken(0.5))
    await collecting
    # The second part has the rest of the audio, and the third one is silent.
    assert "word0 word1 word2" == transcription.text
    assert 5 == len(recognizer.parts)


async def test_a_turn_without_audio() -> None:
    """It is one silent part."""
    recognizer = Recognizer()
    transcription, pieces, collecting = begun(recognizer)
    transcription.finish(b"")
    await collecting
    assert ("", []) == (transcription.text, pieces)
    assert [(True, True)] == [
        (part.parameters["sequence_start"], part.parameters["sequence_end"]) for part in recognizer.parts
    ]


async def test_a_transcription_that_ends_early() -> None:
    """What feeds it does not wait for answers that nobody wants."""
    recognizer = Recognizer()
    transcription, _, collecting = begun(recognizer)
    await transcription.feed(spoken(_PART))
    await turns(20)
    collecting.cancel()
    await asyncio.gather(collecting, return_exceptions=True)
    async with asyncio.timeout(120):
        await transcription.feed(spoken(100 * _PART))
    transcription.finish(b"")
