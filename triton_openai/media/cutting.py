"""
Recordings in pieces: mono samples that come block by block are cut where it is quiet, or where speech starts and ends.

Positions are numbers of samples since the start of the recording.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec

from triton_openai.media.voice_activity import Pauses, Samples, SpeechStarted, VoiceActivity

# Seconds of the frames whose levels show where it is quiet, and of the average that smooths them.
_FRAME_SECONDS = 0.01
_SMOOTHED_SECONDS = 0.1
# Decibels by which a frame may be louder for each second that it is nearer to where the cut should be.
_DECIBELS_A_SECOND = 2.0
# What is so many decibels below the loudest speech is as quiet as silence.
_QUIET_DECIBELS = 45.0
# How much louder than the quietest frame the frames of the same pause are, and how much of the pause is searched.
_PAUSE_DECIBELS = 6.0
_PAUSE_SECONDS = 0.5
# A root mean square of -60 dBFS, below which nothing can be heard, and the seconds over which it is measured.
_SILENCE = 0.001
_HEARD_SECONDS = 0.1


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a recording: mono samples (little-endian FP32, mostly from -1 to 1), and its bounds in seconds."""

    start: float
    end: float
    samples: bytes
    #: Whether nothing can be heard: recognizers invent text for silence.
    silent: bool

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


class Cutter:
    """
    Cuts samples that come piece by piece into chunks of at most *max_chunk_seconds*.

    With *pauses*, only speech becomes chunks. A chunk that is too long is cut at the quietest point of its second half.
    """

    def __init__(self, rate: int, max_chunk_seconds: float, pauses: Pauses | None) -> None:
        """*rate* is in samples a second."""
        self.rate = rate
        self._max_frames = int(max_chunk_seconds * rate)
        self._pauses = pauses
        self._activity: VoiceActivity | None = None
        self._samples = _Samples()
        # Where the chunk begins, if it has begun.
        self._begin: int | None = 0
        if pauses is not None:
            self._begin = None

    def feed(self, samples: Samples) -> Iterator[Chunk]:
        """Add *samples*, and yield the chunks that are complete."""
        self._samples.append(samples)
        if self._pauses is None:
            yield from self._limited(self._samples.end)
        else:
            yield from self._at_pauses(samples, self._pauses)

    def rest(self) -> Iterator[Chunk]:
        """Yield the last chunks."""
        end = self._samples.end
        if self._begin is not None and end > self._begin:
            yield from self._limited(end)
            yield self._take(self._begin, end)

    def _at_pauses(self, samples: Samples, pauses: Pauses) -> Iterator[Chunk]:
        if self._activity is None:
            # Here, because it takes time to load, and this is called in a thread.
            self._activity = VoiceActivity(self.rate, pauses)
        for event in self._activity.feed(samples):
            if isinstance(event, SpeechStarted):
                self._begin = event.position
            elif self._begin is not None:
                yield from self._limited(event.position)
                yield self._take(self._begin, event.position)
                self._begin = None
        if self._begin is None:
            self._samples.drop(self._activity.earliest_start)
        else:
            yield from self._limited(self._activity.position)

    def _limited(self, end: int) -> Iterator[Chunk]:
        """Yield chunks as long as there is more than one may have up to the position *end*."""
        while self._begin is not None and end - self._begin > self._max_frames:
            begin = self._begin
            cut = begin + quietest_point(self._samples.between(begin, begin + self._max_frames), self.rate)
            yield self._take(begin, cut)
            self._begin = cut

    def _take(self, begin: int, end: int) -> Chunk:
        samples = self._samples.between(begin, end)
        chunk = chunk_of(samples, begin, self.rate)
        self._samples.drop(end)
        return chunk


class Windows:
    """
    What a recognizer gets of a recording whose next window begins where it says, not where the last one ended.

    Chunks that follow each other without a gap are one stretch of audio, of which :meth:`next` returns the beginning.
    """

    def __init__(self, chunks: AsyncIterator[Chunk], rate: int, max_seconds: float) -> None:
        """*rate* is in samples a second; no window is longer than *max_seconds*."""
        self._chunks = chunks
        self._rate = rate
        self._max_frames = int(max_seconds * rate)
        self._samples = _Samples()
        # The chunk behind a gap, and whether there are any further ones.
        self._next: Chunk | None = None
        self._more = True

    async def next(self) -> Chunk | None:
        """Return the next window; ``None`` at the end. It is the same one until :meth:`go_on` is called."""
        while self._next is None and self._more and len(self._samples) <= self._max_frames:
            await self._read()
        if not len(self._samples) and self._next is not None:
            self._append(self._next)
            self._next = None
            return await self.next()
        if not len(self._samples):
            return None
        begin = self._samples.begin
        size = len(self._samples)
        if size > self._max_frames:
            size = quietest_point(self._samples.between(begin, begin + self._max_frames), self._rate)
        return chunk_of(self._samples.between(begin, begin + size), begin, self._rate)

    def go_on(self, seconds: float) -> None:
        """Let the next window begin *seconds* after the beginning of the last one."""
        position = self._samples.begin + round(seconds * self._rate)
        self._samples.drop(min(position, self._samples.end))

    async def _read(self) -> None:
        chunk = await anext(self._chunks, None)
        if chunk is None:
            self._more = False
        elif not len(self._samples) or round(chunk.start * self._rate) == self._samples.end:
            self._append(chunk)
        else:
            self._next = chunk

    def _append(self, chunk: Chunk) -> None:
        import numpy as np

        if not len(self._samples):
            self._samples = _Samples(round(chunk.start * self._rate))
        self._samples.append(np.frombuffer(chunk.samples, "<f4"))


class _Samples:
    """A stretch of samples, to which blocks are added at its end, and from which what is done is dropped."""

    def __init__(self, begin: int = 0) -> None:
        """*begin* is the position of the first sample."""
        self.begin = begin
        self.end = begin
        self._pieces: list[Samples] = []

    def __len__(self) -> int:
        return self.end - self.begin

    def append(self, samples: Samples) -> None:
        """Add *samples* at the end."""
        self._pieces.append(samples)
        self.end += len(samples)

    def between(self, begin: int, end: int) -> Samples:
        """Return the samples from the position *begin* to *end*, which share the memory of the stretch."""
        return self._joined()[begin - self.begin : end - self.begin]

    def drop(self, position: int) -> None:
        """Keep only what follows *position*, without what holds the memory of the rest."""
        if position > self.begin:
            self._pieces = [self._joined()[position - self.begin :].copy()]
            self.begin = position

    def _joined(self) -> Samples:
        import numpy as np

        if not self._pieces:
            return np.zeros(0, np.float32)
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return self._pieces[0]


def chunk_of(samples: Samples, begin: int, rate: int) -> Chunk:
    """Return the chunk of *samples* that begins at the position *begin*."""
    return Chunk(
        start=begin / rate,
        end=(begin + len(samples)) / rate,
        samples=samples.astype("<f4", copy=False).tobytes(),
        silent=_loudest(samples, max(1, int(_HEARD_SECONDS * rate))) < _SILENCE,
    )


def halves(chunk: Chunk, rate: int) -> tuple[Chunk, Chunk]:
    """Return the two parts of *chunk*, which is cut where it is quiet around its middle."""
    import numpy as np

    samples = np.frombuffer(chunk.samples, "<f4")
    begin = round(chunk.start * rate)
    quarter = len(samples) // 4
    cut = quarter + quietest_point(samples[quarter : 3 * quarter], rate, middle=True)
    return (chunk_of(samples[:cut], begin, rate), chunk_of(samples[cut:], begin + cut, rate))


def quietest_point(samples: Samples, rate: int, *, middle: bool = False) -> int:
    """
    Return where to cut *samples*: in a pause of their second half, or with *middle* in one near their middle.

    The pause is the quietest one; of two that are about as quiet it is the later one, or the one nearer to the middle.
    The loudest speech is the measure of what is quiet, because recordings have noise of any level.
    """
    import numpy as np

    first = len(samples) // 2
    if middle:
        first = 0
    frame = max(1, int(_FRAME_SECONDS * rate))
    count = (len(samples) - first) // frame
    width = round(_SMOOTHED_SECONDS / _FRAME_SECONDS)
    if count <= width:
        return len(samples) - (len(samples) - first) // 2
    first = len(samples) - count * frame
    energies = np.square(samples[first:], dtype=np.float64).reshape(count, frame).mean(axis=1)
    totals = np.concatenate(([0.0], np.cumsum(energies)))
    smoothed = _decibels((totals[width:] - totals[:-width]) / width)
    quiet = smoothed.max() - _QUIET_DECIBELS
    best_frame = len(smoothed) - 1
    if middle:
        best_frame = len(smoothed) // 2
    distances = np.abs(np.arange(len(smoothed)) - best_frame) * _FRAME_SECONDS
    chosen = int(np.argmin(np.maximum(smoothed, quiet) + distances * _DECIBELS_A_SECOND))
    # A pause that is shorter than the average is somewhere in it.
    levels = np.maximum(_decibels(energies), quiet)
    frame_number = chosen + int(np.argmin(levels[chosen : chosen + width]))
    return first + _middle_of_pause(levels, frame_number) * frame // 2


def _middle_of_pause(levels: Any, frame_number: int) -> int:
    """Return twice the frame in the middle of the pause around frame *frame_number*, by the *levels* of frames."""
    reach = round(_PAUSE_SECONDS / _FRAME_SECONDS)
    limit = levels[frame_number] + _PAUSE_DECIBELS
    first = frame_number
    while first > max(0, frame_number - reach) and levels[first - 1] <= limit:
        first -= 1
    last = frame_number
    while last < min(len(levels) - 1, frame_number + reach) and levels[last + 1] <= limit:
        last += 1
    return first + last + 1


def _decibels(powers: Any) -> Any:
    import numpy as np

    return 10 * np.log10(np.maximum(powers, 1e-12))


def _loudest(samples: Samples, width: int) -> float:
    """Return the root mean square of the loudest *width* samples."""
    import numpy as np

    whole = len(samples) // width * width
    parts = []
    if whole:
        parts.append(samples[:whole].reshape(-1, width))
    if len(samples) > whole:
        parts.append(samples[whole:].reshape(1, -1))
    # Without an array of the squares.
    return max((math.sqrt(np.einsum("ij,ij->i", part, part).max() / part.shape[1]) for part in parts), default=0.0)
