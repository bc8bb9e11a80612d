"""Audio without a container: samples of 16 bits and G.711, as telephones and realtime clients send them."""

from __future__ import annotations

import io
import wave
from functools import cache
from typing import Any, Literal

#: The bytes of a sample.
SAMPLE_SIZE = 2
_SCALE = 32_768


@cache
def _table(law: Literal["ULAW", "ALAW"]) -> Any:
    """Return the samples (int16) of all bytes of G.711."""
    import soundfile

    every_byte = io.BytesIO(bytes(range(256)))
    samples, _ = soundfile.read(every_byte, format="RAW", subtype=law, samplerate=8000, channels=1, dtype="int16")
    return samples


def decode_g711(data: bytes, law: Literal["ULAW", "ALAW"]) -> bytes:
    """Return the little-endian samples of 16 bits that *data* has, a byte each."""
    import numpy as np

    samples: bytes = _table(law)[np.frombuffer(data, np.uint8)].astype("<i2").tobytes()
    return samples


def as_floats(pcm: bytes) -> Any:
    """Return little-endian samples of 16 bits as an array of float32 from -1 to 1."""
    import numpy as np

    return np.frombuffer(pcm, "<i2").astype(np.float32) / _SCALE


def wav_of(pcm: bytes | bytearray, rate: int) -> bytes:
    """Return a WAV file with one channel of *pcm*: little-endian samples of 16 bits, *rate* of them a second."""
    target = io.BytesIO()
    with wave.open(target, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(SAMPLE_SIZE)
        file.setframerate(rate)
        file.writeframes(pcm)
    return target.getvalue()


class Resampler:
    """Changes the rate of a stream of little-endian samples of 16 bits, and makes them little-endian float32."""

    def __init__(self, rate: int, wanted: int) -> None:
        self._stream: Any = None
        if rate != wanted:
            import soxr

            self._stream = soxr.ResampleStream(rate, wanted, 1)

    def feed(self, pcm: bytes, *, last: bool = False) -> bytes:
        """Return the samples that *pcm* completes, and after the *last* piece all that are left."""
        samples = as_floats(pcm)
        if self._stream is not None:
            samples = self._stream.resample_chunk(samples, last=last)
        floats: bytes = samples.astype("<f4").tobytes()
        return floats
