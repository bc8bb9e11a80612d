"""
Requests and answers of Anthropic's Messages API.

Source: the types of Anthropic's Python SDK 2.12, which calls ``…Param`` what clients send. Fields that change nothing
here, such as ``cache_control``, are accepted anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, Union

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai.api.bodies import MAX_MESSAGES, ModelRequest, NotNegative, Positive, Share
from triton_openai.api.paging import Page
from triton_openai.api.parameters import Temperature, accepting, ignoring
from triton_openai.api.tools import MAX_TOOLS

_MAX_BLOCKS = 4096


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class Base64SourceParam(msgspec.Struct, frozen=True, tag_field="type", tag="base64"):
    """A file in base64."""

    media_type: str
    data: str


class UrlSourceParam(msgspec.Struct, frozen=True, tag_field="type", tag="url"):
    """A file at a URL."""

    url: str


class TextSourceParam(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A plain text."""

    data: str


class ImageBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="image"):
    """An image."""

    source: Base64SourceParam | UrlSourceParam


class ContentSourceParam(msgspec.Struct, frozen=True, tag_field="type", tag="content"):
    """A document of texts and images."""

    content: str | Annotated[list[TextBlock | ImageBlockParam], Meta(max_length=_MAX_BLOCKS)]


class FileSourceParam(msgspec.Struct, frozen=True, tag_field="type", tag="file"):
    """A file that was uploaded."""

    file_id: str


class DocumentBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="document"):
    """A document; only text is supported. ``context`` is what the client says about it."""

    source: TextSourceParam | ContentSourceParam | Base64SourceParam | UrlSourceParam | FileSourceParam
    title: str | None = None
    context: str | None = None


class SearchResultBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="search_result"):
    """A text that the client's own search has found, and where."""

    source: str
    title: str
    content: Annotated[list[TextBlock], Meta(max_length=_MAX_BLOCKS)]


class ToolReferenceBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="tool_reference"):
    """A tool that a client's search has found; it is shown to the model from then on."""

    tool_name: str


ResultBlockParam: TypeAlias = (
    TextBlock | ImageBlockParam | DocumentBlockParam | SearchResultBlockParam | ToolReferenceBlockParam
)


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolUseBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A past call of a tool. Input that is no object, as a client makes it of a broken call, is taken too."""

    id: str
    name: str
    input: dict[str, Any] | list[Any] | str | bool | int | float | None = None


class ToolResultBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="tool_result"):
    """What a tool answered."""

    tool_use_id: str
    content: str | Annotated[list[ResultBlockParam], Meta(max_length=_MAX_BLOCKS)] | None = None
    is_error: bool | None = None


class ThinkingBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought. A signature holds the text where the client asked to leave it out of the answer."""

    thinking: str
    signature: str | None = None


class CompactionBlockParam(msgspec.Struct, frozen=True, tag_field="type", tag="compaction"):
    """A summary of the conversation so far."""

    content: str | None = None


class LeftOutBlockParam(msgspec.Struct, frozen=True, tag_field="type"):
    """A block that only Anthropic's API can read, or about a tool that runs there. It is left out."""


# One type for each: the type is the tag.
_LEFT_OUT = [
    msgspec.defstruct(
        "".join(map(str.capitalize, tag.split("_"))), [], bases=(LeftOutBlockParam,), tag=tag, frozen=True
    )
    for tag in (
        *("redacted_thinking", "fallback", "server_tool_use", "mcp_tool_use", "mcp_tool_listing", "mcp_tool_result"),
        *("advisor_tool_result", "bash_code_execution_tool_result", "code_execution_tool_result"),
        *("text_editor_code_execution_tool_result", "tool_search_tool_result", "web_fetch_tool_result"),
        "web_search_tool_result",
    )
]

BlockParam: TypeAlias = (
    TextBlock
    | ImageBlockParam
    | DocumentBlockParam
    | SearchResultBlockParam
    | ToolUseBlockParam
    | ToolResultBlockParam
    | ThinkingBlockParam
    | CompactionBlockParam
)
_AnyBlock: TypeAlias = Union[BlockParam, *_LEFT_OUT]  # type: ignore[valid-type]  # mypy cannot know made types


class MessageParam(msgspec.Struct, frozen=True):
    """One message. Those of the role ``system`` may stand anywhere."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_AnyBlock], Meta(max_length=_MAX_BLOCKS)]


class ToolParam(msgspec.Struct, frozen=True):
    """A tool."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:/-]{0,128}(?!\n)$")] = ""
    #: A tool with a type of its own runs at Anthropic or has its schema there, and is left out.
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    #: Whether the model sees it only once a ``tool_reference`` has named it.
    defer_loading: bool | None = None


class ToolChoiceParam(msgspec.Struct, frozen=True):
    """Whether the model may, must or must not call tools, or must call a certain one."""

    type: Literal["auto", "any", "tool", "none"]
    #: That of the tool that it must call.
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(msgspec.Struct, frozen=True):
    """
    Whether the model thinks, for templates with a switch for it.

    With the display ``omitted`` the answer has the thoughts in the signature of their block only.
    """

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None
    budget_tokens: int | None = None


class OutputFormatParam(msgspec.Struct, frozen=True, tag_field="type", tag="json_schema"):
    """The schema that the answer has to conform to."""

    schema: dict[str, Any]


class OutputConfigParam(msgspec.Struct, frozen=True):
    """How much the model thinks, for templates with levels, and the form of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatParam | None = None


@accepting("cache_control", "diagnostics", "metadata", "service_tier", "speed", "user_profile_id", "workspace_id")
@ignoring("container", "context_management", "inference_geo", "mcp_servers")
class CountTokensRequest(ModelRequest, kw_only=True):
    """A conversation, of which the tokens are counted."""

    messages: Annotated[list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=_MAX_BLOCKS)] | None = None
    tools: Annotated[list[ToolParam], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfigParam | None = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """A conversation to continue. ``max_tokens`` may ask for more than the model's context has room for."""

    max_tokens: Positive
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: NotNegative | None = None
    #: The older name of ``output_config.format``.
    output_format: OutputFormatParam | None = None


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str
    signature: str


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """
    The tokens of a message; an estimate from the texts where no count is known.

    ``input_tokens`` are those that did not come from the backend's cache. What is not known is null.
    """

    input_tokens: int
    cache_creation_input_tokens: int | None
    cache_read_input_tokens: int | None
    output_tokens: int


class MessageObject(msgspec.Struct, frozen=True, kw_only=True):
    """The answer; its ``stop_reason`` is null if the backend does not report why it ended."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[Block]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class BlockDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is added to a block; or, without a type, how the message ended."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: StopReason | UnsetType | None = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream; its name is its ``type``."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "ping",
    ]
    message: MessageObject | UnsetType = UNSET
    index: int | UnsetType = UNSET
    content_block: Block | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessageUsage | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The number of tokens."""

    input_tokens: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """
    One model, as Anthropic's API describes it. Triton does not report when a model was made: it is the epoch.

    ``max_input_tokens`` is null where the context length is not known.
    """

    id: str
    type: Literal["model"] = "model"
    display_name: str
    created_at: str = "1970-01-01T00:00:00Z"
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int | None


class ModelPage(Page[ModelInfo]):
    """A page of the list of models."""
