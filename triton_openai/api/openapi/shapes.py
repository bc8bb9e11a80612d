"""
What is written by hand, for speed or for its smallness, as types: for the description alone, nothing is made of them.

The tests hold every answer against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from triton_openai.api.chat_response import ChatFinishReason
from triton_openai.api.logprobs import ChatLogprobs, CompletionLogprobs
from triton_openai.api.usage import UsageObject
from triton_openai.generation import FinishReason


class ErrorObject(msgspec.Struct, kw_only=True):
    """What went wrong: a sentence for people, and for programs its class, the field to blame and a code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct, kw_only=True):
    """Every error, as the body of an answer or as the last event of a stream."""

    error: ErrorObject


class Live(msgspec.Struct, kw_only=True):
    """The process answers."""

    status: Literal["live"]


class Ready(msgspec.Struct, kw_only=True):
    """Requests can be served."""

    status: Literal["ready"]


class NotReady(msgspec.Struct, kw_only=True):
    """Requests cannot be served now."""

    status: Literal["not ready"]
    reason: str


class FunctionDelta(msgspec.Struct, kw_only=True):
    """A piece of a call: the name comes first and whole, then the JSON text of the arguments."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """A piece of one of the calls; what opens a call has its id."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, kw_only=True):
    """What a chunk adds to the message; nothing in a choice's last chunk."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    refusal: msgspec.UnsetType | None = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """
    One event of a stream. ``usage`` is there when it was asked for: null but for the last chunk, which has no choices.
    """

    id: str
    object: Literal["chat.completion.chunk"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunkChoice(msgspec.Struct, kw_only=True):
    """One choice's part of a chunk."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionChunk(msgspec.Struct, kw_only=True):
    """
    One event of a stream. ``usage`` is there when it was asked for: null but for the last chunk, which has no choices.
    """

    id: str
    object: Literal["text_completion"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[CompletionChunkChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
