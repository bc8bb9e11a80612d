"""
The request and the objects of the Responses API.

Source of the wire format: openai-openapi 2.3.0, and where it and the clients differ, the union of what they require.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from triton_openai.api import guides, parameters
from triton_openai.api.bodies import MAX_ITEMS, MAX_MESSAGES, ModelRequest, Positive, Share, decoded_arguments
from triton_openai.api.logprobs import ContentLogprob
from triton_openai.api.paging import Page

#: An item of ``input``: kept as it is, because it may be stored; `chat_request.py` reads it.
Item: TypeAlias = dict[str, Any]


class SchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema"):
    """What a JSON schema describes; its name and whether it is strict change nothing."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct):
    """The form of the text. ``verbosity`` has no influence: no backend supports it. The response says ``medium``."""

    format: guides.TextFormat | guides.JsonObjectFormat | SchemaFormat | None = None
    verbosity: parameters.Verbosity | None = None


class ReasoningOptions(msgspec.Struct):
    """
    How much the model thinks. The answer's ``effort`` is null where the model's template does not take it.

    With a ``summary`` of any kind, the whole reasoning is given as the summary, without one as ``content``.
    """

    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: (
        Annotated[parameters.Limit, Meta(description="The most tokens of thinking: an extension of OpenRouter.")] | None
    ) = None


class ContextEdit(msgspec.Struct):
    """When a conversation is compacted: beyond a number of tokens, by default three quarters of the context."""

    type: Literal["compaction"]
    compact_threshold: Positive | None = None


class ConversationId(msgspec.Struct):
    """A conversation."""

    id: str


@parameters.accepting("prompt_cache_options", "prompt_cache_retention", "service_tier")
class ItemsRequest(ModelRequest, kw_only=True):
    """Base of the requests with items, which may go on from an earlier response."""

    input: str | Annotated[list[Item], Meta(max_length=MAX_MESSAGES)] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None

    def json_texts(self) -> Iterator[tuple[str, Any]]:
        """Yield the texts that hold JSON, each with its path."""
        if isinstance(self.input, list):
            arguments = ((f"input[{index}].arguments", item.get("arguments")) for index, item in enumerate(self.input))
            yield from decoded_arguments(arguments)


@parameters.accepting("prompt_cache_key")
class CompactRequest(ItemsRequest, kw_only=True):
    """A conversation that becomes shorter."""


#: What clients note about what is stored.
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

#: The names that OpenAI documents. Only the last two have an effect here.
Includable = Literal[
    "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs", "message.input_image.image_url",
    "message.output_text.logprobs", "reasoning.encrypted_content",
]  # fmt: skip


@parameters.accepting("client_metadata")
@parameters.refusing(prompt=None, moderation=None)
class ResponsesRequest(ItemsRequest, kw_only=True):
    """The request. The fields below ``top_p`` are extensions, which chats have too."""

    max_output_tokens: Positive | None = None
    stream: bool | None = None
    stream_options: parameters.StreamOptions | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[Includable] | None = None
    top_logprobs: parameters.Alternatives | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    max_tool_calls: Positive | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    temperature: parameters.Temperature | None = None
    top_p: Share | None = None
    top_k: parameters.Limit | None = None
    min_p: Share | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    frequency_penalty: parameters.Penalty | None = None
    presence_penalty: parameters.Penalty | None = None
    repetition_penalty: parameters.Factor | None = None
    thinking_token_budget: parameters.Limit | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    conversation: str | ConversationId | None = None
    context_management: Annotated[list[ContextEdit], Meta(max_length=1)] | None = None


#: The options that a chat completion has under the same name.
SHARED_OPTIONS = (
    "frequency_penalty", "min_p", "model", "presence_penalty", "repetition_penalty", "seed", "stop", "stream",
    "temperature", "thinking_token_budget", "top_k", "top_p",
)  # fmt: skip

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of the answer."""

    text: str = ""
    annotations: Sequence[Any] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of the model's thinking."""

    text: str = ""


class SummaryText(msgspec.Struct, kw_only=True, tag_field="type", tag="summary_text"):
    """Text of the model's thinking, for clients that show nothing else."""

    text: str = ""


class _OutputItem(msgspec.Struct, kw_only=True, tag_field="type"):
    id: str
    status: ItemStatus = "in_progress"


class OutputMessage(_OutputItem, kw_only=True, tag="message"):
    """A message of the assistant."""

    role: Literal["assistant"] = "assistant"
    content: Sequence[OutputText] = ()


class OutputReasoning(_OutputItem, kw_only=True, tag="reasoning"):
    """
    The model's thinking, in ``summary`` or in ``content``.

    ``encrypted_content`` holds the same, in the form that clients send back.
    """

    summary: Sequence[SummaryText] = ()
    content: Sequence[ReasoningText] = ()
    encrypted_content: str | None = None


class _OutputCall(_OutputItem, kw_only=True):
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET


class OutputFunctionCall(_OutputCall, kw_only=True, tag="function_call"):
    """A call of a function; ``namespace`` is there for a function of a namespace."""

    arguments: str = ""


class OutputCustomCall(_OutputCall, kw_only=True, tag="custom_tool_call"):
    """A call of a custom tool, which takes text."""

    input: str = ""


class OutputCompaction(msgspec.Struct, kw_only=True, tag_field="type", tag="compaction"):
    """A summary of all before it, in the form that clients send back. It is never open."""

    id: str = ""
    encrypted_content: str


OpenItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall | OutputCustomCall
OutputItem: TypeAlias = OpenItem | OutputCompaction


class InputTokensDetails(msgspec.Struct, kw_only=True):
    """The tokens of the input that came from a cache, and those written to one, which no backend counts."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    """The tokens of the model's thinking."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, kw_only=True):
    """
    What the response used. Clients cannot do without it: where the backend counts no tokens and the tokenizer is not
    known, the numbers are estimates.
    """

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int

    @classmethod
    def of(cls, input_tokens: int, output_tokens: int, *, cached: int, reasoning: int) -> Self:
        """Return the usage of tokens, of which some came from a cache and some were thoughts."""
        return cls(
            input_tokens=input_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=cached),
            output_tokens=output_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning),
            total_tokens=input_tokens + output_tokens,
        )


class ResponseFailure(msgspec.Struct):
    """Why a response failed."""

    code: str
    message: str


#: Why a response failed whose maker was stopped or killed.
INTERRUPTED = ResponseFailure("server_error", "The service stopped before the response was complete.")


class IncompleteDetails(msgspec.Struct):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response. What was asked for is told with the values that were used."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    conversation: Mapping[str, str] | None = None
    status: ResponseStatus = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: Mapping[str, str | None]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float = 1.0
    text: Mapping[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: Sequence[Mapping[str, Any]] = ()
    top_logprobs: int = 0
    top_p: float = 1.0
    truncation: Literal["auto", "disabled"] = "disabled"
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: Mapping[str, str] = {}


class CompactedResponse(msgspec.Struct, kw_only=True):
    """The user's messages, and last an item of the type ``compaction``, whose ``encrypted_content`` is the summary."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: Sequence[Item]
    usage: ResponseUsage


class InputTokens(msgspec.Struct, kw_only=True):
    """How many tokens an input has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class Deleted(msgspec.Struct, kw_only=True):
    """The answer to a deletion; ``object`` says of what."""

    id: str
    object: Literal["response", "conversation.deleted", "chat.completion.deleted", "file"]
    deleted: bool = True


class ItemList(Page[Item], tag_field="object", tag="list"):
    """Items of a list, with the ids of the first and the last, and whether more follow."""


class ResponseEvent(msgspec.Struct, kw_only=True):
    """
    An event of a stream; ``type`` is also the name of the event, and decides which of the other fields there are.

    ``sequence_number`` counts from 0 without gaps.
    """

    type: str
    sequence_number: int
    response: ResponseObject | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: Sequence[ContentLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    #: Over a WebSocket, what the headers of an answer over HTTP say: in the first and the last event.
    headers: Mapping[str, str] | UnsetType = UNSET
