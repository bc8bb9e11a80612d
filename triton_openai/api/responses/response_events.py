"""Renders a turn as the events of a Responses stream, and makes the response of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from triton_openai.answer.run import Run
from triton_openai.api.agents import seal
from triton_openai.api.bodies import encode_each, now
from triton_openai.api.logprobs import ContentLogprob, chat_logprobs
from triton_openai.api.responses import objects
from triton_openai.api.responses.item_events import ITEM_KINDS, SUMMARY
from triton_openai.api.responses.request_reader import ToolName
from triton_openai.api.sse import SERVER_SENT, EventRenderer, Framing
from triton_openai.api.tools import custom_input
from triton_openai.errors import ContextLengthExceeded, InvalidRequest, Overloaded, ServiceError
from triton_openai.generation import Delta, FinishReason
from triton_openai.parsers.answer_parser import AnswerParser
from triton_openai.parsers.events import Content, Reasoning, ToolCallStart
from triton_openai.parsers.events import Event as ParserEvent
from triton_openai.parsers.tools.json_text import is_object
from triton_openai.telemetry.request_record import RequestRecord

_encode = msgspec.json.Encoder().encode

# Events that announce the summary of a conversation that is compacted; another one has it.
_COMPACTION_EVENTS = 2


# The codes by which clients decide whether to try again; of several that fit, the first.
_CODES: Mapping[type[ServiceError], str] = {
    ContextLengthExceeded: "context_length_exceeded",
    Overloaded: "rate_limit_exceeded",
    InvalidRequest: "invalid_prompt",
}


@dataclass
class ResponseEvents(EventRenderer):
    """The events of one response, which has one run."""

    #: It grows with the answer, and is whole once :meth:`concluded` or :meth:`cancelled` was called.
    response: objects.ResponseObject
    run: Run
    #: Reads the text.
    parser: AnswerParser
    _: KW_ONLY
    #: How the client calls its tools.
    names: Mapping[str, ToolName]
    #: Whether reasoning items have their ``encrypted_content``.
    sealed: bool
    #: Whether it is tool calls and nothing else.
    forced: bool = False
    #: Whether its first item is the summary of a conversation that is compacted: see :meth:`go_on`.
    compacts: bool = False
    #: The call, whose first and last event have what the headers of an answer over HTTP say; ``None``: over HTTP.
    record: RequestRecord | None = None
    #: Keeps the response before its last event is sent.
    keep: Callable[[], Awaitable[None]] | None = None
    framing: Framing = SERVER_SENT

    def __post_init__(self) -> None:
        self._output: list[objects.OutputItem] = []
        self.response.output = self._output
        self._opened = False
        self._queued = False
        # The opening events have the first numbers, though they may be rendered after the first text.
        self._next = 2
        self._first = 0
        if self.compacts:
            self._first = 1
            self._next += _COMPACTION_EVENTS
        self._compaction_id = f"cmp_{self.response.id.partition('_')[2]}0000"
        # The event with the summary, until it is sent.
        self._compacted = b""
        # The item that is open: its texts, log probabilities, and what stands round a piece of text in its events.
        self._item: objects.OpenItem | None = None
        self._kinds = ITEM_KINDS
        if self.response.reasoning.get("summary") is not None:
            self._kinds = {**ITEM_KINDS, objects.OutputReasoning: SUMMARY}
        self._kind = ITEM_KINDS[objects.OutputMessage]
        self._texts: list[str] = []
        self._logprobs: list[ContentLogprob] = []
        self._head = b""
        self._middle = b""
        self._tail = b""

    def queued(self) -> bytes:
        """Return the first events of a response that waits for its turn in the background; the opening follows."""
        self._queued = True
        return self._begun("response.created", 0) + self._begun("response.queued", 1)

    def opening(self) -> bytes:
        """Return the events that open the response, each once; that with the summary comes when it is made."""
        compacted = self._compacted
        self._compacted = b""
        if self._opened:
            return compacted
        self._opened = True
        if self._queued:
            self.response.status = "in_progress"
            self._next += 1
            begun = self._begun("response.in_progress", 2) + self._compacting(3)
        else:
            begun = self._begun("response.created", 0) + self._begun("response.in_progress", 1) + self._compacting(2)
        return begun + compacted

    def _compacting(self, number: int) -> bytes:
        """Return the events that announce a summary, from *number* on, if there is to be one."""
        if not self.compacts:
            return b""
        item = objects.OutputCompaction(id=self._compaction_id, encrypted_content="")
        added = response_event("response.output_item.added", number, self.framing, output_index=0, item=item)
        return added + response_event(
            "response.compaction.compacting", number + 1, self.framing, output_index=0, item_id=item.id
        )

    def go_on(self, run: Run, parser: AnswerParser, compaction: objects.OutputCompaction | None) -> None:
        """
        Take the run that answers and the parser of its text, where they were made after the first events.

        *compaction* is the summary that they go on from.
        """
        self.run = run
        self.parser = parser
        if compaction is None or self._output:
            return
        compaction.id = self._compaction_id
        self._output.append(compaction)
        self._compacted = self._event("response.output_item.done", output_index=0, item=compaction)

    def keep_alive(self) -> bytes:
        """Return the opening events, then an event that changes nothing: comments do not reset clients' timers."""
        events = self.opening()
        if events:
            return events
        self._next += 1
        return self._begun("response.in_progress", self._next - 1)

    def _begun(self, name: str, number: int) -> bytes:
        """Return an event with the response as it began; the other events have the rest."""
        status: objects.ResponseStatus = "in_progress"
        if self._queued and not self._opened:
            status = "queued"
        begun = msgspec.structs.replace(self.response, status=status, error=None, output=())
        if self.record is None or name != "response.created":
            return response_event(name, number, self.framing, response=begun)
        return response_event(name, number, self.framing, response=begun, headers=self.record.answer_headers())

    def piece(self, choice: int, delta: Delta) -> bytes:
        if self.parser.plain and type(self._item) is objects.OutputMessage and not delta.logprobs:
            return self._text(delta.text)
        if delta.logprobs:
            entries = encode_each(chat_logprobs(delta.logprobs).content)
        else:
            entries = []
        events = self.parser.feed(delta.text, delta.tokens)
        if (
            len(events) == 1
            and type(events[0]) is Content
            and type(self._item) is objects.OutputMessage
            and not entries
        ):
            return self._text(events[0].text)
        return self._parsed(events, entries)

    def last(self, choice: int) -> bytes:
        """Return the text that the parser delayed, and the end of the last item."""
        events = self._parsed(self.parser.flush(cut=self.run.progress.cut), [])
        if len(self._output) == self._first and not self.forced:
            # An empty answer is a message too. A forced call that is cut before its name is nothing.
            events += self._begin(objects.OutputMessage)
        cut = self.run.progress.finish_reason is FinishReason.LENGTH
        if isinstance(self._item, objects.OutputFunctionCall | objects.OutputCustomCall):
            cut = self.parser.cut
        if cut:
            return events + self._close("incomplete")
        return events + self._close("completed")

    async def ended(self, error: ServiceError | None) -> bytes:
        """Return the last events, after the response that they have was stored."""
        events = self.concluded(error)
        if self.keep is not None:
            # The response says whether it is stored.
            await self.keep()
        param = None
        if error is not None:
            param = error.param
        headers: Mapping[str, str] | UnsetType = UNSET
        if self.record is not None:
            headers = self.record.answer_headers(error)
        return events + terminal_events(self.response, self._next, param, framing=self.framing, headers=headers)

    def concluded(self, error: ServiceError | None) -> bytes:
        """Set how the response ended, by *error* if there is one; return the events before the last ones."""
        response = self.response
        if error is not None:
            events = self.opening() + self._close("incomplete")
            response.status = "failed"
            response.error = _failure(error)
            return events
        response.status = "completed"
        broken = self.parser.cut and not self.run.progress.cut
        if self.run.progress.finish_reason is FinishReason.LENGTH or broken:
            response.status = "incomplete"
            response.incomplete_details = objects.IncompleteDetails("max_output_tokens")
        else:
            response.completed_at = now()
        response.usage = self._usage()
        return b""

    def cancelled(self) -> bytes:
        """Make the response a cancelled one, which keeps what it has; return the end of the open item."""
        self.response.status = "cancelled"
        return self._close("incomplete")

    def _usage(self) -> objects.ResponseUsage:
        usage = self.run.progress.usage or self.run.progress.usage_estimate
        made = usage.completion_tokens
        reasoning = min(self.parser.reasoning_tokens, made)
        return objects.ResponseUsage.of(usage.prompt_tokens, made, cached=usage.cached_tokens or 0, reasoning=reasoning)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._next += 1
        return response_event(kind, self._next - 1, self.framing, **fields)

    def _item_event(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the open item."""
        assert self._item is not None
        return self._event(f"response.{kind}", item_id=self._item.id, output_index=len(self._output) - 1, **fields)

    def _part_event(self, what: str, part: objects.OutputText | objects.ReasoningText | objects.SummaryText) -> bytes:
        return self._item_event(f"{self._kind.part_event}.{what}", **{self._kind.index_field: 0}, part=part)

    def _parsed(self, events: Sequence[ParserEvent], entries: list[ContentLogprob]) -> bytes:
        """Return the events for those of the parser; the first text carries the log probabilities *entries*."""
        rendered = b""
        for part in events:
            if isinstance(part, Content):
                rendered += self._content(part.text, entries)
                entries = []
            elif isinstance(part, ToolCallStart):
                rendered += self._open_call(part)
            else:
                if isinstance(part, Reasoning):
                    rendered += self._begin(objects.OutputReasoning)
                rendered += self._text(part.text)
        return rendered

    def _open_call(self, start: ToolCallStart) -> bytes:
        """Return the events that begin the call of a tool."""
        tool = self.names.get(start.name, ToolName(start.name))
        kind: type[objects.OutputFunctionCall | objects.OutputCustomCall] = objects.OutputFunctionCall
        if tool.custom:
            kind = objects.OutputCustomCall
        namespace: str | UnsetType = UNSET
        if tool.namespace is not None:
            namespace = tool.namespace
        return self._open(kind, call_id=start.id, name=tool.name, namespace=namespace)

    def _content(self, text: str, entries: list[ContentLogprob]) -> bytes:
        if not text and not entries:
            return b""
        rendered = self._begin(objects.OutputMessage)
        if not entries:
            return rendered + self._text(text)
        self._texts.append(text)
        self._logprobs += entries
        return rendered + self._item_event("output_text.delta", content_index=0, delta=text, logprobs=entries)

    def _text(self, text: str) -> bytes:
        """Return the event for more *text* of the open item."""
        self._texts.append(text)
        if not self._head:
            # What a custom tool gets is read when it is whole.
            return b""
        number = self._next
        self._next = number + 1
        return self._head + b"%d" % number + self._middle + _encode(text) + self._tail

    def _begin(self, kind: type[objects.OutputMessage | objects.OutputReasoning]) -> bytes:
        """Return the events that begin an item of *kind*, unless one is open."""
        if isinstance(self._item, kind):
            return b""
        return self._open(kind)

    def _open(self, kind: type[objects.OpenItem], **fields: Any) -> bytes:
        """Return the end of the open item, and the events that begin one of *kind*."""
        rendered = self._close("completed")
        names = self._kinds[kind]
        index = len(self._output)
        # The id has that of the response, so that the item can be found by it.
        item = kind(id=f"{names.prefix}_{self.response.id.partition('_')[2]}{index:04x}", **fields)
        self._kind = names
        self._item = item
        self._output.append(item)
        rendered += self._event("response.output_item.added", output_index=index, item=item)
        content = b""
        if names.part is not None:
            rendered += self._part_event("added", names.part())
            content = b'"%b":0,' % names.index_field.encode()
        # All events for pieces of its text are alike.
        delta = f"response.{names.text}.delta"
        # A custom tool's text is sent whole.
        if kind is objects.OutputCustomCall:
            self._head = b""
        else:
            self._head = self.framing.begin(delta) + b'{"type":"%b","sequence_number":' % delta.encode()
        self._middle = b',"item_id":"%b","output_index":%d,%b"delta":' % (item.id.encode(), index, content)
        if kind is objects.OutputMessage:
            self._tail = b',"logprobs":[]}' + self.framing.after
        else:
            self._tail = b"}" + self.framing.after
        return rendered

    def _close(self, status: objects.ItemStatus) -> bytes:
        """Return the events that end the open item, if there is one."""
        item = self._item
        kind = self._kind
        rendered = b""
        if item is None:
            return b""
        if isinstance(item, objects.OutputFunctionCall) and not self._texts and status == "completed":
            # Clients read the arguments as JSON.
            rendered = self._text("{}")
        text = "".join(self._texts)
        logprobs = self._logprobs
        if isinstance(item, objects.OutputFunctionCall) and status == "completed" and not is_object(text or "{}"):
            # The model broke it off, and went on with text.
            status = "incomplete"
        self._texts = []
        self._logprobs = []
        item.status = status
        done: dict[str, Any] = {kind.index_field: 0, "text": text}
        if isinstance(item, objects.OutputMessage):
            done["logprobs"] = logprobs
        elif isinstance(item, objects.OutputReasoning):
            if self.sealed:
                item.encrypted_content = seal(text)
            else:
                item.encrypted_content = None
        elif isinstance(item, objects.OutputFunctionCall):
            done = {"name": item.name, "arguments": text}
        else:
            text = custom_input(text)
            done = {"input": text}
            rendered += self._item_event(f"{kind.text}.delta", delta=text)
        kind.fill(item, text, logprobs)
        rendered += self._item_event(f"{kind.text}.done", **done)
        if kind.part is not None:
            rendered += self._part_event("done", getattr(item, kind.field)[0])
        rendered += self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)
        self._item = None
        return rendered


def _failure(error: ServiceError) -> objects.ResponseFailure:
    if error.code == "service_stopping":
        # As if the process had been killed.
        return objects.INTERRUPTED
    if error.status == 503:
        unknown = "server_is_overloaded"
    else:
        unknown = "server_error"
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return objects.ResponseFailure(code, error.message)
    return objects.ResponseFailure(unknown, error.message)


def terminal_events(
    response: objects.ResponseObject,
    number: int,
    param: str | None = None,
    *,
    framing: Framing = SERVER_SENT,
    headers: Mapping[str, str] | UnsetType = UNSET,
) -> bytes:
    """
    Return what every stream of *response* ends with, from event *number* on; *param* is what a failure blames.

    Over a WebSocket the last event has the *headers* of an answer over HTTP.
    For a cancelled response that is ``response.cancelled``, which OpenAI names for webhooks only.
    """
    rendered = b""
    failure = response.error
    if failure is not None:
        # Some clients read only the one, some only the other.
        rendered = response_event("error", number, framing, code=failure.code, message=failure.message, param=param)
        number += 1
    return rendered + response_event(f"response.{response.status}", number, framing, response=response, headers=headers)


def response_event(kind: str, number: int, framing: Framing = SERVER_SENT, **fields: Any) -> bytes:
    """Return the event of *kind* with the sequence number *number*."""
    return framing.event(kind, _encode(objects.ResponseEvent(type=kind, sequence_number=number, **fields)))
