"""
The frames of HTTP/2 and the header blocks of HPACK, as gRPC calls need them.

Source of the facts: RFC 9113 (HTTP/2), RFC 7541 (HPACK, through hpack) and gRPC's PROTOCOL-HTTP2.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache

import hpack

from triton_openai.triton.connection import Header
from triton_openai.triton.tensors import Buffer

#: The first bytes of a connection.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
# The upper and lower bits of the length, the type, the flags and the stream of a frame.
FRAME = struct.Struct(">HBBBI")
UINT32 = struct.Struct(">I")
SETTING = struct.Struct(">HI")
# HPACK: a field whose name is written out, and the first length of a string that takes more than a byte.
_NEVER_INDEXED = b"\x10"
_LONG = 127
# Whether a message is compressed, and its length.
MESSAGE = struct.Struct(">BI")

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
WITH_PRIORITY = 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE, MAX_FRAME_SIZE = range(1, 6)
PROTOCOL_ERROR = 1
REFUSED_STREAM = 7
CANCEL = 8

UINT31 = 2**31 - 1
DEFAULT_WINDOW = 65_535
# The largest frame that we accept, and the default of servers.
FRAME_SIZE = 16_384
MAX_HEADERS = 64 * 1024


def frame(kind: int, flags: int, stream_id: int, payload: Buffer = b"") -> bytes:
    """Return a frame."""
    size = len(payload)
    return FRAME.pack(size >> 8, size & 0xFF, kind, flags, stream_id) + payload


def header_block(headers: Iterable[Header]) -> bytes:
    """Return *headers* encoded without HPACK's table: the same block is good for every call and connection."""
    return b"".join([_NEVER_INDEXED + _string(name) + _string(value) for name, value in headers])


def _string(text: str) -> bytes:
    data = text.encode()
    size = len(data)
    if size < _LONG:
        return bytes((size,)) + data
    return b"\x7f" + varint(size - _LONG) + data


def varint(value: int) -> bytes:
    """Return *value* seven bits at a time, the lowest first; all but the last byte have their highest bit set."""
    if value <= 0x7F:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@lru_cache(maxsize=64)
def decode_headers(block: bytes) -> Mapping[bytes, bytes]:
    """Return the fields of a header block. Nearly all calls have the same two, at their beginning and at their end."""
    return dict(hpack.Decoder(max_header_list_size=MAX_HEADERS).decode(block, raw=True))


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the *payload* of a frame without its padding. Raises :class:`ValueError`."""
    if not flags & PADDED:
        return payload
    if payload[0] >= len(payload):
        raise ValueError("the server sent more padding than fits into the frame")
    return payload[1 : len(payload) - payload[0]]
