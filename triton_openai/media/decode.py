"""
Decodes the files that clients send, block by block, with libraries that come with the extras.

libsndfile (extra ``audio``) reads WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, AU and CAF; FFmpeg (extra ``media``) reads
the rest, and what libsndfile does not know of these. A decoder gets bytes, never a path, an address or a playlist.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeAlias

from triton_openai.errors import InvalidRequest, install_advice
from triton_openai.media.containers import Container, Content, Part, content_of

# Frames that are decoded at once: 4 MB with as many channels as are taken.
_FRAMES = 65_536
_MAX_CHANNELS = 16
_RATES = range(4_000, 192_001)
# What soundfile calls the containers that are read with it.
_FORMATS = frozenset({"WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF"})
# The containers that FFmpeg may take a file for: none that refers to other files.
_DEMUXERS = "aac,ac3,aiff,amr,amrnb,amrwb,asf,au,avi,caf,eac3,flac,flv,loas,matroska,mov,mp3,mpeg,mpegts,ogg,w64,wav,wv"
_CODECS = frozenset(
    {
        *("aac", "aac_latm", "ac3", "ac3_fixed", "eac3", "alac", "amrnb", "amrwb", "flac", "g722", "gsm", "gsm_ms"),
        *("mp2", "mp2float", "mp3", "mp3float", "opus", "libopus", "speex", "libspeex", "vorbis", "libvorbis"),
        *("wavpack", "wmav1", "wmav2"),
    }
)
_PLAIN_CODECS = ("pcm_", "adpcm_")
# Bytes that FFmpeg makes room for at once: hours of AAC in the table of an MP4 file, of which each stream has one.
_MAX_ALLOCATION = 1 << 24
_MAX_STREAMS = "8"
# Packets that may fail, and the share of those that may.
_MAX_FAILED = 2
_MAX_FAILED_SHARE = 0.02
# Opens a file with 64 MB, and a stack of 1 MB.
_OPEN = """
import io, resource, sys, soundfile
data = sys.stdin.buffer.read()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
for limit, size in (("AS", used + (64 << 20)), ("STACK", 1 << 20), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (size, size))
try:
    soundfile.SoundFile(io.BytesIO(data))
except soundfile.SoundFileError:
    sys.exit(3)
"""
# How that ends for what libsndfile does not know.
_UNKNOWN = 3
_OPEN_SECONDS = 10.0
_VORBIS = re.compile(rb"\x01vorbis")
_TAKEN = "WAV, FLAC, Ogg (Vorbis, Opus, Speex, FLAC), MP3, MP4, WebM, AAC, AIFF, AMR and others"
_DAMAGED = "The file cannot be decoded: it is damaged, or cut off."
_CHANGES = "The audio changes its rate or its channels."

_Samples: TypeAlias = Any
"""An array of NumPy, which is not imported here before it is needed."""
_Block: TypeAlias = tuple[int, _Samples]


def wrong_audio(message: str, code: str = "invalid_audio") -> InvalidRequest:
    """Return the error for a file that is refused."""
    return InvalidRequest(message, param="file", code=code)


def too_long_error(max_seconds: float) -> InvalidRequest:
    """Return the error for a file of more than *max_seconds* seconds."""
    return wrong_audio(f"The audio is longer than the limit of {max_seconds:g} seconds.", "audio_too_long")


def blocks(data: bytes, max_seconds: float) -> Iterator[_Block]:
    """
    Yield the samples a second of *data*, and blocks of frames by channels (FP32).

    Blocks the thread. Raises :class:`InvalidRequest` for what cannot be decoded.
    """
    if not data:
        raise wrong_audio("The file is empty.")
    try:
        content = content_of(data)
    except ValueError as error:
        raise wrong_audio(str(error)) from error
    rate = None
    for part in content.parts:
        for part_rate, block in _blocks_of(part, content, max_seconds):
            if rate is not None and rate != part_rate:
                raise wrong_audio(_CHANGES)
            rate = part_rate
            yield part_rate, block


def _blocks_of(part: Part, content: Content, max_seconds: float) -> Iterator[_Block]:
    if content.container in ("native", "ogg"):
        file = _open_with_soundfile(part)
        if file is not None:
            yield from _with_soundfile(file, content, max_seconds)
            return
        part.seek(0)
    yield from _with_av(part, content.container)


def _is_number(frames: int) -> bool:
    """Return whether the number of *frames* is known: libsndfile has a very large one where it is not."""
    return frames < 1 << 48


def _check(rate: int, channels: int) -> None:
    if channels > _MAX_CHANNELS:
        raise wrong_audio(f"The audio has {channels} channels; {_MAX_CHANNELS} is the most.")
    if rate not in _RATES:
        raise wrong_audio(f"The audio has {rate} samples a second; {_RATES[0]} to {_RATES[-1]} are taken.")


def _unsupported() -> InvalidRequest:
    return wrong_audio(f"This is not audio of a supported format ({_TAKEN}).", "invalid_audio_format")


def _open_with_soundfile(part: Part) -> Any:
    """Return *part* as it is opened by soundfile; ``None`` for what libsndfile does not know."""
    import soundfile

    class Stream(soundfile.SoundFile):  # type: ignore[misc] # it has no types
        """Reads from the first frame to the last. Otherwise it is sought after each block, which some files refuse."""

        def seekable(self) -> bool:
            return False

    if part.has(_VORBIS) and not _opens(bytes(part)):
        return None
    try:
        file = Stream(part)
    except soundfile.SoundFileError:
        return None
    if file.format in _FORMATS:
        return file
    file.close()
    return None


def _with_soundfile(file: Any, content: Content, max_seconds: float) -> Iterator[_Block]:
    import soundfile

    # libsndfile guesses the length of MP3.
    counted = file.format != "MP3" and _is_number(file.frames)
    tolerance = 0
    left = file.frames
    if file.format == "MP3":
        tolerance = file.samplerate
        left = content.samples or 0
    try:
        with file:
            _check(file.samplerate, file.channels)
            if _is_number(left) and left / file.samplerate > max_seconds:
                raise too_long_error(max_seconds)
            # Behind the last frame there may be what is no audio, such as a tag.
            while len(block := file.read(_next(left, counted=counted), dtype="float32", always_2d=True)):
                left -= len(block)
                yield file.samplerate, block
    except soundfile.SoundFileError as error:
        raise wrong_audio(_DAMAGED) from error
    if file.format in ("FLAC", "MP3") and _is_number(left) and left > tolerance:
        raise wrong_audio("The file is cut off: it is shorter than its head says.")


def _next(left: int, *, counted: bool) -> int:
    """Return how many frames are read next, where *left* are left, if they are *counted*."""
    if counted:
        return max(0, min(left, _FRAMES))
    return _FRAMES


def _opens(data: bytes) -> bool:
    """
    Return whether libsndfile knows *data*, as a process of its own with little memory finds out.

    Raises :class:`InvalidRequest` if that process fails.

    A head of Vorbis with some hundred bytes can make libvorbis take gigabytes, or overflow its stack: that ends us.
    """
    command = (sys.executable, "-P", "-c", _OPEN)
    try:
        run = subprocess.run(command, input=data, capture_output=True, check=False, timeout=_OPEN_SECONDS)
    except subprocess.SubprocessError as error:
        raise wrong_audio(_DAMAGED) from error
    if run.returncode not in (0, _UNKNOWN):
        raise wrong_audio(_DAMAGED)
    return run.returncode == 0


@cache
def _av() -> Any:
    """Return PyAV, which then makes room for no more than ``_MAX_ALLOCATION`` bytes at once, whatever files promise."""
    import av.packet

    ctypes.CDLL(av.packet.__file__).av_max_alloc(ctypes.c_size_t(_MAX_ALLOCATION))
    return av


def _open_with_av(part: Part, container: Container) -> Any:
    """Return *part* as it is opened by FFmpeg. Raises :class:`InvalidRequest`, also where FFmpeg is not installed."""
    try:
        av = _av()
    except (ImportError, OSError) as error:
        if container == "unknown":
            raise _unsupported() from error
        raise wrong_audio(
            "MP4, WebM, AAC and others need the extra 'media' of this service, which is not installed: "
            f"{install_advice('media')}. Send WAV, FLAC, Ogg (Vorbis, Opus) or MP3.",
            "invalid_audio_format",
        ) from error
    # A file may name others: nothing is opened but what is in memory.
    options = {"protocol_whitelist": "none", "format_whitelist": _DEMUXERS, "max_streams": _MAX_STREAMS}
    if container == "mov":
        options |= {"enable_drefs": "0", "use_absolute_path": "0"}
    form: str | None = container
    if container in ("native", "probed", "unknown"):
        form = None
    try:
        return av.open(part, mode="r", format=form, options=options)
    except (av.FFmpegError, ValueError, EOFError, MemoryError) as error:
        if form is None:
            raise _unsupported() from error
        raise wrong_audio(_DAMAGED) from error


def _with_av(part: Part, container: Container) -> Iterator[_Block]:
    import numpy as np

    opened = _open_with_av(part, container)
    av = _av()
    try:
        with opened as file:
            stream = next(iter(file.streams.audio), None)
            if stream is None:
                raise wrong_audio("The file has no audio.")
            # FFmpeg may have no decoder.
            codec = getattr(stream.codec_context, "name", "of an unknown format")
            if codec not in _CODECS and not codec.startswith(_PLAIN_CODECS):
                raise wrong_audio(f"The file's audio is {codec}, which is not supported.", "invalid_audio_format")
            _check(stream.rate, stream.channels)
            rate = stream.rate
            channels = stream.channels
            resampler = av.AudioResampler(format="flt")
            frames: list[_Samples] = []
            for decoded in _frames_of(file, stream, part):
                for frame in resampler.resample(decoded):
                    if frame.sample_rate != rate or len(frame.layout.channels) != channels:
                        raise wrong_audio(_CHANGES)
                    frames.append(frame.to_ndarray().reshape(-1, channels))
                if sum(map(len, frames)) >= _FRAMES:
                    yield rate, np.concatenate(frames)
                    frames = []
            if frames:
                yield rate, np.concatenate(frames)
    except (av.FFmpegError, ValueError, EOFError, MemoryError) as error:
        raise wrong_audio(_DAMAGED) from error


def _frames_of(file: Any, stream: Any, part: Part) -> Iterator[Any]:
    """
    Yield the frames of *stream* in *part*, but what is cut off where a stream was joined or left.

    Raises :class:`InvalidRequest` for more that cannot be decoded.
    """
    av = _av()
    decoded = 0
    failed = 0
    packets = file.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.error.InvalidDataError as error:
            # The last packet is not whole.
            if decoded and part.tell() >= len(part):
                return
            raise wrong_audio(_DAMAGED) from error
        if packet is None:
            break
        try:
            frames = packet.decode()
        except av.error.InvalidDataError as error:
            failed += 1
            if failed > _MAX_FAILED + decoded * _MAX_FAILED_SHARE:
                raise wrong_audio(_DAMAGED) from error
            continue
        decoded += len(frames)
        yield from frames
    if failed and not decoded:
        raise wrong_audio(_DAMAGED)
