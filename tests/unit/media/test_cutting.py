"""Recordings are cut in pauses, whatever the lengths of words and pauses; windows begin where the reader says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.speech import RATE
from triton_openai.media.cutting import Chunk, Cutter, Windows, chunk_of, halves, quietest_point
from triton_openai.media.voice_activity import Samples

# In hundredths of a second: a word, and the pause behind it. A shorter pause counts only near the end of a chunk.
WORDS = st.lists(st.tuples(st.integers(10, 290), st.integers(8, 150)), min_size=1, max_size=12)


def spoken(words: Sequence[tuple[int, int]], noise: float = 0.0) -> tuple[Samples, list[tuple[int, int]]]:
    """Return samples with *words* over *noise*, and the bounds of each word."""
    parts = []
    bounds = []
    position = 0
    for length, pause in words:
        size = length * RATE // 100
        parts.append(0.3 * np.sin(2 * np.pi * 500 * np.arange(size) / RATE))
        parts.append(np.zeros(pause * RATE // 100))
        bounds.append((position, position + size))
        position += size + pause * RATE // 100
    samples = np.concatenate(parts)
    samples += np.random.default_rng(1).normal(0, noise, len(samples))
    return samples.astype(np.float32), bounds


def chunks_of(samples: Samples, max_seconds: float, size: int = 5000) -> Iterator[Chunk]:
    """Return the chunks of *samples* that come in blocks of *size*."""
    cutter = Cutter(RATE, max_seconds, None)
    for start in range(0, len(samples), size):
        yield from cutter.feed(samples[start : start + size])
    yield from cutter.rest()


def positions(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    """Return the samples at which each of *chunks* begins and ends."""
    return [(round(chunk.start * RATE), round(chunk.end * RATE)) for chunk in chunks]


@given(WORDS, st.sampled_from([0.0, 0.003, 0.02]))
def test_no_word_is_cut(words: Sequence[tuple[int, int]], noise: float) -> None:
    """Every cut is in a pause, a short one and one with noise too, and nothing is lost between two chunks."""
    samples, bounds = spoken(words, noise)
    found = list(chunks_of(samples, 6))
    assert samples.tobytes() == b"".join(chunk.samples for chunk in found)
    assert all(chunk.seconds <= 6 for chunk in found)
    for _, cut in positions(found)[:-1]:
        assert not any(begin + 160 < cut < end - 160 for begin, end in bounds), (cut, bounds)


@every_case(
    "words, expected",
    [
        # The middle of the one pause, of a long pause before one that is longer than the window's end, and the last one
        # of many.
        ([(400, 40), (200, 0)], 420),
        ([(320, 60), (260, 0)], 350),
        ([(340, 10), (50, 10), (50, 10), (70, 0)], 465),
        # A pause that is a little quieter is not worth to lose seconds for.
        ([(310, 12), (200, 10), (70, 0)], 527),
    ],
)
def test_the_place(words: Sequence[tuple[int, int]], expected: int) -> None:
    """It is in the second half, in the middle of a pause."""
    samples, _ = spoken(words, 0.001)
    assert abs(quietest_point(samples, RATE) - expected * RATE // 100) <= 160


@every_case("samples", [np.zeros(1000, np.float32), np.ones(1, np.float32), np.ones(100_000, np.float32)])
def test_without_a_pause(samples: Samples) -> None:
    """What has none is cut in its second half too."""
    assert len(samples) // 2 <= quietest_point(samples, RATE) <= len(samples)


def test_halves() -> None:
    """Both parts are the chunk, and the cut is in the pause that is nearest to its middle."""
    samples, _ = spoken([(200, 20), (60, 20), (200, 0)])
    first, second = halves(chunk_of(samples, RATE, RATE), RATE)
    assert samples.tobytes() == first.samples + second.samples
    assert (1.0, 6.0) == (first.start, round(second.end, 6))
    assert 2.0 < first.seconds < 3.0
    assert first.end == second.start


async def _each(chunks: Sequence[Chunk]) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        yield chunk


async def windows_of(chunks: Sequence[Chunk], steps: Sequence[float], max_seconds: float = 3) -> list[Chunk]:
    """Return the windows of *chunks* for a reader that goes on by *steps* in turn, at most to each window's end."""
    windows = Windows(_each(chunks), RATE, max_seconds)
    found: list[Chunk] = []
    while (window := await windows.next()) is not None:
        found.append(window)
        windows.go_on(min(steps[len(found) % len(steps)], window.seconds))
    return found


async def test_windows_begin_where_the_reader_says() -> None:
    """Each is as long as it can be, and has the samples of its place."""
    samples, _ = spoken([(30, 10)] * 30, 0.001)
    found = await windows_of(list(chunks_of(samples, 3)), [2.0])
    assert [(number * 2.0) for number in range(6)] == [window.start for window in found]
    for begin, end in positions(found):
        assert samples[begin:end].tobytes() == found[begin // (2 * RATE)].samples
        assert end - begin > 2 * RATE or end == len(samples)
    assert len(samples) == positions(found)[-1][1]


@given(WORDS, st.lists(st.floats(0.3, 4), min_size=1, max_size=5))
async def test_windows_of_any_steps(words: Sequence[tuple[int, int]], steps: Sequence[float]) -> None:
    """All of a recording is in them, in order, and no window is longer than the limit."""
    samples, _ = spoken(words)
    found = positions(await windows_of(list(chunks_of(samples, 3)), steps))
    assert (0, len(samples)) == (found[0][0], found[-1][1])
    assert all(begin < end <= begin + 3 * RATE for begin, end in found)
    assert all(before[0] < after[0] <= before[1] for before, after in pairwise(found))


async def test_windows_end_at_gaps() -> None:
    """What was left out between two chunks is in no window."""
    samples, _ = spoken([(100, 0)])
    chunks = [chunk_of(samples, begin, RATE) for begin in (0, RATE, 3 * RATE, 9 * RATE)]
    found = positions(await windows_of(chunks, [5.0]))
    assert [(0, 2 * RATE), (3 * RATE, 4 * RATE), (9 * RATE, 10 * RATE)] == found
    assert [] == await windows_of([], [1.0])
