"""Audio without a container."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from tests.cases import every_case
from triton_openai.media.pcm import Resampler, as_floats, decode_g711, wav_of


@every_case(
    "law, data, samples",
    [
        # ITU-T G.711, tables 1a to 2b, on a scale of 16 bits.
        ("ULAW", b"\xff\x7f", [0, 0]),
        ("ULAW", b"\x80\x00", [32124, -32124]),
        ("ULAW", b"\xfe\x7e", [8, -8]),
        ("ALAW", b"\xd5\x55", [8, -8]),
        ("ALAW", b"\xaa\x2a", [32256, -32256]),
        ("ALAW", b"", []),
    ],
)
def test_g711(law: str, data: bytes, samples: list[int]) -> None:
    """Each byte is a sample."""
    decoded = decode_g711(data, "ULAW" if law == "ULAW" else "ALAW")
    assert samples == np.frombuffer(decoded, "<i2").tolist()


def test_a_file() -> None:
    """It has the samples and the rate."""
    pcm = np.arange(-5, 5, dtype="<i2").tobytes()
    samples, rate = soundfile.read(io.BytesIO(wav_of(bytearray(pcm), 24_000)), dtype="int16")
    assert (24_000, pcm) == (rate, samples.tobytes())


@pytest.mark.parametrize("rate", [8_000, 16_000, 24_000, 44_100])
def test_changing_the_rate(rate: int) -> None:
    """However the audio is cut, nothing is lost at the seams and at the end."""
    tone = (10_000 * np.sin(np.arange(rate) * 2 * np.pi * 440 / rate)).astype("<i2").tobytes()
    whole = Resampler(rate, 16_000).feed(tone, last=True)
    resampler = Resampler(rate, 16_000)
    pieces = [resampler.feed(tone[start : start + 642]) for start in range(0, len(tone), 642)]
    cut = b"".join([*pieces, resampler.feed(b"", last=True)])
    assert abs(len(whole) // 4 - 16_000) <= 1
    assert np.allclose(np.frombuffer(whole, "<f4"), np.frombuffer(cut, "<f4"), atol=1e-4)
    assert as_floats(tone).max() == pytest.approx(10_000 / 32_768, abs=1e-3)
