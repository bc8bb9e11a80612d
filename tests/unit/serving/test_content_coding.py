"""Codings of bodies: what comes out, in pieces of bounded size, and what is refused."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from multidict import CIMultiDict

from tests.zstd import zstd_module
from triton_openai.errors import InvalidRequest, UnsupportedMediaType
from triton_openai.serving import content_coding
from triton_openai.serving.content_coding import codings, decoder_for
from triton_openai.serving.request_body import content_coding as coding_of

BODY = b"".join(b"%d," % number for number in range(30_000)) + bytes(1_000_000)


def packers() -> dict[str, Callable[[bytes], bytes]]:
    """Return what packs a body, by coding."""
    found: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
    if "zstd" in codings():
        found["zstd"] = zstd_module().compress
    return found


def test_a_body_comes_out_in_pieces() -> None:
    """However it is cut, what comes out is what went in, and no piece is longer than is asked for."""
    for coding, pack in packers().items():
        packed = pack(BODY)
        for step, max_size in ((1 << 30, 1000), (1, 1 << 30), (700, 33), (len(packed), len(BODY))):
            if len(BODY) // max_size > 100_000:
                continue
            decoder = decoder_for(coding)
            content = bytearray()
            for start in range(0, len(packed), step):
                data = packed[start : start + step]
                while True:
                    piece = decoder.decode(data, max_size)
                    assert len(piece) <= max_size
                    content += piece
                    data = b""
                    if not decoder.has_more:
                        break
            decoder.close()
            assert BODY == content, (coding, step, max_size)


def _decode(coding: str, pieces: Sequence[bytes]) -> None:
    decoder = decoder_for(coding)
    for piece in pieces:
        decoder.decode(piece, 1000)
    decoder.close()


def test_what_is_no_such_body() -> None:
    """A body that is cut, damaged, or followed by something is refused, also where that comes later."""
    for coding, pack in packers().items():
        packed = pack(b"a body")
        for pieces in ([packed[:-1]], [packed + b"x"], [packed, b"x"], [packed, packed], [b"a body"], []):
            with pytest.raises(InvalidRequest) as refused:
                _decode(coding, pieces)
            assert (400, "invalid_encoding") == (refused.value.status, refused.value.code), (coding, pieces)


def test_a_zstd_frame_that_wants_much_memory_is_refused() -> None:
    """A frame may name a window of gigabytes. Decoders need not have more than 8 MiB (RFC 8878)."""
    zstd: Any = zstd_module()
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    packed = compressor.compress(BODY) + compressor.flush()
    with pytest.raises(InvalidRequest):
        decoder_for("zstd").decode(packed, 1000)


def test_without_zstd_the_error_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither Python nor a package has it, it is a 415 that names what is decoded."""
    monkeypatch.setattr(content_coding, "_zstd", lambda: None)
    request = cast(web.Request, SimpleNamespace(headers=CIMultiDict({"Content-Encoding": "zstd"})))
    with pytest.raises(UnsupportedMediaType) as refused:
        coding_of(request)
    assert "use gzip, deflate, or none" in refused.value.message
