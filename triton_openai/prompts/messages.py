"""A chat's messages, as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta


# A request may have thousands of what follows. It has no reference cycles, so the garbage collector leaves it out.
class ImageUrl(msgspec.Struct, gc=False, frozen=True):
    """The URL of an image. No backend takes a level of detail, so ``detail`` has no effect."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(msgspec.Struct, gc=False, frozen=True):
    """Audio: a file in base64. What its format is, the file itself says."""

    data: str | None = None
    format: str | None = None


class FileContent(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """A file: its content in base64, or a data URL with it. Files that are stored elsewhere are refused."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


class ContentPart(FileContent, frozen=True, kw_only=True):
    """
    One part of a message's content. Which types of parts are accepted depends on the model.

    Files are texts. Their fields stand in ``file``, or in the part itself, as in the Responses API.
    """

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    #: An object with a ``url``; or the URL itself, as some clients and the Responses API send it.
    image_url: ImageUrl | str | None = None
    file: FileContent | None = None
    input_audio: InputAudio | None = None


#: A message's content: text, parts (some clients put bare strings between them), or null.
Content: TypeAlias = str | Annotated[list[ContentPart | str], Meta(max_length=4096)] | None


class MessageFunctionCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """
    The function that an assistant called. ``arguments`` is JSON text; some clients send it parsed.

    What is broken or no object is taken too, and becomes an object for the model.
    """

    name: str
    arguments: str | dict[str, Any] | list[Any] | bool | int | float | None = None


class MessageCustomCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """The custom tool that an assistant called, with its text."""

    name: str
    input: str


class MessageToolCall(msgspec.Struct, gc=False, frozen=True, kw_only=True):
    """One tool call of an assistant's message."""

    id: str | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"anyOf": [{"enum": ["function", "custom", None]}]})] = None
    function: MessageFunctionCall | None = None
    custom: MessageCustomCall | None = None


class _Message(msgspec.Struct, gc=False, frozen=True, kw_only=True, tag_field="role"):
    content: Content = None
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    """Instructions; the system message of newer OpenAI models."""


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions."""


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    """A message of the user."""


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    """An answer of the model: text, a refusal, or tool calls; with its reasoning if the client keeps it."""

    refusal: str | None = None
    reasoning_content: str | None = None
    #: Another name for ``reasoning_content``, which some servers return and clients send back.
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    #: Deprecated by OpenAI in favour of ``tool_calls``.
    function_call: MessageFunctionCall | None = None
    #: Refused: a prompt holds text only.
    audio: Annotated[dict[str, Any] | None, Meta(extra_json_schema={"anyOf": [{"type": "null"}]})] = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    """The result of a tool."""

    tool_call_id: str | None = None


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """The result of a function. Deprecated by OpenAI in favour of ``tool``."""


#: An item of a request's ``messages``; msgspec picks the type by ``role``.
Message: TypeAlias = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


#: The second is the Responses API's; agents that use both APIs confuse the two.
_IMAGE_TYPES = frozenset({"image_url", "input_image"})
AUDIO_TYPE = "input_audio"


def is_image(part: ContentPart | str) -> bool:
    """Return whether *part* is an image."""
    return not isinstance(part, str) and part.type in _IMAGE_TYPES


def is_audio(part: ContentPart | str) -> bool:
    """Return whether *part* is audio."""
    return not isinstance(part, str) and part.type == AUDIO_TYPE
