"""
Places the words of a text in the sound that it was heard in.

Recognizers say when a sentence is spoken, not when each of its words is. Between two pauses, words follow each other,
and a word takes about as long as it has letters: so the words are shared among the parts of the sound between its
pauses, as their lengths fit best. It is an estimate, of about a tenth of a second where there are pauses.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from triton_openai.jobs import Word
from triton_openai.languages import UNSPACED

# Letters of a language without blanks are words of their own, with the marks that follow.
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")
_LETTER = re.compile(r"\w")
# Seconds of a frame that is either sound or not, and of a pause that divides parts.
_FRAME = 0.02
_PAUSE = 0.06
# A frame is silent below this share of the loudest tenth, and below -60 dBFS.
_SHARE = 0.1
_SILENCE = 0.001
# The most parts of a text, and how many words before and behind the one where a part is expected to end are tried: time
# grows with the parts and with the square of the words. It is 30 ms at most. A part ends at most as many words from
# where it is expected as there are parts, so these are no more.
_MAX_PARTS = 40
_TRIED = 40


def words_of(text: str) -> Sequence[str]:
    """Return the words of *text*."""
    words: list[str] = []
    for word in _WORD.findall(text):
        if words and not _LETTER.search(word):
            words[-1] += word
        else:
            words.append(word)
    return words


def align(text: str, samples: bytes, rate: int, start: float = 0.0) -> Sequence[Word]:
    """
    Return the words of *text* with their times, which are spoken in *samples* (little-endian FP32) of *rate* Hz.

    *start* is when the samples begin, in seconds. It costs about 10 microseconds for each second and 30 ms at most.
    """
    import numpy as np

    words = words_of(text)
    parts = _parts(np.frombuffer(samples, "<f4"), rate, len(words))
    weights = [_weight(word) for word in words]
    times: list[Word] = []
    first = 0
    for (begin, end), last in zip(parts, _shares(weights, [end - begin for begin, end in parts]), strict=True):
        position = begin
        unit = (end - begin) / sum(weights[first:last])
        for number in range(first, last):
            stop = position + unit * weights[number]
            times.append(Word(start=start + position, end=start + stop, text=words[number]))
            position = stop
        first = last
    return times


def _weight(word: str) -> float:
    """Return how long *word* takes, compared to others."""
    return 1.0 + len(_LETTER.findall(word))


def _parts(samples: Any, rate: int, count: int) -> list[tuple[float, float]]:
    """Return where the sound between pauses begins and ends, in seconds: at most *count* parts, none without words."""
    import numpy as np

    if count == 0:
        return []
    size = int(_FRAME * rate)
    frames = samples[: len(samples) // size * size].reshape(-1, size)
    whole = [(0.0, len(samples) / rate)]
    if not len(frames):
        return whole
    levels = np.sqrt(np.einsum("ij,ij->i", frames, frames) / size)
    level = max(_SILENCE, _SHARE * float(np.quantile(levels, 0.9)))
    loud = np.flatnonzero(levels >= level)
    if not len(loud):
        return whole
    gaps = np.flatnonzero(np.diff(loud) * _FRAME > _PAUSE)
    # The longest pauses divide the sound, if there are more than words.
    longest = np.argsort(np.diff(loud)[gaps], kind="stable")[::-1][: min(count, _MAX_PARTS) - 1]
    gaps = np.sort(gaps[longest])
    begins = [loud[0], *loud[gaps + 1]]
    ends = [*loud[gaps], loud[-1]]
    return [(float(begin) * _FRAME, float(end + 1) * _FRAME) for begin, end in zip(begins, ends, strict=True)]


def _shares(weights: Sequence[float], lengths: Sequence[float]) -> Sequence[int]:
    """
    Return up to which word each part reaches, so that the words' *weights* fit the *lengths* of the parts best.

    Each part has a word at least. The cost of a part is the square of what its words lack or have too much. A model may
    write thousands of words for a short sound, so only ends near those that are expected by the lengths are tried.
    """
    if not lengths:
        return []
    totals = [0.0]
    for weight in weights:
        totals.append(totals[-1] + weight)
    # A sound without samples has one part of no length.
    unit = (sum(lengths) or 1.0) / totals[-1]
    count = len(weights)
    # For each number of words: the least cost of the parts so far, and where the last part began.
    costs = [0.0] + [float("inf")] * count
    steps: list[list[int]] = []
    tried = range(1)
    passed = 0.0
    for number, length in enumerate(lengths):
        rest = len(lengths) - number - 1
        passed += length
        expected = bisect_left(totals, passed / unit)
        earlier = tried
        tried = range(max(number + 1, expected - _TRIED), min(count - rest, expected + _TRIED) + 1)
        if not rest:
            tried = range(count, count + 1)
        best = [float("inf")] * (count + 1)
        begins = [0] * (count + 1)
        for end in tried:
            for begin in range(earlier.start, min(earlier.stop, end)):
                cost = costs[begin] + (length - unit * (totals[end] - totals[begin])) ** 2
                if cost < best[end]:
                    best[end] = cost
                    begins[end] = begin
        costs = best
        steps.append(begins)
    ends = []
    end = count
    for begins in reversed(steps):
        ends.append(end)
        end = begins[end]
    return ends[::-1]
