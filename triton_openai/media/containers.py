"""
Where the audio of a file begins and in which container it is, by its content.

Files come from recorders and streams. Players skip what stands in front of the audio: tags, zeros, a frame that is cut
off. They read a WAV file whose recorder never wrote its size.
Sources: RIFF (Microsoft's multimedia specification), EBU 3306 (RF64), ID3v2.4, ISO 11172-3 (MPEG audio), ISO 13818-7
(ADTS), RFC 3533 (Ogg).
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Literal, TypeAlias

import msgspec

#: ``native`` and ``ogg`` are read by libsndfile, and the others by FFmpeg. It finds out for itself what is ``probed``,
#: and may know what is ``unknown`` here.
Container = Literal["native", "ogg", "mov", "matroska", "aac", "probed", "unknown"]

_ID3_HEAD = 10
_FOOTER = 0x10
# Tags in a row that are skipped.
_MAX_TAGS = 10
_CHUNK_HEAD = 8
_RIFF_HEAD = 12
# The most chunks in front of samples, and behind empty ones, that are looked at.
_MAX_CHUNKS = 1_000
# Bytes that are searched at once: each search holds the interpreter.
_SLICE = 1 << 20
# The first bytes of the files that libsndfile reads.
_NATIVE = re.compile(rb"(?s)(?:RIFF|RF64|RIFX)....WAVE|FORM....AIF[FC]|fLaC|\.snd|caff|riff\x2e\x91\xcf\x11")
# Those of containers that FFmpeg reads, whose content looks like frames of MPEG audio.
_PROBED = re.compile(
    rb"(?s)\x00\x00\x01[\xba\xb3]|FLV\x01|RIFF....AVI |\x30\x26\xb2\x75|\x47.{187}\x47|#!AMR|wvpk|\x0b\x77"
)
# A page that begins a stream of Ogg.
_OGG_START = re.compile(rb"OggS\x00[\x02\x03\x06\x07]")
_OGG_PAGE = re.compile(rb"OggS\x00[\x00\x01\x04\x05]")
# Streams that follow each other in a file of Ogg: internet radio begins one with every title.
_MAX_LINKS = 50
# Frames that follow each other without a gap, by which MPEG audio is recognized; the bytes in which they are searched,
# and how many of their positions are looked at, which costs 10 ms.
_FRAMES = 4
_SEARCHED = 1 << 18
_MAX_POSITIONS = 5_000
# The tag in the first frame of an MP3 file, with a flag for the number of frames, which follows. It stands behind the
# side information of a frame, whose length depends on the version and the channels.
_FRAME_COUNT = re.compile(rb"(?s)(?:Xing|Info)...[\x01\x03\x05\x07\x09\x0b\x0d\x0f]")
_SIZE_FOLLOWS = 2
# Bytes of tags behind an MP3 file.
_MAX_TRAILER = 4_096
_SIDE_INFORMATION = {(True, False): 32, (True, True): 17, (False, False): 17, (False, True): 9}
# Of layer III and version 1; the other versions have half of them.
_SAMPLES_OF_FRAME = 1152
# The fewest bytes of a frame.
_MIN_FRAME = 24
_SYNC = re.compile(rb"\xff[\xe0-\xff]")
# Kilobits a second by version 1 or another one, and by layer; samples a second of version 1.
_BIT_RATES = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = (44_100, 48_000, 32_000)
_MPEG_SYNC = 0x7FF
_ADTS_SYNC = 0xFFF


class Part(io.RawIOBase):
    """A file that is a part of *data*, behind a *head* that stands for its own. It is no copy."""

    def __init__(self, data: bytes, start: int = 0, end: int | None = None, head: bytes = b"") -> None:
        super().__init__()
        self._head = head
        self._body = memoryview(data)[start:end]
        self._position = 0
        self._size = len(head) + len(self._body)

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return self._head + bytes(self._body)

    def has(self, pattern: re.Pattern[bytes]) -> bool:
        """Return whether *pattern*, of at most 256 bytes, is somewhere in its body."""
        starts = range(0, len(self._body), _SLICE)
        return any(pattern.search(self._body[start : start + _SLICE + 256]) for start in starts)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        # Decoders take a short read for the end.
        head = self._head[self._position :][: len(target)]
        first = max(0, self._position - len(self._head))
        body = self._body[first : first + len(target) - len(head)]
        count = len(head) + len(body)
        target[:count] = head + body
        self._position += count
        return count


class Content(msgspec.Struct, frozen=True):
    """The audio of a file: its container, and its parts. Only Ogg has several, which follow each other."""

    container: Container
    parts: Sequence[Part]
    #: How many samples an MP3 file has, as its encoder says.
    samples: int | None = None


def content_of(data: bytes) -> Content:
    """Return the audio of a file. Raises ``ValueError`` for too many recordings in a row."""
    start = _behind_tags(data)
    for offset in (start, _behind_zeros(data, start)):
        known = _known(data, offset)
        if known is not None:
            return known
    for match in islice(_SYNC.finditer(data, start, start + _SEARCHED), _MAX_POSITIONS):
        offset = match.start()
        if _repeats(data, offset, _mpeg_frame):
            return _mpeg_audio(data, offset)
        if _repeats(data, offset, _adts_frame):
            return Content("aac", [Part(data, offset)])
    return Content("unknown", [Part(data, start)])


def _known(data: bytes, offset: int) -> Content | None:
    """Return the audio of a file whose first bytes, at *offset*, show its container; ``None`` if they do not."""
    if _NATIVE.match(data, offset):
        return Content("native", [_with_sizes(data, offset)])
    if data.startswith(b"OggS", offset):
        return Content("ogg", _links(data, offset))
    if data[offset + 4 : offset + 8] == b"ftyp":
        return Content("mov", [Part(data, offset)])
    if data.startswith(b"\x1aE\xdf\xa3", offset):
        return Content("matroska", [Part(data, offset)])
    if _PROBED.match(data, offset):
        return Content("probed", [Part(data, offset)])
    return None


def _behind_zeros(data: bytes, offset: int) -> int:
    """Return the offset of the first byte from *offset* on that is not 0, *offset* if there is none."""
    for start in range(offset, len(data), _SLICE):
        rest = data[start : start + _SLICE].lstrip(b"\0")
        if rest:
            return min(len(data), start + _SLICE) - len(rest)
    return offset


def _behind_tags(data: bytes) -> int:
    """Return the position behind tags (ID3v2), and zeros in front of them."""
    start = 0
    for _ in range(_MAX_TAGS):
        tag = _behind_zeros(data, start)
        if not data.startswith(b"ID3", tag):
            return start
        head = data[tag : tag + _ID3_HEAD].ljust(_ID3_HEAD, b"\0")
        length = 0
        for byte in head[6:]:
            length = length << 7 | byte & 0x7F
        if head[5] & _FOOTER:
            length += _ID3_HEAD
        # A tag that is longer than the file is wrong about its length.
        if tag + _ID3_HEAD + length >= len(data):
            length = 0
        start = tag + _ID3_HEAD + length
    return start


def _with_sizes(data: bytes, start: int) -> Part:
    """
    Return a file that begins at *start*; a WAV file with a head that has its size.

    A recorder writes the sizes when it ends. In a stream, or after a crash, they are 0 or too large.
    """
    if data[start : start + 4] not in (b"RIFF", b"RF64"):
        return Part(data, start)
    form = b""
    size = 0
    offset = start + _RIFF_HEAD
    name = b""
    for _ in range(_MAX_CHUNKS):
        name = data[offset : offset + 4]
        size = int.from_bytes(data[offset + 4 : offset + 8], "little")
        if name == b"data" or offset + _CHUNK_HEAD > len(data):
            break
        if name == b"fmt ":
            form = data[offset : offset + _CHUNK_HEAD + size + size % 2]
        offset += _CHUNK_HEAD + size + size % 2
    if name != b"data" or offset + _CHUNK_HEAD > len(data):
        return Part(data, start)
    body = offset + _CHUNK_HEAD
    left = len(data) - body
    if data.startswith(b"RF64", start):
        size = int.from_bytes(data[start + 28 : start + 36], "little")
    if size == 0:
        right = _are_chunks(data, body)
    else:
        right = size <= left
    if right or not form:
        return Part(data, start)
    riff = b"RIFF" + (4 + len(form) + _CHUNK_HEAD + left).to_bytes(4, "little") + b"WAVE"
    return Part(data, body, head=riff + form + b"data" + left.to_bytes(4, "little"))


def _are_chunks(data: bytes, offset: int) -> bool:
    """Return whether only chunks of a RIFF file follow at *offset*: then the one with the samples is really empty."""
    for _ in range(_MAX_CHUNKS):
        if offset + _CHUNK_HEAD > len(data):
            break
        name = data[offset : offset + 4]
        if not (name.isascii() and name.decode("ascii").isprintable()):
            return False
        size = int.from_bytes(data[offset + 4 : offset + 8], "little")
        offset += _CHUNK_HEAD + size + size % 2
    return len(data) <= offset <= len(data) + 1


def _links(data: bytes, start: int) -> Sequence[Part]:
    """Return the streams of a file of Ogg that follow each other. Raises ``ValueError`` if they are too many."""
    starts = [start]
    offset = start
    while (page := _OGG_PAGE.search(data, offset)) is not None:
        match = _OGG_START.search(data, page.end())
        if match is None:
            break
        offset = match.start()
        starts.append(offset)
        if len(starts) > _MAX_LINKS:
            raise ValueError("The file has too many recordings in a row.")
    return [Part(data, *bounds) for bounds in zip(starts, [*starts[1:], len(data)], strict=True)]


class _Frame(msgspec.Struct, frozen=True):
    """A frame: its length in bytes, and what is the same in all frames of a file."""

    length: int
    kind: tuple[float, int, int]


_FrameReader: TypeAlias = Callable[[bytes, int], _Frame | None]


def _repeats(data: bytes, offset: int, read: _FrameReader) -> bool:
    """Return whether frames of the same kind follow each other at *offset*, up to the end of a short file."""
    first = read(data, offset)
    if first is None:
        return False
    offset += first.length
    for _ in range(_FRAMES - 1):
        if offset >= len(data) - 4:
            return offset <= len(data)
        frame = read(data, offset)
        if frame is None or frame.kind != first.kind:
            return False
        offset += frame.length
    return True


def _mpeg_frame(data: bytes, offset: int) -> _Frame | None:
    """Return the frame of MPEG audio (layers I to III) at *offset*, if there is one."""
    head = int.from_bytes(data[offset : offset + 4], "big")
    version = {0: 2.5, 2: 2, 3: 1}.get(head >> 19 & 3)
    layer = 4 - (head >> 17 & 3)
    bit_rate = head >> 12 & 15
    rate = head >> 10 & 3
    if head >> 21 != _MPEG_SYNC or version is None or layer == 4 or bit_rate in (0, 15) or rate == 3:
        return None
    bits = 1000 * _BIT_RATES[min(int(version), 2), layer][bit_rate - 1]
    samples_a_second = int(_RATES[rate] / {1: 1, 2: 2, 2.5: 4}[version])
    padding = head >> 9 & 1
    if layer == 1:
        length = (12 * bits // samples_a_second + padding) * 4
    elif layer == 3 and version != 1:
        length = 72 * bits // samples_a_second + padding
    else:
        length = 144 * bits // samples_a_second + padding
    return _Frame(length, (version, layer, samples_a_second))


def _mpeg_audio(data: bytes, offset: int) -> Content:
    """
    Return MPEG audio that begins at *offset*, with a number of frames that no file of its size exceeds.

    libsndfile stops at the number of frames that the first one says (Xing, Info), or that it guesses by the first one.
    Both lose audio: of files that were joined, and of those with a varying bit rate.
    """
    frame = _mpeg_frame(data, offset)
    assert frame is not None, "there is one"
    version, layer, _ = frame.kind
    if layer != 3:
        return Content("native", [Part(data, offset)])
    samples = _SAMPLES_OF_FRAME
    if version != 1:
        samples //= 2
    first = bytearray(data[offset : offset + frame.length])
    tag = _FRAME_COUNT.search(first)
    many = (len(data) // _MIN_FRAME).to_bytes(4, "big")
    if tag is not None:
        at = tag.end()
        count = int.from_bytes(first[at : at + 4], "big")
        if first[at - 1] & _SIZE_FOLLOWS and _is_all(data, offset, int.from_bytes(first[at + 4 : at + 8], "big")):
            return Content("native", [Part(data, offset)], count * samples)
        first[at : at + 4] = many
        return Content("native", [Part(data, offset + frame.length, head=bytes(first))], count * samples)
    # Version, layer and rate as they are, without a checksum, and with a bit rate that makes room for the tag.
    head = bytes((first[0], first[1] | 1, 0x90 | first[2] & 0x0C, first[3]))
    made = _mpeg_frame(head, 0)
    assert made is not None, "its head was one before"
    mono = first[3] >> 6 == 3
    side = _SIDE_INFORMATION[version == 1, mono]
    body = bytes(side) + b"Xing" + (1).to_bytes(4, "big") + many
    return Content("native", [Part(data, offset, head=(head + body).ljust(made.length, b"\0"))])


def _is_all(data: bytes, offset: int, size: int) -> bool:
    """Return whether *size* bytes, as the encoder says of its MP3 file, are all there is, but for tags behind them."""
    return len(data) - offset <= size + _MAX_TRAILER


def _adts_frame(data: bytes, offset: int) -> _Frame | None:
    """Return the frame of AAC at *offset*, if there is one."""
    head = int.from_bytes(data[offset : offset + 7], "big")
    length = head >> 13 & 0x1FFF
    if len(data) < offset + 7 or head >> 44 != _ADTS_SYNC or head >> 41 & 3 or length < 7:
        return None
    # Version, profile, rate and channels.
    return _Frame(length, (head >> 43 & 1, head >> 34 & 0x3F, head >> 30 & 7))
