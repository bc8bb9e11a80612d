"""Data URLs (RFC 2397) that hold an image in base64."""

from __future__ import annotations

import re

from triton_openai.errors import InvalidRequest
from triton_openai.generation import Image
from triton_openai.media.files import decoded_size, from_base64, too_large

# Everything before the data: a media type, maybe with parameters. As in all URLs, the scheme's case is of no account.
_HEAD = re.compile(r"data:(?P<type>[^,;]{0,200})(?:;[^,;]{1,200}){0,4}?(?P<base64>;base64)?,", re.IGNORECASE)
_LONGEST_HEAD = 1_200
_BLANKS = re.compile(r"[ \t\r\n]+")


def is_data_url(url: str) -> bool:
    """Return whether *url* holds its content itself."""
    scheme, colon, _ = url[:5].partition(":")
    return bool(colon) and scheme.lower() == "data"


async def image_of(url: str, *, largest: int) -> Image:
    """
    Return the image in *url*. The media type that it names has to be an image's; which one, the file itself decides.

    Line breaks and blanks within the base64, which some encoders write, are left out. Raises :class:`InvalidRequest`,
    also for files of more than *largest* bytes.
    """
    head = _HEAD.match(url[:_LONGEST_HEAD])
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
    if decoded_size(data) > largest:
        raise too_large(largest)
    return await from_base64(data)
