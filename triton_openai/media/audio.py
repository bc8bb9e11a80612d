"""
Audio as clients send it: decoded block by block, mixed to mono, resampled, and cut where it is quiet.

The libraries come with the extras ``audio`` (WAV, FLAC, Ogg, MP3) and ``media`` (MP4, WebM, AAC), and are imported when
the first file comes. The format is detected from the content, not from the file name. A decoder gets bytes, never a
path, an address or a playlist of a request. Blocks are decoded when their chunks are read, so an hour needs no more
memory than a few chunks.
"""

from __future__ import annotations

import asyncio
import binascii
import ctypes
import io
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec

from triton_openai.errors import ConfigurationError, InvalidRequest
from triton_openai.media.cutting import Chunk, Cutter
from triton_openai.media.voice_activity import Pauses, Samples

# Frames that are decoded at once: 4 MB with as many channels as are taken.
_FRAMES = 65_536
_MAX_CHANNELS = 16
_RATES = range(4_000, 192_001)
# The largest number of FP16. NaN compares as false.
_LOUDEST = 65_504.0
# How many files are decoded at the same time.
_THREADS = 2
# Samples a second that models of chats take, and the most seconds that one request has: 19 MB.
_CHAT_RATE = 16_000
_MAX_SECONDS_IN_CHATS = 600.0
# Of soundfile, by the first bytes of a file; and what PyAV calls the other containers.
_FORMATS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_MP4 = "mov"
_WEBM = "matroska"
_AAC = "aac"
_CODECS = frozenset({"aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis", "pcm_s16le"})
# Bytes that FFmpeg makes room for at once: hours of AAC in the table of an MP4 file, of which each stream has one.
_MAX_ALLOCATION = 1 << 24
_MAX_STREAMS = "8"
# Opens a file with 64 MB, and a stack of 1 MB.
_OPEN = """
import io, resource, sys, soundfile
data = sys.stdin.buffer.read()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
for limit, size in (("AS", used + (64 << 20)), ("STACK", 1 << 20), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (size, size))
soundfile.SoundFile(io.BytesIO(data))
"""
_OPEN_SECONDS = 10.0
_TAKEN = "WAV, FLAC, Ogg (Vorbis, Opus), MP3, MP4, WebM and AAC"
# The size of a RIFF file that was written as a stream, with the eight bytes in front of it.
_UNKNOWN_SIZES = range(0x7FFF_0000, 0x1_0000_0008)


class Recording:
    """
    A file of audio, decoded to *rate* samples a second and cut into chunks of at most *max_chunk_seconds*.

    With *pauses* it is cut at pauses too, otherwise only at the quietest moment before the limit of a chunk.
    *max_seconds* is the limit of the whole file.
    """

    def __init__(
        self,
        data: bytes,
        *,
        rate: int,
        max_chunk_seconds: float,
        max_seconds: float,
        pauses: Pauses | None = None,
        on_decoded: Callable[[float], object] = lambda _: None,
    ) -> None:
        """
        *on_decoded* is called with the seconds when all of it is decoded.

        Raises :class:`ConfigurationError` without the extra, and :class:`InvalidRequest` for other formats.
        """
        require_audio()
        self._blocks = _blocks(data, max_seconds)
        self._max_seconds = max_seconds
        self._on_decoded = on_decoded
        self._cutter = Cutter(rate, max_chunk_seconds, pauses)
        # Frames that were decoded, and those of a second.
        self._frames = 0
        self._rate = 1

    @property
    def seconds(self) -> float:
        """How much was decoded."""
        return self._frames / self._rate

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Yield the chunks in order. Raises :class:`InvalidRequest` for what cannot be decoded, or is too long."""
        loop = asyncio.get_running_loop()
        steps = self._decoded()
        end = object()
        while (made := await loop.run_in_executor(_threads(), next, steps, end)) is not end:
            if isinstance(made, Chunk):
                yield made
        self._on_decoded(self.seconds)

    def _decoded(self) -> Iterator[Chunk | None]:
        """Yield the chunks, and ``None`` after a block that completes none."""
        import numpy as np
        import soxr

        resampler: Any = None
        for rate, block in self._blocks:
            if not self._frames:
                self._rate = rate
                if rate == self._cutter.rate:
                    resampler = None
                else:
                    resampler = soxr.ResampleStream(rate, self._cutter.rate, 1)
            self._frames += len(block)
            if self.seconds > self._max_seconds:
                raise _too_long(self._max_seconds)
            if not np.abs(block).max(initial=0.0) <= _LOUDEST:
                raise _wrong("The audio has samples that are no numbers.")
            mono = block.mean(axis=1, dtype=np.float32)
            yield from self._cutter.feed(mono if resampler is None else resampler.resample_chunk(mono))
            yield None
        if not self._frames:
            raise _wrong("The file has no audio.")
        if resampler is not None:
            yield from self._cutter.feed(resampler.resample_chunk(np.zeros(0, np.float32), last=True))
        yield from self._cutter.rest()


class AudioReference(msgspec.Struct, frozen=True):
    """Audio in a request: its path, for an error's ``param``, and its file in base64."""

    param: str
    data: str


# Bytes of a second of audio in a chat: samples of 16 bits, in base64.
_CHAT_BASE64 = 2 * _CHAT_RATE * 4 // 3
# Seconds of audio that a chat's file gets at once.
_CHAT_CHUNK = 10.0
# How often audio is in memory: as it was decoded, in a request to Triton, and in what the transport sends.
_COPIES = 3


def decoded_size(seconds: float, rate: int) -> int:
    """Return how many bytes *seconds* of audio at *rate* samples a second take, on their way to Triton included."""
    return int(seconds * rate * 4 * _COPIES)


def loading_size(references: Sequence[AudioReference], *, max_seconds: float) -> int:
    """Return how many bytes :func:`load` takes at most, whatever the audio of *references* is."""
    if not references:
        return 0
    files = sum(len(reference.data) for reference in references)
    return files + int(min(max_seconds, _MAX_SECONDS_IN_CHATS) * _CHAT_BASE64 * _COPIES)


def loaded_size(files: Sequence[str]) -> int:
    """Return how many bytes the result of :func:`load` takes, on its way to Triton included."""
    return _COPIES * sum(map(len, files))


async def load(references: Sequence[AudioReference], *, max_seconds: float) -> tuple[str, ...]:
    """
    Return the audio of *references*, of *max_seconds* seconds together, as WAV files of 16 kHz in base64.

    Raises :class:`InvalidRequest` with its ``param``, and :class:`ConfigurationError` without the extra.
    """
    await asyncio.to_thread(require_audio)
    files = []
    left = min(max_seconds, _MAX_SECONDS_IN_CHATS)
    for reference in references:
        try:
            data = await asyncio.to_thread(binascii.a2b_base64, reference.data, strict_mode=True)
            recording = Recording(data, rate=_CHAT_RATE, max_chunk_seconds=_CHAT_CHUNK, max_seconds=left)
            del data
            files.append(await _wav(recording))
            left -= recording.seconds
        except ValueError as error:
            problem = "The audio is not valid base64."
            raise InvalidRequest(problem, param=reference.param, code="invalid_base64") from error
        except InvalidRequest as error:
            error.param = reference.param
            raise
    return tuple(files)


async def _wav(recording: Recording) -> str:
    """Return a file with all of *recording*, in base64."""
    import numpy as np
    import soundfile

    target = io.BytesIO()
    with soundfile.SoundFile(target, "w", _CHAT_RATE, 1, format="WAV", subtype="PCM_16") as file:
        async for chunk in recording.chunks():
            # The samples follow each other without a gap.
            await asyncio.to_thread(file.write, np.frombuffer(chunk.samples, "<f4"))
    return await asyncio.to_thread(_base64, target)


def _base64(content: io.BytesIO) -> str:
    return binascii.b2a_base64(content.getbuffer(), newline=False).decode("ascii")


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="audio")


def require_audio() -> None:
    """Raise :class:`ConfigurationError` unless the libraries of the extra ``audio`` are there."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:
        raise ConfigurationError(
            "This service cannot read audio: install it with the extra 'audio' (pip install 'triton-openai[audio]').",
            detail=str(error),
        ) from error
    del soundfile, soxr


def _wrong(message: str, code: str = "invalid_audio") -> InvalidRequest:
    return InvalidRequest(message, param="file", code=code)


def _too_long(max_seconds: float) -> InvalidRequest:
    return _wrong(f"The audio is longer than the limit of {max_seconds:g} seconds.", "audio_too_long")


def _known(frames: int) -> bool:
    """Return whether the number of *frames* is known: libsndfile has a very large one where it is not."""
    return frames < 1 << 48


def _check(rate: int, channels: int) -> None:
    if channels > _MAX_CHANNELS:
        raise _wrong(f"The audio has {channels} channels; {_MAX_CHANNELS} is the most.")
    if rate not in _RATES:
        raise _wrong(f"The audio has {rate} samples a second; {_RATES[0]} to {_RATES[-1]} are taken.")


def _blocks(data: bytes, max_seconds: float) -> Iterator[tuple[int, Samples]]:
    """Return what yields the samples a second of *data* and blocks of frames by channels (FP32)."""
    if not data:
        raise _wrong("The file is empty.")
    if data[4:8] == b"ftyp":
        return _with_av(data, _MP4)
    if data.startswith(b"\x1aE\xdf\xa3"):
        return _with_av(data, _WEBM)
    # AAC and MP3 begin with the same bits; MP3 has a layer there, AAC has 0.
    sync = len(data) > 1 and data[0] == 0xFF
    if sync and data[1] & 0xF6 == 0xF0:
        return _with_av(data, _AAC)
    riff = data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"
    if riff or data.startswith((b"fLaC", b"OggS", b"ID3")) or (sync and data[1] & 0xE0 == 0xE0):
        return _with_soundfile(data, max_seconds)
    raise _wrong(f"This is not audio of a supported format ({_TAKEN}).", "invalid_audio_format")


def _with_soundfile(data: bytes, max_seconds: float) -> Iterator[tuple[int, Samples]]:
    import soundfile

    class Stream(soundfile.SoundFile):  # type: ignore[misc] # it has no types
        """Reads from the first frame to the last. Otherwise it is sought after each block, which some files refuse."""

        def seekable(self) -> bool:
            return False

    cut = _wrong("The file is cut off: it is shorter than its head says.")
    size = int.from_bytes(data[4:8], "little") + 8
    if data.startswith(b"RIFF") and size > len(data) and size not in _UNKNOWN_SIZES:
        raise cut
    if b"\x01vorbis" in data:
        _try_opening(data)
    try:
        with Stream(io.BytesIO(data)) as file:
            if file.format not in _FORMATS:
                raise _wrong(f"This is not audio of a supported format ({_TAKEN}).", "invalid_audio_format")
            _check(file.samplerate, file.channels)
            left = file.frames
            if _known(left) and left / file.samplerate > max_seconds:
                raise _too_long(max_seconds)
            while len(block := file.read(_FRAMES, dtype="float32", always_2d=True)):
                left -= len(block)
                yield file.samplerate, block
    except soundfile.SoundFileError as error:
        raise _wrong("The file cannot be decoded: it is damaged, or cut off.") from error
    # Of MP3 a head says it roughly; the others have none that does.
    if _known(left) and left > {"FLAC": 0, "MP3": file.samplerate}.get(file.format, left):
        raise cut


def _try_opening(data: bytes) -> None:
    """
    Raise :class:`InvalidRequest` if a process of its own, with little memory, cannot open *data*.

    A head of Vorbis with some hundred bytes can make libvorbis take gigabytes, or overflow its stack: that ends us.
    """
    command = (sys.executable, "-P", "-c", _OPEN)
    try:
        subprocess.run(command, input=data, capture_output=True, check=True, timeout=_OPEN_SECONDS)
    except subprocess.SubprocessError as error:
        raise _wrong("The file cannot be decoded: it is damaged, or cut off.") from error


@cache
def _av() -> Any:
    """Return PyAV, which then makes room for no more than MOST_AT_ONCE bytes at once, whatever a file promises."""
    import av.packet

    ctypes.CDLL(av.packet.__file__).av_max_alloc(ctypes.c_size_t(_MAX_ALLOCATION))
    return av


def _with_av(data: bytes, container: str) -> Iterator[tuple[int, Samples]]:
    import numpy as np

    try:
        av = _av()
    except (ImportError, OSError) as error:
        raise _wrong(
            "MP4, WebM and AAC need the extra 'media' of this service, which is not installed (pip install "
            "'triton-openai[media]'). Send WAV, FLAC, Ogg or MP3.",
            "invalid_audio_format",
        ) from error
    # A file may name others: nothing is opened but what is in memory.
    options = {"protocol_whitelist": "none", "max_streams": _MAX_STREAMS}
    if container == _MP4:
        options |= {"enable_drefs": "0", "use_absolute_path": "0"}
    try:
        with av.open(io.BytesIO(data), mode="r", format=container, options=options) as file:
            stream = next(iter(file.streams.audio), None)
            if stream is None:
                raise _wrong("The file has no audio.")
            # FFmpeg may have no decoder.
            codec = getattr(stream.codec_context, "name", "of an unknown format")
            if codec not in _CODECS:
                raise _wrong(f"The file's audio is {codec}, which is not supported.", "invalid_audio_format")
            _check(stream.rate, stream.channels)
            rate = stream.rate
            channels = stream.channels
            resampler = av.AudioResampler(format="flt")
            frames: list[Samples] = []
            for decoded in file.decode(stream):
                for frame in resampler.resample(decoded):
                    if frame.sample_rate != rate or len(frame.layout.channels) != channels:
                        raise _wrong("The audio changes its rate or its channels.")
                    frames.append(frame.to_ndarray().reshape(-1, channels))
                if sum(map(len, frames)) >= _FRAMES:
                    yield rate, np.concatenate(frames)
                    frames = []
            if frames:
                yield rate, np.concatenate(frames)
    except (av.FFmpegError, ValueError, EOFError, MemoryError) as error:
        raise _wrong("The file cannot be decoded: it is damaged, or cut off.") from error
