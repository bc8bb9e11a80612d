"""
Measures of what a recognizer writes: whether it repeats itself, and whether it can be spoken in the time.

Whisper may write the same words again and again where it hears no others. Source of the measure of repetition:
openai/whisper (``transcribe.py``), which tries again if a text is compressed by more than 2.4.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import TypeVar

from triton_openai.languages import UNSPACED

_MAX_RATIO = 2.4
# How often a text repeats a part that is taken for a loop, and the longest such part.
_MIN_REPEATS = 4
_MAX_PERIOD = 40
# Words a second that nobody speaks. A character of a script without blanks counts as one.
_MAX_WORDS_A_SECOND = 8.0
# Letters of a second of speech: people speak about 15, and in recordings of five languages 9 at least. A digit is
# spoken as a word, and a character of a script without blanks as a syllable.
_MIN_LETTERS_A_SECOND = 7.0
_LETTERS_OF_DIGIT = 6
_LETTERS_OF_SYLLABLE = 3
_SYLLABLE = re.compile(rf"[{UNSPACED}]")
_WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")
# What is kept or left out as a whole: words, blanks, and marks.
_PIECE = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+|\s+|[^\w\s]")

_Item = TypeVar("_Item")


def compression_ratio(text: str) -> float:
    """Return by how much *text* can be compressed; 0 for an empty one."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


def repeats_itself(text: str) -> bool:
    """Return whether *text* can be compressed by so much that a part of it may be there too often."""
    return compression_ratio(text) > _MAX_RATIO


def word_rate(text: str, seconds: float) -> float:
    """Return how many words a second *text* has, which is spoken in so many *seconds*."""
    return len(_WORD.findall(text)) / seconds


def is_too_fast(text: str, seconds: float) -> bool:
    """Return whether nobody can speak *text* in so many *seconds*."""
    return word_rate(text, seconds) > _MAX_WORDS_A_SECOND


def spoken_letters(text: str) -> int:
    """Return how long *text* is when it is spoken, in letters."""
    letters = sum(1 for character in text if character.isalpha())
    digits = sum(1 for character in text if character.isdigit())
    syllables = len(_SYLLABLE.findall(text))
    return letters + _LETTERS_OF_DIGIT * digits + (_LETTERS_OF_SYLLABLE - 1) * syllables


def is_too_slow(text: str, seconds: float) -> bool:
    """Return whether *text* lacks words of so many *seconds* of speech without pauses."""
    return spoken_letters(text) < _MIN_LETTERS_A_SECOND * seconds


def without_loop(items: Sequence[_Item]) -> Sequence[_Item]:
    """Return *items* without the repetitions that end them; the first occurrence stays."""
    longest = 0
    for period in range(1, min(_MAX_PERIOD, len(items) // _MIN_REPEATS) + 1):
        same = 0
        while same < len(items) - period and items[-1 - same] == items[-1 - same - period]:
            same += 1
        if same >= (_MIN_REPEATS - 1) * period and same > longest:
            longest = same
    return items[: len(items) - longest]


def text_without_loop(text: str) -> str:
    """Return *text* without the repetitions of words that end it."""
    return "".join(without_loop(_PIECE.findall(text))).strip()
