"""
The ``image_url`` parts of a chat's messages.

Source of the wire format: ``ChatCompletionContentPartImage`` (openai-openapi 2.3.0).
"""

from __future__ import annotations

from collections.abc import Sequence

from triton_openai.chat.images import is_image
from triton_openai.chat.messages import ContentPart, Message
from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.media.images import ImageReference
from triton_openai.models import ServedModel

# How closely to look. No backend takes it: a model looks as closely as it is set up to, so there is nothing to honour.
_DETAILS = ("auto", "low", "high", "original")


def images_of(model: ServedModel, messages: Sequence[Message]) -> list[ImageReference]:
    """
    Return the images of *messages* in their order, none of them looked at yet.

    Raises :class:`UnsupportedParameter` when *model* takes no images, :class:`InvalidRequest` for parts without a URL.
    """
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for index, part in enumerate(message.content):
            if isinstance(part, ContentPart) and is_image(part):
                place = f"messages[{number}].content[{index}]"
                if not model.adapter.capabilities.images:
                    raise UnsupportedParameter(
                        f"Content of type '{part.type}' is not supported by this model; only text is.", param=place
                    )
                found.append(ImageReference(f"{place}.image_url", _url(part, f"{place}.image_url")))
    return found


def _url(part: ContentPart, place: str) -> str:
    given = part.image_url
    if isinstance(given, dict):
        detail = given.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise InvalidRequest(
                f"'detail' must be one of {', '.join(_DETAILS)}.", param=f"{place}.detail", code="invalid_value"
            )
        given = given.get("url")
        place = f"{place}.url"
    if given is None:
        raise InvalidRequest(f"Missing required parameter: '{place}'.", param=place, code="missing_required_parameter")
    if not isinstance(given, str):
        raise InvalidRequest(f"Invalid type for '{place}': expected a string.", param=place, code="invalid_type")
    return given.strip()
