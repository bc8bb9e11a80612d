"""Whisper's tokens: the prompt of its decoder, and what its answers say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.speech import WORDS, write_whisper_tokenizer
from triton_openai.errors import ConfigurationError
from triton_openai.prompts.tokenizer import Tokenizer
from triton_openai.prompts.whisper import WhisperTokens

END, FIRST = 50_257, 50_364


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> WhisperTokens:
    """The tokens of the vocabulary for 99 languages."""
    return WhisperTokens(Tokenizer.load(str(write_whisper_tokenizer(tmp_path_factory.mktemp("whisper") / "tokenizer"))))


async def test_prompts(tokens: WhisperTokens) -> None:
    """A prompt has what precedes, the start, the language, the task, and whether times are wanted."""
    for arguments, expected in (
        ((None, False, False, None), [50_258]),
        (("en", False, False, None), [50_258, 50_259, 50_359, 50_363]),
        (("de", True, True, None), [50_258, 50_261, 50_358]),
        (("su", False, True, "never"), [50_361, 0, 50_258, 50_357, 50_359]),
    ):
        language, translate, times, before = arguments
        assert expected == await tokens.prompt(language, translate=translate, times=times, before=before)
    long = await tokens.prompt("en", translate=False, times=True, before="never again " * 300)
    assert (50_361, 223) == (long[0], long.index(50_258) - 1)
    assert "yue" not in tokens.languages


def test_languages(tokens: WhisperTokens) -> None:
    """The first id of an answer is the language, if it is one."""
    assert ("de", None, None) == (tokens.language([50_261, 5]), tokens.language([5]), tokens.language([]))


def test_answers(tokens: WhisperTokens) -> None:
    """Text is what is no special token; times bound segments, and do not run backwards or beyond the audio."""
    never, again = WORDS.index("never"), WORDS.index("again")
    cases: Sequence[tuple[list[int], str, list[tuple[float, float, str]]]] = (
        ([never, again, END, END, never], "never again", [(0, 5, "never again")]),
        ([FIRST + 25, never, FIRST + 50, FIRST + 50, again, FIRST + 100], "never again",
         [(0.5, 1, "never"), (1, 2, "again")]),
        ([FIRST, never, FIRST + 50, FIRST + 60, again, END], "never again", [(0, 1, "never"), (1.2, 5, "again")]),
        ([FIRST + 1500, never, FIRST + 10, again], "never again", [(5, 5, "never"), (5, 5, "again")]),
        ([50_259, 50_359, never, 50_362], "never", [(0, 5, "never")]),
        ([], "", []),
        ([END], "", []),
    )  # fmt: skip
    for ids, text, segments in cases:
        found, parts = tokens.read(ids, 5.0)
        assert (text, segments) == (found, [(round(one.start, 2), round(one.end, 2), one.text) for one in parts]), ids


def test_another_tokenizer(tmp_path: Path) -> None:
    """A tokenizer that is not Whisper's is the operator's mistake, and named."""
    source = Path(__file__).parents[3] / "triton_openai" / "demo" / "tokenizer"
    with pytest.raises(ConfigurationError, match=r"startoftranscript.*--tokenizer"):
        WhisperTokens(Tokenizer.load(str(source)))
