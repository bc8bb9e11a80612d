"""Images as the backends read them: decoded from base64, in a format that Pillow opens."""

from __future__ import annotations

import base64
import hashlib
import io
from typing import Any

#: The inputs that hold images, of vLLM and of TensorRT-LLM.
INPUTS = ("image", "image_url_input", "image_url", "media")
# The only data URL that TensorRT-LLM's preprocessing knows; it fetches everything else.
_PREFIX = "data:image/jpeg;base64,"
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"BM", b"II*\x00", b"MM\x00*")

# Every format needs at least this many bytes for the image's size.
_HEADER = 20


def decode_images(values: Any | None) -> list[bytes]:
    """Return the files in vLLM's ``image`` input; raises `ValueError` with the original's words."""
    if values is None:
        return []
    return [_opened(base64.b64decode(value)) for value in values.reshape(-1)]


def load_images(values: Any | None, prefix: str = _PREFIX) -> list[bytes]:
    """
    Return the files in TensorRT-LLM's ``image_url_input``, or ``image_url``; raises `ValueError`.

    The original fetches everything but data URLs that begin with *prefix*. A stand-in fetches nothing.
    """
    if values is None:
        return []
    files = []
    for value in values.reshape(-1):
        url = value.decode()
        if not url.startswith(prefix):
            raise ValueError(f"No connection adapters were found for {url[:100]!r}")
        files.append(_opened(base64.b64decode(url.split(",")[1])))
    return files


def summary(text: str) -> Any:
    """Return the record of an image: its prefix, if any, and the size and digest of the file."""
    prefix, comma, data = text.rpartition(",")
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError:
        return {"unreadable": text[:100]}
    return {"prefix": prefix + comma, "size": len(file), "sha256": hashlib.sha256(file).hexdigest()}


def _opened(file: bytes) -> bytes:
    if not file.startswith(_SIGNATURES) or len(file) < _HEADER:
        raise ValueError(f"cannot identify image file {io.BytesIO(file)!r}")
    return file
