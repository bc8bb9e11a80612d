"""Recordings for tests, in files of every format, and Whisper's tokens for the words in them."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from triton_openai.languages import LANGUAGES

# Code of the stand-ins, which is written for the Python that Triton runs.
_tones: Any = importlib.import_module("tests.standins.models.tones")
WORDS: Sequence[str] = _tones.WORDS
RATE: int = _tones.RATE
speak, hear = _tones.speak, _tones.hear
SENTENCE = ("never", "tried", "ever", "failed", "no", "matter")
# The first three formants of vowels, each with its frequency and its width in Hz (Peterson and Barney, 1952).
_FORMANTS = {
    "a": ((730, 90), (1090, 110), (2440, 170)),
    "i": ((270, 60), (2290, 150), (3010, 200)),
    "o": ((570, 80), (840, 100), (2410, 170)),
    "u": ((300, 60), (870, 100), (2240, 170)),
}


def say_vowels(vowels: str, *, seconds: float = 0.15, pitch: float = 120) -> Any:
    """Return the samples of *vowels* without a pause: harmonics of a *pitch* in Hz, which Silero takes for speech."""
    time = np.arange(int(seconds * RATE)) / RATE
    wave = 2 * np.pi * np.cumsum(pitch * (1 + 0.05 * np.sin(2 * np.pi * 3 * time))) / RATE
    envelope = np.minimum(1, np.minimum(time / 0.03, (seconds - time) / 0.05))
    parts = []
    for vowel in vowels:
        sound = np.zeros_like(time)
        for number in range(1, 30):
            powers = [
                (width / 2) ** 2 / ((number * pitch - center) ** 2 + (width / 2) ** 2)
                for center, width in _FORMANTS[vowel]
            ]
            sound += sum(powers) ** 0.5 * np.sin(number * wave)
        parts.append(0.3 * envelope * sound / np.abs(sound).max())
    return np.concatenate(parts).astype(np.float32)


def wav(samples: Any, rate: int = RATE, subtype: str = "PCM_16") -> bytes:
    """Return a WAV file with *samples*."""
    return encoded(samples, rate, "WAV", subtype)


def encoded(samples: Any, rate: int, container: str, subtype: str | None = None) -> bytes:
    """Return a file of libsndfile's."""
    target = io.BytesIO()
    soundfile.write(target, samples, rate, format=container, subtype=subtype)
    return target.getvalue()


def muxed(
    samples: Any,
    rate: int,
    container: str,
    codec: str,
    *,
    video: bool = False,
    audio: bool = True,
    encoder: Mapping[str, str] | None = None,
    **options: str,
) -> bytes:
    """
    Return a file of FFmpeg's, with a *video* if asked for one.

    It has *options* of its container, and *encoder* those of the codec of audio.
    """
    target = io.BytesIO()
    with av.open(target, "w", format=container, options=options) as file:
        streams: list[Any] = []
        if audio:
            streams.append(file.add_stream(codec, rate=rate, layout="mono", options=dict(encoder or {})))
        if video:
            pictures: Any = file.add_stream("mpeg2video" if container == "mpeg" else "mpeg4", rate=25)
            pictures.width = pictures.height = 64
            pictures.pix_fmt = "yuv420p"
            for _ in range(5):
                file.mux(pictures.encode(av.VideoFrame(64, 64, "yuv420p")))
            streams.append(pictures)
        if audio:
            frame = av.AudioFrame.from_ndarray(np.asarray(samples, np.float32)[None, :], format="fltp", layout="mono")
            frame.sample_rate = rate
            frame.pts = 0
            frame.time_base = Fraction(1, rate)
            file.mux(streams[0].encode(frame))
        for stream in streams:
            file.mux(stream.encode())
    return target.getvalue()


def write_whisper_tokenizer(folder: Path) -> Path:
    """Write a tokenizer with Whisper's special tokens for 99 languages, and the words of the tones as its texts."""
    special = [
        "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in [*LANGUAGES][:99]), "<|translate|>",
        "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
        *(f"<|{number * 0.02:.2f}|>" for number in range(1501)),
    ]  # fmt: skip
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    vocabulary["<unk>"] = 50_256
    vocabulary |= {token: 50_257 + number for number, token in enumerate(special)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(token) for token in special])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder
