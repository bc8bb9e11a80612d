"""Whisper's tokens: the prompt of its decoder, and what its answers say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cases import every_case
from tests.speech import WORDS, write_whisper_tokenizer
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.whisper import WhisperTokens

END, FIRST = 50_257, 50_364
NEVER, AGAIN = WORDS.index("never"), WORDS.index("again")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> WhisperTokens:
    """The tokens of the vocabulary for 99 languages."""
    return WhisperTokens(Tokenizer.load(str(write_whisper_tokenizer(tmp_path_factory.mktemp("whisper") / "tokenizer"))))


async def test_prompts(tokens: WhisperTokens) -> None:
    """A prompt has what precedes, the start, the language and the task. It never excludes times."""
    for arguments, expected in (
        ((None, False, None), [50_258]),
        (("en", False, None), [50_258, 50_259, 50_359]),
        (("de", True, None), [50_258, 50_261, 50_358]),
        (("su", False, "never"), [50_361, 0, 50_258, 50_357, 50_359]),
    ):
        language, translate, before = arguments
        assert expected == await tokens.prompt(language, translate=translate, before=before)
    long = await tokens.prompt("en", translate=False, before="never again " * 300)
    assert (50_361, 223) == (long[0], long.index(50_258) - 1)
    assert "yue" not in tokens.languages


def test_languages(tokens: WhisperTokens) -> None:
    """The first id of an answer is the language, if it is one."""
    assert ("de", None, None) == (tokens.language([50_261, 5]), tokens.language([5]), tokens.language([]))


@every_case(
    "ids, seconds, complete, segments",
    [
        ([NEVER, AGAIN, END, END, NEVER], 5, True, [(0, 5, "never again")]),
        ([FIRST + 25, NEVER, FIRST + 50, FIRST + 50, AGAIN, FIRST + 100, END], 5, True,
         [(0.5, 1, "never"), (1, 2, "again")]),
        # Two times at the end: speech goes on there.
        ([FIRST + 25, NEVER, FIRST + 50, FIRST + 50, END], 1, True, [(0.5, 1, "never")]),
        ([FIRST, NEVER, FIRST + 50, FIRST + 50, AGAIN, FIRST + 100, FIRST + 110, END], 2, True,
         [(0, 1, "never"), (1, 2, "again")]),
        # What has no time at its end is heard again, but only if it has not begun where the whole window does.
        ([FIRST, NEVER, FIRST + 50, FIRST + 60, AGAIN, END], 1, True, [(0, 1, "never")]),
        ([FIRST, NEVER, AGAIN, END], 5, True, [(0, 5, "never again")]),
        ([FIRST, NEVER, FIRST + 50, AGAIN, END], 5, True, [(0, 1, "never"), (1, 5, "again")]),
        # An answer without an end was cut.
        ([FIRST, NEVER, FIRST + 50, FIRST + 50, AGAIN], 1, True, [(0, 1, "never")]),
        ([FIRST, NEVER, FIRST + 50], 1, True, [(0, 1, "never")]),
        ([FIRST, NEVER, AGAIN], 5, False, [(0, 5, "never again")]),
        ([NEVER, AGAIN], 5, False, [(0, 5, "never again")]),
        # Times do not run backwards or beyond the audio, and none is at the beginning twice.
        ([FIRST + 1500, NEVER, FIRST + 10, AGAIN, END], 5, True, [(5, 5, "never"), (5, 5, "again")]),
        ([FIRST, NEVER, FIRST, FIRST, AGAIN, END], 5, True, [(0, 0, "never"), (0, 5, "again")]),
        ([50_259, 50_359, NEVER, 50_362, END], 5, True, [(0, 5, "never")]),
        ([FIRST, END], 5, True, []),
        ([FIRST], 5, False, []),
        ([], 5, True, []),
        ([END], 5, True, []),
    ],
)  # fmt: skip
def test_answers(
    tokens: WhisperTokens, ids: list[int], seconds: float, complete: bool, segments: Sequence[tuple[float, float, str]]
) -> None:
    """Times bound segments, and say up to where the audio was heard."""
    hearing = tokens.read(ids, 5.0)
    found = [(round(segment.start, 2), round(segment.end, 2), segment.text) for segment in hearing.segments]
    assert segments == found
    assert " ".join(text for _, _, text in segments) == hearing.text
    assert (seconds, complete) == (hearing.seconds, hearing.complete)


def test_another_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that is not Whisper's is the operator's mistake, and named."""
    source = Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"
    with pytest.raises(ConfigurationError, match=r"startoftranscript.*--tokenizer"):
        WhisperTokens(Tokenizer.load(str(source)))
