"""Audio is decoded block by block, within limits, and cut where it is quiet."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import every_case
from tests.speech import RATE, SENTENCE, encoded, hear, muxed, speak, wav
from triton_openai.errors import InvalidRequest
from triton_openai.media.audio import Recording
from triton_openai.media.cutting import Chunk
from triton_openai.media.encode import encoder
from triton_openai.media.voice_activity import Pauses


async def chunks_of(
    data: bytes,
    *,
    rate: int = RATE,
    max_chunk_seconds: float = 30,
    max_seconds: float = 3600,
    pauses: Pauses | None = None,
) -> list[Chunk]:
    """Return the chunks of a file."""
    recording = Recording(data, rate=rate, max_chunk_seconds=max_chunk_seconds, max_seconds=max_seconds, pauses=pauses)
    return [chunk async for chunk in recording.chunks()]


def words(chunk: Chunk) -> list[str]:
    """Return the words in a chunk."""
    return [word for _, _, word in hear(np.frombuffer(chunk.samples, "<f4"))]


@every_case(
    "container, subtype, rate",
    [
        ("WAV", "PCM_16", 16_000), ("WAV", "PCM_U8", 8000), ("WAVEX", "DOUBLE", 96_000), ("RF64", "PCM_24", 44_100),
        ("FLAC", "PCM_16", 48_000), ("OGG", "VORBIS", 22_050), ("OGG", "OPUS", 24_000),
        ("MP3", "MPEG_LAYER_III", 32_000),
    ],
)  # fmt: skip
def test_formats_and_rates(container, subtype, rate):
    """What was said is heard, in the length that it had."""
    (chunk,) = asyncio.run(chunks_of(encoded(speak(SENTENCE, rate=rate), rate, container, subtype)))
    assert list(SENTENCE) == words(chunk)
    assert pytest.approx(3, abs=0.1) == chunk.end
    assert (0, False) == (chunk.start, chunk.silent)
    assert len(chunk.samples) == 4 * round(chunk.end * RATE)


def test_speech_that_the_service_made():
    """A WAV file that was written as a stream does not say how long it is, and is not taken for cut off."""
    made = encoder("wav", RATE)
    (chunk,) = asyncio.run(chunks_of(made.encode(speak(SENTENCE)) + made.finish()))
    assert list(SENTENCE) == words(chunk)


def test_channels_are_averaged():
    """Of two channels with opposite signs nothing is left, and of one that is silent a half."""
    tone = speak(("never",))
    for other, loudest in ((-tone, 0.0), (np.zeros_like(tone), 0.15), (tone, 0.3)):
        (chunk,) = asyncio.run(chunks_of(wav(np.stack([tone, other], axis=1), subtype="FLOAT")))
        assert pytest.approx(loudest, abs=0.01) == np.abs(np.frombuffer(chunk.samples, "<f4")).max()
        assert chunk.silent == (loudest == 0)


def test_cuts_are_in_the_quietest_place():
    """No word is cut, every chunk is within the limit, and together they are the recording."""
    said = [*SENTENCE] * 20
    samples = speak(said)
    found = asyncio.run(chunks_of(wav(samples, subtype="FLOAT"), max_chunk_seconds=7.3))
    assert said == [word for chunk in found for word in words(chunk)]
    assert all(5.3 <= chunk.seconds <= 7.3 for chunk in found[:-1])
    assert samples.tobytes() == b"".join(chunk.samples for chunk in found)
    assert [chunk.end for chunk in found[:-1]] == [chunk.start for chunk in found[1:]]


def test_pauses():
    """Speech is cut at silence that lasts long enough, and the silence between is left out."""
    silence = np.zeros(RATE * 2, np.float32)
    noise = np.random.default_rng(1).normal(0, 0.002, RATE * 2).astype(np.float32)
    file = wav(np.concatenate([silence, speak(("never", "tried")), noise, speak(("again",)), silence]))
    found = asyncio.run(chunks_of(file, pauses=Pauses(silence=0.2, padding=0.1)))
    assert [["never", "tried"], ["again"]] == [words(chunk) for chunk in found]
    assert [pytest.approx(1.9, abs=0.03), pytest.approx(4.9, abs=0.03)] == [chunk.start for chunk in found]
    assert [pytest.approx(3.1, abs=0.03), pytest.approx(5.6, abs=0.03)] == [chunk.end for chunk in found]
    # A lower threshold takes the noise for speech, and shorter silence ends after every word.
    assert 1 == len(asyncio.run(chunks_of(file, pauses=Pauses(threshold=0.05, silence=1))))
    assert 3 == len(asyncio.run(chunks_of(file, pauses=Pauses(silence=0.08))))
    # Speech without a pause is cut at the limit.
    assert all(
        one.seconds <= 3 for one in asyncio.run(chunks_of(wav(speak(["no"] * 20, pause=0)), max_chunk_seconds=3))
    )
    assert [] == asyncio.run(chunks_of(wav(np.zeros(RATE * 90)), pauses=Pauses()))


def test_an_hour_of_silence_ends_at_the_limit():
    """A small file with hours of silence costs neither memory nor the rest of the hours."""
    file = bytearray(encoded(np.zeros(8000 * 3600 * 2, np.float32), 8000, "FLAC"))
    assert len(file) < 1_000_000
    with pytest.raises(InvalidRequest, match="longer than the limit of 600 seconds"):
        asyncio.run(chunks_of(bytes(file), max_seconds=600, max_chunk_seconds=240))
    # As if it were written as a stream: the head does not have the number of samples.
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="longer than the limit of 600 seconds"):
            asyncio.run(chunks_of(bytes(file), max_seconds=600, max_chunk_seconds=240))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 80_000_000, "with the chunks, which the test keeps"


def test_flac_without_its_number_of_samples():
    """A stream's head does not say how long it is; what is missing at its end is not noticed then."""
    file = bytearray(encoded(speak(SENTENCE), RATE, "FLAC"))
    file[21] &= 0xF0
    file[22:26] = bytes(4)
    (chunk,) = asyncio.run(chunks_of(bytes(file)))
    assert list(SENTENCE) == words(chunk)


async def test_memory_does_not_grow_with_the_recording():
    """Chunks that nobody keeps are gone: an hour needs what a minute needs."""
    file = encoded(np.zeros(8000 * 3600, np.float32), 8000, "FLAC")
    recording = Recording(file, rate=RATE, max_chunk_seconds=30, max_seconds=3600)
    tracemalloc.start()
    try:
        async for _ in recording.chunks():
            pass
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert pytest.approx(3600) == recording.seconds
    assert peak < 20_000_000


async def test_what_is_not_taken_is_not_decoded():
    """Decoding waits for whoever takes the chunks."""
    recording = Recording(wav(speak([*SENTENCE] * 40)), rate=RATE, max_chunk_seconds=10, max_seconds=3600)
    chunks = recording.chunks()
    await anext(chunks)
    assert recording.seconds < 20
    await chunks.aclose()


@every_case("name", ["file.m3u8", "/etc/passwd", "http://127.0.0.1:1/"])
def test_nothing_else_is_opened(name, tmp_path):
    """A file that names another one, or an address, is not followed."""
    hls = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{name}\n"
    playlists = [hls, f"ffconcat version 1.0\nfile '{name}'\n", f"{name}\n"]
    for text in playlists:
        with pytest.raises(InvalidRequest, match="supported format"):
            asyncio.run(chunks_of(text.encode()))


def test_a_movie_that_refers_to_another_file():
    """A reference to a file outside of an MP4 file is not followed: there is no audio then."""
    data = muxed(speak(SENTENCE, rate=48_000), 48_000, "mp4", "aac")
    place = data.index(b"url \x00\x00\x00\x01")
    outside = data[:place] + b"url \x00\x00\x00\x00" + data[place + 8 :]
    found: Any = None
    try:
        found = asyncio.run(chunks_of(outside))
    except InvalidRequest as error:
        found = error.code
    assert found == "invalid_audio" or words(found[0]) == list(SENTENCE)


def _promising(count: int) -> bytes:
    """Return an MP4 file whose tables promise *count* samples of a byte."""
    data = bytearray(muxed(speak(("no",), rate=48_000), 48_000, "mp4", "aac"))
    sizes, chunks = data.index(b"stsz"), data.index(b"stsc")
    struct.pack_into(">II", data, sizes + 8, 1, count)
    struct.pack_into(">I", data, chunks + 16, count)
    return bytes(data)


def _fragmented(count: int) -> bytes:
    """Return an MP4 file whose fragment promises *count* samples of the usual size."""
    data = muxed(speak(("no",), rate=48_000), 48_000, "mp4", "aac", movflags="empty_moov+frag_keyframe")
    place = data.index(b"trun")
    return data[: place + 4] + struct.pack(">III", 1, count, 0) + data[place + 16 :]


@every_case("make", [_promising, _fragmented])
def test_a_movie_that_promises_much(make):
    """Tables of a few bytes make no room for millions of samples that are not there, which took gigabytes."""
    status, resets = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    asyncio.run(chunks_of(muxed(speak(("no",), rate=48_000), 48_000, "mp4", "aac")))
    for count in (500_000, 80_000_000):
        resets.write_text("5")
        before = int(status.read_text().partition("VmRSS:")[2].split()[0])
        with contextlib.suppress(InvalidRequest):
            asyncio.run(chunks_of(make(count)))
        assert int(status.read_text().partition("VmHWM:")[2].split()[0]) - before < 64_000, count


class _Bits:
    """Numbers of any width, as Vorbis packs them."""

    def __init__(self) -> None:
        self.value = self.width = 0

    def put(self, *numbers: tuple[int, int]) -> None:
        """Add numbers, each with its width."""
        for number, width in numbers:
            self.value |= number << self.width
            self.width += width

    def packed(self) -> bytes:
        """Return all."""
        return self.value.to_bytes(-(-self.width // 8), "little")


def _page(packets: list[bytes], flags: int, place: int, number: int) -> bytes:
    """Return a page of Ogg."""
    sizes = b"".join(bytes([255] * (len(each) // 255) + [len(each) % 255]) for each in packets)
    page = struct.pack("<4sBBqIIIB", b"OggS", 0, flags, place, 1, number, 0, len(sizes)) + sizes + b"".join(packets)
    # Ogg's checksum is that of zlib with all bits reversed, which begins with 0.
    reverse = bytes(int(f"{each:08b}"[::-1], 2) for each in range(256))
    check = int(f"{zlib.crc32(page.translate(reverse), 0xFFFFFFFF) ^ 0xFFFFFFFF:032b}"[::-1], 2)
    return page[:22] + struct.pack("<I", check) + page[26:]


def _vorbis(books: int, bits: int) -> bytes:
    """Return a file of Ogg Vorbis with as many code *books*, each of 2 to the power of *bits* entries."""
    head, setup = struct.pack("<IBIiii", 0, 1, RATE, 0, 0, 0), _Bits()
    setup.put((books - 1, 8))
    for _ in range(books):
        setup.put((0x564342, 24), (1, 16), (1 << bits, 24), (1, 1), (bits - 1, 5), (1 << bits, bits + 1), (0, 4))
    # One of each: time, floor, residue, mapping and mode.
    setup.put((0, 22), (0, 6), (1, 16), (0, 7), (4, 4), (0, 46), (16, 24), (15, 24), (0, 18), (0, 50), (0, 47), (1, 1))
    packets = [b"\x03vorbis" + bytes(8) + b"\1", b"\x05vorbis" + setup.packed()]
    start = _page([b"\x01vorbis" + head + b"\xb8\1"], 2, 0, 0)
    return start + _page(packets, 0, 0, 1) + _page([bytes(8)] * 20, 4, 2000, 2)


def test_code_books_without_end():
    """A file of some hundred bytes neither overflows the stack of a thread nor takes gigabytes: it is refused."""
    (chunk,) = asyncio.run(chunks_of(_vorbis(1, 8)))
    assert 2000 == len(chunk.samples) // 4
    for books, bits in ((1, 20), (256, 15)):
        with pytest.raises(InvalidRequest, match="damaged"):
            asyncio.run(chunks_of(_vorbis(books, bits)))


_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys({modules!r}))
from triton_openai.errors import ServiceError
from triton_openai.media.audio import Recording
try:
    Recording({data!r}, rate=16000, max_chunk_seconds=1, max_seconds=1)._decoded().__next__()
except ServiceError as error:
    print(error.status, error.code, error.message)
"""


@every_case(
    "modules, data, said",
    [
        (("soundfile",), b"RIFF....WAVE", "501 configuration_error"),
        (("soxr",), b"RIFF....WAVE", "501 configuration_error"),
        (("av",), b"....ftyp", "400 invalid_audio_format"),
        (("av",), b"OggS", "400 invalid_audio_format"),
    ],
)
def test_an_extra_that_is_not_installed(modules, data, said):
    """The error names the extra."""
    code = _WITHOUT.format(modules=modules, data=data)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(said)
    assert f"triton-openai[{'media' if 'av' in modules else 'audio'}]" in run.stdout


def test_random_bytes_never_crash():
    """What is damaged is refused, or decoded as far as it goes."""
    blamed = set()
    random = np.random.default_rng(7)
    tone = speak(("never", "again"), rate=48_000)
    files = [
        encoded(tone, 48_000, "FLAC"), encoded(tone, 48_000, "OGG", "OPUS"), encoded(tone, 48_000, "MP3"),
        muxed(tone, 48_000, "mp4", "aac"), muxed(tone, 48_000, "webm", "libopus"), wav(tone, 48_000),
    ]  # fmt: skip
    for file in files:
        for _ in range(12):
            data = bytearray(file)
            for place in random.integers(0, len(data), 30):
                data[place] = int(random.integers(0, 256))
            try:
                asyncio.run(chunks_of(bytes(data)))
            except InvalidRequest as error:
                blamed.add(error.param)
    assert blamed == {"file"}
