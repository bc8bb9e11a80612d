"""
The images of requests: how many and how large, which formats, and their base64.

Work over a whole file is done in slices, with the event loop's turn between them. A thread would not help: the
functions that do it keep the interpreter lock. Measured, a slice is checked and hashed in 1.5 ms.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence

import msgspec

from triton_openai.errors import InvalidRequest
from triton_openai.generation import Image
from triton_openai.media.fetch import Fetcher, too_large
from triton_openai.tasks import cancel

# The four formats of the OpenAI API, and two that Pillow, with which backends read files, opens as well.
_FORMATS = ("JPEG", "PNG", "GIF", "WebP", "BMP", "TIFF")
_SIGNATURES: Mapping[bytes, str] = {
    b"\xff\xd8\xff": "image/jpeg", b"\x89PNG\r\n\x1a\n": "image/png", b"GIF87a": "image/gif", b"GIF89a": "image/gif",
    b"BM": "image/bmp", b"II*\x00": "image/tiff", b"MM\x00*": "image/tiff",
}  # fmt: skip
_ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
# A multiple of 4 for base64 and, three quarters of it, of 3 for bytes.
_SLICE = 1024 * 1024
#: A data URL before the data: a media type, maybe with parameters. As in all URLs, the scheme's case is of no account.
DATA_URL = re.compile(r"data:(?P<type>[^,;]{0,200})(?:;[^,;]{1,200}){0,4}?(?P<base64>;base64)?,", re.IGNORECASE)
MAX_HEAD_CHARS = 1_200
_BLANKS = re.compile(r"[ \t\r\n]+")


def media_type_of(head: bytes) -> str | None:
    """Return the media type of the file that begins with *head* (12 bytes, or the whole of a shorter file)."""
    if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for signature, kind in _SIGNATURES.items() if head.startswith(signature)), None)


async def from_base64(text: str) -> Image:
    """
    Return the image whose file is *text*: padded base64 of the standard alphabet, without line breaks.

    Raises :class:`InvalidRequest` for anything else, and for files that are no images.
    """
    wrong = InvalidRequest(
        "The image's data is not valid base64 (the standard alphabet, with padding).", code="invalid_base64"
    )
    body = len(text)
    if text.endswith("=="):
        body -= 2
    elif text.endswith("="):
        body -= 1
    digest = hashlib.sha256()
    for start in range(0, len(text), _SLICE):
        if start:
            await asyncio.sleep(0)
        piece = text[start : start + _SLICE].encode("ascii", "replace")
        if piece[: body - start].translate(None, _ALPHABET):
            raise wrong
        digest.update(piece)
    if len(text) % 4:
        raise wrong
    # Whole groups of four characters, so that it decodes.
    kind = media_type_of(binascii.a2b_base64(text[:16]))
    if kind is None:
        raise InvalidRequest(
            f"This is not an image of a supported format ({', '.join(_FORMATS)}).", code="invalid_image_format"
        )
    # 63 bits fit a signed integer of 64 bits; 0 would mean no image.
    number = int.from_bytes(digest.digest()[:8], "big") >> 1 or 1
    return Image(media_type=kind, base64=text, size=_decoded_size(text), digest=number)


def _decoded_size(base64: str) -> int:
    """Return the number of bytes that *base64* (padded, in one line) stands for."""
    return len(base64) // 4 * 3 - base64[-2:].count("=")


async def from_bytes(data: bytes) -> Image:
    """Return the image whose file is *data*. Raises :class:`InvalidRequest` for files that are no images."""
    size = _SLICE // 4 * 3
    pieces = []
    for start in range(0, len(data), size):
        pieces.append(binascii.b2a_base64(data[start : start + size], newline=False).decode("ascii"))
        await asyncio.sleep(0)
    return await from_base64("".join(pieces))


def is_data_url(url: str) -> bool:
    """Return whether *url* holds its content itself."""
    return url[:5].lower().partition(":")[:2] == ("data", ":")


async def from_data_url(url: str, *, max_size: int) -> Image:
    """
    Return the image in *url*. The media type that it names has to be an image's; which one, the file itself decides.

    Line breaks and blanks within the base64, which some encoders write, are left out. Raises :class:`InvalidRequest`,
    also for files of more than *max_size* bytes.
    """
    head = DATA_URL.match(url[:MAX_HEAD_CHARS])
    if head is None or head["base64"] is None:
        raise InvalidRequest(
            "A data URL must have the form data:image/png;base64,... for an image.", code="invalid_image_url"
        )
    named = head["type"].strip().lower()
    if not named.startswith("image/"):
        raise InvalidRequest(
            f"The data URL says that it is '{named[:100] or 'text/plain'}', which is not an image.",
            code="invalid_image_format",
        )
    data = url[head.end() :]
    # Blanks are looked for where encoders put the first: at the end of a line.
    if data and (_BLANKS.search(data, 0, 100) or data[-1] in " \t\r\n"):
        data = _BLANKS.sub("", data)
    if _decoded_size(data) > max_size:
        raise too_large(max_size)
    return await from_base64(data)


# A fetched image is in memory as it came, as bytes, and in base64 as pieces and as a whole.
_COPIES_OF_FETCHED = 5


def images_size(images: Sequence[Image]) -> int:
    """Return how many bytes *images* take."""
    return sum(len(image.base64) for image in images)


class ImageReference(msgspec.Struct, frozen=True):
    """An image in a request: its path, for an error's ``param``, and its URL."""

    param: str
    url: str


class ImageLoader:
    """
    Loads at most *max_images* images of a request, of *max_size* bytes each and *max_total_size* bytes in base64 in
    all.
    """

    def __init__(self, fetcher: Fetcher, *, max_images: int, max_size: int, max_total_size: int) -> None:
        self._fetcher = fetcher
        self._max_images = max_images
        self._max_size = max_size
        self._max_total_size = max_total_size

    def check_count(self, references: Sequence[ImageReference], *, max_images: float = math.inf) -> None:
        """Raise :class:`InvalidRequest` for too many; *max_images* is the model's own limit, where it is known."""
        if max_images > self._max_images:
            limit = self._max_images
        else:
            limit = int(max_images)
        if len(references) > limit:
            raise InvalidRequest(
                f"A request to this model can have {limit} image{'' if limit == 1 else 's'} at most, and this one has "
                f"{len(references)}.",
                param=references[limit].param,
                code="too_many_images",
            )

    async def load(self, references: Sequence[ImageReference]) -> tuple[Image, ...]:
        """
        Return the images in the order of *references*, of which :meth:`check_count` has checked the number.

        Raises :class:`InvalidRequest` with the ``param`` of the image. The first image that fails cancels all others.
        """
        left = self._max_total_size // 4 * 3

        def count(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise self._too_large_together()

        tasks = [asyncio.create_task(self._load(reference, count)) for reference in references]
        try:
            images = await asyncio.gather(*tasks)
        except BaseException:
            await cancel(*tasks)
            raise
        total = 0
        for image, reference in zip(images, references, strict=True):
            total += len(image.base64)
            if total > self._max_total_size:
                error = self._too_large_together()
                error.param = reference.param
                raise error
        return tuple(images)

    def loading_size(self, references: Sequence[ImageReference]) -> int:
        """Return how many bytes :meth:`load` takes at most for *references*."""
        fetched = 0
        size = 0
        for reference in references:
            if is_data_url(reference.url):
                # Its text is copied without the head.
                size += len(reference.url)
            else:
                fetched += self._max_size
        return size + min(fetched, self._max_total_size // 4 * 3) * _COPIES_OF_FETCHED

    def _too_large_together(self) -> InvalidRequest:
        return InvalidRequest(
            f"The request's images are larger than the limit of {self._max_total_size} bytes together.",
            code="image_too_large",
        )

    async def _load(self, reference: ImageReference, count: Callable[[int], object]) -> Image:
        try:
            if is_data_url(reference.url):
                return await from_data_url(reference.url, max_size=self._max_size)
            return await from_bytes(await self._fetcher.fetch(reference.url, count))
        except InvalidRequest as error:
            error.param = reference.param
            raise

    async def close(self) -> None:
        """Close the connections."""
        await self._fetcher.close()
