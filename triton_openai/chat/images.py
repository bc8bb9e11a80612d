"""
What is written into a prompt for an image.

Templates of models that see take a part of type ``image`` and write the model's own placeholder for it (Qwen-VL's
``<|vision_start|><|image_pad|><|vision_end|>``, Llama's ``<|image|>``, Gemma's ``<start_of_image>``, …): that is the
convention of ``transformers``. Others (Phi's, InternVL's first) take text only, and the placeholder has to be in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from triton_openai.chat.messages import ContentPart
from triton_openai.errors import InvalidRequest, UnsupportedParameter

AUTO = "auto"
NONE = "none"
#: The second is the Responses API's, which agents that speak both mix up with the first.
IMAGE_TYPES = frozenset({"image_url", "input_image"})
_NUMBER = "{n}"


class TakesImages(Protocol):
    """What a template says about images; ``ChatTemplate`` is one."""

    @property
    def image_part(self) -> Mapping[str, Any] | None:
        """The part that stands for an image, ``None`` where the template has no use for one."""


class ImageMarks:
    """
    What stands for the images of one request: a *part* that the template writes the placeholder for, or the
    *placeholder* itself, in which ``{n}`` is the image's number within the request; where both are ``None``, nothing.

    Made for one rendering, as it counts.
    """

    def __init__(self, *, part: Mapping[str, Any] | None = None, placeholder: str | None = None) -> None:
        self.part = part
        self._placeholder = placeholder
        self._count = 0

    def missing(self, texts: Sequence[str], images: int, place: str) -> list[str]:
        """
        Return the placeholders of a message's *images* that its *texts* do not hold yet, to be put in front of them.

        In front is where vLLM's own server puts them, and where the models learnt to find them. Raises
        :class:`InvalidRequest` when the texts hold more placeholders than there are images.
        """
        if self._placeholder is None:
            return []
        marks = []
        for _ in range(images):
            self._count += 1
            marks.append(self._placeholder.replace(_NUMBER, str(self._count)))
        lacking = []
        for mark in dict.fromkeys(marks):
            wanted = marks.count(mark)
            there = sum(text.count(mark) for text in texts)
            if there > wanted:
                raise InvalidRequest(
                    f"The message's text holds the placeholder of an image ('{mark}') more often than it has images.",
                    param=place,
                )
            lacking += [mark] * (wanted - there)
        return lacking


def marks(template: TakesImages, setting: str | None, place: str) -> ImageMarks:
    """
    Return what stands for the images in a prompt of *template*; *setting* is the operator's ``--image-placeholder``,
    *place* the first image.

    Raises :class:`UnsupportedParameter` where neither knows, as it is with models that see nothing.
    """
    if setting == NONE:
        return ImageMarks()
    if setting not in (None, AUTO):
        return ImageMarks(placeholder=setting)
    part = template.image_part
    if part is None:
        raise UnsupportedParameter(
            "The model's chat template takes no images. If the model does, its placeholder for them has to be "
            "configured (--image-placeholder).",
            param=place,
        )
    return ImageMarks(part=part)


def is_image(part: ContentPart | str) -> bool:
    """Return whether *part* is an image."""
    return not isinstance(part, str) and part.type in IMAGE_TYPES
