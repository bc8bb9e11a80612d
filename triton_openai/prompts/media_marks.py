"""How a prompt marks the images and the audio of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triton_openai.errors import InvalidRequest


class ImageMarks:
    """
    How a prompt marks the images of one request: with a *part* for which the template writes a placeholder, or with the
    *placeholder* itself, in which ``{n}`` is the image's number within the request; not at all if both are ``None``.

    It counts images, so each rendering needs a new one.
    """

    def __init__(self, *, part: Mapping[str, Any] | None = None, placeholder: str | None = None) -> None:
        self.part = part
        self._placeholder = placeholder
        self._count = 0

    def add_images(self, texts: Sequence[str], images: int, param: str, what: str = "an image") -> list[str]:
        """
        Number the next *images* of the request, those of one message; return the placeholders that its *texts* lack.

        They go in front, as in vLLM's server. For errors, *what* is what the images are, and *param* the path of the
        message's content.

        Raises :class:`InvalidRequest` if the texts have more placeholders than there are images.
        """
        if self._placeholder is None:
            return []
        numbers = range(self._count + 1, self._count + images + 1)
        self._count += images
        marks = [self._placeholder.replace("{n}", str(number)) for number in numbers]
        lacking = []
        for mark in dict.fromkeys(marks):
            more = marks.count(mark) - sum(text.count(mark) for text in texts)
            if more < 0:
                raise InvalidRequest(
                    f"The message's text holds the placeholder of {what} ('{mark}') more often than it has such parts.",
                    param=param,
                )
            lacking += [mark] * more
        return lacking
