"""
The codings of bodies (``Content-Encoding``, RFC 9110, section 8.4.1): what is decoded, and in pieces of bounded size.

gzip and deflate are always decoded, and zstd where Python or the package ``backports.zstd`` has it, as in aiohttp.
Of each, a single member or frame is taken: millions of empty ones would take long.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

from triton_openai.errors import InvalidRequest

# zlib's name for the format of each coding.
_ZLIB_FORMATS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
# Bytes that a zstd frame may refer back to, as a power of two: what every decoder must support (RFC 8878).
_ZSTD_WINDOW = 23
_ZSTD_MODULES = ("compression.zstd", "backports.zstd")


@cache
def _zstd() -> Any | None:
    """Return the module that decodes zstd, if there is one."""
    for name in _ZSTD_MODULES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def codings() -> Sequence[str]:
    """Return the names of the codings that are decoded."""
    names = list(_ZLIB_FORMATS)
    if _zstd() is not None:
        names.append("zstd")
    return names


class Decoder(Protocol):
    """Decodes a body as it arrives."""

    @property
    def has_more(self) -> bool:
        """Whether another call returns more without further input."""

    def decode(self, data: bytes, max_size: int) -> bytes:
        """Return *max_size* bytes at most of what *data* continues. Raises :class:`InvalidRequest`."""

    def close(self) -> None:
        """Note that nothing follows. Raises :class:`InvalidRequest` for a body without an end."""


def decoder_for(coding: str) -> Decoder:
    """Return a decoder for *coding*, which is one of :func:`codings`."""
    if coding == "zstd":
        return _ZstdDecoder()
    return _ZlibDecoder(coding)


def _invalid(coding: str) -> InvalidRequest:
    message = f"The request's body is not valid {coding}, which its Content-Encoding says it is."
    return InvalidRequest(message, code="invalid_encoding")


class _ZlibDecoder:
    """Decodes gzip and deflate."""

    def __init__(self, coding: str) -> None:
        self._coding = coding
        self._decoder = zlib.decompressobj(_ZLIB_FORMATS[coding])
        self.has_more = False

    def decode(self, data: bytes, max_size: int) -> bytes:
        try:
            content = self._decoder.decompress(self._decoder.unconsumed_tail + data, max_size)
        except zlib.error as error:
            raise _invalid(self._coding) from error
        if self._decoder.unused_data:
            raise _invalid(self._coding)
        # What fills the size may have a rest inside of the decoder.
        self.has_more = not self._decoder.eof and (bool(self._decoder.unconsumed_tail) or len(content) == max_size)
        return content

    def close(self) -> None:
        if not self._decoder.eof:
            raise _invalid(self._coding)


class _ZstdDecoder:
    """Decodes zstd."""

    def __init__(self) -> None:
        module = _zstd()
        assert module is not None, "zstd is one of the codings"
        self._module = module
        window = self._module.DecompressionParameter.window_log_max
        self._decoder = self._module.ZstdDecompressor(options={window: _ZSTD_WINDOW})

    @property
    def has_more(self) -> bool:
        return not (self._decoder.eof or self._decoder.needs_input)

    def decode(self, data: bytes, max_size: int) -> bytes:
        if self._decoder.eof:
            if data:
                raise _invalid("zstd")
            return b""
        try:
            content: bytes = self._decoder.decompress(data, max_size)
        except self._module.ZstdError as error:
            raise _invalid("zstd") from error
        if self._decoder.unused_data:
            raise _invalid("zstd")
        return content

    def close(self) -> None:
        if not self._decoder.eof:
            raise _invalid("zstd")
