"""The audio formats of synthesized speech: their media types, rates and encoding costs. ``encode`` makes the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

Format = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]
#: The media types that OpenAI answers with.
MEDIA_TYPES: Mapping[Format, str] = {
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "flac": "audio/flac",
    "wav": "audio/wav",
    "pcm": "audio/pcm",
}
# Microseconds that a second of audio takes, at most, and to change its rate.
_COSTS: Mapping[Format, float] = {"mp3": 8_000, "opus": 20_000, "aac": 8_000, "flac": 1_000, "wav": 200, "pcm": 200}
_RESAMPLING = 2_000
# What a format can have, where it cannot have every rate. OpenAI's raw samples have no other.
_MPEG_RATES = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_RATES: Mapping[Format, Sequence[int]] = {
    "mp3": _MPEG_RATES,
    "aac": _MPEG_RATES,
    "opus": (8_000, 12_000, 16_000, 24_000, 48_000),
    "pcm": (24_000,),
}


def file_rate(kind: Format, rate: int) -> int:
    """Return the rate in Hz of a file of *kind* for samples of *rate* Hz: the lowest possible one that is not lower."""
    rates = _RATES.get(kind, (rate,))
    return next((candidate for candidate in rates if candidate >= rate), rates[-1])


def encoding_cost(kind: Format, rate: int, count: int) -> float:
    """Return about how many microseconds it takes to encode *count* samples of *rate* Hz."""
    return (_COSTS[kind] + (file_rate(kind, rate) != rate) * _RESAMPLING) * count / rate
