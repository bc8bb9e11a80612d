"""Words are placed in the sound between pauses."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.speech import RATE, WORDS, hear, speak
from triton_openai.media.alignment import align, words_of


@every_case(
    "text, expected",
    [
        ("Never tried.", ["Never", "tried."]),
        ("Oh \u2014 no !", ["Oh\u2014", "no!"]),
        ("\u4f60\u597d\uff0cTriton 2", ["\u4f60", "\u597d\uff0c", "Triton", "2"]),
        ("don't", ["don't"]),
        ("... well", ["...", "well"]),
        ("", []),
    ],
)
def test_words(text: str, expected: Sequence[str]) -> None:
    """A word has the marks that follow it; of languages without blanks, each letter is one."""
    assert expected == words_of(text)


@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=12),
    st.lists(st.sampled_from((0.1, 0.2, 0.9)), min_size=12, max_size=12),
)
def test_words_with_pauses(words: list[str], pauses: list[float]) -> None:
    """Where there is a pause behind each word, the times are those of the sound."""
    parts = [speak((word,), pause=pause) for word, pause in zip(words, pauses, strict=False)]
    samples = np.concatenate(parts)
    found = align(" ".join(words), samples.tobytes(), RATE, start=2.0)
    assert words == [word.text for word in found]
    for word, (start, end, _) in zip(found, hear(samples), strict=True):
        assert pytest.approx((start, end), abs=0.021) == (word.start - 2, word.end - 2)


def test_words_that_follow_each_other() -> None:
    """Without a pause between them, words share the sound by their letters; no part is left without a word."""
    rng = np.random.default_rng(1)
    lengths = [[("triton", 0.6), ("is", 0.3)], [("a", 0.2), ("server", 0.7), ("that", 0.4), ("answers", 0.8)]]
    samples, expected, place = [], [], 0.0
    for part in lengths:
        for word, seconds in part:
            samples.append(rng.normal(0, 0.2, int(seconds * RATE)))
            expected.append((word, place, place + seconds))
            place += seconds
        samples.append(np.zeros(RATE // 2))
        place += 0.5
    found = align(" ".join(word for word, _, _ in expected), np.concatenate(samples).astype("<f4").tobytes(), RATE)
    assert [word for word, _, _ in expected] == [each.text for each in found]
    for each, (_, start, end) in zip(found, expected, strict=True):
        assert pytest.approx((start, end), abs=0.2) == (each.start, each.end)


@given(
    st.lists(st.floats(-1, 1, width=32), max_size=4000),
    st.text(st.sampled_from("ab \u4f60."), max_size=40),
)
def test_any_sound(samples: list[float], text: str) -> None:
    """Whatever the sound is, every word has a place in it, and they are in their order."""
    found = align(text, np.array(samples, "<f4").tobytes(), RATE)
    assert [word.text for word in found] == list(words_of(text))
    times = [time for word in found for time in (word.start, word.end)]
    assert times == sorted(times)
    assert all(0 <= time <= len(samples) / RATE + 0.02 for time in times)


#: Half a minute, in which one can say 150 words.
HALF_A_MINUTE = np.concatenate([speak(("no",), pause=0.1)] * 60).tobytes()


def cost_of(count: int) -> float:
    """Return the CPU time that *count* words take; other programs on the machine only make it longer."""
    spent = []
    for _ in range(3):
        before = time.thread_time()
        align("no " * count, HALF_A_MINUTE, RATE)
        spent.append(time.thread_time() - before)
    return min(spent)


def test_what_it_costs() -> None:
    """A model that repeats itself takes hardly longer than one that says as many words as one can say."""
    usual = cost_of(150)
    assert usual < 3
    # 20 times as many words take three times as long; each pair of them would take 400 times as long.
    assert cost_of(3000) < 20 * usual


@every_case("count", [40, 41, 500, 3000])
def test_more_words_than_one_can_say(count: int) -> None:
    """Every word has its place."""
    found = align("no " * count, HALF_A_MINUTE, RATE)
    assert count == len(found)
    assert [word.start for word in found] == sorted(word.start for word in found)
