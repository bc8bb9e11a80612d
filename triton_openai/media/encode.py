"""
Encodes speech while it is made: samples in, the bytes of a file out, part by part and for readers that cannot seek.

``wav`` and ``pcm`` need nothing. ``mp3``, ``opus`` and ``flac`` are made by libsndfile and other rates by soxr (extra
``audio``), ``aac`` by FFmpeg (extra ``media``). They are imported when they are needed. All of it blocks.
"""

from __future__ import annotations

import importlib
import io
import struct
import wave
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from triton_openai.errors import InvalidAnswer, InvalidRequest, UnsupportedParameter, install_advice
from triton_openai.media.decode import blocks
from triton_openai.media.speech_formats import Format, file_rate

Samples = npt.NDArray[np.float32]
# A constant 128 kbit/s for MP3: of others, readers guess the length by the first frames, and stop too early.
_LIBSNDFILE: Mapping[Format, Mapping[str, Any]] = {
    "mp3": {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT", "compression_level": 0.2},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
}
_FULL = 32_768
# Seconds of a file that is read as a whole.
_MAX_FILE_SECONDS = 3_600
# The head of a FLAC file says how long it is. So the file is kept until it is whole, up to this size in bytes, which is
# more than five minutes; what is longer leaves while it is made, and does not say it.
_MAX_WHOLE = 1 << 24
# The length of a stream, which is not known yet.
_UNKNOWN = 0xFFFFFFFF


class Encoder(Protocol):
    """Makes one file."""

    def encode(self, samples: Samples) -> bytes:
        """Return the bytes that *samples* add, perhaps none yet."""

    def finish(self) -> bytes:
        """Return the last bytes."""


def encoder(kind: Format, rate: int) -> Encoder:
    """
    Return the encoder of *kind* for samples of *rate* Hz.

    Raises :class:`UnsupportedParameter` if what it needs is not installed.
    """
    target_rate = file_rate(kind, rate)
    made: Encoder
    if kind in _LIBSNDFILE:
        made = _Sndfile(_imported("soundfile", "audio", kind), kind, target_rate)
    elif kind == "aac":
        made = _Aac(_imported("av", "media", kind), target_rate)
    else:
        made = _Pcm(_wav_header(target_rate) if kind == "wav" else b"")
    if target_rate == rate:
        return made
    return _Resampled(made, _imported("soxr", "audio", f"{kind} from a model with {rate} Hz"), rate, target_rate)


def _imported(module: str, extra: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as error:
        raise UnsupportedParameter(
            f"The response_format {what} needs the extra '{extra}' of this service: {install_advice(extra)}.",
            param="response_format",
        ) from error


def _int16(samples: Samples) -> npt.NDArray[np.int16]:
    rounded: npt.NDArray[np.int16] = np.clip(np.rint(samples * _FULL), -_FULL, _FULL - 1).astype("<i2")
    return rounded


class _Pcm:
    """Raw samples of 16 bits behind a *head*."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def encode(self, samples: Samples) -> bytes:
        head = self._head
        self._head = b""
        return head + _int16(samples).tobytes()

    def finish(self) -> bytes:
        head = self._head
        self._head = b""
        return head


def _wav_header(rate: int) -> bytes:
    """Return the head of a WAV file without an end: one channel with 16 bits."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16)
    return struct.pack("<4sI4s", b"RIFF", _UNKNOWN, b"WAVE") + form + struct.pack("<4sI", b"data", _UNKNOWN)


class _Sink(io.RawIOBase):
    """Collects what a library writes, for a reader that cannot seek: later corrections of bytes are dropped."""

    def __init__(self) -> None:
        self._new = bytearray()
        # The bytes that were taken, and the position of the next write.
        self._taken = 0
        self._position = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._taken + len(self._new)}[whence]
        self._position = base + offset
        return self._position

    def write(self, data: Any) -> int:
        written = bytes(data)
        # Bytes that were taken are not changed any more.
        late = max(0, self._taken - self._position)
        start = max(0, self._position - self._taken)
        kept = written[late:]
        self._new[start : start + len(kept)] = kept
        self._position += len(written)
        return len(written)

    @property
    def size(self) -> int:
        """How many bytes were written since the last call of :meth:`take`."""
        return len(self._new)

    @property
    def whole(self) -> bool:
        """Whether nothing was taken yet, so that a library can still correct every byte."""
        return self._taken == 0

    def take(self) -> bytes:
        """Return what was written since the last call."""
        new = bytes(self._new)
        self._new = bytearray()
        self._taken += len(new)
        return new


class _Sndfile:
    """A file of libsndfile."""

    def __init__(self, soundfile: Any, kind: Format, rate: int) -> None:
        options = _LIBSNDFILE[kind]
        self._sink = _Sink()
        self._takes_int16 = options["subtype"] == "PCM_16"
        self._waits = kind == "flac"
        self._file = soundfile.SoundFile(self._sink, "w", rate, 1, **options)

    def encode(self, samples: Samples) -> bytes:
        if self._takes_int16:
            self._file.write(_int16(samples))
        else:
            self._file.write(samples)
        if self._waits and self._sink.whole and self._sink.size < _MAX_WHOLE:
            return b""
        return self._sink.take()

    def finish(self) -> bytes:
        self._file.close()
        return self._sink.take()


class _Aac:
    """Frames of AAC with heads of their own (ADTS), by FFmpeg."""

    def __init__(self, av: Any, rate: int) -> None:
        self._av = av
        self._rate = rate
        self._sent = 0
        self._sink = _Sink()
        self._file = av.open(self._sink, "w", format="adts")
        self._stream = self._file.add_stream("aac", rate=rate, layout="mono")

    def encode(self, samples: Samples) -> bytes:
        frame = self._av.AudioFrame.from_ndarray(samples[np.newaxis, :], format="fltp", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._sent
        frame.time_base = Fraction(1, self._rate)
        self._sent += len(samples)
        self._file.mux(self._stream.encode(frame))
        return self._sink.take()

    def finish(self) -> bytes:
        self._file.mux(self._stream.encode(None))
        self._file.close()
        return self._sink.take()


class _Resampled:
    """An encoder for samples of another rate."""

    def __init__(self, behind: Encoder, soxr: Any, rate: int, target_rate: int) -> None:
        self._encoder = behind
        self._stream = soxr.ResampleStream(rate, target_rate, 1, dtype="float32")

    def encode(self, samples: Samples) -> bytes:
        return self._converted(samples)

    def finish(self) -> bytes:
        return self._converted(np.zeros(0, np.float32), last=True) + self._encoder.finish()

    def _converted(self, samples: Samples, *, last: bool = False) -> bytes:
        converted = self._stream.resample_chunk(samples, last=last)
        # FFmpeg takes no frame without samples.
        if len(converted):
            return self._encoder.encode(converted)
        return b""


def samples_of(data: bytes, datatype: str) -> Samples:
    """
    Return little-endian *data* of *datatype* as samples from -1 to 1.

    Raises :class:`InvalidAnswer` for values that are not numbers.
    """
    kind = {"FP32": "<f4", "FP16": "<f2", "FP64": "<f8", "INT16": "<i2"}[datatype]
    if len(data) % np.dtype(kind).itemsize:
        raise InvalidAnswer("its waveform is cut off")
    samples = np.frombuffer(data, kind).astype(np.float32)
    if datatype == "INT16":
        samples /= _FULL
    elif not np.isfinite(samples.sum(dtype=np.float64)):
        raise InvalidAnswer("its audio has values that are not numbers")
    return samples


class Joiner:
    """Joins parts that overlap by *overlap* samples: there, one part fades into the next."""

    def __init__(self, overlap: int) -> None:
        self._overlap = overlap
        self._tail = np.zeros(0, np.float32)

    def join(self, part: Samples) -> Samples:
        """Add a part; return the samples that later parts do not change."""
        if not self._overlap:
            return part
        tail = self._tail
        both = min(len(tail), len(part))
        if both:
            fade = np.linspace(0, 1, both, dtype=np.float32)
            faded = tail[len(tail) - both :] * (1 - fade) + part[:both] * fade
            part = np.concatenate([tail[: len(tail) - both], faded, part[both:]])
        kept = max(0, len(part) - self._overlap)
        self._tail = part[kept:]
        return part[:kept]

    def rest(self) -> Samples:
        """Return the samples after the last part."""
        tail = self._tail
        self._tail = np.zeros(0, np.float32)
        return tail


def read_audio(data: bytes) -> tuple[Samples, int]:
    """
    Return the samples of a file of the operator or of a model, mixed down to one channel, and their rate.

    Raises ``ValueError`` with a sentence for what cannot be read.
    """
    try:
        importlib.import_module("soundfile")
    except (ImportError, OSError):
        return _read_wav(data)
    parts: list[Samples] = []
    rate = 0
    try:
        for block_rate, block in blocks(data, _MAX_FILE_SECONDS):
            rate = block_rate
            parts.append(block.mean(axis=1, dtype=np.float32))
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    if not parts:
        raise ValueError("The file has no audio.")
    return np.concatenate(parts), rate


def _read_wav(data: bytes) -> tuple[Samples, int]:
    """Return what :func:`read_audio` does, of a WAV file with 16 bits, by the standard library alone."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            if file.getsampwidth() != 2:
                raise ValueError("It has not 16 bits, which needs the extra [audio].")
            frames = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
            return (frames.mean(axis=1) / _FULL).astype(np.float32), file.getframerate()
    except (wave.Error, EOFError) as error:
        raise ValueError("It is not a WAV file; others need the extra [audio].") from error


def resampled(samples: Samples, rate: int, target_rate: int) -> Samples:
    """
    Return *samples* of *rate* Hz, an array with one dimension, at *target_rate* Hz.

    Raises ``ValueError`` if that needs what is not installed.
    """
    if rate == target_rate:
        return samples
    try:
        soxr: Any = importlib.import_module("soxr")
    except (ImportError, OSError) as error:
        raise ValueError(f"It has {rate} Hz; to make {target_rate} Hz of it needs the extra [audio].") from error
    converted: Samples = soxr.resample(samples, rate, target_rate)
    return converted
