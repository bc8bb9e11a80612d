"""
Audio as clients send it: decoded block by block, mixed to mono, resampled, and cut where it is quiet.

The libraries come with the extras ``audio`` and ``media``, and are imported when the first file comes. The format is
detected from the content, not from the file name. Blocks are decoded when their chunks are read, so an hour needs no
more memory than a few chunks.
"""

from __future__ import annotations

import asyncio
import binascii
import io
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import msgspec

from triton_openai.errors import ConfigurationError, InvalidRequest, install_advice
from triton_openai.media.cutting import Chunk, Cutter
from triton_openai.media.decode import blocks, too_long_error, wrong_audio
from triton_openai.media.voice_activity import Pauses

# The largest number of FP16. NaN compares as false.
_LOUDEST = 65_504.0
# How many files are decoded at the same time.
_THREADS = 2
# Samples a second that models of chats take, and the most seconds that one request has: 19 MB.
_CHAT_RATE = 16_000
_MAX_SECONDS_IN_CHATS = 600.0


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

        Raises :class:`ConfigurationError` without the extra.
        """
        require_audio()
        self._blocks = blocks(data, max_seconds)
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
                raise too_long_error(self._max_seconds)
            if not np.abs(block).max(initial=0.0) <= _LOUDEST:
                raise wrong_audio("The audio has samples that are no numbers.")
            mono = block.mean(axis=1, dtype=np.float32)
            yield from self._cutter.feed(mono if resampler is None else resampler.resample_chunk(mono))
            yield None
        if not self._frames:
            raise wrong_audio("The file has no audio.")
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
            f"This service cannot read audio, because the extra 'audio' is not installed: {install_advice('audio')}.",
            detail=str(error),
        ) from error
    del soundfile, soxr
