"""
The messages of a chat request, as the OpenAI API defines them and as clients really send them.

Roles, fields and parts are those of ``ChatCompletionMessageParam`` (OpenAI API reference, "Create chat completion").
Where clients are looser than the reference (content null, an empty list of tool calls, parts without a type, arguments
already parsed, ``reasoning_content`` sent back), so are these types; unknown keys are ignored. What is wrong in form
fails while msgspec decodes; what is wrong in meaning fails in ``prepare``.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

#: What is read by hand, as it should be; see ``api.documented``.
ImageUrl: TypeAlias = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["url"],
                    "properties": {
                        "url": {"type": "string"},
                        "detail": {"enum": ["auto", "low", "high", "original", None]},
                    },
                },
                {"type": "null"},
            ]
        }
    ),
]


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content. Only its type is known here: which types work is the model's affair."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    #: Read by ``images``: an object with a ``url``, or the URL itself, which is how some clients and the Responses API
    #: write it.
    image_url: ImageUrl = None


#: A message's content: text, parts (some clients put bare strings between them), or null.
Content: TypeAlias = str | list[ContentPart | str] | None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The function that an assistant called. ``arguments`` is JSON text; some clients send it parsed."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One tool call of an assistant's message."""

    id: str | None = None
    type: Annotated[str | None, Meta(extra_json_schema={"anyOf": [{"enum": ["function", None]}]})] = None
    function: FunctionCall | None = None


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="role"):
    content: Content = None
    name: str | None = None


class DeveloperMessage(_Message, frozen=True, kw_only=True, tag="developer"):
    """Instructions; what newer OpenAI models have in place of a system message."""


class SystemMessage(_Message, frozen=True, kw_only=True, tag="system"):
    """Instructions."""


class UserMessage(_Message, frozen=True, kw_only=True, tag="user"):
    """What the user says."""


class AssistantMessage(_Message, frozen=True, kw_only=True, tag="assistant"):
    """What the model said: text, a refusal, or calls of tools; with its reasoning where the client keeps it."""

    refusal: str | None = None
    reasoning_content: str | None = None
    #: The other name under which servers return, and clients send back, the same thing.
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    #: Deprecated by OpenAI in favour of ``tool_calls``.
    function_call: FunctionCall | None = None
    #: Refused: only text can be told again.
    audio: Annotated[dict[str, Any] | None, Meta(extra_json_schema={"anyOf": [{"type": "null"}]})] = None


class ToolMessage(_Message, frozen=True, kw_only=True, tag="tool"):
    """What a tool answered."""

    tool_call_id: str | None = None


class FunctionMessage(_Message, frozen=True, kw_only=True, tag="function"):
    """What a function answered. Deprecated by OpenAI in favour of ``tool``."""


#: What a request's ``messages`` is a list of; msgspec picks the type by ``role``.
Message: TypeAlias = DeveloperMessage | SystemMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage
