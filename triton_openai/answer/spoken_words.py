"""The words of a transcript with their times: as the model returns them, or placed in the sound of its segments."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from triton_openai import offload
from triton_openai.jobs import Segment, Transcript, Word
from triton_openai.media.alignment import align
from triton_openai.media.cutting import Chunk

# Microseconds for each byte of samples, at most: 60 ms for half a minute with as many words as one can say.
_ALIGNING = 0.03
# Bytes of a sample.
_SAMPLE = 4


async def place_words(transcript: Transcript, chunk: Chunk, rate: int) -> Sequence[Word]:
    """
    Return the words of the *transcript* of *chunk*, with times from the beginning of the recording.

    The samples of the chunk have *rate* Hz. There are none without words or segments of the model.
    """
    if transcript.words:
        return [replace(word, start=chunk.start + word.start, end=chunk.start + word.end) for word in transcript.words]
    return await offload.run(_aligned, chunk, transcript.segments, rate, cost=_ALIGNING * len(chunk.samples))


def _aligned(chunk: Chunk, segments: Sequence[Segment], rate: int) -> Sequence[Word]:
    """Return the words of *segments*, whose times count from the beginning of *chunk*."""
    words: list[Word] = []
    for segment in segments:
        first = int(segment.start * rate) * _SAMPLE
        last = int(segment.end * rate) * _SAMPLE
        words += align(segment.text, chunk.samples[first:last], rate, chunk.start + segment.start)
    return words
