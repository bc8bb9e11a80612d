"""The content of messages: texts, files, and marks for images and audio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from triton_openai.errors import InvalidRequest, UnsupportedParameter
from triton_openai.media import text_files
from triton_openai.prompts.media_marks import ImageMarks
from triton_openai.prompts.messages import Content, ContentPart, FileContent, UserMessage, is_audio, is_image
from triton_openai.prompts.origins import MessageOrigin
from triton_openai.prompts.parts import Prepared, text_part
from triton_openai.prompts.prompt_template import PromptTemplate

#: How images and audio are marked.
Marks: TypeAlias = tuple[ImageMarks | None, ImageMarks | None]
NO_MARKS: Marks = (None, None)

#: Joins the text parts of a message for templates that take one string, as in vLLM.
BETWEEN_PARTS = "\n"
_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_FILE_TYPES = frozenset({"file", "input_file"})
# What to do about types of parts that vLLM's server takes, and no model gets through this service.
_INSTEAD = {
    "video_url": "This service reads no video. Send frames of it as images to a model that takes images.",
    "audio_url": "Send the audio in a part of type 'input_audio' to a model that takes audio.",
}


def text_of(message: UserMessage, origin: MessageOrigin) -> str:
    """Return the text of *message* from *origin*, without its images. Raises as `prepare`."""
    if isinstance(message.content, str):
        return message.content
    texts = [
        _text(part, origin, f"[{index}]") for index, part in enumerate(message.content or ()) if not is_image(part)
    ]
    return BETWEEN_PARTS.join(texts)


def prepared_content(
    content: Content, template: PromptTemplate, marks: Marks, origin: MessageOrigin
) -> Prepared | None:
    """Return *content* of the message from *origin* in the form that *template* takes."""
    if content is None:
        return None
    if isinstance(content, str):
        if template.wants_parts:
            return [text_part(content)]
        return content
    parts = [_text_or_mark(part, marks, origin, f"[{index}]") for index, part in enumerate(content)]
    texts = [part for part in parts if isinstance(part, str)]
    lacking = _lacking_placeholders(parts, texts, marks, origin)
    if any(isinstance(part, ImageMarks) and part.part is not None for part in parts):
        return _parts_of([*lacking, *parts])
    # Each on a line of its own, as in vLLM's server, whatever the template puts between parts.
    if lacking:
        texts = [BETWEEN_PARTS.join([*lacking, *texts])]
    # A single part means the same as a string, and templates that take both handle strings better.
    if template.wants_parts or (template.takes_parts and len(texts) > 1):
        return [text_part(text) for text in texts]
    return BETWEEN_PARTS.join(texts)


def empty_content(template: PromptTemplate) -> Prepared:
    """Return content without text."""
    if template.wants_parts:
        return [text_part("")]
    return ""


def _text_or_mark(part: ContentPart | str, marks: Marks, origin: MessageOrigin, inner: str) -> str | ImageMarks:
    """Return the text of *part*, or how the image or the audio that it is is marked."""
    images, audio = marks
    if images is not None and is_image(part):
        return images
    if audio is not None and is_audio(part):
        return audio
    return _text(part, origin, inner)


def _lacking_placeholders(
    parts: Sequence[str | ImageMarks], texts: Sequence[str], marks: Marks, origin: MessageOrigin
) -> list[str]:
    """Return the placeholders of images and audio among *parts* that *texts* lack."""
    images, audio = marks
    lacking: list[str] = []
    for mark, what in ((images, "an image"), (audio, "audio")):
        if mark is not None and mark in parts and mark.part is None:
            lacking += mark.add_images(texts, parts.count(mark), origin.content(), what)
    return lacking


def _parts_of(parts: Sequence[str | ImageMarks]) -> list[dict[str, Any]]:
    """Return texts as parts, and the template's own parts for images and audio."""
    prepared: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            prepared.append(text_part(part))
        elif part.part is not None:
            prepared.append(dict(part.part))
    return prepared


def _text(part: ContentPart | str, origin: MessageOrigin, inner: str) -> str:
    """
    Return the text of *part*, which is at *inner* in the content of the message from *origin*.

    Raises :class:`InvalidRequest` or :class:`UnsupportedParameter`.
    """
    if isinstance(part, str):
        return part
    if part.type in _FILE_TYPES:
        if part.file is None:
            return _file(part, origin, inner)
        return _file(part.file, origin, f"{inner}.file")
    if part.type is None or part.type in _TEXT_TYPES:
        text = part.text
    elif part.type == "refusal":
        text = part.refusal
    else:
        message = f"Content of type '{part.type[:100]}' is not supported by this model; only text is."
        if part.type in _INSTEAD:
            message = f"Content of type '{part.type}' is not supported. {_INSTEAD[part.type]}"
        raise UnsupportedParameter(message, param=origin.content(inner))
    if text is None:
        raise InvalidRequest(f"A part of type '{part.type or 'text'}' must have its text.", param=origin.content(inner))
    return text


def _file(file: FileContent, origin: MessageOrigin, inner: str) -> str:
    """Return the text of *file* as the model reads it."""
    if file.file_data is None:
        for name in ("file_id", "file_url"):
            if getattr(file, name) is not None:
                raise UnsupportedParameter(
                    f"'{name}' is not supported: send the file's content in 'file_data'.",
                    param=origin.content(f"{inner}.{name}"),
                )
        raise InvalidRequest("A file must have its content in 'file_data'.", param=origin.content(f"{inner}.file_data"))
    try:
        return text_files.render(file.filename, text_files.decode(file.file_data, file.filename))
    except InvalidRequest as error:
        error.param = origin.content(f"{inner}.file_data")
        raise
