"""
Speech of tones: each word of a small vocabulary is a tone of its own, which nobody mistakes for another one.

So tests know every word of a recording, and when it is spoken, whatever was done to the samples on their way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WORDS = (
    "never", "tried", "ever", "failed", "no", "matter", "try", "again", "better", "hallo", "welt", "guten", "morgen",
    "fail",
)  # fmt: skip
RATE = 16_000
#: Seconds of a word, and of the silence behind it.
SPOKEN, PAUSE = 0.4, 0.1
_LOWEST, _STEP, _LOUDNESS = 400.0, 150.0, 0.3
# Seconds of a frame that is either loud or not.
_FRAME = 0.02
_LEAST_LOUD, _LEAST_FRAMES = 0.02, 3


def speak(words: Sequence[str], *, rate: int = RATE, pause: float = PAUSE) -> np.ndarray:
    """Return the samples of *words*, each with a *pause* behind it."""
    time = np.arange(int(SPOKEN * rate)) / rate
    silence = np.zeros(int(pause * rate))
    parts = [
        part
        for word in words
        for part in (_LOUDNESS * np.sin(2 * np.pi * (_LOWEST + _STEP * WORDS.index(word)) * time), silence)
    ]
    return np.concatenate(parts or [silence]).astype(np.float32)


def hear(samples: np.ndarray, rate: int = RATE) -> list[tuple[float, float, str]]:
    """Return the words in *samples*, with the seconds in which each begins and ends."""
    size = int(_FRAME * rate)
    frames = samples[: len(samples) // size * size].reshape(-1, size).astype(np.float64)
    loud = np.append(np.sqrt(np.square(frames).mean(axis=1)) > _LEAST_LOUD, False)
    heard, first = [], None
    for number, now in enumerate(loud.tolist()):
        if now and first is None:
            first = number
        elif not now and first is not None:
            if number - first >= _LEAST_FRAMES:
                tone = frames[first:number].reshape(-1)
                peak = np.argmax(np.abs(np.fft.rfft(tone))) * rate / len(tone)
                word = WORDS[min(max(round((peak - _LOWEST) / _STEP), 0), len(WORDS) - 1)]
                heard.append((first * _FRAME, number * _FRAME, word))
            first = None
    return heard
