"""
The objects that answer a chat: ``chat.completion`` and ``chat.completion.chunk`` (openai-openapi 2.3.0).

``reasoning_content`` is DeepSeek's extension and ``reasoning`` OpenRouter's and vLLM's; both are in wide use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from triton_openai.answer.fan_out import Collected
from triton_openai.answer.run import Run
from triton_openai.api.generate import Task
from triton_openai.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from triton_openai.api.service import RequestContext
from triton_openai.api.sse import Chunks
from triton_openai.api.tools import ToolPlan
from triton_openai.api.usage import UsageObject, usage_of
from triton_openai.generation import Delta, FinishReason, Progress
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallStart

_encode = msgspec.json.Encoder().encode

ReasoningField = Literal["reasoning_content", "reasoning", "both"]
ChatFinishReason = Literal["stop", "length", "tool_calls", "function_call"]
_REASONS: Mapping[FinishReason, ChatFinishReason] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class FunctionCall(msgspec.Struct, kw_only=True):
    """A function and its arguments as JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, kw_only=True):
    """The assistant's message. ``content`` and ``refusal`` are always there: clients do not check for them."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. The last two fields are vLLM's."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer, without ``usage`` if the tokens are not known. The last two fields are vLLM's, on request."""

    id: str
    object: Literal["chat.completion"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[ChatChoice]
    usage: UsageObject | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


def finish_reason(progress: Progress, parser: AnswerParser, plan: ToolPlan) -> ChatFinishReason | None:
    """
    Return why the choice ended, as OpenAI says it.

    It is ``tool_calls`` only for complete calls that the model chose to make. A forced call ends with ``stop``, a call
    cut by the length with ``length``, and a call cut by a stop string with ``stop``: its arguments are not JSON.
    """
    reason = progress.finish_reason
    if reason is not FinishReason.LENGTH and parser.calls and not parser.cut and plan.mode != "named":
        return "function_call" if plan.legacy else "tool_calls"
    return None if reason is None else _REASONS[reason]


def reasoning_tokens(parsers: Sequence[AnswerParser]) -> int | None:
    """Return the tokens of reasoning in all choices, ``None`` if there were none or they are not known."""
    return sum(parser.reasoning_tokens for parser in parsers) or None


def reasoning_fields(setting: ReasoningField) -> tuple[str, ...]:
    """Return the names of the fields that the reasoning is shown in."""
    return ("reasoning_content", "reasoning") if setting == "both" else (setting,)


def message_of(events: Sequence[Event], plan: ToolPlan, fields: Sequence[str]) -> AnswerMessage:
    """Return the message that *events* make together, with the reasoning in *fields*."""
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, Content):
            content.append(event.text)
        elif isinstance(event, Reasoning):
            thoughts.append(event.text)
        elif isinstance(event, ToolCallStart):
            calls.append(ToolCall(id=event.id, function=FunctionCall(name=event.name)))
            arguments.append([])
        else:
            arguments[event.index].append(event.text)
    for call, parts in zip(calls, arguments, strict=True):
        call.function.arguments = "".join(parts)
    text = "".join(content)
    reasoning = "".join(thoughts) or msgspec.UNSET
    return AnswerMessage(
        role="assistant",
        content=text if text or not calls else None,
        refusal=None,
        **dict.fromkeys(fields, reasoning),
        tool_calls=calls if calls and not plan.legacy else msgspec.UNSET,
        function_call=calls[0].function if calls and plan.legacy else msgspec.UNSET,
    )


def chat_choice(
    index: int,
    answer: Collected,
    parser: AnswerParser,
    plan: ToolPlan,
    fields: Sequence[str],
    *,
    logprobs: bool,
    token_ids: bool,
) -> ChatChoice:
    """Return a choice of the whole answer, with *logprobs* and *token_ids* where they are wanted."""
    if parser.plain:
        message = AnswerMessage(role="assistant", content=answer.text, refusal=None)
    else:
        events = [event for delta in answer.deltas for event in parser.feed(delta.text, delta.tokens)]
        message = message_of([*events, *parser.flush()], plan, fields)
    return ChatChoice(
        index=index,
        message=message,
        logprobs=chat_logprobs(answer.logprobs) if logprobs else None,
        finish_reason=finish_reason(answer.run.progress, parser, plan),
        stop_reason=answer.run.progress.stop_reason,
        token_ids=answer.token_ids if token_ids else msgspec.UNSET,
    )


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
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """One event of a stream. ``usage`` is there on request: null but for the last chunk, which has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = msgspec.field(name="object")
    created: int
    model: str
    choices: Sequence[ChatChunkChoice]
    usage: UsageObject | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunks(Chunks):
    """The chunks of one stream; each of *parsers* reads a choice."""

    def __init__(
        self,
        context: RequestContext[Any],
        task: Task,
        runs: Sequence[Run],
        *,
        parsers: Sequence[AnswerParser],
        plan: ToolPlan,
        fields: Sequence[str],
    ) -> None:
        super().__init__("chat.completion.chunk", context, task, runs)
        self._parsers = parsers
        self._plan = plan
        self._reasoning_fields = fields
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail
        #: What precedes the text of most chunks; empty for a choice whose chunks need more.
        self._text_heads = [
            self._head + b'{"index":%d,"delta":{"content":' % choice
            if parser.plain and not self._continuous and not self._ids
            else b""
            for choice, parser in enumerate(parsers)
        ]

    def first(self, choice: int) -> bytes:
        """Return the chunk with the role, and with the prompt's ids where they are wanted."""
        tail = self._tail
        if self._ids:
            tail = b'],"prompt_token_ids":' + _encode(self._runs[choice].generation.prompt_ids) + tail[1:]
        return self._chunk(choice, b'{"role":"assistant","content":"","refusal":null}', b"null", tail)

    def piece(self, choice: int, delta: Delta) -> bytes:
        head = self._text_heads[choice]
        if head and not delta.logprobs:
            return head + _encode(delta.text) + self._text_tail
        return self._events(choice, self._parsers[choice].feed(delta.text, delta.tokens), delta)

    def last(self, choice: int) -> bytes:
        """Return the text that the parser delayed, and the chunk with the finish reason."""
        parser, progress = self._parsers[choice], self._runs[choice].progress
        delayed = self._events(choice, parser.flush(), Delta())
        reasons = (_encode(finish_reason(progress, parser, self._plan)), _encode(progress.stop_reason))
        end = b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b}' % (choice, *reasons)
        return delayed + self._head + end + self._ended(choice)

    def _usage(self) -> UsageObject | None:
        usages = [run.progress.usage for run in self._runs]
        return usage_of(usages, n=self._n, reasoning_tokens=reasoning_tokens(self._parsers))

    def _events(self, choice: int, events: Sequence[Event], delta: Delta) -> bytes:
        """Return a chunk for each of *events*; the first carries the log probabilities and ids that came with it."""
        if not self._reasoning_fields:
            events = [event for event in events if not isinstance(event, Reasoning)]
        logprobs = _encode(chat_logprobs(delta.logprobs)) if delta.logprobs else b"null"
        ids = b',"token_ids":' + _encode(list(delta.token_ids)) if self._ids else b""
        if not events and (delta.logprobs or (ids and delta.token_ids)):
            return self._chunk(choice, b'{"content":""}', logprobs, self._counted(choice), ids)
        chunks = []
        for event in events:
            chunks.append(self._chunk(choice, _encode(self._delta(event)), logprobs, self._counted(choice), ids))
            logprobs, ids = b"null", b""
        return b"".join(chunks)

    def _delta(self, event: Event) -> dict[str, Any]:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return dict.fromkeys(self._reasoning_fields, event.text)
        if isinstance(event, ToolCallStart):
            function = {"name": event.name, "arguments": ""}
            if self._plan.legacy:
                return {"function_call": function}
            return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
        if self._plan.legacy:
            return {"function_call": {"arguments": event.text}}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    def _chunk(self, choice: int, delta: bytes, logprobs: bytes, tail: bytes, ids: bytes = b"") -> bytes:
        body = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null%b}' % (choice, delta, logprobs, ids)
        return self._head + body + tail
