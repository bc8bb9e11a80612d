"""Files as recorders and streams leave them: what FFmpeg reads whole is heard whole."""

from __future__ import annotations

import asyncio
import io
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import every_case
from tests.speech import RATE, SENTENCE, encoded, hear, muxed, speak, wav
from triton_openai.errors import InvalidRequest
from triton_openai.media.audio import Recording
from triton_openai.media.containers import Part, content_of

# FFmpeg encodes these two only with libraries that not every build has.
_SPEEX = Path(__file__).parents[2] / "fixtures" / "words.spx"
_AMR = _SPEEX.with_suffix(".amr")
_TONE = speak(SENTENCE, rate=48_000)
_ID3 = b"ID3\x03\0\0\0\0\0\x0a" + bytes(10)
# A picture whose bytes look like frames of MP3.
_PICTURE = b"ID3\x03\0\0\0\0\x2e\x70" + b"\xff\xfb\x90\x64" * 1500


def heard(data: bytes) -> list[str]:
    """Return the words in a file."""

    async def decode() -> list[Any]:
        recording = Recording(data, rate=RATE, max_chunk_seconds=60, max_seconds=3600)
        return [np.frombuffer(chunk.samples, "<f4") async for chunk in recording.chunks()]

    return [word for _, _, word in hear(np.concatenate(asyncio.run(decode())))]


def sized(riff: int, data: int, *, before: bytes = b"", behind: bytes = b"", subtype: str = "PCM_16") -> bytes:
    """Return a WAV file whose head says that RIFF and its samples have these sizes."""
    file = wav(speak(SENTENCE), subtype=subtype)
    place = file.index(b"data")
    head = b"RIFF" + struct.pack("<I", riff) + file[8:place] + before
    return head + b"data" + struct.pack("<I", data) + file[place + 8 :] + behind


def rf64(size: int) -> bytes:
    """Return a RF64 file whose head says that its samples have this *size*."""
    file = bytearray(encoded(speak(SENTENCE), RATE, "RF64", "PCM_16"))
    struct.pack_into("<QQ", file, file.index(b"ds64") + 8, 0, size)
    return bytes(file)


_LARGE = 0x7FFF_FFFF
_LIST = b"LIST" + struct.pack("<I", 4) + b"INFO"


@every_case(
    "file",
    [
        sized(0, 0), sized(0, 192_000), sized(36, 96_000), sized(_LARGE, _LARGE), sized(500_000, 400_000),
        sized(0xFFFF_FFFF, 0xFFFF_FFFF), sized(0x8000_0024, 0x8000_0000), sized(0, 0, before=_LIST),
        sized(0, 0, behind=b"\1"), sized(0, 0, subtype="FLOAT"), sized(0, 0, subtype="PCM_24"),
        sized(_LARGE, _LARGE, subtype="ALAW"), sized(0, 0, subtype="MS_ADPCM"),
        sized(96_048, 96_000, behind=_LIST),
        rf64(0), rf64(1 << 60), _ID3 + wav(speak(SENTENCE)), bytes(100) + wav(speak(SENTENCE)),
    ],
    ids=lambda file: repr(file[:48]),
)  # fmt: skip
def test_wav_files_whose_sizes_are_wrong(file: bytes) -> None:
    """A recorder that streams, or that was ended, leaves sizes of 0 or too large ones: all samples are heard."""
    assert list(SENTENCE) == heard(file)


_CHUNKS = b"abcd" + bytes(4)
_RIFF = b"RIFF\xff\xff\xff\xffWAVE"
_SIZE = 16 << 20


@every_case(
    "file",
    [
        bytes(_SIZE),
        _RIFF + _CHUNKS * (_SIZE // len(_CHUNKS)),
        _RIFF + _LIST + b"data" + bytes(4) + _CHUNKS * (_SIZE // len(_CHUNKS)),
    ],
    ids=lambda file: repr(file[:48]),
)
def test_files_that_take_long_to_look_at(file: bytes) -> None:
    """Zeros and empty chunks without end take no seconds: an upload can have megabytes of them."""
    assert seconds_of(file) < 1


def seconds_of(file: bytes) -> float:
    """Return the seconds of CPU time for a look at *file*; other programs on the machine only make them more."""
    began = time.thread_time()
    content_of(file)
    return time.thread_time() - began


def test_a_wav_file_that_is_really_empty() -> None:
    """Chunks that follow an empty one are not taken for samples."""
    with pytest.raises(InvalidRequest, match="has no audio"):
        heard(wav(np.zeros(0)) + b"LIST" + struct.pack("<I", 4) + b"INFO")


def mp3(rate: int = 48_000) -> bytes:
    """Return a MP3 file without the frame in which an encoder says how long it is."""
    file = encoded(speak(SENTENCE, rate=rate), rate, "MP3")
    second = file.index(file[:2], 24)
    return file[second:]


@every_case(
    "change",
    [
        lambda file: file[200:],
        lambda file: bytes(5000) + file,
        lambda file: _ID3 + bytes(2000) + file,
        lambda file: _ID3 + _ID3 + file,
        lambda file: _PICTURE + file,
        lambda file: b"HTTP/1.1 200 OK\r\n\r\n" + file,
        lambda file: b"APETAGEX" + bytes(24) + file,
        lambda file: b"\xff" * 3000 + file,
        lambda file: file + b"TAG" + bytes(125),
    ],
)
def test_frames_from_anywhere(change: Callable[[bytes], bytes]) -> None:
    """MP3 and AAC begin at their first whole frame, whatever is in front of it."""
    for rate in (48_000, 22_050, 8_000):
        assert list(SENTENCE)[1:] == heard(change(mp3(rate)))[-5:], rate
    assert list(SENTENCE)[1:] == heard(change(muxed(_TONE, 48_000, "adts", "aac")))[-5:]
    assert list(SENTENCE)[1:] == heard(change(muxed(_TONE, 48_000, "mp2", "mp2")))[-5:]


@every_case(
    "file",
    [
        muxed(_TONE, 48_000, "ogg", "flac"), _SPEEX.read_bytes(), _ID3 + _SPEEX.read_bytes(),
        _ID3 + muxed(_TONE, 48_000, "adts", "aac"), muxed(_TONE, 48_000, "latm", "aac"),
        _ID3 + encoded(_TONE, 48_000, "FLAC"), bytes(10) + encoded(_TONE, 48_000, "FLAC"),
        encoded(_TONE, 48_000, "FLAC") + b"TAG" + bytes(125), bytes(10) + encoded(_TONE, 48_000, "OGG", "OPUS"),
        encoded(_TONE, 48_000, "AIFF"), encoded(_TONE, 48_000, "AU", "ULAW"), encoded(_TONE, 48_000, "CAF"),
        encoded(_TONE, 48_000, "W64"), _AMR.read_bytes(),
        muxed(_TONE, 48_000, "mpegts", "aac"), muxed(_TONE, 48_000, "mpeg", "mp2", video=True),
        muxed(_TONE, 48_000, "flv", "aac"), muxed(_TONE, 48_000, "caf", "alac"),
        muxed(_TONE, 48_000, "mov", "pcm_s16le"), muxed(_TONE, 48_000, "wav", "adpcm_ima_wav"),
        muxed(_TONE, 48_000, "matroska", "flac"), muxed(_TONE, 48_000, "avi", "libmp3lame", video=True),
        muxed(_TONE, 48_000, "ac3", "ac3"), muxed(_TONE, 48_000, "adts", "aac")[:-40],
    ],
    ids=lambda file: repr(file[:48]),
)  # fmt: skip
def test_containers(file: bytes) -> None:
    """Containers are recognized by what they have in them, behind tags and zeros too."""
    assert list(SENTENCE) == heard(file)


def length(data: bytes) -> float:
    """Return the seconds of a file."""

    async def decode() -> float:
        recording = Recording(data, rate=RATE, max_chunk_seconds=60, max_seconds=3600)
        async for _ in recording.chunks():
            pass
        return recording.seconds

    return asyncio.run(decode())


@every_case("rate", [48_000, 22_050, 8_000])
def test_mp3_has_the_length_that_was_encoded(rate: int) -> None:
    """What an encoder adds at both ends is left out, also with tags in front of the audio and behind it."""
    file = encoded(speak(SENTENCE, rate=rate), rate, "MP3")
    for each in (file, _ID3 + file, file + b"TAG" + bytes(125), _PICTURE + file):
        assert pytest.approx(3) == length(each)


@every_case("rate", [48_000, 22_050, 8_000])
def test_mp3_files_that_were_joined(rate: int) -> None:
    """The first one says how long it is, which is not how long all of them are."""
    file = encoded(speak(SENTENCE, rate=rate), rate, "MP3")
    assert list(SENTENCE) == heard(file)
    assert [*SENTENCE, *SENTENCE] == heard(file + file)
    assert [*SENTENCE, *SENTENCE][1:] == heard(mp3(rate) + file)[-11:]


def test_mp3_files_that_are_cut_off() -> None:
    """A file that is a second shorter than its encoder said is refused."""
    file = encoded(speak([*SENTENCE] * 3, rate=48_000), 48_000, "MP3")
    with pytest.raises(InvalidRequest, match="cut off"):
        heard(file[: len(file) // 2])


@every_case("subtype", ["VORBIS", "OPUS"])
def test_streams_in_a_row(subtype: str) -> None:
    """Internet radio begins a stream of Ogg with each title: all of them are heard, up to a limit."""
    first = encoded(speak(("never", "tried"), rate=48_000), 48_000, "OGG", subtype)
    second = encoded(speak(("no", "matter"), rate=48_000), 48_000, "OGG", subtype)
    assert ["never", "tried", "no", "matter"] == heard(first + second)
    with pytest.raises(InvalidRequest, match="too many recordings"):
        heard(first * 60)


def test_frames_that_are_damaged() -> None:
    """A stream with frames that cannot be decoded is refused, but for what is cut off at its end."""
    file = bytearray(muxed(_TONE, 48_000, "adts", "aac"))
    rng = np.random.default_rng(1)
    for place in rng.integers(0, len(file), 2000):
        file[place] = 0x55
    with pytest.raises(InvalidRequest, match="damaged"):
        heard(bytes(file))


@given(
    st.binary(max_size=50),
    st.binary(max_size=20),
    st.lists(st.tuples(st.integers(-80, 80), st.sampled_from((0, 1, 2)), st.integers(0, 40)), max_size=10),
)
def test_a_part_reads_as_a_file(data: bytes, head: bytes, steps: list[tuple[int, int, int]]) -> None:
    """A part behind another head reads and seeks as a file with these bytes does."""
    start = len(data) // 2
    part = Part(data, start, head=head)
    file = io.BytesIO(head + data[start:])
    assert (len(part), bytes(part)) == (len(file.getvalue()), file.getvalue())
    for offset, whence, count in steps:
        moved = max(offset, -_position(file, whence))
        assert part.seek(offset, whence) == file.seek(moved, whence)
        assert part.read(count) == file.read(count)


def _position(file: io.BytesIO, whence: int) -> int:
    return {0: 0, 1: file.tell(), 2: len(file.getvalue())}[whence]


@given(st.binary(max_size=3000))
def test_any_bytes(data: bytes) -> None:
    """Whatever a file has, it has a container, and no more bytes than before but a head."""
    assert all(len(part) <= len(data) + 64 for part in content_of(data).parts)
