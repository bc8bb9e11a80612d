"""Small image files, and a web server that gives them out."""

from __future__ import annotations

import base64
import hashlib
import zlib
from typing import Any


def png(seed: int = 0, size: int = 0) -> bytes:
    """Return a PNG of one pixel whose colour is *seed*, with so much text in it that it has *size* bytes at least."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    pixel = zlib.compress(bytes([0, seed & 0xFF, seed >> 8 & 0xFF, 0]))
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", bytes([0, 0, 0, 1, 0, 0, 0, 1, 8, 2, 0, 0, 0]))
    text = chunk(b"tEXt", b"Comment\x00" + b"x" * size) if size else b""
    return head + text + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")


def data_url(file: bytes, kind: str = "image/png") -> str:
    """Return *file* as a data URL."""
    return f"data:{kind};base64,{base64.b64encode(file).decode()}"


def part(url: str, **fields: Any) -> dict[str, Any]:
    """Return the part of a message that holds an image."""
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def seen(*files: bytes, prefix: str = "") -> list[dict[str, Any]]:
    """Return what the stand-ins record of *files*."""
    return [{"prefix": prefix, "size": len(file), "sha256": hashlib.sha256(file).hexdigest()} for file in files]
