"""Samples as models take them: numbers of 16 bits, and WAV files of those."""

from __future__ import annotations

import io
import wave
from typing import Any

_LOUDEST_PCM = 32_767


def pcm(samples: Any) -> Any:
    """Return samples of 16 bits; what is louder than they can be is as loud as they can."""
    return (samples.clip(-1, 1) * _LOUDEST_PCM).round().astype("<i2")


def wav_file(samples: Any, rate: int) -> bytes:
    """Return a WAV file with *samples*, an array from -1 to 1, of which a second has *rate*."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(pcm(samples).tobytes())
    return target.getvalue()
