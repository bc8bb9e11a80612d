"""Renders answers as Anthropic's API has them: messages, the events of streams, and errors with their statuses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import msgspec

from triton_openai.answer.run import Run
from triton_openai.api.agents import seal
from triton_openai.api.bodies import encode
from triton_openai.api.cut_json import read_cut_object
from triton_openai.api.messages import types
from triton_openai.api.sse import EventRenderer, event
from triton_openai.errors import ContextLengthExceeded, Overloaded, RateLimited, ServiceError, ServiceOverloaded
from triton_openai.generation import AnswerState, Delta, FinishReason
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Event, Reasoning, ToolCallStart
from triton_openai.telemetry.request_record import RequestRecord


def message_usage(progress: AnswerState) -> types.MessageUsage:
    """Return the tokens up to now. Clients need numbers: an estimate is better than none."""
    usage = progress.usage_so_far or progress.usage_estimate
    return types.MessageUsage(
        input_tokens=usage.prompt_tokens - (usage.cached_tokens or 0),
        cache_creation_input_tokens=None,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
    )


def stop_reason_of(
    progress: AnswerState, parser: AnswerParser, *, limited: bool
) -> tuple[types.StopReason | None, str | None]:
    """
    Return why the answer ended, and the stop sequence that ended it.

    *limited* is whether the context had less room than the client asked for.
    """
    reason = progress.finish_reason
    stop = progress.stop_reason
    if reason is FinishReason.LENGTH:
        if limited:
            return "model_context_window_exceeded", None
        return "max_tokens", None
    if parser.calls and not parser.cut:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    if reason is not None and parser.cut:
        # Its input is not whole, whatever cut it.
        return "max_tokens", None
    if reason is None:
        return None, None
    return "end_turn", None


def _block_of(start: Event, text: str, *, omitted: bool) -> types.Block:
    """Return the block that *start* opens; a thought that is *omitted* is in its signature."""
    if isinstance(start, Content):
        return types.TextBlock(text)
    if not isinstance(start, ToolCallStart):
        if omitted:
            return types.ThinkingBlock("", seal(text))
        return types.ThinkingBlock(text, "")
    return types.ToolUseBlock(start.id, start.name, _input_of(text))


def _input_of(arguments: str) -> dict[str, Any]:
    """Return the input of a call; of one that was cut, the members that are whole."""
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return read_cut_object(arguments).members


@dataclass
class MessageEvents(EventRenderer):
    """The events of one stream, or, as :attr:`message`, what they make together."""

    message_id: str
    model: str
    run: Run
    #: Reads the text.
    parser: AnswerParser
    _: KW_ONLY
    #: See :func:`stop_reason_of`.
    limited: bool
    #: Whether thoughts are in the signatures of their blocks.
    omits_thinking: bool
    request_id: str
    #: Whether the answer is sent as a whole.
    whole: bool = False
    blocks: list[types.Block] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Stream state: the number of the block, the event that opened it, and its texts
        self._begun = False
        self._index = 0
        self._open: Event | None = None
        self._texts: list[str] = []

    def opening(self) -> bytes:
        """Return the start of the message, unless it was sent to keep the connection alive."""
        if self._begun:
            return b""
        self._begun = True
        return _event(types.MessageEvent(type="message_start", message=self._message(None, None)))

    def _message(self, reason: types.StopReason | None, sequence: str | None) -> types.MessageObject:
        return types.MessageObject(
            id=self.message_id,
            model=self.model,
            content=self.blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=message_usage(self.run.progress),
        )

    @property
    def message(self) -> types.MessageObject:
        """The whole message."""
        return self._message(*stop_reason_of(self.run.progress, self.parser, limited=self.limited))

    def keep_alive(self) -> bytes:
        return self.opening() + _event(types.MessageEvent(type="ping"))

    def piece(self, choice: int, delta: Delta) -> bytes:
        return self._render(self.parser.feed(delta.text, delta.tokens))

    def last(self, choice: int) -> bytes:
        """Return the text that the parser delayed, and the end of the last block."""
        return self._render(self.parser.flush(cut=self.run.progress.cut)) + self._close()

    async def ended(self, error: ServiceError | None) -> bytes:
        """Return why the message ended, and its end; or the *error*."""
        if error is not None:
            return event("error", envelope(error, self.request_id))
        reason, sequence = stop_reason_of(self.run.progress, self.parser, limited=self.limited)
        delta = types.BlockDelta(stop_reason=reason, stop_sequence=sequence)
        ended = types.MessageEvent(type="message_delta", delta=delta, usage=message_usage(self.run.progress))
        return _event(ended) + _event(types.MessageEvent(type="message_stop"))

    def _render(self, events: Sequence[Event]) -> bytes:
        parts: list[bytes] = []
        for each in events:
            if isinstance(each, Content):
                if each.text:
                    parts += self._block(each, types.TextBlock("")), self._delta(b"text_delta", b"text", each.text)
            elif isinstance(each, Reasoning):
                parts.append(self._block(each, types.ThinkingBlock("", "")))
                if self.omits_thinking:
                    self._texts.append(each.text)
                else:
                    parts.append(self._delta(b"thinking_delta", b"thinking", each.text))
            elif isinstance(each, ToolCallStart):
                parts += self._close(), self._block(each, types.ToolUseBlock(each.id, each.name, {}))
            else:
                parts.append(self._delta(b"input_json_delta", b"partial_json", each.text))
        return b"".join(parts)

    def _block(self, opening: Event, block: types.Block) -> bytes:
        """Return the start of a *block*, unless one of its kind is open."""
        if type(self._open) is type(opening):
            return b""
        closed = self._close()
        self._open = opening
        started = types.MessageEvent(type="content_block_start", index=self._index, content_block=block)
        return closed + _event(started)

    def _delta(self, kind: bytes, field: bytes, text: str) -> bytes:
        if self.whole:
            self._texts.append(text)
        # Once per token: without the structs.
        return event(
            "content_block_delta",
            b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}'
            % (self._index, kind, field, encode(text)),
        )

    def _close(self) -> bytes:
        """Return the end of the block that is open, if one is."""
        opened = self._open
        text = "".join(self._texts)
        events = b""
        if opened is None:
            return b""
        omitted = self.omits_thinking and isinstance(opened, Reasoning)
        if omitted:
            events = self._delta(b"signature_delta", b"signature", seal(text))
        events += _event(types.MessageEvent(type="content_block_stop", index=self._index))
        self._open = None
        self._texts = []
        self._index = self._index + 1
        if self.whole:
            self.blocks.append(_block_of(opened, text, omitted=omitted))
        return events


def _event(data: types.MessageEvent) -> bytes:
    return event(data.type, encode(data))


OVERLOADED = 529
_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_PATHS = re.compile(r"(/v1)?/messages(/.*)?", re.DOTALL)
_MODEL_PATHS = re.compile(r"(/v1)?/models(/.*)?", re.DOTALL)


class AnthropicError(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong, as the ``error`` of an envelope: its type, and a sentence."""

    type: str
    message: str


class AnthropicEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """Every error, as the body of an answer or as the last event of a stream."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str


def is_anthropic_request(path: str, headers: Mapping[str, str]) -> bool:
    """Return whether a request is of Anthropic's API, which shares the paths of the models with OpenAI's."""
    if _PATHS.fullmatch(path):
        return True
    return "anthropic-version" in headers and _MODEL_PATHS.fullmatch(path) is not None


def anthropic_status(kind: type[ServiceError]) -> int:
    """Return the status that Anthropic's API has for errors of *kind*."""
    busy = issubclass(kind, Overloaded | ServiceOverloaded) and not issubclass(kind, RateLimited)
    if busy:
        return OVERLOADED
    return kind.status


def anthropic_error_type(status: int) -> str:
    """Return the type that Anthropic's API has for errors with *status*."""
    known = _TYPES.get(status)
    if known is not None:
        return known
    if status < 500:
        return "invalid_request_error"
    return "api_error"


def envelope(error: ServiceError, request_id: str) -> bytes:
    """Return the body of *error*. Anthropic's errors have no field for the parameter: the message begins with it."""
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        if error.tokens is not None:
            message = f"{error.tokens} tokens > {min(error.limit or 0, error.tokens - 1)} maximum"
        # Clients read these words to find out that they have to shorten the conversation.
        message = f"prompt is too long: {message}"
    elif error.param is not None and error.param not in message:
        message = f"{error.param}: {message}"
    kind = anthropic_error_type(anthropic_status(type(error)))
    return encode(AnthropicEnvelope(error=AnthropicError(type=kind, message=message), request_id=request_id))


def add_request_id(record: RequestRecord) -> None:
    """Add the header ``request-id`` to the answer, which Anthropic's clients read."""
    record.headers = {**record.headers, "request-id": record.request_id}


def error_body(
    path: str, headers: Mapping[str, str], record: RequestRecord, error: ServiceError
) -> tuple[int, bytes] | None:
    """Return the status and the body of *error* for a request of Anthropic's API; ``None`` for other requests."""
    if not is_anthropic_request(path, headers):
        return None
    add_request_id(record)
    return anthropic_status(type(error)), envelope(error, record.request_id)
