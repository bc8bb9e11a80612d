"""No word of a recording is lost or written twice, wherever a window ends and however the model's answer is cut."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hearing import Whisper, model, record, transcribe, words_in
from tests.speech import WORDS, write_whisper_tokenizer
from triton_openai.answer.transcription import Transcription
from triton_openai.prompts.tokenizer import Tokenizer

WAV = ("WAV FP32 [-1]", "WAV_LENS INT32 [1]")
TEXT = ("TRANSCRIPTS STRING [1]",)
# A word, and the hundredths of a second that it and the pause behind it last.
SPOKEN = st.lists(
    st.tuples(st.sampled_from(WORDS), st.integers(10, 300), st.integers(4, 200)), min_size=1, max_size=60
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Whisper's special tokens, and the words."""
    return Tokenizer.load(str(write_whisper_tokenizer(tmp_path_factory.mktemp("whisper") / "tokenizer")))


def engine(tokenizer: Tokenizer) -> Any:
    """Return a model that takes and gives token ids."""
    return model((*WAV, "DECODER_INPUT_IDS INT32 [-1]"), ("OUTPUT_IDS INT32 [-1]",), tokenizer)


def said(transcription: Transcription) -> list[str]:
    """Return the words of the segments, which are those of the text."""
    words = [word for segment in transcription.segments for word in segment.text.split()]
    assert words == transcription.text.split()
    return words


@settings(max_examples=40)
@given(SPOKEN, st.sampled_from([224, 96, 12]))
async def test_words_and_times(tokenizer: Tokenizer, spoken: Sequence[tuple[str, int, int]], max_tokens: int) -> None:
    """Each window begins where the last answer ended: each word is there once, at its time."""
    samples = record(spoken)
    found = await transcribe(Whisper(max_tokens=max_tokens), engine(tokenizer), samples)
    assert [word for word, _, _ in spoken] == said(found)
    expected = words_in(samples)
    for segment, (begin, end, word) in zip(found.segments, expected, strict=True):
        assert word == segment.text
        assert begin == pytest.approx(segment.start, abs=0.03)
        assert end == pytest.approx(segment.end, abs=0.03)
    assert all(before.end <= after.start + 0.03 for before, after in pairwise(found.segments))


@settings(max_examples=20)
@given(SPOKEN)
async def test_models_of_text(spoken: Sequence[tuple[str, int, int]]) -> None:
    """Nor do models lose a word whose answers have neither times nor an end."""
    for inputs in ((*WAV, "TEXT_PREFIX STRING [1]"), WAV):
        found = await transcribe(Whisper(), model(inputs, TEXT, None), record(spoken))
        assert [word for word, _, _ in spoken] == said(found)


async def test_loops(tokenizer: Tokenizer) -> None:
    """A model that repeats a word to its limit is asked for less at once, and all words are there once."""
    words = [WORDS[number * 5 % 13] for number in range(100)]
    whisper = Whisper(max_sound_seconds=12)
    samples = record([(word, 40, 20) for word in words])
    found = await transcribe(whisper, engine(tokenizer), samples)
    assert words == said(found)
    # 60 seconds: two of 30, and parts of them.
    assert whisper.requests <= 14


async def test_loops_without_end(tokenizer: Tokenizer) -> None:
    """What repeats itself however short the audio is, is written once."""
    samples = record([("never", 100, 50), ("again", 100, 50)])
    found = await transcribe(Whisper(max_sound_seconds=0), engine(tokenizer), samples)
    assert said(found) in (["never", "again"], ["never", "again", "again"])


async def test_words_that_somebody_repeats(tokenizer: Tokenizer) -> None:
    """They are no loop, however often they are said."""
    words = ["no"] * 110
    found = await transcribe(Whisper(), engine(tokenizer), record([("no", 30, 20)] * 110))
    assert words == said(found)
    for inputs in ((*WAV, "TEXT_PREFIX STRING [1]"), WAV):
        found = await transcribe(Whisper(), model(inputs, TEXT, None), record([("no", 30, 20)] * 110))
        assert words == said(found)


async def test_words_that_are_passed_over(tokenizer: Tokenizer) -> None:
    """An answer with too few words for so much speech is not taken: the model is asked for less at once."""
    words = [WORDS[number * 5 % 13] for number in range(100)]
    samples = record([(word, 40, 20) for word in words])
    for served in (engine(tokenizer), model((*WAV, "TEXT_PREFIX STRING [1]"), TEXT, None)):
        whisper = Whisper(max_heard_seconds=16)
        assert words == said(await transcribe(whisper, served, samples))
        # 60 seconds: three of 20 or two of 30, and their halves.
        assert whisper.requests <= 12


async def test_somebody_who_speaks_slowly(tokenizer: Tokenizer) -> None:
    """Few words in much speech are taken where less audio has no more of them, which is asked for once."""
    words = [WORDS[number * 5 % 13] for number in range(40)]
    whisper = Whisper()
    assert words == said(await transcribe(whisper, engine(tokenizer), record([(word, 200, 20) for word in words])))
    # 88 seconds, of which each window leaves three for the next one.
    assert whisper.requests <= 6


async def test_windows_are_as_long_as_they_can_be(tokenizer: Tokenizer) -> None:
    """An hour takes hardly more requests than its windows, and silence takes none."""
    words = [("never", 40, 60), ("tried", 80, 20)] * 300
    whisper = Whisper()
    await transcribe(whisper, engine(tokenizer), record(words))
    # A half of the first window is asked for again, because the words repeat themselves.
    assert 20 <= whisper.requests <= 30
    assert sum(whisper.seconds) < 800
    silent = Whisper()
    await transcribe(silent, engine(tokenizer), record([("no", 10, 100_00)]))
    assert 1 == silent.requests
